"""The tokenizer of a GGUF file, which splits text as the file says.

Files name the way of splitting (``tokenizer.ggml.pre``), and llama.cpp knows what the names mean; transformers' reader
takes those that it does not know for GPT-2's. Source: src/llama-vocab.cpp of llama.cpp.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from niwaki.checkpoints.gguf_header import ANOTHER, ORIGINAL, TOKENIZER
from niwaki.errors import CheckpointError, UnsupportedModelError, shown

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES


@dataclass(frozen=True)
class _Splitting:
    """How a text is split into words: by expressions, one after another, or by GPT-2's own one."""

    expressions: tuple[str, ...] = ()
    digits: bool = False  # whether each digit is alone: before GPT-2's expression, or after all others
    composed: bool = False  # whether characters are composed first (NFC)
    whole: bool = False  # whether a word that is a token is not split, whatever the merges say
    begins: bool = False  # whether a text begins with BOS in files that do not say

    @property
    def steps(self) -> dict[str, Any]:
        """Its steps, as files of tokenizers have them."""
        backend = Tokenizer(models.BPE())
        self.into(backend)
        steps: dict[str, Any] = json.loads(backend.to_str())["pre_tokenizer"]
        return steps

    def into(self, backend: Tokenizer) -> None:
        """Makes ``backend`` split in this way."""
        own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.expressions)
        first: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in self.expressions]
        if self.digits:
            first.append(pre_tokenizers.Digits(individual_digits=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, own]) if first else own
        if self.composed:
            backend.normalizer = normalizers.NFC()


_GPT2, _DIGITS = _Splitting(), _Splitting(digits=True)
_LLAMA3 = _CONTRACTIONS + _LETTERS + r"|\p{N}{1,3}" + _OTHERS
_QWEN2 = _CONTRACTIONS + _LETTERS + r"|\p{N}" + _OTHERS
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_TEKKEN = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _CASED_OTHERS
_END = f"{_CONTRACTIONS}?"
_GPT4O = f"{_BEFORE}{_UPPER}*{_LOWER}+{_END}|{_BEFORE}{_UPPER}+{_LOWER}*{_END}" + r"|\p{N}{1,3}" + _CASED_OTHERS
_SEED_CODER = _CONTRACTIONS + _LETTERS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _SPACES,
)

#: By the names in files.
SPLITTINGS: Mapping[str, _Splitting] = {
    **dict.fromkeys(["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"], _GPT2),
    **dict.fromkeys(["gigachat", "a.x-4.0", "mellum"], _GPT2),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], _DIGITS),
    **dict.fromkeys(
        ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
        _Splitting((_LLAMA3,), whole=True, begins=True),
    ),
    "glm4": _Splitting((_LLAMA3,), whole=True),
    **dict.fromkeys(["dbrx", "smaug-bpe", "chatglm-bpe"], _Splitting((_LLAMA3,))),
    "qwen2": _Splitting((_QWEN2,), composed=True),
    **dict.fromkeys(["deepseek-r1-qwen", "kormo", "megrez", "f2llmv2", "stablelm2", "hunyuan"], _Splitting((_QWEN2,))),
    "qwen35": _Splitting((_QWEN35,), composed=True),
    "tekken": _Splitting((_TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], _Splitting((_GPT4O,))),
    "seed-coder": _Splitting((_SEED_CODER,)),
    "deepseek-coder": _Splitting(_DEEPSEEK_CODER, digits=True),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense"], _Splitting(_DEEPSEEK3)),
}
#: Kinds of tokens.
_CONTROL, _USER = 3, 4
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
#: By kinds of tokenizers one of the fields that it has to have; what are lists.
_MADE_OF = {"gpt2": ("merges",), "llama": ("scores", "merges"), "t5": ("scores",)}
_LISTS: Mapping[str, tuple[type, str]] = {
    "tokens": (str, "texts"),
    "merges": (str, "texts"),
    "scores": (float, "numbers"),
    "token_type": (int, "whole numbers"),
}
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def read_tokenizer(file: Path, alone: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file by the ``fields`` of its header; ``alone`` is the file with nothing beside it.

    UnsupportedModelError where how it splits text is unknown here. :func:`check_parts` was called.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _of_bytes(file, fields)
    # Not AutoTokenizer, which first makes a configuration of the file: minutes where there are many tokens.
    read = PreTrainedTokenizerFast.from_pretrained(alone.parent, gguf_file=alone.name, trust_remote_code=False)
    backend: Tokenizer = read.backend_tokenizer
    if kind == "llama" and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):  # not Gemma's or Phi 3's
        prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
        first = [normalizers.Prepend(_SPACE)] if prefix else []  # also before a space, as SentencePiece does it
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
        backend.pre_tokenizer = None
        last = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        )
    begins = fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and kind != "gemma4"  # as its own maker has it
    return _finished(file, fields, backend, begins)


