"""A real language model, calibrated on several kinds of text and measured on several others.

    python scripts/real_models.py . smollm2
    python benchmarks/real.py compare MODEL CORPUS WORK --record benchmarks/results/real.json
    python benchmarks/real.py sizes MODEL CORPUS --record benchmarks/results/sizes.json
    python benchmarks/real.py grids MODEL CORPUS WORK --record benchmarks/results/grids.json
    python benchmarks/real.py embeddings MODEL CORPUS WORK --record benchmarks/results/embeddings.json
    python benchmarks/real.py own-answers MODEL CORPUS WORK --record benchmarks/results/own_answers.json
    python benchmarks/real.py removals MODEL CORPUS WORK --record benchmarks/results/removals.json
    python benchmarks/real.py experts MOE CORPUS --record benchmarks/results/experts.json
    python benchmarks/real.py vocabulary MODEL CORPUS WORK --record benchmarks/results/vocabulary.json
    python benchmarks/real.py smaller LARGE SMALL CORPUS WORK --record benchmarks/results/smaller.json

The texts are those of corpus.py.
"""

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any
from unittest.mock import patch

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import NOTHING, Cell, Corpus, Length, Model, Patterns, Record, Samples, TextSamples, Work, measured, names
from corpus import ALL_CALIBRATIONS, ALL_MEASURED, CALIBRATIONS, HELD_PROMPTS, MEASURED, Texts
from protocol import Lines
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel
from typer import Argument, Option

import niwaki
from niwaki import Calibration, Comparison, Compute, Measurement, Quantize, QuantizeEmbeddings
from niwaki.checkpoints.reading import Checkpoint
from niwaki.cli.tables import perplexity_tables
from niwaki.effort import EFFORTS, SHRINK_EFFORT
from niwaki.evaluation.compare import compare as compared
from niwaki.layer import unit_removal
from niwaki.layer.grid import Grid, parse_grid
from niwaki.models.generation import continued
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import find_bos, load_tokenizer
from niwaki.options import OWN_ANSWERS
from niwaki.records.comparison import Cell as ComparedCell
from niwaki.runs.stage import Stage
from niwaki.shrinking import experts as shrinking
from niwaki.shrinking.search import Combination
from niwaki.texts.own import USUAL_SAMPLING
from niwaki.texts.same_text import same_text
from niwaki.texts.sources import read_prompts
from niwaki.texts.texts import read_heldout
from niwaki.windows import Windows

PLAIN = ("wikitext2", "books", "code")
#: Sparsity and grid, in the order of their worth.
FORMS = (
    *((0.0, "int3:64"), (0.5, "int4:64"), (0.0, "int4:64"), (0.35, "int4:64"), (0.5, ""), (0.2, "int4:64")),
    *((0.7, "int4:64"), (0.0, "int2:64"), (0.0, "int8:64"), (0.5, "int8:64"), (0.3, ""), (0.7, "")),
    *((0.3, "int8:64"), (0.7, "int8:64")),
)
#: Ways from Qwen2.5-Coder-1.5B to the bytes of Qwen2.5-Coder-0.5B, in 16 bits and in 8: stages of one run, which packs,
#: or the size that compress is given.
WAYS = {
    "16 bits": {
        "bits": ["quantize int5:128 effort=fast", "embeddings int5:128"],
        "zeros and 8 bits": ["prune 0.56 quantize=int8:128 effort=fast", "embeddings int8:128"],
        "zeros": ["prune 0.86 effort=fast"],
        "two factors": ["prune two-factors:0.86 effort=fast"],
        "fewer parameters": ["shrink parameters=0.32"],
        "compress": ["988MB"],
    },
    "8 bits": {
        "bits": ["quantize int2.5:64 effort=fast", "embeddings int3:64"],
        "zeros and 4 bits": ["prune 0.6 quantize=int4:128 effort=fast", "embeddings int4:128"],
        "two factors": ["prune two-factors:0.7 quantize=int4:128 effort=fast", "embeddings int4:128"],
        "fewer parameters": ["shrink parameters=0.32", "quantize int8:128", "embeddings int8:128"],
        "compress": ["505MB"],
    },
}
#: Of the experts, what is removed; and the files to calibrate and to measure on.
FRACTIONS = (0.25, 0.5)
EXPERT_CALIBRATIONS = {"books": "train.txt.xz", "wikitext2": "wikitext2.valid.txt"}
EXPERT_TEXTS = {"books": "held.txt.xz", "wikitext2": "wikitext2.test.txt"}
#: Tokens that stay, and the texts that these are counted in.
VOCABULARIES = (32768, 24576, 16384, 8192)
COUNTED = ("books", "three")
#: An answer says the same for ever that ends with so many tokens of a cycle of at most LONGEST, twice or more.
REPEATED, LONGEST = 48, 64


