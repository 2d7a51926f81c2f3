r"""What formats of llama.cpp lose, rounded to the nearest and on calibration text, as llama.cpp computes them.

    npm install --ignore-scripts --prefix PEER node-llama-cpp@3.22.1
    python benchmarks/llama_cpp_loss.py MODEL PEER --calibration books.txt --text held.txt \
        --record benchmarks/results/llama_cpp_loss.json

Each format is written as `niwaki export` rounds the model, and after `niwaki quantize` onto the grid that has the
format's numbers. Predictions are those of llama.cpp itself, on the same windows; those of F16 are what the others are
measured against. A command that asks for more adds to its record.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import common
import numpy as np
import torch
from common import Held, Length, Model, Samples, TextSamples
from rich.console import Console
from torch import Tensor
from typer import Argument, Option

import niwaki
from niwaki import Calibration
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import ExportFormat
from niwaki.models.locate import locate_model
from niwaki.models.tokens import load_tokenizer
from niwaki.texts.texts import read_windows

#: By format, the grid that has its numbers.
GRIDS: dict[ExportFormat, str] = {"gguf-q8_0": "int8:32", "gguf-q4_0": "int4:32"}


class Predictions:
    """Those of one file after each token of ``windows`` (windows, tokens), read from disk a window at a time."""

    def __init__(self, peer: Path, file: Path, windows: Tensor, logits: Path) -> None:
        asked = logits.with_suffix(".json")
        asked.write_text(json.dumps(windows.tolist()))
        command = [*common.node_script(peer, "llama_cpp_logits.mjs"), str(file), str(asked), str(logits)]
        subprocess.run(command, stdout=sys.stderr, stderr=sys.stderr, check=True)
        self._values = np.memmap(logits, np.float32, "r").reshape(*windows.shape, -1)

    def __iter__(self) -> Iterator[Tensor]:
        """(tokens, words) of each window: logarithms of probabilities."""
        for window in self._values:
            yield torch.from_numpy(np.array(window)).double().log_softmax(dim=-1)


def llama_cpp_loss(
    model: Model,
    peer: Annotated[Path, Argument(help="Where npm installed node-llama-cpp.")],
    record: Annotated[Path | None, Option(help="Write JSON there after each file, and resume from it.")] = None,
    calibration: common.Calibration = "demo",
    text: Held = common.HELD,
    formats: Annotated[str, Option(help="Of llama.cpp.")] = "gguf-q8_0,gguf-q4_0",
    efforts: Annotated[str, Option(help="As of niwaki quantize.")] = "fast,balanced",
    samples: Samples = 64,
    text_samples: TextSamples = 8,
    length: Length = 256,
) -> None:
    """What formats of llama.cpp lose, rounded to the nearest and on calibration text, as llama.cpp computes them."""
    if not (package := peer / "node_modules" / "node-llama-cpp" / "package.json").exists():
        print(f"nothing is measured: {package} is not there; npm installs it, see the head of {Path(__file__).name}")
        return
    texts = common.by_name(text)
    sheet = common.Sheet(
        record,
        {
            "model": model.name,
            "calibration": Path(calibration).name,
            "texts": [*texts],
            "samples": samples,
            "text_samples": text_samples,
            "length": length,
            "node_llama_cpp": json.loads(package.read_text())["version"],
        },
    )
    tokenizer = load_tokenizer(Checkpoint(locate_model(str(model))).path)
    windows = torch.cat([read_windows(each, tokenizer, length, text_samples).tokens for each in texts.values()])
    asked = [(form, effort) for form in common.chosen(formats, GRIDS) for effort in ("none", *common.names(efforts))]
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        place = Path(scratch)
        niwaki.export(model, place / "dense.gguf", "gguf-f16")
        dense = Predictions(peer, place / "dense.gguf", windows, place / "dense")
        for form, effort in asked:
            if sheet.has(format=form, effort=effort):
                continue
            source, file = model, place / "model.gguf"
            if effort != "none":
                source = place / "on-grid"
                books = Calibration(calibration, samples=samples, length=length)
                niwaki.quantize(
                    model, source, GRIDS[form], effort=effort, calibration=books, measurement=None, restart=True
                )
            niwaki.export(source, file, form)
            divergences, losses = compared(dense, Predictions(peer, file, windows, place / "other"), windows)
            file.unlink()
            if effort != "none":
                shutil.rmtree(source)
            cell = {}
            for number, name in enumerate(texts):
                of = slice(number * text_samples, (number + 1) * text_samples)
                cell[name] = {"divergence": divergences[of], "loss": losses[of]}
                Console().print(
                    f"{form:10s} {effort:10s} {name:20s} KL {np.mean(divergences[of]):.5f}  "
                    f"loss {np.mean(losses[of]):+.5f} nats",
                    highlight=False,
                    soft_wrap=True,
                )
            sheet.add(format=form, effort=effort, texts=cell)


def compared(dense: Predictions, other: Predictions, windows: Tensor) -> tuple[list[float], list[float]]:
    """Of each window, in nats a token: the KL divergence from ``dense``, and the loss that is added to that of it."""
    divergences, losses = list[float](), list[float]()
    for p, q, tokens in zip(dense, other, windows, strict=True):
        divergences.append(float((p.exp() * (p - q)).sum(dim=-1).mean()))
        following = tokens[1:].unsqueeze(1)
        losses.append(float((p[:-1].gather(1, following) - q[:-1].gather(1, following)).mean()))
    return divergences, losses


if __name__ == "__main__":
    common.main(llama_cpp_loss, about=__doc__)
