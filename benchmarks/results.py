"""Writes the tables of the documentation, and the picture of README.md, from the records in benchmarks/results.

make results                           # or, without setting anything up:
python benchmarks/results.py           # after a benchmark with --record benchmarks/results/...
python benchmarks/results.py --check   # fails if they differ
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import exp
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

from picture import Form, pictures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HELD = "demo-held"

Cell = dict[str, Any]


def record(name: str) -> Any:
    """The record of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    # No blank before a bar that follows an empty cell, as formatters of markdown have it.
    return lines + [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows]


def perplexities(cells: list[Cell], text: str, seconds: bool) -> list[str]:
    """A method a row, a pattern a column, the lowest perplexity in bold; with seconds, those of table 3."""
    found = {(cell["method"], cell["pattern"]): cell for cell in cells}
    methods = list(dict.fromkeys(method for method, _ in found if method != "dense"))
    patterns = list(dict.fromkeys(pattern for _, pattern in found if pattern))
    times = {cell["method"]: cell["seconds"] for cell in record("table3")["cells"]} if seconds else {}

    def value(method: str, pattern: str) -> float:
        return float(found[method, pattern]["perplexity"][text]["value"])

    rows = [["dense", f"{value('dense', ''):.2f}"] + [""] * (len(patterns) - 1 + seconds)]
    for method in methods:
        row = [method]
        for pattern in patterns:
            best = min(value(other, pattern) for other in methods)
            shown = f"{value(method, pattern):.2f}"
            row.append(f"**{shown}**" if value(method, pattern) == best else shown)
        rows.append(row + ([f"{times[method]:.1f}"] if seconds else []))
    return markdown(["method", *patterns, *(["seconds"] if seconds else [])], rows)


#: The rows of README.md's table.
README_METHODS = ("wanda", "sparsegpt", "admm-grad", "continuation@balanced", "continuation@best")
#: The rows of the table of efforts, with what each says of itself.
EFFORTS = {
    "wanda": ("none: `--solver wanda`", "a mask from one score, weights unchanged"),
    "continuation": ("`fast`", "each matrix alone, as methods were published"),
    "continuation@balanced": (
        "`balanced`",
        "shares zeros out by what they cost the loss, adds a quarter of own text, fits each block on 0.3 of it all, "
        "or 0.6 (n:m)",
    ),
    "continuation@best": ("`best`", "fits on all of the text, and on text that the dense model writes; then heals"),
}


def readme() -> list[str]:
    """The table of README.md, with what was measured."""
    protocol = record("protocol")
    cells = [cell for cell in protocol["cells"] if cell["method"] in ("dense", *README_METHODS)]
    measured = cells[0]["perplexity"][HELD]
    spread = 100 * measured["standard_error"] / measured["value"]
    return [
        *perplexities(cells, HELD, seconds=True),
        "",
        f"Perplexity (lower is better) on {measured['tokens']:,} tokens of books that the model never saw, at context "
        f"{measured['context']}; calibrated on {protocol['samples']} x {protocol['length']} tokens; seconds of a whole "
        f"run at 60 %. ± {spread:.1f} % between texts of this size, much less between methods on the same text. "
        "[All methods](docs/methods.md). `python benchmarks/protocol.py compare --record benchmarks/results/protocol.json` "
        "measures it again.",
    ]


def efforts() -> list[str]:
    """What an effort does, its time, and how much of the gap to the dense model it leaves: docs/effort.md."""
    values = {
        (cell["method"], cell["pattern"]): cell["perplexity"][HELD]["value"] for cell in record("protocol")["cells"]
    }
    times = {cell["method"]: cell["seconds"] for cell in record("table3")["cells"]}
    dense, patterns, fast = values["dense", ""], ("60 %", "80 %", "2:4"), "continuation"
    rows = []
    for method, (effort, does) in EFFORTS.items():
        gaps = [(values[method, pattern] - dense) / (values[fast, pattern] - dense) for pattern in patterns]
        rows.append([effort, does, f"{times[method] / times[fast]:.1f}", *(f"{gap:.2f}" for gap in gaps)])
    header = ["effort", "what it does", "time", *(f"gap at {pattern}" for pattern in patterns)]
    return [*markdown(header, rows), "", "Time, and gap to the dense perplexity, relative to `fast`."]