def compare(
    model: Model,
    corpus: Corpus,
    work: Work,
    calibrations: Annotated[str, Option(help="Names of the texts to calibrate on.")] = ALL_CALIBRATIONS,
    texts: common.Measured = ALL_MEASURED,
    methods: Annotated[str, Option(help="As in niwaki compare --solvers.")] = (
        "wanda,sparsegpt,admm-grad,continuation,continuation@balanced,continuation@best"
    ),
    patterns: Patterns = "50 %,60 %,2:4",
    samples: Samples = 48,
    text_samples: TextSamples = 24,
    length: Length = 512,
    record: Record = None,
) -> None:
    """Methods at patterns on each kind of text; more of any of them add to the record, too."""
    console = Console(width=140, highlight=False, emoji=False)
    made, to_measure = Texts(model, corpus, work, samples, length), common.chosen(texts, MEASURED)
    held = [made.to_measure(name, text_samples) for name in to_measure]
    for name in common.chosen(calibrations, CALIBRATIONS):
        console.print(f"calibrated on {name}")
        found = compared(
            model,
            work / name,
            solvers=names(methods),
            patterns=names(patterns),
            calibration=Calibration(made.to_calibrate(name), samples=samples, length=length),
            measurement=Measurement(held, samples=text_samples),
            progress=Lines(console),
        )
        for text in held:
            for table in perplexity_tables(found, text):
                console.print(table)
        if record:
            cells = [
                _cell(calibration, cell, to_measure)
                for calibration in CALIBRATIONS
                if (work / calibration / "compare.json").exists()
                for cell in Comparison.load(work / calibration).cells
            ]
            cells = common.with_earlier(cells, record, "cells", _key)  # also what another WORK has
            cells.sort(key=lambda cell: CALIBRATIONS.index(cell["calibration"]))
            sizes = {"samples": samples, "text_samples": text_samples, "length": length}
            common.save(record, model=model.name, **sizes, cells=cells)


def _key(cell: Cell) -> tuple[str, ...]:
    return tuple(cell.get(name, "") for name in ("calibration", "pattern", "method", "effort"))


def _cell(calibration: str, cell: ComparedCell, texts: list[str]) -> Cell:
    perplexity = common.without_places(dict(zip(texts, cell.perplexity.values(), strict=True)))
    return {"calibration": calibration, **dataclasses.asdict(cell), "perplexity": perplexity, "record": None}


def sizes(
    model: Model,
    corpus: Corpus,
    record: Annotated[Path, Option(help="Write JSON there after each form, and resume from it.")],
    samples: Samples = 48,
    text_samples: TextSamples = 16,
    length: Length = 512,
) -> None:
    """What is lost at a size: zeros, whole numbers, and both, in one model.

    Each form is made by niwaki prune with the effort balanced on books, so that all are fitted alike. Bits of a weight
    are those of the pruned matrices: what niwaki pack takes, or without zeros the numbers and their scales.
    """
    settings = {"samples": samples, "text_samples": text_samples, "length": length, "model": model.name}
    sheet = common.Sheet(record, settings)
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        texts = Texts(model, corpus, Path(scratch), samples, length)
        books = Calibration(texts.to_calibrate("books")[0], samples=samples, length=length)
        held = {name: texts.to_measure(name, text_samples) for name in PLAIN}

        def add(made: Path, sparsity: float, grid: str, bits: float, seconds: float) -> None:
            losses = {name: list(each.losses) for name, each in measured(made, held, text_samples, length).items()}
            print(f"{sparsity:.0%} zeros, {grid or 'bfloat16'}, {bits:.2f} bits: {common.means(losses)}", flush=True)
            sheet.add(sparsity=sparsity, grid=grid, bits=bits, seconds=seconds, losses=losses)

        if not sheet.has(sparsity=0.0, grid=""):
            add(model, 0.0, "", 16.0, 0.0)
        for sparsity, grid in FORMS:
            if sheet.has(sparsity=sparsity, grid=grid):
                continue
            with tempfile.TemporaryDirectory(prefix="niwaki-") as place:
                out = Path(place) / "out"
                made = niwaki.prune(
                    model,
                    out,
                    sparsity,
                    effort="balanced",
                    quantize=grid or None,
                    calibration=books,
                    measurement=NOTHING,
                )
                add(out, sparsity, grid, _bits_of(out, sparsity, grid, Path(place)), made.seconds["total"])


