"""`niwaki compress` beside other recipes of the same size.

    python benchmarks/compress.py recipes MODEL CORPUS WORK --record benchmarks/results/compress.json
    python benchmarks/compress.py programs MODEL CORPUS WORK --record benchmarks/results/compress_programs.json
    python benchmarks/compress.py bounds MODEL CORPUS WORK --record benchmarks/results/compress_bounds.json
    python benchmarks/compress.py speeds MODEL --record benchmarks/results/compress_speed.json
    python benchmarks/compress.py ties MODEL CORPUS WORK

Each recipe is a list of stages whose files are at most as large as the size says: what compress decides on, what it
names besides, and what somebody would make by hand. All are calibrated on books and measured on texts of several kinds,
see corpus.py.
"""

import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import NOTHING, Corpus, Length, Model, Samples, TextSamples, Work
from corpus import ALL_MEASURED, MEASURED, Texts
from typer import Option

import niwaki
from niwaki import Calibration, Export, Pack, Prune, Quantize, QuantizeEmbeddings, Shrink, ShrinkVocabulary
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import Runtime
from niwaki.compression.compress import plan_compression
from niwaki.compression.ways import Composition
from niwaki.files import weights_size
from niwaki.layer.grid import Grid
from niwaki.models.layout import fused
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.mixed_bits import choose_alike, choose_bits, costs_of_bits, foreseen as foreseen_nats
from niwaki.records.progress import Progress
from niwaki.runs.stage import Stage, remembering
from niwaki.texts import texts as read

#: Bits a weight that scales take, one of 2 bytes for 64 weights or for the 32 of GGUF, and the mask of a matrix with
#: zeros.
SCALE, GGUF_SCALE, MASK = 0.25, 0.5, 1.0
#: Zeros, between which a recipe is one that somebody would try.
ZEROS = (0.1, 0.7)
#: Shares of the parameters, or of the tokens, that somebody would leave for llama.cpp.
LEFT = (0.9, 0.75, 0.5)
#: What padding may take, a share of the size.
PADDING = 0.002
EFFORTS = ("fast", "balanced")


def _by_hand(model: StreamedModel, asked: int, runtime: Runtime) -> Iterator[tuple[str, list[Stage]]]:
    """Recipes of that size in bytes as somebody would make them by hand, by their names."""
    parts, allowed = Composition.of(model, runtime), (1 - PADDING) * asked
    if runtime == "llama.cpp":
        return _for_llama_cpp(parts, allowed, model.config.vocab_size)
    return _for_niwaki(parts, allowed)


def _for_niwaki(parts: Composition, allowed: float) -> Iterator[tuple[str, list[Stage]]]:
    """One number of bits for all matrices or mixed ones, zeros with 4, 8 or 16 bits, embeddings and head of 8 to 4."""
    room = 8 * (allowed - parts.others - parts.headers)  # bits for matrices and embeddings
    for effort, ends in itertools.product(EFFORTS, (8, 6, 5, 4)):
        last: list[Stage] = [QuantizeEmbeddings(f"int{ends}:64"), Pack()]
        bits = (room - parts.embeddings * (ends + SCALE)) / parts.matrices
        tail = f", embeddings of {ends}, {effort}"
        mixed = min(8.0, bits - SCALE)
        if mixed >= 2:
            yield f"{mixed:.2f} bits{tail}", [Quantize(f"int{mixed:.2f}:64", effort=effort), *last]
        if alike := max((each for each in (3, 4, 5, 6) if each <= mixed), default=None):
            yield f"{alike} bits for all{tail}", [Quantize(f"int{alike}:64", effort=effort), *last]
        for values in (16, 8, 4):
            zeros = 1 - (bits - MASK - (SCALE if values < 16 else 0.0)) / values
            if ZEROS[0] <= zeros <= ZEROS[1]:
                grid = None if values == 16 else f"int{values}:64"
                yield (
                    f"{zeros:.0%} zeros, {values} bits{tail}",
                    [Prune(round(zeros, 3), None, effort, quantize=grid), *last],
                )