def methods() -> list[str]:
    """The tables of docs/methods.md, one for each text."""
    cells = record("protocol")["cells"]
    lines = []
    for text in cells[0]["perplexity"]:
        lines += [f"On {text}:", "", *perplexities(cells, text, seconds=text == HELD), ""]
    return lines[:-1]


def layer_error() -> list[str]:
    """Errors relative to the first solver's, in brackets on held-out tokens."""
    rows: dict[str, list[str]] = {}
    patterns = []
    for entry in record("layer_error")["results"]:
        shown = f"{entry['relative_error']:.3f} ({entry['relative_held_error']:.3f})"
        rows.setdefault(entry["solver"], []).append(shown)
        patterns.append(entry["pattern"])
    return markdown(["solver", *dict.fromkeys(patterns)], [[solver, *values] for solver, values in rows.items()])


def figure1() -> list[str]:
    """Error relative to the optimal one, and milliseconds, after some numbers of steps: geometric means."""
    layers = record("error_time")["layers"]
    rows = []
    for method in layers[0]["curves"]:
        row = [method]
        for steps in (1, 5, 20, 100):
            points = [
                (point["error"] / layer["optimal"], point["seconds"])
                for layer in layers
                for point in layer["curves"][method]
                if point["steps"] == steps
            ]
            if len(points) == len(layers):
                error, seconds = map(geometric_mean, zip(*points, strict=True))
                row.append(f"{error:.3f} in {1e3 * seconds:.1f} ms")
            else:
                row.append("")
        rows.append(row)
    return markdown(["update", "1 step", "5 steps", "20 steps", "100 steps"], rows)


def figure2() -> list[str]:
    """Perplexity and seconds of solving of each update by its steps."""
    cells = [cell for cell in record("figure2")["cells"] if cell["pattern"]]
    patterns = list(dict.fromkeys(cell["pattern"] for cell in cells))
    rows: dict[str, list[str]] = {}
    for cell in cells:
        value = cell["perplexity"][HELD]["value"]
        rows.setdefault(cell["method"], []).append(f"{value:.2f} in {cell['stages']['solve']:.2f} s")
    return markdown(["method", *patterns], [[method, *values] for method, values in rows.items()])


def table2() -> list[str]:
    """A mask a row, an update a column."""
    cells = [cell for cell in record("table2")["cells"] if cell["pattern"]]
    found = {cell["method"]: cell["perplexity"][HELD]["value"] for cell in cells}
    masks = list(dict.fromkeys(name.split("+")[0] for name in found))
    updates = list(dict.fromkeys(name.split("+")[1] for name in found))
    rows = [[mask, *(f"{found[f'{mask}+{update}']:.2f}" for update in updates)] for mask in masks]
    shown = ["none" if update == "magnitude" else update for update in updates]
    return markdown(["mask", *shown], rows)


