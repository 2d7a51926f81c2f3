"""The tokens of a model of which some can be removed: which have to stay, and what has a row for each of them."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError, UsageError
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import encode, find_bos
from niwaki.quantities import parse_vocabulary
from niwaki.shrinking.tokenizer import TokenizerFile, added_in, load_smaller
from niwaki.texts.rows import ChatTemplate, TemplateError, rendered

# Which tokens stay: those that are common, in the text that was counted and in the text the tokenizer is from.

#: How much of a token's score is how common it was in the tokenizer's own text, and not in what was counted. On SmolLM2
#: with books counted: docs/results-quality.md.
PRIOR = 0.3
#: Sizes that are not asked for as such are multiples of it.
_MULTIPLE = 64


@dataclass(frozen=True)
class Size:
    """How many tokens stay: a ``number``, all but a ``share``, or so much of what the counted text uses (``used``)."""

    number: int | None = None
    share: float | None = None
    used: float | None = None

    @classmethod
    def of(cls, given: float | str) -> "Size":
        """24576, "24576", 0.5, "50 %", "used" or "used:0.9995"; UsageError for all else."""
        return cls(*parse_vocabulary(given))


def score(file: TokenizerFile, counts: Tensor) -> Tensor:
    """(tokens,) float64 what each token is worth: its share of ``counts`` and of the tokenizer's own text."""
    prior = torch.zeros(len(counts), dtype=torch.float64)
    for number, value in file.shares().items():
        if number < len(prior):
            prior[number] = value
    return (1 - PRIOR) * counts.double() / counts.sum() + PRIOR * prior


def choose(file: TokenizerFile, counts: Tensor, size: Size, always: Collection[int]) -> list[int]:
    """The numbers of the tokens that stay, in order: those of ``always``, and the best by :func:`score`, closed.

    ``counts`` (tokens,) are the shares of the counted text, of all numbers that the model has. UsageError where the
    ``size`` is less than what has to stay, or all there is.
    """
    values = score(file, counts).tolist()
    known = (number for number in file.tokens.values() if number < len(values))  # by the model too
    order = sorted(known, key=lambda number: (-values[number], number))
    kept = set[int]()
    for number in sorted({*file.always, *always}):
        kept |= {*file.needs(number)}
    least, whole = len(kept), len({*order, *kept})
    if size.used is not None:
        kept |= _of_text(file, counts, size.used)
        wanted = _rounded(len(kept), whole)
    else:
        wanted = size.number or _rounded(round((1 - (size.share or 0)) * whole), whole)
    if wanted < least:
        raise UsageError(
            f"a vocabulary of {wanted:,} is less than the {least:,} tokens that have to stay: bytes, special tokens "
            "and what these need; give more"
        )
    if wanted >= whole:
        raise UsageError(f"a vocabulary of {wanted:,} tokens would remove none of the {whole:,} that the tokenizer has")
    return sorted(_filled(file, kept, order, wanted))


def _rounded(count: int, whole: int) -> int:
    """The next multiple of 64, but no more than there are."""
    return min(whole, -(-count // _MULTIPLE) * _MULTIPLE)


def _of_text(file: TokenizerFile, counts: Tensor, share: float) -> set[int]:
    """The most common tokens that make up this ``share`` of the text, with what they need."""
    kept, values, had = set[int](), counts.double(), 0.0
    for number in torch.argsort(values, descending=True, stable=True).tolist():
        if not values[number] or had >= share * float(values.sum()):
            break
        had += float(values[number])
        kept |= {*file.needs(number)}
    return kept


def _filled(file: TokenizerFile, kept: set[int], order: list[int], size: int) -> set[int]:
    """``kept`` with the first tokens of ``order`` that fit into the ``size``, each with what it needs."""
    while len(kept) < size:
        later = list[int]()  # too many for now: some of what they need may come first
        for number in order:
            if number in kept:
                continue
            missing = {*file.needs(number)} - kept
            if len(kept) + len(missing) <= size:
                kept |= missing
            else:
                later.append(number)
            if len(kept) == size:
                break
        order = later
    return kept


def renumbered(kept: Collection[int]) -> Mapping[int, int]:
    """The new number of each token that stays, by its old one: the same order without gaps."""
    return {number: new for new, number in enumerate(sorted(kept))}


# Numbers of tokens in the files beside the tokenizer's own: configurations name some, and others say how many.

#: Files of a model directory that name tokens by their numbers.
FILES = (
    "config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
_SIZE = "vocab_size"
#: The part of a configuration that is of the language model, where it has others too.
_TEXT = "text_config"
#: Names of entries with a number, a list of numbers, or lists of them.
_NUMBERS = re.compile(r"(.*_)?token_(id|ids|index)|(begin_)?suppress_tokens|(bad|force)_words_ids")
#: Names of entries that have to do with tokens in a way that is not known here; segments of a text are no tokens.
_UNKNOWN = re.compile(
    r"(?!type_vocab_size).*vocab.*|forced_decoder_ids|sequence_bias|no_timestamps_token.*|token_healing|.*token_map.*"
)
#: What these have where they do nothing.
_NOTHING: tuple[Any, ...] = (None, False, [], {})


def named(values: Mapping[str, Any], where: Path) -> Iterator[int]:
    """All numbers of tokens in a configuration; UnsupportedModelError for entries that are not known."""

    def found(number: int) -> int:
        numbers.append(number)
        return number

    numbers = list[int]()
    mapped(values, found, 1, where)
    yield from numbers


def mapped(
    values: Mapping[str, Any], new: Callable[[int], int], size: int, where: Path, is_text: bool = True
) -> dict[str, Any]:
    """A configuration with the ``new`` numbers of its tokens, of a vocabulary of ``size``.

    ``is_text`` is whether its size of a vocabulary is that of the language model. UnsupportedModelError for entries
    that are not known.
    """
    made: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("sequence_bias", "pruning_config", "quantization_config"):
            made[name] = mapped(value, new, size, where, is_text=name == _TEXT)
        elif name == _SIZE and is_text and isinstance(value, int):
            made[name] = size
        elif _NUMBERS.fullmatch(name):
            made[name] = _each(value, new, name, where)
        elif _UNKNOWN.fullmatch(name) and value not in _NOTHING:
            raise UnsupportedModelError(
                f"{where} has {name} {str(value)[:60]}, and what becomes of that with fewer tokens is not known; no "
                "tokens of this model can be removed"
            )
        else:
            made[name] = value
    return made


def _each(value: Any, new: Callable[[int], int], name: str, where: Path) -> Any:
    """``value`` with new numbers, a number or lists of such; those below 0 stand for none."""
    if isinstance(value, list):
        return [_each(one, new, name, where) for one in value]
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 0):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModelError(f"{where} has {name} {str(value)[:60]}, which is not a token id")
    return new(value)


#: Conversations that show which tokens a chat template needs; some take no system message, or begin with a question.
_CONVERSATION = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "a"},
]