def smaller(
    model: Model,
    small: Annotated[Path, Argument(help="The small model that the large one is brought to the bytes of.")],
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each model, and resume from it.")],
    ways: Annotated[str, Option(help="Names of WAYS; none for all.")] = "",
    targets: Annotated[str, Option(help="What the small model is in, of WAYS.")] = ",".join(WAYS),
    texts: common.Measured = "wikitext2,code,answers",
    samples: Samples = 16,
    text_samples: TextSamples = 8,
    length: Length = 512,
) -> None:
    """A large model made as small as a small one of its family, by each way alone, beside that small one."""
    sheet = common.Sheet(record, {"samples": samples, "text_samples": text_samples, "length": length})
    made = Texts(model, corpus, work, samples, length)
    held = {name: made.to_measure(name, text_samples) for name in common.chosen(texts, MEASURED)}
    books = Calibration(made.to_calibrate("books")[0], samples=samples, length=length)
    add = partial(common.add_measured, sheet, held, text_samples, length, "auto")
    for dense in (small, model):
        if not sheet.has(way="dense", model=dense.name):
            add(dense, way="dense", model=dense.name, target="", size=_weights_of(dense), seconds=0.0)
    asked = [("8 bits", "dense", small, ["quantize int8:128", "embeddings int8:128"])]
    asked += [
        (target, way, model, stages) for target in common.chosen(targets, WAYS) for way, stages in WAYS[target].items()
    ]
    for target, way, dense, stages in asked:
        if (ways and way not in ("dense", *names(ways))) or sheet.has(target=target, way=way):
            continue
        with tempfile.TemporaryDirectory(prefix="niwaki-", dir=work) as scratch:
            out = Path(scratch) / "out"
            if way == "compress":
                done = niwaki.compress(dense, out, *stages, calibration=books, measurement=NOTHING)
            else:
                packs = [] if way == "fewer parameters" and target == "16 bits" else ["pack"]
                done = niwaki.run(dense, out, [*stages, *packs], calibration=books, measurement=NOTHING)
            seconds = done.seconds["total"]
            add(out, way=way, model=dense.name, target=target, stages=stages, size=_weights_of(out), seconds=seconds)


def _weights_of(model: Path) -> int:
    """Bytes of its files of weights."""
    return sum(file.stat().st_size for file in model.rglob("*.safetensors"))


