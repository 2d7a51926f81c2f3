"""The tokens of a tokenizer.json: which others each one needs, how common it was, and the file without some of them.

What is kept is closed: with each token all that its own merges make on the way to it. A text whose tokens all stay then
has the same tokens as before, because byte-pair encoding takes the same merges in the same order, and no merge of
another token comes first: it would have come first in the whole vocabulary too. Of Unigram the best path stays the best
among fewer.
"""

import copy
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.files import output_errors, replace_file
from niwaki.models.tokens import load_tokenizer

NAME = "tokenizer.json"
#: Parts of tokenizers that make byte-level text: each character of a token is a byte.
_BYTE_LEVEL = "ByteLevel"
#: Entries of steps with text that goes into tokens instead of the user's, such as the mark for a space.
_PUT_IN = ("replacement", "content", "prepend")
#: Settings of byte-pair encoding, of which others make other tokens than merges alone.
_MERGING: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}


class TokenizerFile:
    """tokenizer.json of a model directory, of byte-pair encoding of bytes or Unigram.

    UnsupportedModelError for all other kinds, and where there is no such file; CheckpointError where it makes no sense.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        if not self.path.is_file():
            raise UnsupportedModelError(
                f"{directory} has no {NAME}, which removing tokens needs; save its tokenizer with transformers "
                "first (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        self._content = read_json(self.path)
        try:
            self._model: dict[str, Any] = self._content["model"]
            # Old files do not say the kind of byte-pair encoding.
            self._kind = self._model.get("type", "BPE" if "merges" in self._model else "unknown")
            if self._kind not in ("BPE", "Unigram"):
                raise self._unsupported(f"is of the kind {self._kind}")
            #: By text, the number of each token; first those that are made of text.
            vocab = self._model["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
            self.tokens = {str(token): int(number) for token, number in pairs}
            self.added = {each["content"]: int(each["id"]) for each in self._content.get("added_tokens") or []}
            #: (first, second, result) of each merge, None where a token of it is missing.
            self._merges = [*self._read_merges()] if self._kind == "BPE" else []
            self._ranks = {merge[:2]: (rank, merge[2]) for rank, merge in reversed([*enumerate(self._merges)]) if merge}
            self._check()
            #: Tokens without which some text could not be encoded, or that stand for no text.
            self.always = self._always()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{self.path} is not a tokenizer that can be read ({error!r})") from error
        self._texts = {number: token for token, number in self.tokens.items()}

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path} {what}, so no tokens can be removed; byte-level BPE, BPE with byte fallback and Unigram can"
        )

    def _read_merges(self) -> Iterator[tuple[str, str, str] | None]:
        for merge in self._model["merges"]:
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            parts = (first, second, first + second)
            yield parts if all(part in self.tokens for part in parts) else None

    def _check(self) -> None:
        if self._kind != "BPE":
            return
        for name, known in _MERGING.items():
            if (value := self._model.get(name)) not in known:
                raise self._unsupported(f"has {name} {value!r}")
        steps = (self._content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder"))
        is_byte_level = any(_BYTE_LEVEL in _values(step, "type") for step in steps)
        if not (is_byte_level or self._model.get("byte_fallback")):
            raise self._unsupported("is BPE of characters without bytes")

    def _always(self) -> frozenset[int]:
        names = {f"<0x{byte:02X}>" for byte in range(256)}
        kept = {self.tokens[name] for name in names & self.tokens.keys()}
        if not (self._model.get("byte_fallback") and len(kept) == len(names)):  # characters stand for themselves
            kept |= {number for token, number in self.tokens.items() if len(token) == 1}
        put_in = (_values(self._content.get(step), *_PUT_IN) for step in ("normalizer", "pre_tokenizer"))
        kept |= {self.tokens[each] for texts in put_in for text in texts for each in text if each in self.tokens}
        if (unknown := self._model.get("unk_token")) in self.tokens:
            kept.add(self.tokens[unknown])
        if (number := self._model.get("unk_id")) is not None:
            kept.add(number)
        if self._kind == "Unigram":  # what is unknown costs more than the rarest token, whose score has to stay
            scores = [score for _, score in self._model["vocab"]]
            kept.add(scores.index(min(scores)))
        return frozenset(kept | {*self.added.values()})

    def needs(self, number: int) -> list[int]:
        """The tokens that the merges of token ``number`` make on the way to it, itself last; of Unigram itself.

        That is its only way in any text: merges within a token's characters do not see what is around it.
        """
        if self._kind == "Unigram" or number not in self._texts:
            return [number]
        token = self._texts[number]
        symbols = [one if one in self.tokens else "" for one in token]
        made = [self.tokens[one] for one in symbols if one]
        if "" in symbols:  # no merge makes it: a text has it where it is added, or is the word as a whole
            return [number]
        while len(symbols) > 1:
            pairs = [self._ranks.get((one, other)) for one, other in itertools.pairwise(symbols)]
            rank, place = min((pair[0] if pair else math.inf, i) for i, pair in enumerate(pairs))
            if (pair := pairs[place]) is None:
                return [number]
            assert rank == pair[0]
            symbols[place : place + 2] = [pair[1]]
            made.append(self.tokens[pair[1]])
        return made

    def shares(self) -> dict[int, float]:
        """How common each token was in the text that the tokenizer is from, by its number, as far as the file tells.

        Unigram says its probability. Merges are in the order of how common they were, and by Zipf's law that is about
        one over their rank.
        """
        if self._kind == "Unigram":
            values = {i: math.exp(min(score, 0.0)) for i, (_, score) in enumerate(self._model["vocab"])}
        else:
            values = {}
            for rank, merge in enumerate(self._merges):
                if merge:
                    values.setdefault(self.tokens[merge[2]], 1 / (rank + 1))
        total = sum(values.values()) or 1.0
        return {number: value / total for number, value in values.items()}

    def without(self, new: Mapping[int, int]) -> dict[str, Any]:
        """The content of tokenizer.json with the tokens in ``new`` alone, which says what their numbers become."""
        content = copy.deepcopy(self._content)
        model = content["model"]
        if self._kind == "Unigram":
            model["vocab"] = [pair for number, pair in enumerate(self._model["vocab"]) if number in new]
        else:
            model["vocab"] = {token: new[number] for token, number in self.tokens.items() if number in new}
            pairs = zip(self._model["merges"], self._merges, strict=True)
            model["merges"] = [
                merge for merge, parts in pairs if parts and all(part in model["vocab"] for part in parts)
            ]
        if model.get("unk_id") is not None:
            model["unk_id"] = new[model["unk_id"]]
        for each in content.get("added_tokens") or []:
            each["id"] = new[each["id"]]
        if content.get("padding"):
            content["padding"]["pad_id"] = new[content["padding"]["pad_id"]]
        _renumber(content.get("post_processor"), new)
        return content


def _values(step: Any, *names: str) -> set[str]:
    """All texts under ``names``, of a step, the steps in it, and so on."""
    if isinstance(step, list):
        return {value for each in step for value in _values(each, *names)}
    if not isinstance(step, dict):
        return set()
    own = {step[name] for name in names if isinstance(step.get(name), str)}
    return own.union(*(_values(each, *names) for each in step.values()))


def _renumber(step: Any, new: Mapping[int, int]) -> None:
    """Gives the tokens that a post-processor puts around texts the numbers that they have now."""
    if isinstance(step, list):
        for each in step:
            _renumber(each, new)
    elif isinstance(step, dict):
        for name in ("sep", "cls"):  # of BERT's and RoBERTa's kinds: a text and a number
            if isinstance(step.get(name), list) and len(step[name]) == 2:
                step[name][1] = new[step[name][1]]
        for each in (step.get("special_tokens") or {}).values() if step.get("type") == "TemplateProcessing" else ():
            each["ids"] = [new[number] for number in each["ids"]]
        _renumber(step.get("processors"), new)


# The tokenizer's files of a model directory, with fewer tokens.

#: Files of the same tokens in other forms, which the output is without.
_OTHERS = (
    "tokenizer.model*", "spiece.model", "sentencepiece*.model", "tekken.json", "*.tiktoken", "vocab.bpe",
    "encoder.json",
)  # fmt: skip
#: What a tokenizer is loaded from beside tokenizer.json.
_BESIDE = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens.json"
_VOCABULARY = "vocab.json"
_MERGES = "merges.txt"


def left_out(directory: Path) -> set[str]:
    """Names of files of a model directory with all tokens in a form that is not written again."""
    return {path.name for pattern in _OTHERS for path in directory.glob(pattern)}


def load_smaller(directory: Path, file: TokenizerFile, new: Mapping[int, int]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory with the tokens ``new`` alone, as it will be loaded from the output."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        for name in (*_BESIDE, _ADDED, _VOCABULARY, _MERGES):
            if (directory / name).is_file():
                shutil.copyfile(directory / name, path / name)
        write_tokenizer(path, file, new)
        return load_tokenizer(path)


def added_in(directory: Path) -> set[int]:
    """The numbers of tokens that files beside tokenizer.json add to it, whether or not it has them."""
    added, config = (
        read_json(file) if (file := directory / name).is_file() else dict[str, Any]() for name in (_ADDED, _CONFIG)
    )
    decoder = config.get("added_tokens_decoder")
    return {*added.values(), *(map(int, decoder) if isinstance(decoder, dict) else ())}


def write_tokenizer(directory: Path, file: TokenizerFile, new: Mapping[int, int]) -> None:
    """Writes tokenizer.json, and again the other files there of the tokenizer, with the tokens ``new`` alone."""
    content = file.without(new)
    _write(directory / NAME, content)
    model = content["model"]
    if (directory / _VOCABULARY).is_file() and isinstance(model["vocab"], dict):
        _write(directory / _VOCABULARY, model["vocab"])
    if (directory / _MERGES).is_file() and "merges" in model:
        lines = (one if isinstance(one, str) else " ".join(one) for one in model["merges"])
        replace_file(directory / _MERGES, "\n".join(["#version: 0.2", *lines]) + "\n")
    if (path := directory / _ADDED).is_file():
        _write(path, {token: new[number] for token, number in read_json(path).items()})
    if (path := directory / _CONFIG).is_file():
        values: dict[str, Any] = read_json(path)
        if isinstance(added := values.get("added_tokens_decoder"), dict):
            values["added_tokens_decoder"] = {str(new[int(number)]): token for number, token in added.items()}
            _write(path, values)


def _write(path: Path, values: Any) -> None:
    with output_errors(path.parent):
        replace_file(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
