"""What the benchmarks share: layers to measure on, times, and records."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see niwaki/cli/main.py

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.files import write_json
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.records.record import versions
from niwaki.texts.reading import read_windows


@dataclass(frozen=True)
class Layer:
    """A matrix with the Gram matrix of its inputs of some tokens, and that on another text if there is one."""

    name: str
    W: Tensor
    H: Tensor
    H_held: Tensor | None = None
    tokens: int | None = None

    def problem(self) -> LayerProblem:
        """With nothing computed in advance except the power, which belongs to the measurement."""
        problem = LayerProblem(self.W, Gram(self.H, shared=False, tokens=self.tokens))
        _ = problem.power
        return problem


def synthetic(rows: int, columns: int, device: str = "cpu") -> Layer:
    """(rows, columns) weights of Student's t with 4 degrees of freedom; inputs with a few strong directions."""
    generator = torch.Generator(device).manual_seed(0)
    W = torch.randn(rows, columns, generator=generator, device=device)
    chi = torch.zeros_like(W)
    for _ in range(4):
        normal = torch.randn(rows, columns, generator=generator, device=device)
        chi.addcmul_(normal, normal, value=0.25)
    H = torch.zeros(columns, columns, device=device)
    directions = torch.randn(16, columns, generator=generator, device=device)
    for _ in range(8):
        X = torch.randn(columns // 4, columns, generator=generator, device=device)
        X.addmm_(torch.randn(len(X), 16, generator=generator, device=device), directions)
        H.addmm_(X.T, X, alpha=1 / (8 * len(X)))
    return Layer(f"synthetic {rows} x {columns}", W.div_(chi.sqrt_()), H)


def add_layer_arguments(parser: argparse.ArgumentParser, blocks: list[int]) -> None:
    """The options that :func:`layers` reads."""
    parser.add_argument("--model", default="demo", help="any model directory")
    parser.add_argument("--texts", nargs=2, default=["demo", "demo-held"], help="calibration and held-out text")
    parser.add_argument("--samples", nargs=2, type=int, default=[256, 200])
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--blocks", nargs="*", type=int, default=blocks)
    parser.add_argument("--synthetic", nargs="*", metavar="ROWSxCOLUMNS", help="these instead of a model's")
    parser.add_argument("--record", type=Path, help="write JSON there")


def layers(arguments: argparse.Namespace, dtype: str = "float32") -> Iterator[Layer]:
    """The matrices of the chosen blocks, from dense inputs on both texts in ``dtype``, or synthetic ones."""
    if arguments.synthetic:
        for text in arguments.synthetic:
            rows, columns = text.split("x")
            yield synthetic(int(rows), int(columns))
        return
    checkpoint = Checkpoint(locate_model(arguments.model))
    streamed, tokenizer = StreamedModel(checkpoint, dtype=dtype), load_tokenizer(checkpoint.path)
    states = [
        streamed.embed(read_windows(text, tokenizer, arguments.length, count).tokens)
        for text, count in zip(arguments.texts, arguments.samples, strict=True)
    ]
    for block in streamed.stream():
        if block.index in arguments.blocks:
            calibration, held = (block.input_grams(state) for state in states)
            matrices = {matrix.name: matrix for matrix in block.matrices}
            for ours, theirs in zip(calibration, held, strict=True):
                for name in ours.names:
                    weight = block.weight(matrices[name])
                    yield Layer(f"block {block.index} {name}", weight, ours.H, theirs.H, ours.tokens)
        if block.index >= max(arguments.blocks, default=0):
            return
        for state in states:
            block.advance(state)


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def with_earlier(
    made: list[dict[str, Any]], path: Path, part: str, key: Callable[[dict[str, Any]], object]
) -> list[dict[str, Any]]:
    """``made``, and of what the record at ``path`` has as ``part`` all that has other keys."""
    earlier = json.loads(path.read_text())[part] if path.exists() else []
    keys = {key(each) for each in made}
    return made + [each for each in earlier if key(each) not in keys]


def save(path: Path | None, **content: Any) -> None:
    """Writes ``content`` with the versions and the number of threads, if there is a path."""
    if path:
        threads = torch.get_num_threads()
        write_json(path, json.dumps({**content, "threads": threads, "versions": versions()}, indent=2) + "\n")
