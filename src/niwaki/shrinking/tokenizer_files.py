"""The tokenizer's files of a model directory, with fewer tokens."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from niwaki.checkpoints.tensors import read_json
from niwaki.files import output_errors, replace_file
from niwaki.models.tokens import load_tokenizer
from niwaki.shrinking.tokenizer_file import NAME, TokenizerFile

#: Files of the same tokens in other forms, which the output is without.
_OTHERS = (
    "tokenizer.model*",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "*.tiktoken",
    "vocab.bpe",
    "encoder.json",
)
#: What a tokenizer is loaded from beside tokenizer.json.
_BESIDE = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CONFIG, _ADDED, _VOCABULARY, _MERGES = "tokenizer_config.json", "added_tokens.json", "vocab.json", "merges.txt"


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