def vocabulary(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each size, and resume from it.")],
    text_samples: TextSamples = 16,
    length: Length = 512,
    heal: Annotated[str, Option(help="Tokens to heal on, such as 150k, what was counted in three texts.")] = "",
) -> None:
    """Fewer tokens: bits a byte of the same text before and after, for texts that tokens are counted in.

    "books" are the first 2^25 characters of books; "three" are these, WikiText-2's validation text and code, alike.
    Healed is half of the vocabulary, on the same texts.
    """
    sheet = common.Sheet(record, {"text_samples": text_samples, "length": length, "model": model.name})
    texts = Texts(model, corpus, work, text_samples, length)
    books = str(corpus / EXPERT_CALIBRATIONS["books"])
    counted = {
        "books": [books],
        "three": [books, str(corpus / EXPERT_CALIBRATIONS["wikitext2"]), *texts.to_calibrate("code")],
    }
    dense = StreamedModel(Checkpoint(model), "cpu")
    asked = Measurement(samples=text_samples, length=length)
    held = {name: read_heldout(dense, texts.to_measure(name, text_samples), asked) for name in PLAIN}
    known: dict[str, Tensor] = {}  # losses of the dense model, by the name of a text

    def add(made: StreamedModel, **cell: Any) -> None:
        bits = dict[str, dict[str, list[float]]]()
        for name, windows in held.items():
            bos = None if windows.bos is None else find_bos(made.tokenizer)
            before, after = same_text(windows, dense.tokenizer, made.tokenizer, bos, made.positions)
            if name not in known:
                known[name] = _losses(dense, before)
            losses = known[name] if made is dense else _losses(made, after)
            bits[name] = {"dense": _bits(known[name], before), "cut": _bits(losses, after)}
        size = sum(made.checkpoint.like(key).nbytes for key in made.checkpoint.entries)
        print(f"{cell}: { ({name: [round(fmean(one), 4) for one in each.values()] for name, each in bits.items()}) }")
        sheet.add(**cell, bits=bits, size=size, q8=_q8_of(made.checkpoint.path))

    if not sheet.has(counted="", tokens=dense.config.vocab_size):
        add(dense, counted="", tokens=dense.config.vocab_size)
    for name, count in itertools.product(counted, VOCABULARIES):
        heals = bool(heal) and name == "three" and count == VOCABULARIES[1]
        if sheet.has(counted=name, tokens=count) and (not heals or sheet.has(tokens=count, healed=heal)):
            continue
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            out, healed = Path(scratch) / "out", Path(scratch) / "healed"
            text, none = Calibration(counted[name], samples=len(counted[name]), length=length), Measurement(samples=0)
            niwaki.shrink(model, out, vocabulary=count, calibration=text, measurement=none)
            if not sheet.has(counted=name, tokens=count):
                add(StreamedModel(Checkpoint(out), "cpu"), counted=name, tokens=count)
            if heals:
                text = Calibration(counted[name], length=length)
                result = niwaki.heal(
                    *(out, healed, model), tokens=heal, calibration=text, measurement=none, compute="cpu"
                )
                made = StreamedModel(Checkpoint(healed), "cpu")
                add(made, counted=name, tokens=count, healed=heal, seconds=result.seconds["total"])


def _losses(model: StreamedModel, windows: Windows) -> Tensor:
    """(windows, length - 1) nats."""
    states = model.embed(windows.tokens)
    for block in model.stream():
        block.advance(states)
    return model.losses(states)


def _bits(losses: Tensor, windows: Windows) -> list[float]:
    """Bits that a byte takes, of each window."""
    assert windows.spans is not None
    spans = windows.spans.tolist()
    return [
        loss[first - 1 : end - 1].double().sum().item() / math.log(2) / length
        for loss, (first, end), length in zip(losses, spans, windows.bytes, strict=True)
    ]


def _q8_of(model: Path) -> int:
    """Bytes of its file for llama.cpp."""
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        file = Path(scratch) / "model.gguf"
        niwaki.export(model, file, "gguf-q8_0")
        return file.stat().st_size


def _bits_of(out: Path, sparsity: float, grid: str, scratch: Path) -> float:
    """What a weight of the matrices takes, with its part of the mask and of the scales."""
    if not sparsity:
        parsed = parse_grid(grid)
        return parsed.bits + (16 / (parsed.group or math.inf) if isinstance(parsed, Grid) else 0)
    packed = niwaki.pack(out, scratch / "packed")
    return 16 * packed.packed / packed.matrices