def _for_llama_cpp(parts: Composition, allowed: float, tokens: int) -> Iterator[tuple[str, list[Stage]]]:
    """One number of bits for all matrices or mixed ones, of the model as it is, with fewer parameters or tokens."""
    everything = parts.matrices + parts.embeddings
    smaller: list[tuple[str, list[Stage], float, float]] = [("", [], parts.matrices, 1.0)]
    for left in LEFT:
        count = int(left * tokens)
        smaller += [
            (f", {left:g} of the parameters", [Shrink(parameters=left)], left * everything - parts.embeddings, 1.0),
            (f", {count:,} tokens", [ShrinkVocabulary(count)], parts.matrices, left),
        ]
    for effort, (words, first, matrices, share) in itertools.product(EFFORTS, smaller):
        embeddings = share * (parts.embeddings * (8 + GGUF_SCALE) + 8 * parts.tokenizer)
        mixed = (8 * (allowed - parts.others - parts.headers) - embeddings) / matrices - GGUF_SCALE
        tail = f"{words}, {effort}"
        if 4 <= mixed < 8:
            bits = f"{math.floor(100 * mixed) / 100:.2f}"
            yield f"{bits} bits{tail}", [*first, Quantize(f"int{bits}:32", effort=effort), *_in_gguf()]
        if alike := max((each for each in (4, 5, 8) if each <= mixed), default=None):
            last = _in_gguf(eight=alike == 8)
            yield f"{alike} bits for all{tail}", [*first, Quantize(f"int{alike}:32", effort=effort), *last]


def _in_gguf(eight: bool = False) -> list[Stage]:
    """The last stages for llama.cpp; in a file of 4 bits, matrices of mixed bits and of 5 keep theirs."""
    return [QuantizeEmbeddings("int8:32"), Export("gguf-q8_0" if eight else "gguf-q4_0")]


@remembering()
def recipes(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each model, and resume from it.")],
    sizes: Annotated[str, Option(help="Shares of the model's bytes.")] = "0.35,0.45,0.27,0.31",
    others: Annotated[int, Option(help="How many of the others that compress names are made too.")] = 2,
    by_hand: Annotated[bool, Option(help="Also all that somebody would make by hand.")] = False,
    runtime: Annotated[Runtime, Option("--for", help="The program that runs them: niwaki or llama.cpp.")] = "niwaki",
    texts: common.Measured = ALL_MEASURED,
    samples: Samples = 16,
    text_samples: TextSamples = 16,
    length: Length = 512,
) -> None:
    """What the recipe of compress and others of the same size lose, and how large they are."""
    program = {} if runtime == "niwaki" else {"runtime": runtime}
    bench = _Bench(model, corpus, work, record, texts, samples, text_samples, length, program)
    for size in common.fractions(sizes):
        plan = plan_compression(model, size, runtime=runtime, calibration=bench.books)
        print(plan, flush=True)
        asked = [("compress", plan.way.stages, plan.way.nats)]
        asked += [(way.words, way.stages, way.nats) for way in plan.others[:others]]
        asked += [(name, tuple(stages), None) for name, stages in _by_hand(bench.dense, plan.asked, runtime) if by_hand]
        for name, stages, foreseen in asked:
            if bench.sheet.has(size=size, recipe=name):
                continue
            bench.add(stages, size=size, recipe=name, foreseen=foreseen)


@remembering()
def programs(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each model, and resume from it.")],
    sizes: Annotated[str, Option(help="Shares of the model's bytes, for llama.cpp.")] = "0.75,0.6,0.45,0.35",
    parameters: Annotated[str, Option(help="Shares of the parameters, for transformers.")] = "0.9,0.75",
    texts: common.Measured = ALL_MEASURED,
    samples: Samples = 16,
    text_samples: TextSamples = 16,
    length: Length = 512,
) -> None:
    """What models for llama.cpp and for transformers lose, and how large they are."""
    bench = _Bench(model, corpus, work, record, texts, samples, text_samples, length)
    asked: list[tuple[Runtime, dict[str, Any]]] = [("llama.cpp", {"size": size}) for size in common.fractions(sizes)]
    asked += [("transformers", {"parameters": share}) for share in common.fractions(parameters)]
    for runtime, how in asked:
        if not bench.sheet.has(runtime=runtime, **how):
            plan = plan_compression(model, runtime=runtime, calibration=bench.books, **how)
            print(plan, flush=True)
            bench.add(plan.way.stages, runtime=runtime, **how, recipe=plan.way.words, foreseen=plan.way.nats)