def ablation() -> list[str]:
    """For each text perplexities, and the part of ADMM-Grad's gap to the dense model."""
    cells = record("ablation")["cells"]
    found = {(cell["method"], cell["pattern"]): cell for cell in cells}
    methods = list(dict.fromkeys(method for method, _ in found if method != "dense"))
    patterns = list(dict.fromkeys(pattern for _, pattern in found if pattern))
    lines: list[str] = []
    for text in cells[0]["perplexity"]:
        dense = cells[0]["perplexity"][text]

        def gap(method: str, pattern: str, text: str = text, dense: float = dense["value"]) -> float:
            return float(found[method, pattern]["perplexity"][text]["value"]) - dense

        rows = []
        for method in methods:
            row = [method.removeprefix("continuation@").replace("fast:", "+ ")]
            for pattern in patterns:
                shown = ""  # n:m has no allocation
                if (method, pattern) in found:
                    share = gap(method, pattern) / gap(methods[0], pattern)
                    shown = f"{gap(method, pattern) + dense['value']:.2f} ({share:.2f})"
                row.append(shown)
            rows.append(row)
        lines += [dense_line(text, dense), "", *markdown(["", *patterns], rows), ""]
    times = {cell["method"]: cell["seconds"] for cell in record("table3")["cells"]}
    shown = ", ".join(
        f"{method.removeprefix('continuation@')} {times[method]:.1f} ({times[method] / times[methods[0]]:.2f})"
        for method in methods
        if method in times
    )
    return [*lines, f"Seconds of a whole run at 60 %, two cores, in brackets relative to the first: {shown}."]


def dense_line(text: str, dense: Cell) -> str:
    """What a table is about."""
    return f"On {text}, dense {dense['value']:.2f} ± {dense['standard_error']:.2f}:"


def structured() -> list[str]:
    """For each text a method a row, and a fraction of the blocks' parameters a column."""
    cells = record("structured")["cells"]
    methods = ("blocks", "neurons", "heads and neurons", "zeros anywhere")
    sizes = sorted({cell["size"] for cell in cells[1:]})
    lines: list[str] = []
    for text, dense in cells[0]["perplexity"].items():
        found = {(cell["method"], cell["size"]): cell["perplexity"][text]["value"] for cell in cells[1:]}
        rows = [
            [method, *(f"{found[method, size]:.2f}" if (method, size) in found else "" for size in sizes)]
            for method in methods
        ]
        lines += [
            dense_line(text, dense),
            "",
            *markdown(["removed", *(f"{100 * size:.0f} %" for size in sizes)], rows),
            "",
        ]
    return lines[:-1]


def table3() -> list[str]:
    """Seconds of a run and of its solving."""
    cells = [cell for cell in record("table3")["cells"] if cell["pattern"]]
    rows = []
    for cell in cells:
        solving, perplexity = cell["stages"]["solve"], cell["perplexity"][HELD]["value"]
        rows.append([cell["method"], f"{cell['seconds']:.1f}", f"{solving:.2f}", f"{perplexity:.2f}"])
    return markdown(["method", "seconds in total", "of it solving", "perplexity"], rows)


def layer_time() -> list[str]:
    """For each size: times of solvers in 20 products, and the share of the product rate."""
    entries = record("layer_time")["results"]
    sizes = list(dict.fromkeys(entry["size"] for entry in entries))
    rows: dict[str, list[str]] = {}
    for entry in entries:
        share = f" ({100 * entry['share']:.0f} %)" if "share" in entry else ""
        shown = f"{entry['seconds']:.3g} s" if entry["relative"] == 1 else f"{entry['relative']:.2f}{share}"
        rows.setdefault(entry["what"], []).append(shown)
    return markdown(["", *(size.replace("x", " x ") for size in sizes)], [[k, *v] for k, v in rows.items()])


def precision() -> list[str]:
    """Errors relative to those of products in float32: means over patterns, and on the model the worst matrix."""
    measured = record("precision")
    places = list(dict.fromkeys(entry["where"] for entry in measured["results"]))
    found: dict[tuple[str, str, str], dict[str, list[Cell]]] = {}
    for entry in measured["results"]:
        row = found.setdefault((entry["factors"], entry["what"], entry["solver"]), {})
        row.setdefault(entry["where"], []).append(entry)

    def shown(entries: list[Cell]) -> str:
        value = geometric_mean(entry["relative_error"] for entry in entries)
        if entries[0]["where"] != "model":
            return f"{value:.3f}" if value < 10 else f"{value:.0f}"
        return f"{value:.4f} ({max(entry['worst'] for entry in entries):.4f})"

    names = {"solver": "solvers' products", "all": "both, and the forward pass"}
    rows = [
        [factors or "either", names.get(what, what), solver, *(shown(row[place]) for place in places)]
        for (factors, what, solver), row in found.items()
    ]
    off = {
        place: 100 * max(abs(e["said"] - 1) for e in measured["results"] if _always_at(e, place)) for place in places
    }
    said = ", ".join(f"{off[place]:.2g} % ({place})" for place in places)
    return [
        *markdown(["factors", "in", "solver", *places], rows),
        "",
        f"The {measured['same_bits']} Gram matrices of the model in bfloat16 are the same in TF32, to the bit. "
        f"With all products in TF32 the errors that solvers record differ from the true ones by up to: {said}.",
    ]