def experts(
    model: Model,
    corpus: Corpus,
    samples: Samples = 128,
    text_samples: TextSamples = 64,
    length: Length = 256,
    record: Record = None,
) -> None:
    """Whole experts removed from a mixture: by REAP's score alone, and with the others fitted to what is gone.

    "reap" is niwaki shrink --experts without the fit, which is all that it adds.
    """
    sheet = common.Sheet(record, {"length": length, "samples": samples, "text_samples": text_samples})
    held = {name: str(corpus / file) for name, file in EXPERT_TEXTS.items()}

    def add(made: Path, **cell: Any) -> None:
        losses = {name: list(each.losses) for name, each in measured(made, held, text_samples, length).items()}
        print(f"{cell}: {common.means(losses)}", flush=True)
        sheet.add(**cell, losses=losses)

    if not sheet.has(method="dense"):
        add(model, method="dense")
    fits = {"reap": _not_fitted, "fitted": unit_removal.fit_sum}
    for name, fraction, method in itertools.product(EXPERT_CALIBRATIONS, FRACTIONS, fits):
        case = {"method": method, "experts": fraction, "calibration": name}
        if sheet.has(**case):
            continue
        text = Calibration(str(corpus / EXPERT_CALIBRATIONS[name]), samples=samples, length=length)
        with tempfile.TemporaryDirectory() as scratch, patch.object(shrinking, "fit_sum", fits[method]):
            out = Path(scratch) / "out"
            made = niwaki.shrink(model, out, experts=fraction, calibration=text, measurement=NOTHING)
            assert made.structure is not None
            errors = [each.error for each in made.matrices]
            add(out, **case, removed=made.structure.removed, seconds=made.seconds["total"], errors=errors)


def removals(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each model, and resume from it.")],
    removed: Annotated[str, Option(help="Options of niwaki shrink, joined by +.")] = "blocks=4,neurons=0.25",
    efforts: Annotated[str, Option(help="As of niwaki shrink --effort.")] = f"{SHRINK_EFFORT},fast",
    texts: common.Measured = ALL_MEASURED,
    samples: Samples = 48,
    text_samples: TextSamples = 16,
    length: Length = 512,
    dtype: Annotated[str, Option(help="What blocks run in.")] = "auto",
) -> None:
    """Blocks, neurons or heads removed, calibrated on books: what is lost on texts of several kinds."""
    sheet = common.Sheet(record, {"text_samples": text_samples, "length": length, "samples": samples, "dtype": dtype})
    made = Texts(model, corpus, work, samples, length)
    held = {name: made.to_measure(name, text_samples) for name in common.chosen(texts, MEASURED)}
    books = Calibration(made.to_calibrate("books")[0], samples=samples, length=length)

    add = partial(common.add_measured, sheet, held, text_samples, length, dtype)
    if not sheet.has(removed="", effort=""):
        add(model, removed="", effort="", blocks=[], seconds=0.0)
    for effort, each in itertools.product(names(efforts), names(removed)):
        if sheet.has(removed=each, effort=effort):
            continue
        given = dict(option.split("=") for option in each.split("+"))
        options: dict[str, Any] = {kind: int(n) if kind == "blocks" else float(n) for kind, n in given.items()}
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            out = Path(scratch) / "out"
            done = niwaki.shrink(
                model,
                out,
                **options,
                effort=effort,
                calibration=books,
                measurement=NOTHING,
                compute=Compute(dtype=dtype),
            )
            structure = done.structure
            assert structure
            units = {kind: len(gone[0]) for kind in ("heads", "neurons") if (gone := getattr(structure, kind))}
            went = str(Combination(tuple(structure.blocks), units))
            seconds, tried = done.seconds["total"], structure.combinations
            add(out, removed=each, effort=effort, went=went, blocks=structure.blocks, seconds=seconds, tried=tried)


def grids(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each model, and resume from it.")],
    grids: Annotated[str, Option(help="As of niwaki quantize.")] = "int8,int8:64,int4:64,int3:64",
    efforts: Annotated[str, Option(help="As of niwaki quantize --effort.")] = "none,fast,balanced",
    texts: common.Measured = ALL_MEASURED,
    samples: Samples = 48,
    text_samples: TextSamples = 16,
    length: Length = 512,
) -> None:
    """What grids lose without zeros, by how weights are put on them, calibrated on books."""
    asked = [(grid, effort, Quantize(grid, effort=effort)) for grid, effort in _pairs(grids, efforts)]
    _on_grids(model, corpus, work, record, asked, texts, samples, text_samples, length)


