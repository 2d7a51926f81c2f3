"""What llama.cpp computes of a GGUF file, from its keys and tensors alone: an independent reference in float64."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import regex
import torch
from torch import Tensor
from torch.nn import functional

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_EXPRESSIONS = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "qwen2": [_CASED + _REST],
    "deepseek-r1-qwen": [_CASED + _REST],
    "qwen35": [(_CASED + _REST).replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")],
    "seed-coder": [_CASED + r"| ?[^\s\p{L}\p{N}\r\n]+" + _REST[_REST.index(r"|\s*[\r\n]+") :]],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        _HAN,
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST[_REST.index(r"|\s*[\r\n]+") :],
    ],
    "llama-bpe": [_CASED + "{1,3}" + _REST],
    "smaug-bpe": [_CASED + "{1,3}" + _REST],
}


class File:
    """A GGUF file as llama.cpp reads it."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.keys: dict[str, Any] = {name: each.contents() for name, each in reader.fields.items()}
        self.tensors = {
            each.name: torch.from_numpy(np.array(gguf.quants.dequantize(each.data, each.tensor_type))).double()
            for each in reader.tensors
        }
        self.family = self.keys["general.architecture"]

    def __getitem__(self, key: str) -> Any:
        return self.keys[f"{self.family}.{key}"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.family}.{key}", default)

    @property
    def length(self) -> int:
        return int(self["context_length"])

    def logits(self, tokens: list[int]) -> Tensor:
        """(tokens, words)"""
        x = self.tensors["token_embd.weight"][tokens]
        for block in range(self["block_count"]):
            x = x + self._attention(block, self._norm(x, f"blk.{block}.attn_norm"))
            inner = self._norm(x, f"blk.{block}.ffn_norm")
            x = x + (self._experts if self.family == "qwen3moe" else self._neurons)(block, inner)
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self._norm(x, "output_norm") @ head.T

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        scale = torch.rsqrt(variance + float(self["attention.layer_norm_rms_epsilon"]))
        return x * scale * self.tensors[f"{name}.weight"]

    def _attention(self, block: int, x: Tensor) -> Tensor:
        width = self["attention.key_length"]
        q, k, v = (
            self._linear(x, f"blk.{block}.attn_{name}").unflatten(-1, (-1, width)).transpose(0, 1) for name in "qkv"
        )
        if f"blk.{block}.attn_q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"blk.{block}.attn_q_norm"), self._norm(k, f"blk.{block}.attn_k_norm")
        q, k = self._turn(q), self._turn(k)
        k, v = (each.repeat_interleave(len(q) // len(k), dim=0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / width**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self._linear(mixed.transpose(0, 1).flatten(1), f"blk.{block}.attn_output")

    def _turn(self, x: Tensor) -> Tensor:
        """Rotary positions, of x (heads, tokens, width)."""
        width = self["rope.dimension_count"]
        angles = float(self["rope.freq_base"]) ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        if "rope_freqs.weight" in self.tensors:
            angles = angles / self.tensors["rope_freqs.weight"]
        angles, length = self._stretched(angles), float(self.get("rope.scaling.attn_factor", 1.0))
        if self.get("rope.scaling.type") == "yarn":
            length *= 1 + 0.1 * math.log(self["rope.scaling.factor"])
        turns = torch.polar(
            torch.full((x.shape[1], width // 2), length, dtype=torch.float64),
            torch.arange(x.shape[1], dtype=torch.float64)[:, None] * angles,
        )
        if self.family == "llama":  # neighbours
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
        turned = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _stretched(self, angles: Tensor) -> Tensor:
        """Those that turn fewer than 32 times within the original context are stretched, the more the fewer."""
        slow = angles / float(self.get("rope.scaling.factor", 1.0))
        if self.get("rope.scaling.type") != "yarn":
            return slow
        of_turns = [self["rope.scaling.original_context_length"] / (2 * math.pi * turns) for turns in (32, 1)]
        first, last = (len(angles) * math.log(each) / math.log(float(self["rope.freq_base"])) for each in of_turns)
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * len(angles) - 1)
        share = ((torch.arange(len(angles)) - first) / max(last - first, 0.001)).clamp(0, 1)
        return slow * share + angles * (1 - share)

    def _neurons(self, block: int, x: Tensor) -> Tensor:
        gate, up = (self._linear(x, f"blk.{block}.ffn_{name}") for name in ("gate", "up"))
        return self._linear(functional.silu(gate) * up, f"blk.{block}.ffn_down")

    def _experts(self, block: int, x: Tensor) -> Tensor:
        chances = self._linear(x, f"blk.{block}.ffn_gate_inp").softmax(-1)
        best = chances.topk(self["expert_used_count"], dim=-1)
        shares = best.values / best.values.sum(-1, keepdim=True)
        gate, up, down = (self.tensors[f"blk.{block}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        y = torch.zeros_like(x)
        for token, (experts, weights) in enumerate(zip(best.indices, shares, strict=True)):
            for expert, weight in zip(experts.tolist(), weights, strict=True):
                inner = functional.silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
                y[token] += weight * (down[expert] @ inner)
        return y

    def split(self, text: str) -> list[int]:
        """The tokens of a text, with what is added before and behind."""
        words = self.keys["tokenizer.ggml.tokens"]
        self._numbers = {word: number for number, word in enumerate(words)}
        merges = [tuple(each.split(" ")) for each in self.keys.get("tokenizer.ggml.merges", [])]
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
        scores = self.keys.get("tokenizer.ggml.scores", [])
        self._scores = dict(zip(words, scores, strict=True)) if scores else {}
        kinds = self.keys["tokenizer.ggml.token_type"]
        special = sorted((w for w, kind in zip(words, kinds, strict=True) if kind in (3, 4)), key=len, reverse=True)
        tokens = [self._numbers[part] if known else part for part, known in _partition(text, special)]
        plain = self._split_pieces if self._scores else self._split_plain
        found = [one for part in tokens for one in ([part] if isinstance(part, int) else plain(part))]
        if self.keys.get("tokenizer.ggml.add_bos_token", self.keys["tokenizer.ggml.pre"] == "llama-bpe"):
            found.insert(0, self.keys["tokenizer.ggml.bos_token_id"])
        if self.keys.get("tokenizer.ggml.add_eos_token"):
            found.append(self.keys["tokenizer.ggml.eos_token_id"])
        return found

    def _split_plain(self, text: str) -> list[int]:
        pieces = [text]
        for expression in _EXPRESSIONS[self.keys["tokenizer.ggml.pre"]]:
            pieces = [part for piece in pieces for part in _matches(expression, piece)]
        return [number for piece in pieces for number in self._merge(piece)]

    def _split_pieces(self, text: str) -> list[int]:
        """By scores: of all that are side by side and make a token, those with the highest first."""
        prefix = self.keys.get("tokenizer.ggml.add_space_prefix", True)
        symbols = list((" " * prefix + text).replace(" ", "▁"))
        while pairs := [
            (-self._scores[left + right], i)
            for i, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in self._scores
        ]:
            _, at = min(pairs)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        return [
            number
            for one in symbols
            for number in (
                [self._numbers[one]]
                if one in self._numbers
                else [self._numbers[f"<0x{byte:02X}>"] for byte in one.encode()]
            )
        ]

    def _merge(self, piece: str) -> list[int]:
        symbols = ["".join(_CHARACTERS[byte] for byte in piece.encode())]
        if self.keys["tokenizer.ggml.pre"] != "llama-bpe" or symbols[0] not in self._numbers:
            symbols = list(symbols[0])
        while pairs := [pair for pair in itertools.pairwise(symbols) if pair in self._ranks]:
            pair = min(pairs, key=self._ranks.__getitem__)
            at = next(i for i in range(len(symbols)) if tuple(symbols[i : i + 2]) == pair)
            symbols[at : at + 2] = ["".join(pair)]
        return [self._numbers[symbol] for symbol in symbols]


def _partition(text: str, special: list[str]) -> list[tuple[str, bool]]:
    """The parts of a text, and whether each is one of the special tokens: the longest are looked for first."""
    parts = [(text, False)]
    for token in special:
        found = []
        for part, known in parts:
            between = [part] if known else part.split(token)
            for i, each in enumerate(between):
                found += [(token, True)] if i else []
                found += [(each, known)] if each else []
        parts = found
    return parts


def _matches(expression: str, text: str) -> list[str]:
    """What an expression finds in a text, and what is between."""
    ends = sorted({0, len(text), *(at for match in regex.finditer(expression, text) for at in match.span())})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def _byte_characters() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_CHARACTERS = _byte_characters()
