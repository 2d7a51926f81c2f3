"""Tiny random models that are an encoder with a decoder, and pairs for them."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    MarianConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SwitchTransformersConfig,
    T5Config,
    WhisperConfig,
    WhisperFeatureExtractor,
)

from niwaki.models.pairs import SOURCES, rows_of
from support.made import made_once
from support.models import EMBEDDED, EMBEDDED_VOCABULARY

_WIDTH: dict[str, Any] = {"d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
_T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4, **_WIDTH}
_BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **_WIDTH,
}
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 40, "bos_token_id": 1}
#: The frames of sound that the small Whisper hears, and samples in each.
FRAMES, HOP = 100, 160
KINDS = ("t5", "bart", "marian", "switch_transformers", "whisper")


def _config(kind: str, vocabulary: int) -> PreTrainedConfig:
    if kind == "t5":
        return T5Config(vocab_size=vocabulary, feed_forward_proj="gated-gelu", **_T5)
    if kind == "switch_transformers":
        return SwitchTransformersConfig(
            vocab_size=vocabulary,
            num_experts=4,
            expert_capacity=64,
            **{**_T5, "num_layers": 2, "num_decoder_layers": 2},
        )
    if kind == "whisper":
        return WhisperConfig(vocab_size=vocabulary, **_WHISPER)
    of = BartConfig if kind == "bart" else MarianConfig
    return of(vocab_size=vocabulary, max_position_embeddings=64, forced_eos_token_id=None, **_BART)


def class_of(kind: str) -> Any:
    """What transformers loads it with."""
    return AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM


def save_pair_model(path: Path, kind: str, with_words: bool = False) -> Path:
    """A model of this type with 64 tokens, or ``with_words``, the tokenizer of the embedded model."""

    def make(place: Path) -> None:
        torch.manual_seed(0)
        model: PreTrainedModel = class_of(kind).from_config(_config(kind, EMBEDDED_VOCABULARY if with_words else 64))
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.ndim > 1 and "embed_positions" not in name:
                    value.mul_(3 if kind in ("bart", "marian", "whisper") else 1)
        model.save_pretrained(place)
        if with_words:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(EMBEDDED / name, place)
        if kind == "whisper":
            WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=HOP).save_pretrained(place)

    made_once(path, f"pair {kind} {with_words}", make)
    torch.manual_seed(0)  # the same state whether the files were made now or before
    return path


def reference_of(path: Path, kind: str) -> PreTrainedModel:
    """The model as transformers loads it."""
    model: PreTrainedModel = class_of(kind).from_pretrained(path).eval()
    return model


def inputs_of(kind: str, source: list[int]) -> dict[str, Tensor]:
    """What transformers' model receives of a source."""
    return dict(SOURCES[source[0]]) if kind == "whisper" else {"input_ids": torch.tensor([source])}


def logits_of(model: PreTrainedModel, kind: str, pair: tuple[list[int], list[int]]) -> Tensor:
    """(predictions, vocabulary), of the tokens of a target after the first."""
    source, target = pair
    logits: Tensor = model(**inputs_of(kind, source), decoder_input_ids=torch.tensor([target[:-1]])).logits
    return logits[0]


def pairs_of(kind: str, count: int = 24, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Pairs of several lengths, of tokens or of the numbers of sounds."""
    drawing = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count, 2), generator=drawing).tolist()
    draw = [[torch.randint(3, 60, (n,), generator=drawing).tolist() for n in both] for both in lengths]
    pairs = [(source, [1, *target]) for source, target in draw]
    if kind != "whisper":
        return pairs
    sounds = [{"input_features": torch.randn(1, 8, FRAMES, generator=drawing)} for _ in pairs]
    numbers = [SOURCES.number(f"{seed} {i}", lambda i=i: sounds[i]) for i in range(count)]  # type: ignore[misc]
    return [([number], target) for number, (_, target) in zip(numbers, pairs, strict=True)]


def rows(kind: str, count: int = 24, seed: int = 0) -> Tensor:
    """The same as rows of tokens."""
    return rows_of(pairs_of(kind, count, seed))


def write_pairs(file: Path, count: int, sounds: bool = False) -> Path:
    """A file of ``count`` pairs of text, or of sounds and text, which are written beside it."""
    drawing = torch.Generator().manual_seed(0)
    lines = []
    for i in range(count):
        numbers = torch.randint(10, 99, (8,), generator=drawing).tolist()
        target = " ".join(map(str, sorted(numbers[: 4 + i % 4])))
        source = " ".join(map(str, numbers))
        if sounds:
            source = f"{i}.wav"
            _write_sound(file.parent / source, [200 + 20 * number for number in numbers])
        lines.append(json.dumps({"source": source, "target": target}))
    file.write_text("\n".join(lines) + "\n")
    return file


def _write_sound(file: Path, pitches: list[int]) -> None:
    times = torch.arange(2000) / 16_000
    samples = torch.cat([torch.sin(2 * torch.pi * pitch * times) for pitch in pitches]) * 20_000
    with wave.open(str(file), "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16_000)
        written.writeframes(samples.to(torch.int16).numpy().tobytes())