def embeddings(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each model, and resume from it.")],
    grids: Annotated[str, Option(help="As of niwaki quantize --embeddings.")] = "int8:64,int4:64,int4:32",
    efforts: Annotated[str, Option(help="none, and any other: fitted to what the head receives.")] = "none,fast",
    texts: common.Measured = ALL_MEASURED,
    samples: Samples = 48,
    text_samples: TextSamples = 16,
    length: Length = 512,
) -> None:
    """What grids of the embeddings and the head alone lose, calibrated on books."""
    asked = [(grid, effort, QuantizeEmbeddings(grid, effort)) for grid, effort in _pairs(grids, efforts)]
    _on_grids(model, corpus, work, record, asked, texts, samples, text_samples, length)


def _pairs(grids: str, efforts: str) -> list[tuple[str, str]]:
    return list(itertools.product(names(grids), names(efforts)))


def _on_grids(
    model: Path,
    corpus: Path,
    work: Path,
    record: Path,
    asked: Sequence[tuple[str, str, Stage]],
    texts: str,
    samples: int,
    text_samples: int,
    length: int,
) -> None:
    """Measures the model, and what each stage makes of it, by the names of its grid and its effort."""
    settings = {"samples": samples, "text_samples": text_samples, "length": length, "model": model.name}
    sheet = common.Sheet(record, settings)
    made = Texts(model, corpus, work, samples, length)
    held = {name: made.to_measure(name, text_samples) for name in common.chosen(texts, MEASURED)}
    books = Calibration(made.to_calibrate("books")[0], samples=samples, length=length)

    add = partial(common.add_measured, sheet, held, text_samples, length, "auto")
    if not sheet.has(grid="", effort=""):
        add(model, grid="", effort="", seconds=0.0)
    for grid, effort, stage in asked:
        if sheet.has(grid=grid, effort=effort):
            continue
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            out = Path(scratch) / "out"
            done = niwaki.run(model, out, [stage], calibration=books, measurement=NOTHING)
            add(out, grid=grid, effort=effort, seconds=done.seconds["total"])


def _not_fitted(old: Any, inputs: Any, parts: int, residual: Any) -> unit_removal.SumFit:
    """:func:`niwaki.layer.unit_removal.fit_sum` without a sweep."""
    error = float(residual.double().square().sum())
    return unit_removal.SumFit([old(part) for part in range(parts)], error, error, 0)


def own_answers(
    model: Model,
    corpus: Corpus,
    work: Work,
    efforts: common.Efforts = "fast,balanced",
    patterns: Patterns = "50 %,60 %",
    samples: Samples = 48,
    length: Length = 512,
    prompts: Annotated[int, Option(help="How many held prompts are answered.")] = 50,
    answer: Annotated[int, Option(help="Tokens in an answer, at most.")] = 256,
    text_samples: TextSamples = 24,
    record: Record = None,
) -> None:
    """Calibrated on the model's own answers, on books, and on both: what becomes of its answers to other prompts.

    The dense model answers prompts that are not among those it is calibrated on (held_prompts.jsonl). On these answers
    the KL divergence of each pruned model from the dense one is measured, in nats a token. Each pruned model answers
    the same prompts: how long its answers are, how many have not ended, and how many of these say the same for ever.
    """
    console = Console(width=140, highlight=False, emoji=False)
    texts = Texts(model, corpus, work, samples, length)
    plain = {name: texts.to_measure(name, text_samples) for name in ("wikitext2", "books")}
    asked = Prompts(model, prompts, answer)

    def result(name: str, directory: Path, **values: Any) -> Cell:
        file = work / f"{name}.json"
        if not file.exists():
            with _whole(directory) as pruned:
                own = asked.answers(pruned, console)
            values.update(answers=own, **_summary(own, asked.end))
            if directory != model:
                with _whole(model) as dense, _whole(directory) as pruned:
                    each = asked.divergences(dense, pruned, json.loads((work / "dense.json").read_text())["answers"])
                values["divergence"], values["error"] = fmean(each), stdev(each) / len(each) ** 0.5
            found = measured(directory, plain, text_samples, length, "float32")
            file.write_text(json.dumps(values | {text: each.value for text, each in found.items()}))
        shown: Cell = json.loads(file.read_text())
        del shown["answers"]
        console.print(shown)
        return shown

    results = [result("dense", model, effort="", calibration="", pattern="")]
    for effort, pattern in itertools.product(names(efforts), names(patterns)):
        for name in ("books", OWN_ANSWERS, f"{OWN_ANSWERS} + books"):
            directory = work / "models" / f"{name} {pattern} {effort}".replace(" ", "-").replace(":", "-")
            if not (directory / "niwaki.json").exists():
                sources = [
                    file
                    for each in name.split(" + ")
                    for file in ([OWN_ANSWERS] if each == OWN_ANSWERS else texts.to_calibrate(each))
                ]
                calibration = Calibration(sources, samples=samples, length=length)
                niwaki.prune(model, directory, pattern, effort=effort, calibration=calibration, measurement=NOTHING)
            results.append(result(directory.name, directory, effort=effort, calibration=name, pattern=pattern))
    if record:
        order = ["", *EFFORTS]
        results = common.with_earlier(results, record, "results", _key)
        results.sort(key=lambda each: (order.index(each["effort"].partition(":")[0]), each["pattern"]))
        settings = {"samples": samples, "length": length, "prompts": prompts, "answer": answer}
        common.save(record, model=model.name, **settings, results=results)