class ModelTokens:
    """The tokens of a model, of which the least needed can be removed.

    Attributes:
        rows: How many the model has.
        keys: The tensors with a row for each of them.
        file: The tokenizer's file.

    Raises:
        UnsupportedModelError: tokens of this model cannot be removed.
        CheckpointError: its files make no sense.
    """

    def __init__(self, model: StreamedModel) -> None:
        if model.pairs is not None:
            raise UnsupportedModelError(
                f"{model.checkpoint.path} is an encoder with a decoder; removing tokens is not supported"
            )
        self._model, self._directory = model, model.checkpoint.path
        self.rows: int = model.config.vocab_size
        self.keys = _keys_of_rows(model)
        self.file = TokenizerFile(self._directory)
        files = [file for name in FILES if (file := self._directory / name).is_file()]
        #: The tokens that configurations name by their numbers, each with a file that does.
        self._named = {number: file for file in files for number in named(read_json(file), file)}

    @property
    def weights(self) -> int:
        """How many weights go with each token."""
        entries = self._model.checkpoint.stored.entries
        return sum(prod(entries[key].shape[1:]) for key in self.keys)

    @property
    def unused(self) -> int:
        """How many of them the tokenizer does not have, and nothing names."""
        known = {*self.file.tokens.values(), *self.file.added.values(), *self._always}
        return self.rows - sum(number < self.rows for number in known)

    def choose(self, shares: Tensor, size: Size) -> Mapping[int, int]:
        """The new number of each token that stays, by its old one; ``shares`` (tokens,) are those of a text.

        UsageError where the ``size`` is less than what has to stay, or all there is.
        """
        return renumbered(choose(self.file, shares, size, self._always))

    def tokenizer(self, new: Mapping[int, int]) -> PreTrainedTokenizerBase:
        """The tokenizer with these tokens alone."""
        return load_smaller(self._directory, self.file, new)

    @cached_property
    def _always(self) -> set[int]:
        """Tokens that stay beside those that the tokenizer cannot do without: named in files, and of chat templates."""
        tokenizer = self._model.tokenizer
        tokens = {*self.file.tokens.values(), *self.file.added.values()}
        for number, where in self._named.items():
            if number >= self.rows and number not in tokens:
                raise CheckpointError(
                    f"{where} names the token {number:,}, and the model has {self.rows:,}; correct or remove that"
                )
        special = {number for number in tokenizer.all_special_ids if number in tokens}
        return {*self._named, *special, *added_in(self._directory), *_of_template(tokenizer)}


def _of_template(tokenizer: Any) -> set[int]:
    """The tokens that the chat template puts around what is said, if there is one and it can be rendered."""
    if (template := ChatTemplate.of(tokenizer, find_bos(tokenizer))) is None:
        return set()
    for first in range(2):
        try:
            (text,) = rendered(template.template, [_CONVERSATION[first:]], template.special, ask=True)
            return {*encode(tokenizer, text)}
        except TemplateError:
            continue
    return set()


def _keys_of_rows(model: StreamedModel) -> set[str]:
    """The keys of all tensors with a row for each token; UnsupportedModelError where one is not known to have them."""
    checkpoint, rows = model.checkpoint.stored, model.config.vocab_size
    parts = [model.model.get_input_embeddings(), model.model.get_output_embeddings()]
    names = [
        f"{path}.{own}"
        for path, module in model.model.named_modules(remove_duplicate=False)
        if any(module is part for part in parts)
        for own, _ in module.named_parameters(recurse=False)
    ]
    known = {key for name in names for key in [*model.layout.keys(name), name] if key in checkpoint.entries}
    found = {key for key, entry in checkpoint.entries.items() if rows in entry.shape}
    wrong = sorted(found - known) or sorted(key for key in known if checkpoint.entries[key].shape[:1] != (rows,))
    if wrong:
        entry = checkpoint.entries[wrong[0]]
        raise UnsupportedModelError(
            f"{checkpoint.path} has {wrong[0]!r} of the shape {entry.shape}, and whether it has a row for each of the "
            f"{rows:,} tokens is not known; no tokens of this model can be removed"
        )
    return known