def decode() -> list[str]:
    """For each size and number of threads and vectors: the time of torch's dense product over that of a packed one."""
    entries = record("decode")["results"]
    packed = list(dict.fromkeys(e["name"] for e in entries if e["name"].startswith("packed")))
    cases = list(dict.fromkeys((e["size"], e["threads"], e["batch"]) for e in entries))
    rows = []
    for size, threads, batch in cases:
        found = {e["name"]: e for e in entries if (e["size"], e["threads"], e["batch"]) == (size, threads, batch)}
        row = [f"{size.replace('x', ' x ')}, {threads}, {batch}", f"{1e3 * found['torch bfloat16']['seconds']:.1f}"]
        row.append(f"{1e3 * found['plain dense']['seconds']:.1f}" if "plain dense" in found else "")
        rows.append(row + [f"{found[name]['torch_over_this']:.2f}" for name in packed])
    shown = [f"{100 * float(name.split()[1]):.0f} %" for name in packed]
    return markdown(["size, threads, vectors", "torch, ms", "plain dense kernel, ms", *shown], rows)


def gpu_instructions() -> list[str]:
    """For each kind of values and number of vectors and rows: instructions for a position, by generation of GPUs."""
    entries = record("gpu_instructions")["results"]
    names = list(dict.fromkeys(e["architecture"] for e in entries))
    sizes = list(dict.fromkeys(e["rows"] for e in entries))
    lines = []
    for kind, vectors in dict.fromkeys((e["kind"], e["vectors"]) for e in entries):
        found: dict[tuple[str, ...], list[int]] = defaultdict(list)  # rows with the same figures
        for rows in sizes:
            cases = [e for e in entries if (e["kind"], e["vectors"], e["rows"]) == (kind, vectors, rows)]
            waits, registers = max(e["waits"] for e in cases), max(e["registers"] for e in cases)
            found[(*(f"{e['instructions']:.1f}" for e in cases), str(waits), str(registers))].append(rows)
        for figures, alike in found.items():
            shown = "any" if alike == sizes else ", ".join(f"{rows:,}" for rows in alike)
            lines.append([kind, str(vectors), shown, *figures])
    return markdown(["values", "vectors", "rows", *(f"sm_{name}" for name in names), "waits", "registers"], lines)


def paths() -> list[str]:
    """For each dtype and kind of AVX-512, at each size: the time of one product by AVX2 over that by this."""
    names = {"AVX512BW": "without VBMI2", "AVX512": "with VBMI2", "AVX512_BF16": "with VBMI2 and bfloat16"}
    found: dict[tuple[str, float, str], dict[tuple[str, int], float]] = defaultdict(dict)
    for e in record("paths")["results"]:
        found[e["dtype"], e["sparsity"], e["path"]][e["size"], e["threads"]] = e["seconds"]
    rows = []
    for (dtype, sparsity, path), seconds in found.items():
        if path in names:
            ratios = [found[dtype, sparsity, "AVX2"][case] / seconds[case] for case in seconds]
            rows.append([f"{dtype}, {100 * sparsity:.0f} %", names[path], *(f"{ratio:.2f}" for ratio in ratios)])
    cases = next(iter(found.values()))
    return markdown(["dtype, zeros", "AVX-512", *(f"{size.replace('x', ' x ')}, {n}" for size, n in cases)], rows)


