r"""What files for llama.cpp lose, as llama.cpp computes them.

    npm install --ignore-scripts --prefix PEER node-llama-cpp@3.22.1
    python benchmarks/llama_cpp_loss.py formats MODEL PEER --calibration books.txt --text held.txt \
        --record benchmarks/results/llama_cpp_loss.json
    python benchmarks/llama_cpp_loss.py beside MODEL PEER --calibration books.txt --text held.txt \
        --record benchmarks/results/llama_quantize.json
    python benchmarks/llama_cpp_loss.py quantized MODEL-GPTQ PEER Q4_0 --text held.txt

"formats" are niwaki's own, rounded to the nearest and on calibration text; "beside" are the files that llama-quantize
makes with an importance matrix of the same text, and niwaki's of the same bytes; "quantized" is a model in GPTQ, AWQ or
compressed-tensors, with the same whole numbers and rounded a second time.

Each format is written as `niwaki export` rounds the model, and after `niwaki quantize` onto the grid that has the
format's numbers. Predictions are those of llama.cpp itself, on the same windows; those of F16 are what the others are
measured against. A command that asks for more adds to its record.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import common
import gguf
import numpy as np
import torch
from common import NOTHING, Held, Length, Model, Samples, TextSamples
from llama_library import LlamaCpp
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


def formats(
    model: Model,
    peer: Annotated[Path, Argument(help="Where npm installed node-llama-cpp.")],
    record: Annotated[Path | None, Option(help="Write JSON there after each file, and resume from it.")] = None,
    calibration: common.Calibration = "demo",
    text: Held = common.HELD,
    names: Annotated[str, Option("--formats", help="Of llama.cpp.")] = "gguf-q8_0,gguf-q4_0",
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
    asked = [(form, effort) for form in common.chosen(names, GRIDS) for effort in ("none", *common.names(efforts))]
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        place = Path(scratch)
        niwaki.export(model, place / "dense.gguf", "gguf-f16")
        llama = LlamaCpp(peer)
        predicted = kept(llama.logits(place / "dense.gguf", windows), place / "predicted")
        for form, effort in asked:
            if sheet.has(format=form, effort=effort):
                continue
            source, file = model, place / "model.gguf"
            if effort != "none":
                source = place / "on-grid"
                books = Calibration(calibration, samples=samples, length=length)
                niwaki.quantize(
                    model,
                    source,
                    GRIDS[form],
                    effort=effort,
                    calibration=books,
                    measurement=NOTHING,
                    restart=True,
                )
            niwaki.export(source, file, form)
            cell = compared(predicted, llama.logits(file, windows), windows, texts)
            file.unlink()
            if effort != "none":
                shutil.rmtree(source)
            for name, found in cell.items():
                Console().print(
                    f"{form:10s} {effort:10s} {name:20s} KL {np.mean(found['divergence']):.5f}  "
                    f"loss {np.mean(found['loss']):+.5f} nats",
                    highlight=False,
                    soft_wrap=True,
                )
            sheet.add(format=form, effort=effort, texts=cell)


def beside(
    model: Model,
    peer: Annotated[Path, Argument(help="Where npm installed node-llama-cpp.")],
    record: Annotated[Path | None, Option(help="Write JSON there after each file, and resume from it.")] = None,
    calibration: common.Calibration = "demo",
    text: Held = common.HELD,
    mixtures: Annotated[str, Option(help="Of llama-quantize.")] = "Q4_K_M,IQ4_XS,Q3_K_M,Q2_K",
    quick: Annotated[bool, Option("--quick", help="As of niwaki compress.")] = False,
    peer_only: Annotated[bool, Option("--peer-only", help="Only the files of llama-quantize.")] = False,
    samples: Samples = 64,
    text_samples: TextSamples = 8,
    length: Length = 256,
) -> None:
    """The files of llama-quantize with an importance matrix, and those of niwaki compress of the same bytes."""
    texts = common.by_name(text)
    settings = {"calibration": Path(calibration).name, "texts": [*texts], "samples": samples, "length": length}
    sheet = common.Sheet(record, {**settings, "text_samples": text_samples})
    source = Checkpoint(locate_model(str(model)))
    tokenizer = load_tokenizer(source.path)
    windows = torch.cat([read_windows(each, tokenizer, length, text_samples).tokens for each in texts.values()])
    given = Calibration(calibration, samples=samples, length=length)
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        place = Path(scratch)
        began = time.perf_counter()
        llama, dense = LlamaCpp(peer), place / "dense.gguf"
        niwaki.export(model, dense, "gguf-f16")
        exported = time.perf_counter() - began
        predicted = kept(llama.logits(dense, windows), place / "predicted")

        def add(file: Path, seconds: float, **cell: str) -> None:
            found = compared(predicted, llama.logits(file, windows), windows, texts)
            shown = ", ".join(f"{name} {np.mean(each['divergence']):.5f}" for name, each in found.items())
            print(f"{cell} {file.stat().st_size:,} bytes, {seconds:.0f} s: KL {shown}", flush=True)
            where = {"model": model.name, "processor": common.processor()}
            sheet.add(**where, **cell, bytes=file.stat().st_size, seconds=seconds, texts=found)

        began = time.perf_counter()
        niwaki.importance_matrix(model, place / "imatrix.gguf", given)
        importance = _mean_squares(place / "imatrix.gguf")
        prepared = exported + time.perf_counter() - began
        by = "niwaki --quick" if quick else "niwaki"
        for mixture in common.names(mixtures):
            theirs, made = (sheet.has(model=model.name, mixture=mixture, by=each) for each in ("llama-quantize", by))
            if theirs and (made or peer_only):
                continue
            began, file, out = time.perf_counter(), place / "theirs.gguf", place / "out"
            llama.quantize(dense, file, mixture, importance)
            if not theirs:
                add(file, prepared + time.perf_counter() - began, mixture=mixture, by="llama-quantize")
            if not peer_only:
                began = time.perf_counter()
                # The same bytes: what a file has beside its weights is foreseen with a margin.
                niwaki.compress(
                    model,
                    out,
                    file.stat().st_size,
                    runtime="llama.cpp",
                    quick=quick,
                    calibration=given,
                    measurement=NOTHING,
                )
                add(out / "model.gguf", time.perf_counter() - began, mixture=mixture, by=by)
                shutil.rmtree(out)


def quantized(
    model: Model,
    peer: Annotated[Path, Argument(help="Where npm installed node-llama-cpp.")],
    mixture: Annotated[str, Argument(help="Of llama-quantize.")],
    record: Annotated[Path | None, Option(help="Write JSON there after each file, and resume from it.")] = None,
    text: Held = common.HELD,
    text_samples: TextSamples = 8,
    length: Length = 256,
) -> None:
    """A quantized model with its own whole numbers, and as llama-quantize rounds it again, both beside F16."""
    texts = common.by_name(text)
    settings = {"texts": [*texts], "text_samples": text_samples, "length": length}
    sheet, source = common.Sheet(record, settings), Checkpoint(locate_model(str(model)))
    tokenizer = load_tokenizer(source.path)
    windows = torch.cat([read_windows(each, tokenizer, length, text_samples).tokens for each in texts.values()])
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        llama, (dense, ours, theirs) = LlamaCpp(peer), (Path(scratch) / f"{name}.gguf" for name in "abc")
        niwaki.export(model, dense, "gguf-f16")
        niwaki.export(model, ours, "gguf")
        llama.quantize(dense, theirs, mixture, {})
        predicted = kept(llama.logits(dense, windows), Path(scratch) / "predicted")
        for by, file in {"niwaki": ours, "llama-quantize": theirs}.items():
            found = compared(predicted, llama.logits(file, windows), windows, texts)
            print(
                by, f"{file.stat().st_size:,} bytes", *(f"{np.mean(each['divergence']):.5f}" for each in found.values())
            )
            where = {"model": model.name, "processor": common.processor()}
            sheet.add(**where, mixture=mixture, by=by, bytes=file.stat().st_size, texts=found)


def _mean_squares(file: Path) -> dict[str, Tensor]:
    """By tensor, what an importance matrix says of each input."""
    values = {each.name: torch.from_numpy(each.data.copy()) for each in gguf.GGUFReader(file).tensors}
    sums = {name.removesuffix(".in_sum2"): value for name, value in values.items() if name.endswith(".in_sum2")}
    return {name: (value / values[f"{name}.counts"]).flatten() for name, value in sums.items()}


def kept(logits: Iterable[Tensor], place: Path) -> list[Tensor]:
    """The ``logits`` of each window, which stay in files of the new folder ``place`` and not in memory."""
    place.mkdir()
    files = list[Path]()
    for each in logits:
        files.append(place / f"{len(files)}.npy")
        np.save(files[-1], each.numpy())
    return [torch.from_numpy(np.load(file, mmap_mode="c")) for file in files]


def compared(
    predicted: Iterable[Tensor], logits: Iterable[Tensor], windows: Tensor, texts: Collection[str]
) -> dict[str, dict[str, list[float]]]:
    """By text, of which each has as many of the ``windows``, for each of them in nats a token.

    That is the KL divergence of the ``logits`` from those ``predicted`` by the dense model, that of the prediction
    after the first token of a window alone, and the loss that is added to that of the dense model.
    """
    found = {"divergence": list[float](), "first": list[float](), "loss": list[float]()}
    for before, after, tokens in zip(predicted, logits, windows, strict=True):
        p, q = before.log_softmax(dim=-1), after.log_softmax(dim=-1)
        following = tokens[1:].unsqueeze(1)
        found["loss"].append(float((p[:-1].gather(1, following) - q[:-1].gather(1, following)).double().mean()))
        divergences = (p.exp() * (p - q)).sum(dim=-1).double()
        found["divergence"].append(float(divergences.mean()))
        found["first"].append(float(divergences[0]))
    each = len(windows) // len(texts)
    slices = [slice(i, i + each) for i in range(0, len(windows), each)]
    return {
        name: {measure: values[of] for measure, values in found.items()} for name, of in zip(texts, slices, strict=True)
    }


if __name__ == "__main__":
    common.main(formats, beside, quantized, about=__doc__)
