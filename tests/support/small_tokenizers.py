"""Tiny tokenizers of the kinds that tokens can be removed of, and models with them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.models import random_model

TEXT = """The old man sat by the river in 1984, and didn't say a word about the other men or the river.
def the_other(word: str) -> int:
    return len(word) + 1984  # the words of the other men
Größe, naïve, 東京 and 東京都 are words too; so are the others, and the rivers that the men sat by.
"""
SPECIAL = ("<s>", "</s>", "<image>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
KINDS = ("bytes", "whole words", "fallback", "unigram")


def _trained(kind: str) -> Tokenizer:
    lines = TEXT.splitlines(keepends=True) * 4
    if kind in ("bytes", "whole words"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet))
        return made
    made = Tokenizer(models.BPE() if kind == "fallback" else models.Unigram())
    made.normalizer = normalizers.Replace(" ", "▁")
    if kind == "unigram":
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer: Any = (
        trainers.BpeTrainer(vocab_size=160, limit_alphabet=50)
        if kind == "fallback"
        else trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"])
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.train_from_iterator(lines, trainer)
    return made


@functools.cache
def _content(kind: str) -> str:
    """tokenizer.json; special tokens are the last ones, so that all numbers change."""
    content: dict[str, Any] = json.loads(_trained(kind).to_str())
    model = content["model"]
    if kind == "unigram":
        model["vocab"] += [[token, 0.0] for token in BYTES]
        model["byte_fallback"] = True
        count = len(model["vocab"])
    else:
        if kind == "fallback":
            texts = ["<unk>", *BYTES, *model["vocab"]]
            model |= {"vocab": {token: i for i, token in enumerate(texts)}, "byte_fallback": True}
            model |= {"unk_token": "<unk>", "fuse_unk": True}
        model["ignore_merges"] = kind == "whole words"
        count = len(model["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": count + i, "content": token, **flags, "special": True} for i, token in enumerate(SPECIAL)
    ]
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [count], "tokens": ["<s>"]}}
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    post = {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": special}
    return json.dumps({**content, "post_processor": post})


def size(kind: str) -> int:
    """How many tokens a tokenizer has."""
    return Tokenizer.from_str(_content(kind)).get_vocab_size()


def write_tokenizer(path: Path, kind: str) -> Path:
    """Writes the files of a tokenizer."""
    path.mkdir(exist_ok=True)
    first = size(kind) - len(SPECIAL)
    (path / "tokenizer.json").write_text(_content(kind))
    added = {str(first + i): {"content": token, "special": True} for i, token in enumerate(SPECIAL)}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": added}))
    return path


def _with_biases(**changes: Any) -> PreTrainedModel:
    """A model whose head has biases, which none of the families' cases has."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", **sizes, **changes))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def save_with_tokenizer(path: Path, kind: str, case: str = "llama", rows: int = 5, **changes: Any) -> Path:
    """A random model of a family with a tokenizer of a kind; so many rows more than that has tokens, as often."""
    count = size(kind)
    first = count - len(SPECIAL)
    changes |= {"vocab_size": count + rows, "bos_token_id": first, "eos_token_id": first + 1}
    model = _with_biases(**changes) if case == "phi" else random_model(case, **changes)
    model.generation_config.eos_token_id = [first + 1, first + 2]
    model.save_pretrained(path)
    return write_tokenizer(path, kind)


_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
#: What a tokenizer of SentencePiece's kind does to spaces, as files of tokenizers have it: Gemma, Phi-3, and LLaMA 2 in
#: transformers 4 and 5.
SPACES: dict[str, tuple[Any, Any]] = {
    "replaced": (_REPLACED, _SPLIT),
    "before each": ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _REPLACED]}, None),
    "before the first": (None, {**_METASPACE, "prepend_scheme": "first"}),
    "never before": (None, {**_METASPACE, "prepend_scheme": "never"}),
}


def write_pieces(path: Path, spaces: str = "replaced", runs: bool = False) -> Path:
    """The files of a tokenizer of SentencePiece's kind, which has all merges that make a token, in the tokens' order.

    With ``runs`` those of runs of spaces come first, in turns with others, the longest left parts before all others.
    """
    trained: dict[str, Any] = json.loads(_trained("fallback").to_str())
    pieces = [*trained["model"]["vocab"], "▁▁", "▁▁▁", "▁▁▁▁", "=", "==", "===", "===="]
    vocabulary = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>", *BYTES, *dict.fromkeys(pieces)))}
    pairs = [(token[:i], token[i:]) for token in vocabulary for i in range(1, len(token)) if token[0] != "<"]
    merges = [pair for pair in pairs if vocabulary.keys() >= {*pair}]
    if runs:
        merges.sort(key=lambda pair: (len({*"".join(pair)}) > 1, -len(pair[0]) * (len({*"".join(pair)}) == 1)))
    normalizer, splits = SPACES[spaces]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": i, "content": token, **flags, "special": True} for token, i in vocabulary.items() if i < 3]
    count = len(vocabulary)
    more = ("<|im_end|>", "\n\n", "\n\n\n", "<h1>")
    added = [{"id": count + i, "content": token, **flags, "special": i == 0} for i, token in enumerate(more)]
    model = {**trained["model"], "vocab": vocabulary, "merges": merges, "byte_fallback": True, "fuse_unk": True}
    content = {**trained, "model": {**model, "unk_token": "<unk>"}, "added_tokens": [*special, *added]}
    content |= {"normalizer": normalizer, "pre_tokenizer": splits, "post_processor": None}
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(content))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return path


def save_with_pieces(path: Path, spaces: str = "replaced", runs: bool = False) -> Path:
    """A random LLaMA with such a tokenizer."""
    write_pieces(path, spaces, runs)
    count = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    random_model("llama", vocab_size=count + 2, bos_token_id=1, eos_token_id=2).save_pretrained(path)
    return path