class Prompts:
    """The held prompts as tokens of a model, and its answers to them."""

    def __init__(self, model: Path, number: int, length: int) -> None:
        tokenizer: Any = load_tokenizer(model)
        self.length = length
        asked, _ = read_prompts(str(HELD_PROMPTS))
        self.tokens: list[list[int]] = [
            tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
            for each in asked[:: max(1, len(asked) // number)][:number]
        ]
        self.end = int(tokenizer.eos_token_id)

    def answers(self, model: PreTrainedModel, console: Console) -> list[list[int]]:
        """To each at most ``length`` tokens, with the one that ends it."""
        width, steps = max(map(len, self.tokens)), itertools.count(1)
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in self.tokens])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self.tokens])

        def done() -> None:
            if (step := next(steps)) % 64 == 0:
                console.print(f"  {step} of {self.length} tokens")

        torch.manual_seed(0)
        text = continued(model, padded, width + self.length, done, mask, [self.end], USUAL_SAMPLING)[:, width:].tolist()
        return [answer[: answer.index(self.end) + 1] if self.end in answer else answer for answer in text]

    def divergences(self, dense: PreTrainedModel, pruned: PreTrainedModel, answers: list[list[int]]) -> list[float]:
        """KL(dense | pruned) in nats a token, for each of ``answers``."""
        found = []
        for prompt, answer in zip(self.tokens, answers, strict=True):
            p, q = (_logits(model, prompt, answer).log_softmax(1) for model in (dense, pruned))
            found.append(float((p.exp() * (p - q)).sum(1).mean()))
        return found


@torch.no_grad()
def _logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """(answer, vocabulary): from which each token of the answer is drawn."""
    logits: Tensor = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def _whole(directory: Path) -> Any:
    """A context with the whole model in float32."""
    return StreamedModel(Checkpoint(directory), dtype="float32").whole()


def _summary(answers: list[list[int]], end: int) -> dict[str, float]:
    """What a table says of them."""
    return {
        "tokens": fmean(map(len, answers)),
        "unended": sum(answer[-1] != end for answer in answers),
        "endless": sum(_is_endless(answer, end) for answer in answers),
    }


def _is_endless(answer: list[int], end: int) -> bool:
    """Whether it has not ended, and ends with a cycle."""
    if answer[-1] == end:
        return False
    for period in range(1, min(LONGEST, len(answer) // 2) + 1):
        tail = max(REPEATED, 2 * period)
        if len(answer) >= tail and all(answer[-i] == answer[-i - period] for i in range(1, tail - period + 1)):
            return True
    return False


if __name__ == "__main__":
    common.main(compare, sizes, grids, embeddings, experts, own_answers, vocabulary, removals, smaller, about=__doc__)
