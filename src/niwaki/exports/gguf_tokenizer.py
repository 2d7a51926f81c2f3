"""The tokenizer of a model as GGUF files have it: what transformers does with text has to be what llama.cpp does.

Judged is the tokenizer that transformers has loaded, not its files: its classes replace some of what these say. Each
step, with all that changes tokens, is one that llama.cpp has a name for, or the tokenizer is refused.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.models.gguf_source_tokenizer import SPLITTINGS
from niwaki.models.tokens import load_tokenizer

#: llama.cpp's names for ways of splitting that have been tried there with what is exported. It knows more.
_SPLITTINGS = ("gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe")
#: What changes no tokens of a step.
_HARMLESS = {"trim_offsets"}
#: Values of the model of merges, of which llama.cpp has no others. Unknown characters are none: all have their bytes.
_MERGING: dict[str, tuple[Any, ...]] = {
    "type": ("BPE",),
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (False, None),
}
#: Ordinary tokens of these names end texts in llama.cpp, or are special.
_TAKEN = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "[EOS]", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>"),
    *("<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[e~[", "<|channel|>", "<|message|>", "<|start|>"),
    *("<|constrain|>", "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>", "<|prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>", "<|suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "<|code_middle|>", "<|middle|>"),
    *("<|fim_pad|>", "<fim-pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>"),
    *("<reponame>", "<|file_sep|>"),
}
#: Kinds of tokens.
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5


class Tokenizer:
    """That of a model directory of ``size`` words, checked; ``notes`` is what llama.cpp does otherwise to few texts.

    UnsupportedModelError for what llama.cpp does otherwise or niwaki does not know; CheckpointError where it has other
    tokens than the model, or there is none.
    """

    def __init__(self, path: Path, size: int, config_end: Any = None) -> None:
        self.path, self.size, self.notes = path, size, list[str]()
        if (
            not any((path / name).exists() for name in ("tokenizer.json", "vocab.json"))
            and (path / "tokenizer.model").exists()
        ):
            raise self._unsupported("is tokenizer.model alone, of SentencePiece", "niwaki knows byte-level BPE only")
        self._tokenizer = load_tokenizer(path)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise self._unsupported(f"is a {type(self._tokenizer).__name__}", "niwaki takes those of tokenizers alone")
        if self._tokenizer.split_special_tokens:
            raise self._unsupported("has split_special_tokens True", "llama.cpp looks for special tokens in texts")
        self._content: dict[str, Any] = json.loads(backend.to_str())
        self._model: dict[str, Any] = self._content["model"]
        self._added: list[dict[str, Any]] = self._content["added_tokens"]
        self._check_merges()
        self._check_alphabet()
        self._check_added()
        self.splitter = self._find_splitter()
        self.tokens, self.kinds = self._list_tokens()
        self.starts, self.ends = self._find_ends()
        self.stops = self._find_stops(config_end)

    @property
    def file_size(self) -> int:
        """How many bytes of a file it takes, within a few hundred: strings with their lengths, and kinds of tokens."""
        template = self._tokenizer.chat_template or ""
        templates = template.values() if isinstance(template, dict) else [template]
        return 4 * len(self.kinds) + sum(8 + len(text.encode()) for text in (*self.tokens, *self._merges, *templates))

    def write(self, writer: Any) -> None:
        """Adds it to a ``GGUFWriter``."""
        tokenizer = self._tokenizer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.splitter)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        writer.add_token_merges(self._merges)
        for name in ("bos", "unk", "pad", "sep", "mask"):
            if (number := getattr(tokenizer, f"{name}_token_id")) is not None and number < self.size:
                getattr(writer, f"add_{name}_token_id")(number)
        for add, number in zip(
            (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), self.stops, strict=False
        ):
            add(number)
        writer.add_add_bos_token(self.starts)
        writer.add_add_eos_token(self.ends)
        if template := tokenizer.chat_template:
            named = isinstance(template, dict)
            writer.add_chat_template([{"name": k, "template": v} for k, v in template.items()] if named else template)

    def _unsupported(self, what: str, instead: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the tokenizer of {self.path} {what}, which cannot be exported to GGUF: {instead}"
        )

    def _check_merges(self) -> None:
        for key, known in _MERGING.items():
            if (value := self._model.get(key)) not in known:
                raise self._unsupported(f"has {key} {value!r}", f"niwaki can tell llama.cpp of {known[0]!r} alone")
        self._merges = [one if isinstance(one, str) else " ".join(one) for one in self._model["merges"]]
        if not self._merges or any(merge.count(" ") != 1 for merge in self._merges):
            raise self._unsupported("has no merges, or some with spaces", "llama.cpp writes each with one space")
        decoder = self._content["decoder"] or {}
        if decoder.get("type") != "ByteLevel":
            raise self._unsupported(f"has the decoder {decoder.get('type')}", "llama.cpp makes text of bytes")
        normalizers = _steps(self._content["normalizer"], "normalizers")
        if normalizers == [{"type": "NFC"}]:
            self.notes.append(
                "llama.cpp does not bring text into the form NFC, as this tokenizer does: a letter with its accent "
                "as a character of its own gives other tokens there"
            )
        elif normalizers:
            kinds = ", ".join(str(one.get("type")) for one in normalizers)
            raise self._unsupported(f"changes texts ({kinds})", "llama.cpp takes them as they are")

    def _check_alphabet(self) -> None:
        """Where a byte has no token, one program leaves it out before merging, the other after."""
        byte_of = _bytes_of_characters()
        missing = {byte for character, byte in byte_of.items() if character not in self._model["vocab"]}
        missing -= {0xC0, 0xC1, *range(0xF5, 0x100)}  # no text has them
        rare = {*range(32), 0x7F, *range(0xF1, 0xF5)} - set(b"\t\n\r")
        if missing - rare or (missing and self._model.get("unk_token") is not None):
            raise self._unsupported(f"has no token for {len(missing)} bytes", "llama.cpp leaves them out")
        if missing:
            self.notes.append(
                f"the tokenizer has no token for {len(missing)} bytes, those of control characters or of rare ones; "
                "around them llama.cpp can give other tokens"
            )

    def _check_added(self) -> None:
        """Tokens that are looked for in a text before it is split."""
        texts = {each["content"] for each in self._added}
        normalizers = _steps(self._content["normalizer"], "normalizers")
        for each in self._added:
            flags = [name for name in ("lstrip", "rstrip", "single_word") if each.get(name)]
            if flags or not each["content"] or "\0" in each["content"]:
                raise self._unsupported(
                    f"has the token {each['content']!r} with {' and '.join(flags) or 'no text'}",
                    "llama.cpp looks for its text alone",
                )
            is_changed = bool(normalizers) and each.get("normalized")  # by NFC: all else has been refused
            if is_changed and not unicodedata.is_normalized("NFC", each["content"]):
                raise self._unsupported(
                    f"has the token {each['content']!r}, normalized, and brings it into the form NFC",
                    "llama.cpp looks for its text as it is",
                )
        ordinary = sorted((self._model["vocab"].keys() & _TAKEN) - texts)
        if ordinary:
            raise self._unsupported(
                f"has the ordinary token {ordinary[0]!r}", "llama.cpp ends texts at that, or takes it as special"
            )
        starts: dict[str, str] = {text[:i]: text for text in texts for i in range(1, len(text))}
        for text in sorted(texts):
            for i in range(1, len(text)):
                other = starts.get(text[i:])
                if other is not None and text not in other and other not in text:
                    raise self._unsupported(
                        f"has the tokens {text!r} and {other!r}, which can overlap", "llama.cpp takes the longer one"
                    )
        whole = {each["content"] for each in self._added if not each.get("normalized")}
        for text in sorted(texts - whole):
            if inner := [one for one in sorted(whole) if one in text]:
                raise self._unsupported(
                    f"has the token {text!r}, but {inner[0]!r} in it is found first", "llama.cpp takes the longer one"
                )

    def _find_splitter(self) -> str:
        steps = _steps(self._content["pre_tokenizer"], "pretokenizers")
        keeps = bool(self._model.get("ignore_merges"))
        for name in _SPLITTINGS:
            if steps == _steps(SPLITTINGS[name].steps, "pretokenizers") and keeps == SPLITTINGS[name].whole:
                return name
        shown = [{key: value for key, value in step.items() if key != "pattern"} for step in steps]
        raise self._unsupported(
            f"splits text in a way that llama.cpp has no name for ({shown}, ignore_merges {keeps})",
            "niwaki knows those of GPT-2, SmolLM2, Qwen 2 and LLaMA 3",
        )

    def _list_tokens(self) -> tuple[list[str], list[int]]:
        """By number the tokens and their kinds; some numbers may have none."""
        added = {each["id"]: each for each in self._added}
        beyond = [each["content"] for number, each in added.items() if number >= self.size]
        if beyond:
            self.notes.append(f"the model has no place for {', '.join(map(repr, beyond))}; the file leaves that out")
        named = {**self._model["vocab"], **{each["content"]: number for number, each in added.items()}}
        tokens: dict[int, str] = {}
        for token, number in named.items():
            if token in beyond:
                continue
            if not 0 <= number < self.size:
                raise CheckpointError(f"the tokenizer of {self.path} has the token {number}, of {self.size} it can be")
            if number in tokens:
                raise CheckpointError(f"{self.path} has two tokens {number}: {tokens[number]!r} and {token!r}")
            tokens[number] = token
        kinds = [_NORMAL if number in tokens else _UNUSED for number in range(self.size)]
        for number, each in added.items():
            if number < self.size:
                kinds[number] = _CONTROL if each.get("special") else _USER
        for number in range(self.size):
            if number not in tokens:
                tokens[number] = f"[PAD{number}]"
                while tokens[number] in named:
                    tokens[number] = f"[{tokens[number]}]"
        return [tokens[number] for number in range(self.size)], kinds

    def _find_ends(self) -> tuple[bool, bool]:
        """Whether the tokens of a text have the beginning of text before them, and its end after them."""
        alone, whole = (self._encode(special) for special in (False, True))
        for start in range(len(whole) - len(alone) + 1):
            if whole[start : start + len(alone)] == alone:
                before, after = whole[:start], whole[start + len(alone) :]
                if before in ([], [self._tokenizer.bos_token_id]) and after in ([], [self._tokenizer.eos_token_id]):
                    return bool(before), bool(after)
        raise self._unsupported(
            f"adds tokens to a text ({whole} for {alone})", "llama.cpp adds the beginning and the end of text alone"
        )

    def _encode(self, special: bool) -> list[int]:
        return list(self._tokenizer("a", add_special_tokens=special).input_ids)

    def _find_stops(self, config_end: Any) -> list[int]:
        """Tokens at which llama.cpp has to end a text, the tokenizer's own first."""
        file = self.path / "generation_config.json"
        given = read_json(file).get("eos_token_id") if file.is_file() else config_end
        given = given if isinstance(given, list) else [given]
        own = self._tokenizer.eos_token_id
        stops = list(dict.fromkeys(one for one in (own, *given) if isinstance(one, int) and 0 <= one < self.size))
        if not stops:
            self.notes.append(f"no token ends a text; llama.cpp ends one at the token 11, {self.tokens[11:12]}")
        if unsaid := [self.tokens[one] for one in stops[3:] if self.tokens[one] not in _TAKEN]:
            self.notes.append(f"llama.cpp does not end texts at {', '.join(map(repr, unsaid))}, as transformers does")
        return stops[:3]


def _steps(value: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    """A step or a sequence of them as a list, without what changes no tokens."""
    if value is None:
        return []
    if value["type"] == "Sequence":
        return [step for part in value[several] for step in _steps(part, several)]
    return [{key: each for key, each in value.items() if key not in _HARMLESS}]


def _bytes_of_characters() -> dict[str, int]:
    """The characters that stand for bytes in the tokens of GPT-2's kind: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