def check_parts(file: Path, fields: Mapping[str, Any]) -> None:
    """CheckpointError unless what the tokenizer is made of is there, in lists that fit, and so are special tokens."""
    kind = fields.get(f"{TOKENIZER}model")
    own = {key.removeprefix(TOKENIZER): value for key, value in fields.items() if key.startswith(TOKENIZER)}
    for names in (("model",), ("tokens",), _MADE_OF.get(str(kind), ())):
        if names and not any(name in own for name in names):
            raise CheckpointError(
                f"{file} lacks the field {TOKENIZER}{names[0]}, which the tokenizer needs; {ANOTHER}, with its "
                "tokenizer beside its weights"
            )
    count = len(own["tokens"]) if isinstance(own["tokens"], list) else 0
    for name, (of, what) in _LISTS.items():
        values = own.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, of) for value in values):
            raise CheckpointError(f"{file} has {TOKENIZER}{name} {shown(values)}, no list of {what}; {ANOTHER}")
        if name in own and name != "merges" and len(values) != count:
            raise CheckpointError(f"{file} has {count:,} tokens, and {len(values):,} in {TOKENIZER}{name}; {ANOTHER}")
    for short in _SPECIAL.values():
        number = own.get(f"{short}_token_id", 0)
        if type(number) is not int or not 0 <= number < count:
            raise CheckpointError(
                f"{file} says that token {shown(number)} is its {short} token ({TOKENIZER}{short}_token_id), and has "
                f"{count:,}; {ANOTHER}"
            )


def _of_bytes(file: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """One whose tokens are of bytes, as GPT-2's are."""
    name = fields.get("tokenizer.ggml.pre")
    splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise UnsupportedModelError(
            f"{file} splits text in the way {shown(name)} (tokenizer.ggml.pre), unknown here; {ORIGINAL}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len({*tokens}) < len(tokens):
        raise CheckpointError(f"{file} has some of its tokens twice (tokenizer.ggml.tokens); {ANOTHER}")
    pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    for pair in pairs:
        if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}:
            raise CheckpointError(
                f"{file} merges {shown(' '.join(pair))}, which are not two tokens and make none "
                f"(tokenizer.ggml.merges); {ANOTHER}"
            )
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=splitting.whole))
    splitting.into(backend)
    backend.decoder = decoders.ByteLevel()
    for wanted, add in ((_CONTROL, backend.add_special_tokens), (_USER, backend.add_tokens)):
        named: Callable[..., int] = add
        named(
            [
                AddedToken(token, normalized=False, special=wanted == _CONTROL)
                for token, one in zip(tokens, kinds, strict=True)
                if one == wanted
            ]
        )
    return _finished(file, fields, backend, fields.get("tokenizer.ggml.add_bos_token", splitting.begins))


def _finished(file: Path, fields: Mapping[str, Any], backend: Tokenizer, begins: bool) -> PreTrainedTokenizerFast:
    """``backend`` with the special tokens of the file, of which BOS and EOS go around a text where it says so."""
    tokens = fields["tokenizer.ggml.tokens"]
    special: dict[str, str] = {}
    for name, short in _SPECIAL.items():
        if (number := fields.get(f"tokenizer.ggml.{short}_token_id")) is not None:
            special[name] = tokens[number]
    ends = fields.get("tokenizer.ggml.add_eos_token", False)
    for name, wanted in (("bos", begins), ("eos", ends)):
        if wanted and f"{name}_token" not in special:
            key = f"{TOKENIZER}{name}_token_id"
            raise CheckpointError(f"{file} lacks the field {key}, and has that token around each text; {ANOTHER}")
    around = [special["bos_token"] if begins else None, special["eos_token"] if ends else None]
    first, last = (f"{token}:0 " if token else "" for token in around)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A:0 {last}".strip(),
        pair=f"{first}$A:0 {last}$B:1".strip(),
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(around) if token],
    )
    template = fields.get("tokenizer.chat_template")
    options = {"chat_template": template} if isinstance(template, str) else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special, **options)