class _Bench:
    """Models that are made from one on books, and what is measured of them, on a sheet."""

    def __init__(
        self,
        model: Path,
        corpus: Path,
        work: Path,
        record: Path,
        texts: str,
        samples: int,
        measured: int,
        length: int,
        program: Mapping[str, str] = {},
    ) -> None:
        settings = {"samples": samples, "text_samples": measured, "length": length, "model": model.name, **program}
        self.sheet = common.Sheet(record, settings)
        made = Texts(model, corpus, work, samples, length)
        held = {name: made.to_measure(name, measured) for name in common.chosen(texts, MEASURED)}
        self.books = Calibration(made.to_calibrate("books")[0], samples=samples, length=length)
        self.dense = StreamedModel(Checkpoint(model), "cpu")
        self._measure = partial(common.add_measured, self.sheet, held, measured, length, "auto")
        if not self.sheet.has(recipe="dense"):
            before = sum(entry.size for entry in self.dense.checkpoint.entries.values())
            self._measure(model, size=1.0, recipe="dense", bytes=before, seconds=0.0)

    def add(self, stages: Sequence[Stage], **cell: Any) -> None:
        """Makes the model that ``stages`` make, and puts it on the sheet."""
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            out = Path(scratch) / "out"
            done = niwaki.run(self.dense.checkpoint.path, out, stages, calibration=self.books, measurement=NOTHING)
            size = weights_size(out)
            seconds = done.seconds.get("total", 0.0)
            words = [f"{stage.name} {stage}".strip() for stage in stages]
            dense = self.dense.checkpoint.path if any(stage.changes_tokens for stage in stages) else None
            self._measure(out, dense, **cell, stages=words, bytes=size, seconds=seconds)


def bounds(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each run, and resume from it.")],
    losses: Annotated[str, Option(help="Nats a token that may be lost.")] = "0.02,0.05,0.2",
    runs: Annotated[int, Option(help="Each with the next loss, kind of calibration text and seed.")] = 10,
    texts: common.Measured = ALL_MEASURED,
    samples: Samples = 16,
    text_samples: TextSamples = 16,
    length: Length = 512,
) -> None:
    """Whether a loss that `compress --loss` was bounded to on some windows of several texts is kept on others.

    Each run calibrates on one of the kinds, bounds the loss on the first windows of all, and is measured on the
    second half of each text.
    """
    kinds = common.chosen(texts, MEASURED)
    settings = {"samples": samples, "text_samples": text_samples, "length": length, "model": model.name, "texts": kinds}
    sheet, allowed = common.Sheet(record, settings), common.fractions(losses)
    made = Texts(model, corpus, work, samples, length)
    halves = {kind: _halves(Path(made.to_measure(kind, 2 * text_samples)), work) for kind in kinds}
    first, *others = (str(begin) for begin, _ in halves.values())
    ends = {kind: str(end) for kind, (_, end) in halves.items()}
    add = partial(common.add_measured, sheet, ends, text_samples, length, "auto")
    if not sheet.has(run=0):
        add(model, run=0)
    for number in range(1, runs + 1):
        if sheet.has(run=number):
            continue
        loss, kind = allowed[number % len(allowed)], kinds[number % len(kinds)]
        text = Calibration(made.to_calibrate(kind)[0], samples=samples, length=length, order="random", seed=number)
        measurement = niwaki.Measurement(first, samples=text_samples, length=length)
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            out, began = Path(scratch) / "out", time.perf_counter()
            done = niwaki.compress(model, out, loss=loss, also=others, calibration=text, measurement=measurement)
            weights = weights_size(out)
            facts: dict[str, Any] = {"bytes": weights, "seconds": time.perf_counter() - began, "said": done.notes[-1]}
            trials = sum(note.startswith("tried") for note in done.notes)
            fewer = model if done.structure and done.structure.vocabulary else None
            add(out, fewer, run=number, loss=loss, calibration=kind, trials=trials, **facts)


