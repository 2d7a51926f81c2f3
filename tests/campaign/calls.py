"""The functions and classes of ``niwaki`` with arguments of all types, as people and programs call them by mistake."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import niwaki
from campaign.home import contents, furnish
from niwaki import Grid, NiwakiError, Wanda
from support.forks import forked, refused

_home = Path()
_TEXT = niwaki.Calibration("demo", samples=2, length=32)
_MEASURED = niwaki.Measurement(samples=1)


class _Text(str):
    pass


# fmt: off
#: What is given where something else belongs, or the same in another type.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 10**30, 0.0, 0.5, 1.0, 1.5, -0.5, 3.0, 1e-320, float("nan"), float("inf")),
    *("", " ", "0", "1", "0.5", "60 %", "nan", "1e9999999%", "1e400", "9" * 250, "٣", "\udcff", "x" * 250, 1 + 2j),
    *("x" * 5000, "a\0b", "~nosuch/m"),
    *("auto", "cpu", "float32", "float16", "quantum", "8GiB", f"{'9' * 240}GiB", "demo", "demo-held", "nope", "./nope"),
    *("2:4", "4:2", "0:1", "0:2", "2:0", "per-row:0.5", "mixed-2:4", "2:4+per-row:0.6", "2:4+" * 60, "block-4x4:0.5"),
    *("wanda", "wanda+exact", "wanda+" * 40, "admm1:rho=-1", "admm1:iterations=1", "fast", "best:epochs=0.1"),
    *("fast:allocation=error", "int4", "int4:16", "int9", "which-follows", b"wanda", bytearray(b"2:4"), Ellipsis),
    *(Path("nope"), Path(), Path("demo"), Path("text.txt"), _Text("demo"), _Text("wanda"), object(), np.ma, sys),
    *([], (), {}, set(), [0.5], (0,), (0, 1), [0, 2], (0, 1, 2), (0.0, 1), ("0", "1"), ["wanda"], ["demo-held"]),
    *([None], [["a"]], {"rho": 2}, {"rho": "2"}, range(2), iter(()), lambda *_: 0, int, ValueError("no")),
    *(np.int64(1), np.int8(2), np.uint64(2**63), np.float32(0.5), np.float64(0.5)),
    *(np.bool_(True), np.str_("wanda"), Fraction(1, 2)),
    *(np.array(2), np.array([0, 1]), np.array([0.5]), np.zeros((2, 8), np.int64), Decimal("0.5")),
    *(torch.tensor(1), torch.tensor(0.5), torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.int64), torch.ones(1, 9, 2)),
    *(torch.float32, torch.float16, torch.int8, torch.device("cpu"), torch.device("meta"), torch.nn.Linear(2, 2)),
    *(_TEXT, niwaki.Calibration, _MEASURED, niwaki.Measurement(samples=0), niwaki.Measurement(()), niwaki.Compute()),
    *(niwaki.Compute("cpu", "bfloat16"), niwaki.Compute(max_memory="1GiB"), niwaki.Effort()),
    *(niwaki.Effort(fit=niwaki.Fitting(epochs=0.1)), niwaki.Effort(niwaki.Planning("loss")), niwaki.Fitting()),
    *(niwaki.Effort, Wanda(), Wanda),
    *(niwaki.NM(2, 4), niwaki.NM, niwaki.PerRow(0.5), Grid(4), Grid(8, 16), niwaki.Progress()),
    *(niwaki.Windows(torch.zeros(2, 8, dtype=torch.int64), "0"),),
    *(niwaki.Windows(torch.zeros(2, 8), "0"), niwaki.Progress),
)
#: Sparsities that have to be reached exactly, whatever allocates them.
_SPARSITIES = (0.0, 0.5, "60 %", np.float32(0.7), 0.9, 0.985, 0.99, 0.995, 0.999, 0.9999, 1 - 1e-9, 1 - 1e-16)
_EFFORTS = (
    *("fast", "balanced", niwaki.Effort(niwaki.Planning("loss")), niwaki.Effort(niwaki.Planning("error"))),
    "fast:allocation=loss",
)
# fmt: on


def prepare(place: Path) -> None:
    global _home
    _home = place
    furnish(place)
    torch.set_num_threads(1)


def _functions(place: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By name, with arguments that are right."""
    model, pruned, packed, out = _home / "model", _home / "pruned", _home / "packed", place / "out"
    texts: dict[str, Any] = {"calibration": _TEXT, "measurement": _MEASURED, "compute": niwaki.Compute()}
    pruning = {"solver": "wanda", "effort": None, "mask_from": None, "quantize": None, "blocks": None}
    common: dict[str, Any] = {"restart": False, "progress": None}
    training: dict[str, Any] = {"tokens": 200, "max_time": None, "rate": 0.01, "batch": 32}
    lesson = niwaki.Calibration("demo", length=32)
    held = {"measurement": niwaki.Measurement("demo-held", samples=1, length=32)}
    comparing = {**texts, **held, "effort": "fast", "keep": False, "max_time": None, "progress": None}
    options = {"compute": "cpu", "progress": None}
    writing = {"tokens": 2, "temperature": 0.0, "seed": 0, "compute": "cpu", "say": None}
    both: dict[str, Any] = {"model": model, "out": out}
    smaller = {**both, "blocks": 1, "neurons": 0.25, "heads": 0.0}
    healed = {"pruned": pruned, "out": out, "teacher": model, **training, **texts, "calibration": lesson}
    page = {"directory": pruned, "out": place / "out.html", "prompts": [], "reference": None, "progress": None}
    made = (niwaki.Calibration, niwaki.Measurement, niwaki.Compute, niwaki.Effort, niwaki.Prune, niwaki.Quantize)
    return {
        **{function.__name__: (function, dict(vars(function()))) for function in (*made, niwaki.Heal)},
        "Shrink": (niwaki.Shrink, vars(niwaki.Shrink(blocks=1))),
        "Grid": (Grid, vars(Grid(4))),
        "prune": (niwaki.prune, {**both, "pattern": 0.5, **pruning, **texts, **common}),
        "quantize": (niwaki.quantize, {**both, "grid": "int8", "effort": None, **texts, **common}),
        "shrink": (niwaki.shrink, {**smaller, **texts, **common}),
        "heal": (niwaki.heal, {**healed, **common}),
        "compare": (niwaki.compare, {**both, "solvers": "wanda", "patterns": 0.5, **comparing}),
        "evaluate": (niwaki.evaluate, {"model": model, **held, **options}),
        "evaluate_tasks": (niwaki.evaluate_tasks, {"model": model, "tasks": "nope", "limit": 1, **options}),
        "inspect": (lambda model: list(niwaki.inspect(model)), {"model": model}),
        "bench": (niwaki.bench, {"model": "nope/nope", "prompt": 2, "tokens": 2, "repeats": 1, **options}),
        "report": (niwaki.report, page),
        "pack": (niwaki.pack, {"model": pruned, "out": out, "progress": None}),
        "unpack": (niwaki.unpack, {"model": packed, "out": out, "progress": None}),
        "export": (niwaki.export, {"model": pruned, "out": out, "format": "gguf-f16", "progress": None}),
        "load": (niwaki.load, {"model": packed, "device": "cpu", "dtype": "float32"}),
        "generate": (niwaki.generate, {"model": packed, "prompt": "The trees", **writing}),
        "make_solver": (niwaki.make_solver, {"name": "admm1:iterations=2"}),
        "Windows": (niwaki.Windows, {"tokens": torch.zeros(2, 8, dtype=torch.int64), "source": "", "order": "first"}),
        "NM": (niwaki.NM, {"n": 2, "m": 4}),
        "PerRow": (niwaki.PerRow, {"sparsity": 0.5}),
        "Unstructured": (niwaki.Unstructured, {"sparsity": 0.5}),
        "Record.load": (niwaki.Record.load, {"path": pruned / "niwaki.json"}),
        "Comparison.load": (niwaki.Comparison.load, {"path": place}),
    }