def experts() -> list[str]:
    """Nats above the whole mixture after experts were removed, with and without the fit of the others."""
    cells = record("experts")["cells"]
    found = {(cell.get("calibration"), cell.get("experts"), cell["method"]): cell["losses"] for cell in cells}
    dense, rows = cells[0]["losses"], []
    for calibration, fraction in dict.fromkeys((cell["calibration"], cell["experts"]) for cell in cells[1:]):
        reap, fitted = (found[calibration, fraction, method] for method in ("reap", "fitted"))
        for text in dense:
            alone, error = _paired(reap[text], dense[text])
            left, its_error = _paired(fitted[text], dense[text])
            gaps = [f"{alone:.3f} ±{error:.3f}", f"{left:.3f} ±{its_error:.3f}", f"{left / alone:.2f}"]
            rows.append([f"{100 * fraction:.0f} %", calibration, text, *gaps])
    return markdown(["experts removed", "calibrated on", "measured on", "REAP alone", "fitted", "ratio"], rows)


def sizes(name: str, timed: bool = False) -> list[str]:
    """What is lost at each size: perplexity, nats above the dense model, and their mean; and tokens a second."""
    made = record(name)
    dense = made["cells"][0]["losses"]
    speeds = {form["form"]: form["tokens_per_second"] for form in record("llama_cpp")["forms"]} if timed else {}
    rows = []
    for cell in sorted(made["cells"], key=lambda cell: -cell["bits"]):
        pairs = {text: _paired(losses, dense[text]) for text, losses in cell["losses"].items()}
        row = [f"{100 * cell['sparsity']:.0f} %", _values(cell), f"{cell['bits']:.2f}"]
        for text, (gap, error) in pairs.items():
            above = f" ({gap:.3f} ±{error:.3f})" if cell is not made["cells"][0] else ""
            row.append(f"{exp(fmean(cell['losses'][text])):.2f}{above}")
        row.append(f"{fmean(gap for gap, _ in pairs.values()):.3f}")
        if timed:
            speed = speeds.get(_runner(cell))
            row.append(f"{speed:.0f}" if speed else "")
        rows.append(row)
    return [
        *markdown(["zeros", "values", "bits a weight", *dense, "mean of nats", *(["tokens/s"] if timed else [])], rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens of books at the default effort; "
        f"perplexity on {made['text_samples']} x {made['length']} tokens of each text and, in brackets, nats a token "
        "above the dense model with the standard error of that difference. Bits are those of the pruned matrices, with "
        "mask and scales.",
    ]


def _runner(cell: Cell) -> str:
    """What this form is called in the record of llama_cpp.py: niwaki writes with all but the dense model."""
    if not cell["sparsity"] and not cell["grid"]:
        return "transformers, bfloat16"
    return f"packed, {cell['sparsity']:.0%} zeros" + (f", {cell['grid']}" if cell["grid"] else "")


def _values(cell: Cell) -> str:
    return f"{cell['grid'].removeprefix('int').partition(':')[0]} bits" if cell["grid"] else "bfloat16"


def forms() -> list[Form]:
    """The same as points of a picture."""
    cells = record("sizes")["cells"]
    dense = cells[0]["losses"]
    found = []
    for cell in sorted(cells[1:], key=lambda cell: cell["bits"]):
        nats = fmean(_paired(losses, dense[text])[0] for text, losses in cell["losses"].items())
        zeros = f"{100 * cell['sparsity']:.0f} % zeros"
        kind = _values(cell) if cell["sparsity"] else "no zeros"
        found.append(Form(cell["bits"], nats, kind, f"{zeros}, {_values(cell)}" if cell["sparsity"] else _values(cell)))
    return found


def llama_cpp() -> list[str]:
    """The speed of each form of a model, beside transformers'."""
    forms = record("llama_cpp")["forms"]
    usual = next(form for form in forms if form["form"].startswith("transformers"))["tokens_per_second"]
    rows = [
        [
            form["form"],
            f"{form['bytes'] / 2**20:.0f}",
            f"{form['first_token'] * 1e3:.0f}",
            f"{form['tokens_per_second']:.0f} ({form['slowest']:.0f} to {form['fastest']:.0f})",
            f"{form['tokens_per_second'] / usual:.2f}",
        ]
        for form in forms
    ]
    return markdown(["", "MiB", "first token, ms", "tokens/s", "times transformers'"], rows)


def real() -> list[str]:
    """The real model: perplexity, and nats above the dense model with the error of that difference, for each text."""
    return _measured_on_texts("real")


def third() -> list[str]:
    """The model that nothing was tuned on."""
    return _measured_on_texts("third")


def _measured_on_texts(name: str) -> list[str]:
    made = record(name)
    header, rows = _above_dense(made)
    return [
        *markdown(header, rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens, measured on "
        f"{made['text_samples']} x {made['length']} of each text; in brackets nats a token above the dense model, with "
        "the standard error of that difference; at the end their mean, relative to that of ADMM-Grad. "
        + _default_solver(made),
    ]


def _default_solver(made: Any) -> str:
    """On how many pairs of texts it is better than ADMM-Grad, by differences window by window."""
    losses: dict[tuple[str, str, str], dict[str, Any]] = defaultdict(dict)
    for cell in made["cells"]:
        for text, measured in cell["perplexity"].items():
            losses[cell["calibration"], cell["pattern"], text][cell["method"]] = measured["losses"]
    below = above = count = 0
    for pair in losses.values():
        if {"continuation", "admm-grad"} <= pair.keys():
            difference, error = _paired(pair["continuation"], pair["admm-grad"])
            below, above, count = below + (difference < -2 * error), above + (difference > 2 * error), count + 1
    return (
        f"Window by window, continuation is below ADMM-Grad by more than two standard errors on {below} of {count} "
        f"pairs of texts and patterns, and above it on {above}."
    )


def _paired(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """The mean difference of windows' losses, and its standard error."""
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    return fmean(differences), stdev(differences) / len(differences) ** 0.5


def real_at_half() -> list[str]:
    """The part of it that README.md has."""
    made = record("real")
    header, rows = _above_dense(made)
    rows = [row[2:] for row in rows if row[:2] in (["", ""], ["books", "50 %"])]
    return [
        *markdown(header[2:], rows),
        "",
        f"SmolLM2-135M-Instruct at 50 %, calibrated on {made['samples']} x {made['length']} tokens of books. "
        f"Perplexity on {made['text_samples']} x {made['length']} tokens each of WikiText-2, books by other authors, "
        "Python's standard library, and the dense model's answers to prompts; in brackets nats a token above the dense "
        "model; at the end their mean, relative to ADMM-Grad's.",
    ]


def _above_dense(made: Any) -> tuple[list[str], list[list[str]]]:
    patterns = ["", "50 %", "60 %", "2:4"]

    def place(cell: Cell) -> tuple[bool, str, int]:
        return cell["calibration"] != "books", cell["calibration"], patterns.index(cell["pattern"])

    cells = sorted(made["cells"], key=place)
    texts = list(cells[0]["perplexity"])
    dense = {cell["calibration"]: cell["perplexity"] for cell in cells if not cell["pattern"]}
    rows = [["", "", "dense", *(f"{cells[0]['perplexity'][text]['value']:.2f}" for text in texts), ""]]
    gaps: dict[tuple[str, str, str], float] = {}
    for cell in cells:
        calibration, pattern, method = cell["calibration"], cell["pattern"], cell["method"]
        if not pattern:
            continue
        row, above = [calibration, pattern, method], []
        for text in texts:
            measured = cell["perplexity"][text]
            difference, error = _paired(measured["losses"], dense[calibration][text]["losses"])
            above.append(difference)
            row.append(f"{measured['value']:.2f} ({above[-1]:.3f} ±{error:.3f})")
        gaps[calibration, pattern, method] = fmean(above)
        rows.append(row)
    for row in rows[1:]:
        beside = gaps.get((row[0], row[1], "admm-grad"))
        row.append(f"{gaps[row[0], row[1], row[2]] / beside:.2f}" if beside else "")
    return ["calibrated on", "zeros", "method", *texts, "of ADMM-Grad's"], rows


def own_answers() -> list[str]:
    """Calibrated on books and on the model's own answers: what becomes of its answers, and of plain text."""
    made = record("own_answers")
    rows = []
    for result in made["results"]:
        divergence = f"{result['divergence']:.3f} ±{result['error']:.3f}" if result["pattern"] else ""
        rows.append(
            [
                result["calibration"] or "dense",
                result["pattern"],
                result["effort"],
                divergence,
                f"{result['tokens']:.0f}",
                f"{result['unended']}",
                f"{result['endless']}",
                *(f"{result[text]:.2f}" for text in ("wikitext2", "books")),
            ]
        )
    heads = ["calibrated on", "zeros", "effort", "KL", "tokens", "not ended", "endless", "wikitext2", "books"]
    return [
        *markdown(heads, rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens; "
        f"{made['prompts']} other prompts, answers of at most {made['answer']} tokens.",
    ]


def heal(name: str = "heal") -> list[str]:
    """What healing leaves of the distance from the dense model, on each text."""
    made = record(name)
    dense, before, rows = made["results"][0]["losses"], [0.0], []
    for result in made["results"][1:]:
        pairs = [_paired(losses, dense[text]) for text, losses in result["losses"].items()]
        above, healing = [difference for difference, _ in pairs], result["healing"]
        if healing is None:
            before = above
        left = [fmean(above[:n]) / fmean(before[:n]) for n in (2, len(above))]
        closed = [f"{100 * (1 - each):.0f} %" if healing else "" for each in left]
        tokens = f"{healing['points'][-1]['tokens'] // 1000:,} k" if healing else ""
        what = f"healed, {healing['method']}, {result['time']}" if healing else result["effort"]
        rows.append([result["pattern"], what, tokens, *(f"{a:.3f} ±{error:.3f}" for a, error in pairs), *closed])
    return [
        *markdown(["pruned", "", "tokens", *dense, "closed of the first two", "of all"], rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens of books, healed on books and "
        "WikiText-2's validation text: nats a token above the dense model, with the standard error of that difference, "
        f"on {made['text_samples']} x {made['length']} tokens of each text; at the end the share of it that healing "
        "has closed, in the mean of WikiText-2 and books, and of all texts.",
    ]


def llm_compressor() -> list[str]:
    """Perplexity, time and memory beside those of llm-compressor."""
    made = record("llm_compressor")
    rows = [
        [
            f"{result['tool']} {result['method']}",
            result["dtype"],
            *(f"{value:.2f}" for value in result["perplexity"].values()),
            f"{result['seconds']:.0f}",
            f"{result['gigabytes']:.2f}",
        ]
        for result in made["results"]
    ]
    return [
        *markdown(["", "computed in", *made["results"][0]["perplexity"], "seconds", "GB"], rows),
        "",
        f"{made['model']} at {made['sparsity']:.0%}, calibrated on {made['samples']} x {made['length']} tokens of "
        "books.",
    ]


def model_types() -> list[str]:
    """What becomes of each type of language model that transformers has."""
    made = record("model_types")
    efforts, types = ("fast", "balanced"), made["types"]
    kinds = {
        "pruned": "pruned, and right",
        "refused": "refused, in a line",
        "wrong": "wrong",
        "failed": "a traceback, or no end",
        "not built": "no tiny model of it was made",
    }
    found = {effort: {kind: each[effort]["outcome"] for kind, each in types.items()} for effort in efforts}
    rows = [
        [words] + [str(list(found[e].values()).count(outcome)) for e in efforts] for outcome, words in kinds.items()
    ]
    everywhere: dict[str, list[str]] = {outcome: [] for outcome in kinds}
    refused = []
    for kind, each in types.items():
        if found["fast"][kind] == found["balanced"][kind]:
            everywhere[found["fast"][kind]].append(f"`{kind}`")
        for effort in ("fast",) if found["fast"][kind] == "refused" else efforts:
            # Of a reason that names its exception, what that says; the first clause says what is not supported.
            reason = each[effort]["reason"].partition(": ")[2].removeprefix("model: ").partition("; ")[0]
            if found[effort][kind] == "refused":
                refused.append([f"`{kind}`", reason.replace("|", "/")])
    return [
        *markdown([f"of {len(types)} types, transformers {made['versions']['transformers']}", *efforts], rows),
        "",
        f"Pruned with both: {', '.join(everywhere['pruned'])}.",
        "",
        "Not made, because sizes have to fit each other or other libraries are missing: "
        f"{', '.join(everywhere['not built'])}.",
        "",
        *markdown(["refused", "why"], refused),
    ]


def _always_at(entry: Cell, place: str) -> bool:
    return bool((entry["where"], entry["what"], entry["factors"]) == (place, "all", "TF32"))


#: Between which marks of which file each table goes.
TABLES: list[tuple[str, str, Callable[[], list[str]]]] = [
    ("README.md", "real", real_at_half),
    ("README.md", "results", readme),
    ("docs/methods.md", "results", methods),
    ("docs/effort.md", "efforts", efforts),
    ("docs/effort.md", "ablation", ablation),
    ("docs/structured.md", "structured", structured),
    ("docs/benchmarks.md", "real", real),
    ("docs/benchmarks.md", "third", third),
    ("docs/benchmarks.md", "own_answers", own_answers),
    ("docs/benchmarks.md", "llm_compressor", llm_compressor),
    ("docs/benchmarks.md", "layer_error", layer_error),
    ("docs/benchmarks.md", "figure1", figure1),
    ("docs/benchmarks.md", "figure2", figure2),
    ("docs/benchmarks.md", "table2", table2),
    ("docs/benchmarks.md", "table3", table3),
    ("docs/benchmarks.md", "layer_time", layer_time),
    ("docs/benchmarks.md", "precision", precision),
    ("docs/healing.md", "heal", heal),
    ("docs/healing.md", "heal_demo", partial(heal, "heal_demo")),
    ("docs/log.md", "paths", paths),
    ("docs/models.md", "model_types", model_types),
    ("docs/packed.md", "decode", decode),
    ("docs/packed.md", "llama_cpp", llama_cpp),
    ("docs/packed.md", "gpu_instructions", gpu_instructions),
    ("docs/structured.md", "experts", experts),
    ("docs/when-to-prune.md", "sizes", partial(sizes, "sizes", timed=True)),
    ("docs/when-to-prune.md", "sizes_demo", partial(sizes, "sizes_demo")),
]


def render() -> dict[Path, str]:
    """The text of each file with its tables as the records have them, and the pictures."""
    texts: dict[Path, str] = {}
    for file, mark, table in TABLES:
        path = ROOT / file
        texts[path] = between(texts.get(path) or path.read_text(), mark, table())
    return texts | dict(pictures(record("protocol"), HELD, forms(), ROOT / "docs" / "figures"))


def between(text: str, mark: str, lines: list[str]) -> str:
    """``text`` with ``lines`` between its marks."""
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    body = "\n".join([start, "", *lines, "", end])
    found, count = re.subn(f"{re.escape(start)}.*{re.escape(end)}", lambda _: body, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{start} and {end} are to be there once, and not {count} times")
    return found


def main() -> None:
    """Writes, or with --check compares."""
    made = render()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"not as in {RESULTS.name}: {', '.join(p.name for p in stale)}; `make results`" if stale else 0)
    for path in stale:
        path.write_text(made[path])


if __name__ == "__main__":
    main()
