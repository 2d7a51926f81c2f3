"""The embedded model on the reference protocol: the paper's experiments, quantization and structured pruning.

    python benchmarks/protocol.py compare --record benchmarks/results/protocol.json
    python benchmarks/protocol.py compare --experiment table2 --record benchmarks/results/table2.json
    python benchmarks/protocol.py compare --methods alps,wanda+exact --patterns "60 %,2:4"
    python benchmarks/protocol.py compare --calibration train.txt --text held.txt --text wikitext2.test.txt
    python benchmarks/protocol.py compare --model MODEL --calibration c4 --text wikitext2 --length 2048 --samples 128
    python benchmarks/protocol.py quantization --text demo-held --text wikitext2.test.txt
    python benchmarks/protocol.py kept-format
    python benchmarks/protocol.py structured --record benchmarks/results/structured.json

256 windows of 256 tokens to calibrate on and 200 to measure on; the calibration and held-out excerpts that ship with
niwaki are the protocol's.
"""

import dataclasses
import json
import re
import shutil
import statistics
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import NOTHING, Cell, Held, Length, Record, Rounds, Samples, TextSamples, measured, names
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer import Option

import niwaki
from niwaki import Calibration, Comparison, Measurement, Progress
from niwaki.checkpoints.reading import SINGLE_NAME
from niwaki.cli.tables import perplexity_tables
from niwaki.evaluation.compare import compare as compared
from niwaki.layer.floats import E2M1, E4M3, Floats, TiledFloats
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.rounding import onto_floats
from niwaki.models.locate import locate_model
from niwaki.records.comparison import METHODS, PATTERNS, Cell as ComparedCell

SAMPLES, TEXT_SAMPLES, LENGTH = 256, 200, 256
CALIBRATION = Calibration("demo", samples=SAMPLES, length=LENGTH)

STEPS = (1, 10, 20, 50, 100)
RATES = (0.01, 0.03, 0.1)
#: What is changed in the effort "fast", one at a time.
INGREDIENTS = (
    *("importance=0.5", "epochs=1", "epochs=1:synthetic=0.5"),
    *("allocation=error", "allocation=loss"),
)
#: Methods and patterns of each experiment. "A+magnitude" is the mask of A with the weights as they were.
EXPERIMENTS: dict[str, tuple[list[str], list[str]]] = {
    "table1": (list(METHODS), list(PATTERNS)),
    "table2": (
        [
            f"{mask}+{update}"
            for mask in ("wanda", "magnitude", "ria", "sparsegpt", "admm-grad", "alps", "continuation")
            for update in ("magnitude", "sparsegpt", "adam", "admm1", "cg", "exact")
        ],
        ["60 %"],
    ),
    "table3": (
        [
            *("magnitude", "wanda", "ria", "sparsegpt", "alps", "admm-grad"),
            *("continuation", "continuation@balanced", "continuation@best"),
            *("admm1", "adam", "sgd", "cg", "exact"),
        ],
        ["60 %"],
    ),
    "figure2": (
        [
            "wanda",
            *(f"wanda+admm1:iterations={steps}" for steps in STEPS),
            *(f"wanda+adam:learning_rate={rate}:iterations={steps}" for rate in RATES for steps in STEPS),
            *(f"wanda+cg:iterations={steps}" for steps in STEPS),
            *("wanda+sparsegpt", "sparsegpt", "wanda+exact", "admm-grad", "continuation"),
        ],
        ["60 %", "80 %"],
    ),
    "ablation": (
        [
            *("admm-grad", "continuation"),
            *(f"continuation@fast:{change}" for change in INGREDIENTS),
            *("continuation@balanced", "continuation@best"),
        ],
        ["50 %", "60 %", "70 %", "80 %", "90 %", "2:4"],
    ),
}
#: Sparsity, effort and grids.
GRIDS = (
    (0.0, "fast", ("int4:64", "int3:64")),
    (0.5, "fast", ("int4:64",)),
    (0.5, "balanced:epochs=0", ("int4:64",)),
    (0.5, "best:synthetic=0:epochs=4:batch=2048:rate=0.03", ("int4:64",)),
)
FP8 = TiledFloats(E4M3, (128, 128), torch.float32)
MXFP4 = TiledFloats(E2M1, (1, 32), None)
#: Of the blocks' parameters, what structured pruning removes.
FRACTIONS = [Fraction(1, 12), Fraction(1, 6), Fraction(1, 4), Fraction(1, 3), Fraction(1, 2)]
STRUCTURES = ("blocks", "neurons", "heads and neurons", "zeros anywhere")