def case(chance: random.Random, place: Path) -> str:
    functions = _functions(place)
    name = chance.choice(["prune", "prune", "prune", *functions])
    function, arguments = functions[name]
    exact = name == "prune" and chance.random() < 0.4
    if exact:
        arguments |= {"pattern": chance.choice(_SPARSITIES), "effort": chance.choice(_EFFORTS)}
    else:
        for argument in chance.sample([*arguments], min(len(arguments), chance.choice((1, 1, 1, 2)))):
            arguments[argument] = chance.choice(_ODD)

    def work() -> None:
        import os

        os.chdir(place)
        os.environ["HOME"] = str(place)
        try:
            result = function(**arguments)
        except NiwakiError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None
        if name == "prune":
            _check(result, Path(arguments["out"]), exact)

    before = contents(_home)
    ended = forked(work)
    said = f"{name} {arguments!r:.1000}"
    assert contents(_home) == before, f"{said} changed its input"
    assert ended.code in (0, 2), f"{said}\n{ended.err[-3000:]}"
    if ended.code == 0:
        return f"{name} done"
    assert not exact, f"{said}: {ended.err}"
    line = refused(ended)
    left = [path for path in place.rglob("*") if path.is_file()]
    assert not left, f"{said} left {left}: {line}"
    return "refused"


def _check(record: niwaki.Record, out: Path, exact: bool) -> None:
    """That what is written has the zeros that the record says, and of an exact sparsity that number of them."""
    tensors = load_file(out / "model.safetensors")
    pruned = [tensors[f"model.layers.{matrix.block}.{matrix.name}.weight"] for matrix in record.matrices]
    zeros = [int((value == 0).sum()) for value in pruned]
    sizes = [value.numel() for value in pruned]
    assert not any(bool(torch.signbit(value[value == 0]).any()) for value in pruned)
    assert record.sparsity == sum(zeros) / sum(sizes)
    if exact:
        kind, _, number = record.pattern.partition(":")
        assert kind == "per-row"
        total = round(float(number) * sum(sizes))
        shares = [round(float(number) * size) for size in sizes]
        uniform = record.effort["allocation"] == "uniform"
        assert zeros == shares if uniform else sum(zeros) == total, f"{sum(zeros)} zeros, and {total} were asked for"