def _halves(text: Path, work: Path) -> tuple[Path, Path]:
    """Files with the first and the second half of a text."""
    whole = "".join(json.loads(line)["text"] for line in text.read_text().splitlines())
    files = work / f"{text.stem}-first.txt", work / f"{text.stem}-second.txt"
    for file, part in zip(files, (whole[: len(whole) // 2], whole[len(whole) // 2 :]), strict=True):
        file.write_text(part)
    return files


def speeds(
    model: Model,
    record: common.Record = None,
    sizes: Annotated[str, Option(help="Shares of the model's bytes.")] = "0.45,0.35,0.27",
    prompt: Annotated[int, Option(help="Tokens of the prompt.")] = 64,
    tokens: Annotated[int, Option(help="Tokens that are written after it.")] = 64,
    rounds: Annotated[int, Option(help="Of all models in turns.")] = 3,
) -> None:
    """Tokens a second of the model in transformers and of what compress makes of it, in turns, and what plans foresee.

    How the numbers were found makes no difference to the time, so that little text is calibrated on.
    """
    found = {size: list[float]() for size in (1.0, *common.fractions(sizes))}
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        places, foreseen = {1.0: model}, dict[float, float | None]()
        demo = Calibration("demo", samples=4, length=128)
        for size in list(found)[1:]:
            plan = plan_compression(model, size, calibration=demo, measure_speed=True)
            foreseen |= {1.0: plan.speed.dense, size: plan.speed.of(plan.way.size)} if plan.speed else {}
            print(plan, flush=True)
            places[size] = Path(scratch) / str(size)
            niwaki.compress(model, places[size], size, calibration=demo, measurement=NOTHING)
        for _ in range(rounds):
            for size, place in places.items():
                measured = niwaki.bench(place, prompt_tokens=prompt, tokens=tokens)
                form = "dense" if size == 1 else "packed"
                (speed,) = (each for each in measured.speeds if each.weights == form)
                found[size].append(speed.tokens_per_second)
                print(f"{size:g}: {speed.tokens_per_second:.1f} tokens a second", flush=True)
    cells = [
        {"size": size, "tokens_per_second": median(rates), "rates": rates, "foreseen": foreseen.get(size)}
        for size, rates in found.items()
    ]
    machine = f"{torch.get_num_threads()} threads of {common.processor()}"
    common.save(record, model=model.name, machine=machine, prompt=prompt, tokens=tokens, cells=cells)


def ties(
    model: Model,
    corpus: Corpus,
    work: Work,
    means: Annotated[str, Option(help="Means of bits, over all weights.")] = "3,3.5,4,4.5,5,6",
    samples: Samples = 16,
    length: Length = 512,
) -> None:
    """What bits of matrices are foreseen to cost that servers compute as one, over what each costs with its own."""
    stream = StreamedModel(Checkpoint(model), "cpu", "float32")
    books = Calibration(Texts(model, corpus, work, samples, length).to_calibrate("books")[0], samples, length)
    windows = read.Texts.read(stream, books, NOTHING).windows
    costs = costs_of_bits(stream, Grid(8, 64, 4.5), windows.tokens, "auto", World(), Progress())
    for mean in map(float, means.split(",")):
        own = foreseen_nats(costs, choose_bits(costs, mean))
        tied = foreseen_nats(costs, choose_alike(costs, mean, stream.matrices(), fused))
        print(f"{mean:g} bits: {own:.4f} nats with its own each, {tied:.4f} ({tied / own:.2f}) tied", flush=True)


if __name__ == "__main__":
    common.main(recipes, programs, bounds, speeds, ties, about=__doc__)