Experiment = Literal["table1", "table2", "table3", "figure2", "ablation"]


class Lines(Progress):
    """A line for each cell."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def done(self, cell: ComparedCell) -> None:
        if cell.perplexity or cell.stages:
            stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cell.stages.items())
            self._console.print(f"{cell}; {cell.seconds:.2f} s ({stages})", soft_wrap=True)


def compare(
    model: str = "demo",
    calibration: common.Calibration = "demo",
    text: Held = common.HELD,
    samples: Samples = SAMPLES,
    text_samples: TextSamples = TEXT_SAMPLES,
    length: Length = LENGTH,
    experiment: Annotated[Experiment, Option(help="Which methods and patterns.")] = "table1",
    methods: Annotated[str, Option(help="Instead of the experiment's.")] = "",
    patterns: Annotated[str, Option(help="Likewise.")] = "",
    rounds: Rounds = 1,
    record: Record = None,
    add: Annotated[bool, Option("--add", help="Put the results into the record that is there.")] = False,
) -> None:
    """Perplexity and time of methods at patterns.

    table1 is every method at every pattern; table2 mask x update at 60 %; table3 the total time of every method at
    60 %; figure2 perplexity against time for updates of 1 to 100 steps of Wanda's mask at 60 and 80 %; ablation each
    ingredient of --effort alone, and the efforts.

    The model is converted to float32 before it is pruned, and so is the result. Times are medians of the rounds, all
    else is of the first.
    """
    console = Console(width=120, highlight=False, emoji=False)
    usual_methods, usual_patterns = EXPERIMENTS[experiment]
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        found = [
            compared(
                float32_copy(model, Path(scratch) / "float32"),
                solvers=names(methods) or usual_methods,
                progress=Lines(console),
                patterns=names(patterns) or usual_patterns,
                calibration=Calibration(calibration, samples=samples, length=length),
                measurement=Measurement(text, samples=text_samples if number == 0 else 1),
            )
            for number in range(rounds)
        ]
    comparison = _medians(found)
    for each in text:
        for table in perplexity_tables(comparison, each):
            console.print(table)
    if record:
        cells = [_cell(cell) for cell in comparison.cells]
        if add:
            cells = common.with_earlier(cells, record, "cells", lambda cell: (cell["method"], cell["pattern"]))
        sizes = {"samples": samples, "text_samples": text_samples, "length": length}
        common.save(record, experiment=experiment, **sizes, cells=cells)


def float32_copy(model: str, out: Path) -> str:
    """A float32 copy of a model directory, so that its pruned weights are not rounded to bfloat16."""
    if not out.exists():
        source = locate_model(model)
        shutil.copytree(source, out)
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
        loaded.save_pretrained(out)
    return str(out)


def _medians(found: list[Comparison]) -> Comparison:
    cells = [
        dataclasses.replace(
            cells[0],
            seconds=statistics.median(cell.seconds for cell in cells),
            stages={name: statistics.median(cell.stages[name] for cell in cells) for name in cells[0].stages},
        )
        for cells in zip(*(each.cells for each in found), strict=True)
    ]
    return dataclasses.replace(found[0], cells=cells)


def _cell(cell: ComparedCell) -> Cell:
    perplexity = common.without_places({Path(text).name: value for text, value in cell.perplexity.items()})
    for value in perplexity.values():
        del value["losses"]  # of each window, which no table needs
    return dataclasses.asdict(cell) | {"perplexity": perplexity}


def quantization(text: Held = common.HELD) -> None:
    """Perplexity of models that are pruned and put on a grid, together or one after the other.

    "nearest" rounds the weights of the model without a grid afterwards, with nothing of niwaki's: scales put the
    largest weight of a group at the end of the grid.
    """

    def show(model: str | Path, *what: str) -> None:
        values = measured(model, common.by_name(text), TEXT_SAMPLES, LENGTH).values()
        print(f"{' '.join(what)}: {', '.join(f'{each.value:.2f}' for each in values)}", flush=True)

    show("demo", "dense")
    for sparsity, effort, grids in GRIDS:
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            options: dict[str, Any] = {"effort": effort, "calibration": CALIBRATION, "measurement": None}
            for grid in ("", *grids):
                out = Path(scratch) / (grid or "plain")
                niwaki.prune("demo", out, sparsity, quantize=grid or None, **options)
                show(out, str(sparsity), effort, grid and f"{grid} together")
            for grid in grids:
                bits, group = re.findall(r"\d+", grid)
                rounded = Path(scratch) / f"{grid} nearest"
                _nearest(Path(scratch) / "plain", rounded, int(bits), int(group))
                show(rounded, str(sparsity), effort, grid, "nearest")


@torch.no_grad()
def _nearest(model: Path, out: Path, bits: int, group: int) -> None:
    """Rounds the matrices of the blocks to the nearest whole number of ``bits``, times a scale for each group."""
    shutil.copytree(model, out)
    tensors = load_file(out / SINGLE_NAME)
    for name, weight in tensors.items():
        if re.search(r"\.layers\.\d+\..*proj\.weight$", name):
            W = weight.float().unflatten(1, (-1, group))
            scales = (W.abs().amax(dim=2, keepdim=True) / (2 ** (bits - 1) - 0.5)).to(weight.dtype).float()
            codes = (W / scales.where(scales > 0, 1)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            tensors[name] = (codes * scales).flatten(1).to(weight.dtype)
    save_file(tensors, out / SINGLE_NAME, metadata={"format": "pt"})


def kept_format() -> None:
    """What it costs that a model stays in its format: the embedded one in FP8, and in numbers and groups of MXFP4.

    No family that niwaki ships a model of comes in MXFP4, so there the rounding of --quantize is replaced by that of
    the format, as it is and without its sweeps. Perplexity on demo-held; 6 runs, some minutes on one thread.
    """
    with tempfile.TemporaryDirectory() as name:
        place, demo = Path(name), locate_model("demo")
        dense = _in_fp8(demo, place / "fp8")
        print("FP8, without the format", _at_half(dense, place / "usual"))
        print("FP8, --keep-format", _at_half(dense, place / "kept", keep_format=True))
        after = niwaki.evaluate(_in_fp8(place / "usual", place / "afterwards"), _HELD)
        print("FP8, nearest", after.figure)
        print("MXFP4, without the format", _at_half(demo, place / "plain"))
        print("MXFP4, --keep-format", _at_half(demo, place / "swept", MXFP4))
        rounded = dataclasses.replace(MXFP4, numbers=_Rounded(2, 1, 8))
        print("MXFP4, nearest", _at_half(demo, place / "nearest", rounded))


_HELD = Measurement("demo-held", samples=100, length=LENGTH)


class _Rounded(Floats):
    """Numbers to which weights are rounded one by one."""

    is_coarse = False


def _in_fp8(source: Path, out: Path) -> Path:
    """``source`` with its matrices in FP8, the largest weight of each block at the highest number."""
    shutil.copytree(source, out)
    stored: dict[str, Tensor] = {}
    for key, value in load_file(source / SINGLE_NAME).items():
        stored[key] = value
        if "_proj" in key:
            W, (down, across) = value.float(), FP8.tiles((value.shape[0], value.shape[1]))
            blocks = [[part.abs().max() for part in rows.split(128, 1)] for rows in W.split(128)]
            scales = torch.tensor(blocks).view(down, across) / E4M3.highest
            stored[key] = (W / FP8.factors(scales, W.shape)).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scales
    save_file(stored, out / SINGLE_NAME, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return out


def _at_half(model: Path, out: Path, numbers: TiledFloats | None = None, **options: Any) -> str:
    """The perplexity of ``model`` at 50 %; in ``numbers``, in place of whole ones, if they are given."""

    def rounded(problem: LayerProblem, solution: Solution, *_: Any) -> tuple[Solution, Tensor]:
        assert numbers
        rows, columns = problem.W.shape
        return onto_floats(problem, solution, numbers, torch.zeros(numbers.tiles((rows, columns))))

    options |= {"calibration": Calibration("demo", samples=64, length=LENGTH), "measurement": _HELD}
    if numbers is None:
        return niwaki.prune(model, out, 0.5, effort="fast", **options).perplexity["after"].figure
    with patch("niwaki.models.formats.onto_grid", rounded), patch("niwaki.models.formats.verify_grid"):
        return niwaki.prune(model, out, 0.5, effort="fast", quantize="int4:32", **options).perplexity["after"].figure


def structured(text: Held = common.HELD, record: Record = None) -> None:
    """Structured pruning beside zeros anywhere, at the same fraction of the blocks' parameters removed.

    The embedded model has 6 blocks with 6 heads and 512 neurons each, the heads of a LLaMA have to divide its width,
    and a multiple of 32 neurons stays: not every fraction is possible. What the record has already is not run again.
    """
    sheet = common.Sheet(record, {"samples": SAMPLES, "text_samples": TEXT_SAMPLES, "length": LENGTH})

    def add(method: str, size: Fraction, model: str | Path, removed: float, seconds: float) -> None:
        found = measured(model, common.by_name(text), TEXT_SAMPLES, LENGTH)
        values = ", ".join(f"{each.value:.2f}" for each in found.values())
        print(f"{method} {float(size):.3f} ({removed:.4f}): {values}; {seconds:.1f} s", flush=True)
        cell = {"method": method, "size": float(size), "removed": removed}
        sheet.add(**cell, perplexity=common.without_places(found), seconds=seconds)

    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        model = float32_copy("demo", Path(scratch) / "float32")
        if not sheet.has(method="dense"):
            add("dense", Fraction(0), model, 0.0, 0.0)
        for size in FRACTIONS:
            for method in STRUCTURES:
                out = Path(scratch) / f"{method} {size.denominator}"
                options = _removing(method, size)
                if options is None or sheet.has(method=method, size=float(size)):
                    continue
                run = niwaki.prune if method == "zeros anywhere" else niwaki.shrink
                made = run(model, out, calibration=CALIBRATION, measurement=NOTHING, **options)
                removed = made.structure.removed if made.structure else made.sparsity
                add(method, size, out, removed, made.seconds["total"])


def _removing(method: str, size: Fraction) -> dict[str, Any] | None:
    """Options of ``shrink`` or ``prune`` for the embedded model, whose MLPs have 2/3 of a block's parameters."""
    if method == "zeros anywhere":
        return {"effort": "fast", "pattern": float(size)}
    if method == "blocks":
        return {"blocks": int(6 * size)} if (6 * size).denominator == 1 else None
    if method == "neurons":
        return {"neurons": float(size * 3 / 2)}
    heads = Fraction(1, 2)
    neurons = (size - heads / 3) * 3 / 2
    return {"heads": float(heads), "neurons": float(neurons)} if neurons > 0 else None


if __name__ == "__main__":
    common.main(compare, quantization, kept_format, structured, about=__doc__)
