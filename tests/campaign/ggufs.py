"""GGUF files with other bytes: most are refused in a line, and of the others comes what the package gguf reads."""

from __future__ import annotations

import functools
import json
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from huggingface_hub import cached_assets_path
from safetensors.torch import load_file
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

import niwaki
from niwaki import files
from support.forks import command, refused
from support.gguf_files import changed
from support.models import add_tokenizer, random_model

_home = Path()
_start = 0  # of the tensors
#: Of the header and each field and tensor, where in the file its first numbers are, and their bytes.
_numbers: list[list[tuple[int, int]]] = []
_lengths: list[int] = []  # of arrays, behind the types of their elements
#: Bytes that a command may take beyond what this process has, and its seconds.
_MEMORY, _PATIENCE = 1 << 31, 60.0
_SMALL = (0, 1, 3, 7, 31, 32, 33, 255, 256, 2**16)
_ODD = (*_SMALL, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 32, 2**64 - 1)
_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_NAMES |= {"output.weight": "lm_head.weight"}
_PARTS = {f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"}
_PARTS |= {f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")}
_PARTS |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
#: What configurations say of the fields that are about the architecture, where it has no other value.
_SAID = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}


def prepare(place: Path) -> None:
    """A file with a vocabulary of bytes and two words."""
    global _home, _start, _numbers, _lengths
    _home = place
    tokens = ["<s>", "</s>", *bytes_to_unicode().values(), "th", "the"]
    random_model("llama grouped", vocab_size=4096, dtype=torch.float16).save_pretrained(place / "model")
    niwaki.export(add_tokenizer(place / "model"), place / "model.gguf", "gguf-f16")

    def smaller(fields: Any, kept: dict[str, Any]) -> None:
        kinds = fields["tokenizer.ggml.token_type"][1]
        fields["tokenizer.ggml.tokens"] = (tokens, fields["tokenizer.ggml.tokens"][1])
        fields["tokenizer.ggml.token_type"] = ([3, 3] + [1] * (len(tokens) - 2), kinds)
        fields["tokenizer.ggml.merges"] = (["t h", "th e"], fields["tokenizer.ggml.merges"][1])
        fields["llama.vocab_size"] = (len(tokens), fields["llama.vocab_size"][1])
        for name in ("token_embd.weight", "output.weight"):
            kept[name] = np.ascontiguousarray(kept[name][: len(tokens)])

    changed(place / "model.gguf", smaller)
    reader = gguf.GGUFReader(place / "model.gguf")
    _start = min(tensor.data_offset for tensor in reader.tensors)
    described = [*list(reader.fields.values())[3:], *(tensor.field for tensor in reader.tensors)]
    arrays = [each for each in reader.fields.values() if each.types[0].name == "ARRAY"]
    _lengths = [_numbers_of(each)[-1][0] for each in arrays]
    _numbers = [[(4, 4), (8, 8), (16, 8)], *map(_numbers_of, described)]


def case(chance: random.Random, place: Path) -> str:
    content = bytearray((_home / "model.gguf").read_bytes())
    for _ in range(chance.choice((0, 1, 1, 1, 2, 5))):
        chance.choice((_a_byte, _a_number, _a_number, _an_array, _a_letter, _a_piece, _an_end))(chance, content)
    file = place / "model.gguf"
    file.write_bytes(content)
    ended = command(["inspect", file], place, functools.partial(_limited, place), _PATIENCE)
    if ended.code:
        assert "MemoryError" not in refused(ended), "it took all memory that it was given"
        return "refused"
    (made,) = place.glob("cache/**/model/model.safetensors")
    _check(file, made.parent)
    return "taken"


def _limited(place: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    found: Callable[..., Path] = functools.partial(cached_assets_path, assets_dir=place / "cache")
    vars(files)["cached_assets_path"] = found


def _a_byte(chance: random.Random, content: bytearray) -> None:
    content[chance.randrange(min(_start, len(content)))] = chance.randrange(256)


def _numbers_of(field: Any) -> list[tuple[int, int]]:
    """Where the counts, lengths, types and values of a field or tensor are, of an array all before its values."""
    ends = [field.offset, *(field.offset + np.cumsum([part.nbytes for part in field.parts])).tolist()]
    parts = list(zip(ends, field.parts, strict=False))[:5]
    return [(at, part.nbytes) for at, part in parts if part.nbytes in (1, 4, 8)]


def _a_number(chance: random.Random, content: bytearray) -> None:
    at, size = chance.choice(chance.choice(_numbers))
    value = chance.choice(_ODD) & (2 ** (8 * size) - 1)
    content[at : at + size] = value.to_bytes(size, "little")


def _an_array(chance: random.Random, content: bytearray) -> None:
    """Of elements of any size, more of them than bytes: for some readers those beyond the end are nothing."""
    at = chance.choice(_lengths)
    content[at - 4 : at + 8] = struct.pack("<IQ", chance.randrange(14), chance.choice(_ODD))


def _a_letter(chance: random.Random, content: bytearray) -> None:
    """Of a name, a word or a token."""
    places = [at for at in range(min(_start, len(content))) if chr(content[at]).isalpha()]
    if places:
        content[chance.choice(places)] = ord(chance.choice("abcxyz._-"))


def _a_piece(chance: random.Random, content: bytearray) -> None:
    """More or fewer bytes somewhere."""
    at, size = chance.randrange(len(content)), chance.choice((1, 4, 8, 32, 100))
    content[at : at + chance.choice((0, size))] = chance.randbytes(chance.choice((0, size)))


def _an_end(chance: random.Random, content: bytearray) -> None:
    del content[chance.randrange(len(content)) :]


def _check(file: Path, directory: Path) -> None:
    """Asserts that the model is what the file says."""
    reader, config = gguf.GGUFReader(file), json.loads((directory / "config.json").read_text())
    fields = {key: each.contents() for key, each in reader.fields.items()}
    made = load_file(directory / "model.safetensors")
    for tensor in reader.tensors:
        name, value = _transformers_name(tensor.name), torch.from_numpy(tensor.data.copy())
        for part, key in (("attn_q.", "head_count"), ("attn_k.", "head_count_kv")):
            if part in tensor.name:
                value = _halves(value, fields[f"llama.attention.{key}"])
        assert torch.equal(made.pop(name).float(), value.to(torch.float16).float()), tensor.name
    assert not made
    for key, name in _SAID.items():
        if f"llama.{key}" in fields:
            assert np.float32(config[name]) == np.float32(fields[f"llama.{key}"]), key
    base = fields.get("llama.rope.freq_base", 10_000.0)
    assert np.float32(config["rope_parameters"]["rope_theta"]) == np.float32(base)


def _transformers_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, number, part, _ = name.split(".")
    return f"model.layers.{number}.{_PARTS[part]}.weight"


def _halves(value: Tensor, heads: int) -> Tensor:
    """Rows of heads with neighbours beside each other, as llama.cpp turns them, as transformers has them."""
    turned: Tensor = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return turned
