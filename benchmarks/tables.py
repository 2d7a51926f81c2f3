"""Tables of single matrices, of products and of the embedded model on the protocol, each from one or two records."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, geometric_mean, stdev
from typing import Any

HELD = "demo-held"

Cell = dict[str, Any]
Lines = list[str]

#: The rows of the table of efforts.
EFFORTS = {
    "wanda": "none: `--solver wanda`",
    "continuation": "`fast`",
    "continuation@balanced": "`balanced`",
    "continuation@best": "`best`",
}
STRUCTURES = ("blocks", "neurons", "heads and neurons", "zeros anywhere")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """The lines of a table."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    # No blank before a bar that follows an empty cell, as formatters of markdown have it.
    return lines + [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows]


def crossed(corner: str, entries: Iterable[tuple[str, str, str]], columns: Sequence[str] = ()) -> Lines:
    """A table of (row, column, cell), in the order in which they come, with cells left empty where there is none."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row, column, shown in entries:
        found[row][column] = shown
    columns = columns or list(dict.fromkeys(column for row in found.values() for column in row))
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in found.items()]
    return markdown([corner, *columns], rows)


def paired(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """The mean difference of windows' losses, and its standard error."""
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    return fmean(differences), stdev(differences) / len(differences) ** 0.5


def times(size: str) -> str:
    """A size as it is written."""
    return size.replace("x", " x ")


def _pruned(made: Any) -> list[Cell]:
    """The cells of a comparison without that of the dense model."""
    return [cell for cell in made["cells"] if cell["pattern"]]


def _values(made: Any, text: str) -> dict[tuple[str, str], float]:
    """Perplexities by method and pattern."""
    return {(cell["method"], cell["pattern"]): cell["perplexity"][text]["value"] for cell in made["cells"]}


def _seconds(made: Any) -> dict[str, float]:
    """Of a whole run, by method."""
    return {cell["method"]: cell["seconds"] for cell in made["cells"]}


def _dense_line(text: str, dense: Cell) -> str:
    """What a table is about."""
    return f"On {text}, dense {dense['value']:.2f} ± {dense['standard_error']:.2f}:"


# The protocol


def _perplexities(values: dict[tuple[str, str], float], seconds: dict[str, float] | None) -> Lines:
    """A method a row, a pattern a column, the lowest perplexity in bold; with seconds, those of table 3."""
    methods = list(dict.fromkeys(method for method, _ in values if method != "dense"))
    patterns = list(dict.fromkeys(pattern for _, pattern in values if pattern))
    last = ["seconds"] if seconds else []
    rows = [["dense", f"{values['dense', '']:.2f}"] + [""] * (len(patterns) - 1 + len(last))]
    for method in methods:
        row = [method]
        for pattern in patterns:
            shown = f"{values[method, pattern]:.2f}"
            is_best = values[method, pattern] == min(values[other, pattern] for other in methods)
            row.append(f"**{shown}**" if is_best else shown)
        rows.append(row + ([f"{seconds[method]:.1f}"] if seconds else []))
    return markdown(["method", *patterns, *last], rows)


def efforts(protocol: Any, timed: Any) -> Lines:
    """The time of each effort, and how much of the gap to the dense model it leaves: docs/prune.md."""
    values, seconds = _values(protocol, HELD), _seconds(timed)
    dense, patterns, fast = values["dense", ""], ("60 %", "80 %", "2:4"), "continuation"
    rows = []
    for method, effort in EFFORTS.items():
        gaps = [(values[method, pattern] - dense) / (values[fast, pattern] - dense) for pattern in patterns]
        rows.append([effort, f"{seconds[method] / seconds[fast]:.1f}", *(f"{gap:.2f}" for gap in gaps)])
    header = ["effort", "time", *(f"gap at {pattern}" for pattern in patterns)]
    return [*markdown(header, rows), "", "Time, and gap to the dense perplexity, relative to `fast`."]


def methods(protocol: Any, timed: Any) -> Lines:
    """The tables of docs/methods.md, one for each text."""
    lines = []
    for text in protocol["cells"][0]["perplexity"]:
        seconds = _seconds(timed) if text == HELD else None
        lines += [f"On {text}:", "", *_perplexities(_values(protocol, text), seconds), ""]
    return lines[:-1]


def figure2(made: Any) -> Lines:
    """Perplexity and seconds of solving of each update by its steps."""
    return crossed(
        "method",
        (
            (
                cell["method"],
                cell["pattern"],
                f"{cell['perplexity'][HELD]['value']:.2f} in {cell['stages']['solve']:.2f} s",
            )
            for cell in _pruned(made)
        ),
    )


def table2(made: Any) -> Lines:
    """A mask a row, an update a column."""
    entries = []
    for cell in _pruned(made):
        mask, update = cell["method"].split("+")
        shown = "none" if update == "magnitude" else update
        entries.append((mask, shown, f"{cell['perplexity'][HELD]['value']:.2f}"))
    return crossed("mask", entries)


def table3(made: Any) -> Lines:
    """Seconds of a run and of its solving."""
    rows = []
    for cell in _pruned(made):
        solving, perplexity = cell["stages"]["solve"], cell["perplexity"][HELD]["value"]
        rows.append([cell["method"], f"{cell['seconds']:.1f}", f"{solving:.2f}", f"{perplexity:.2f}"])
    return markdown(["method", "seconds in total", "seconds of solving", "perplexity"], rows)


def ablation(made: Any, timed: Any) -> Lines:
    """For each text perplexities, and the part of the first method's gap to the dense model."""
    first = _pruned(made)[0]["method"]
    lines: Lines = []
    for text, measured in made["cells"][0]["perplexity"].items():
        values, dense = _values(made, text), measured["value"]
        entries = []
        for (method, pattern), value in values.items():
            if pattern:
                share = (value - dense) / (values[first, pattern] - dense)
                name = method.removeprefix("continuation@").replace("fast:", "+ ")
                entries.append((name, pattern, f"{value:.2f} ({share:.2f})"))
        lines += [_dense_line(text, measured), "", *crossed("", entries), ""]
    seconds = _seconds(timed)
    shown = ", ".join(
        f"{method.removeprefix('continuation@')} {seconds[method]:.1f} ({seconds[method] / seconds[first]:.2f})"
        for method in dict.fromkeys(cell["method"] for cell in _pruned(made))
        if method in seconds
    )
    return [*lines, f"Seconds of a whole run at 60 %, two cores, in brackets relative to the first: {shown}."]


def structured(made: Any) -> Lines:
    """For each text a method a row, and a fraction of the blocks' parameters a column."""
    dense, *cells = made["cells"]
    cells.sort(key=lambda cell: STRUCTURES.index(cell["method"]))
    columns = [f"{100 * size:.0f} %" for size in sorted({cell["size"] for cell in cells})]
    lines: Lines = []
    for text, measured in dense["perplexity"].items():
        entries = [
            (cell["method"], f"{100 * cell['size']:.0f} %", f"{cell['perplexity'][text]['value']:.2f}")
            for cell in cells
        ]
        lines += [_dense_line(text, measured), "", *crossed("removed", entries, columns), ""]
    return lines[:-1]


# Single matrices


def layer_error(made: Any) -> Lines:
    """Errors relative to the first solver's, in brackets on held-out tokens."""
    return crossed(
        "solver",
        (
            (e["solver"], e["pattern"], f"{e['relative_error']:.3f} ({e['relative_held_error']:.3f})")
            for e in made["results"]
        ),
    )


def figure1(made: Any) -> Lines:
    """Error relative to the optimal one, and milliseconds, after some numbers of steps: geometric means."""
    layers, rows = made["layers"], []
    for method in layers[0]["curves"]:
        row = [method]
        for steps in (1, 5, 20, 100):
            points = [
                (point["error"] / layer["optimal"], point["seconds"])
                for layer in layers
                for point in layer["curves"][method]
                if point["steps"] == steps
            ]
            shown = ""
            if len(points) == len(layers):
                error, seconds = map(geometric_mean, zip(*points, strict=True))
                shown = f"{error:.3f} in {1e3 * seconds:.1f} ms"
            row.append(shown)
        rows.append(row)
    return markdown(["update", "1 step", "5 steps", "20 steps", "100 steps"], rows)


def layer_time(made: Any) -> Lines:
    """For each size: times of solvers in 20 products, and the share of the product rate."""
    entries = []
    for e in made["results"]:
        share = f" ({100 * e['share']:.0f} %)" if "share" in e else ""
        shown = f"{e['seconds']:.3g} s" if e["relative"] == 1 else f"{e['relative']:.2f}{share}"
        entries.append((e["what"], times(e["size"]), shown))
    return crossed("", entries)


def precision(made: Any) -> Lines:
    """Errors relative to those of products in float32: means over patterns, and on the model the worst matrix."""
    places = list(dict.fromkeys(e["where"] for e in made["results"]))
    found: dict[tuple[str, str, str], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    off: dict[str, float] = dict.fromkeys(places, 0.0)
    for e in made["results"]:
        found[e["factors"], e["what"], e["solver"]][e["where"]].append(e)
        if (e["what"], e["factors"]) == ("all", "TF32"):
            off[e["where"]] = max(off[e["where"]], 100 * abs(e["said"] - 1))

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
    said = ", ".join(f"{value:.2g} % ({place})" for place, value in off.items())
    return [
        *markdown(["factors", "in", "solver", *places], rows),
        "",
        f"The {made['same_bits']} Gram matrices of the model in bfloat16 are the same in TF32, to the bit. "
        f"With all products in TF32 the errors that solvers record differ from the true ones by up to: {said}.",
    ]


# Products with packed matrices


def decode(made: Any) -> Lines:
    """For each size and number of threads and vectors: the time of torch's dense product over that of a packed one."""
    cases: dict[tuple[str, int, int], dict[str, Cell]] = defaultdict(dict)
    for e in made["results"]:
        cases[e["size"], e["threads"], e["batch"]][e["name"]] = e
    packed = list(dict.fromkeys(e["name"] for e in made["results"] if e["name"].startswith("packed")))
    rows = []
    for (size, threads, batch), found in cases.items():
        row = [f"{times(size)}, {threads}, {batch}", f"{1e3 * found['torch bfloat16']['seconds']:.1f}"]
        row.append(f"{1e3 * found['plain dense']['seconds']:.1f}" if "plain dense" in found else "")
        rows.append(row + [f"{found[name]['torch_over_this']:.2f}" for name in packed])
    shown = [f"{100 * float(name.split()[1]):.0f} %" for name in packed]
    return markdown(["size, threads, vectors", "torch, ms", "plain dense kernel, ms", *shown], rows)


def paths(made: Any) -> Lines:
    """For each dtype and kind of AVX-512, at each size: the time of one product by AVX2 over that by this."""
    names = {"AVX512BW": "without VBMI2", "AVX512": "with VBMI2", "AVX512_BF16": "with VBMI2 and bfloat16"}
    found: dict[tuple[str, float, str], dict[tuple[str, int], float]] = defaultdict(dict)
    for e in made["results"]:
        found[e["dtype"], e["sparsity"], e["path"]][e["size"], e["threads"]] = e["seconds"]
    rows = []
    for (dtype, sparsity, path), seconds in found.items():
        if path in names:
            ratios = [found[dtype, sparsity, "AVX2"][case] / seconds[case] for case in seconds]
            rows.append([f"{dtype}, {100 * sparsity:.0f} %", names[path], *(f"{ratio:.2f}" for ratio in ratios)])
    cases = next(iter(found.values()))
    return markdown(["dtype, zeros", "AVX-512", *(f"{times(size)}, {threads}" for size, threads in cases)], rows)


def gpu_instructions(made: Any) -> Lines:
    """For each kind of values and number of vectors and rows: instructions for a position, by generation of GPUs."""
    names = list(dict.fromkeys(e["architecture"] for e in made["results"]))
    cases: dict[tuple[str, int], dict[int, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for e in made["results"]:
        cases[e["kind"], e["vectors"]][e["rows"]].append(e)
    lines = []
    for (kind, vectors), by_rows in cases.items():
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)  # rows with the same figures
        for rows, those in by_rows.items():
            most = (str(max(e[name] for e in those)) for name in ("waits", "registers"))
            alike[(*(f"{e['instructions']:.1f}" for e in those), *most)].append(rows)
        for figures, sizes in alike.items():
            shown = "any" if sizes == list(by_rows) else ", ".join(f"{rows:,}" for rows in sizes)
            lines.append([kind, str(vectors), shown, *figures])
    return markdown(["values", "vectors", "rows", *(f"sm_{name}" for name in names), "waits", "registers"], lines)


def gpu_decode(made: Any) -> Lines:
    """For each size and number of vectors: the time of the dense product over those of packed and 2:4 matrices."""
    cases: dict[tuple[str, int], dict[str, Cell]] = defaultdict(dict)
    for e in made["results"]:
        name = f"packed, {100 * e['sparsity']:.0f} %" if e["kind"] == "packed" else e["kind"]
        cases[e["shape"], e["batch"]][name] = e
    packed = [name for name in next(iter(cases.values())) if name.startswith("packed")]
    rows = []
    for (size, vectors), found in cases.items():
        ratios = [f"{found[name]['dense_over_this']:.2f}" if name in found else "" for name in [*packed, "2:4"]]
        launched = found["dense"]["launched"] / found["2:4"]["launched"]
        microseconds = f"{1e6 * found['dense']['seconds']:.0f}"
        rows.append([f"{times(size)}, {vectors:,}", microseconds, *ratios, f"{launched:.2f}"])
    return markdown(["size, vectors", "dense, us", *packed, "2:4", "2:4, launched from Python"], rows)


def gpu_blocks(made: Any) -> Lines:
    """For each method: seconds of a block by stage, of all blocks, and memory."""
    stages = ["plan", "capture", "solve", "advance", "fit"]
    rows = []
    for e in made["results"]:
        solver, _, effort = e["solver"].partition("@")
        spent = [f"{e['block'][stage]:.1f}" if stage in e["block"] else "" for stage in stages]
        memory = f"{e['record']['device'] / 2**30:.1f} GiB"
        rows.append([f"`{solver}`, {effort or 'fast'}", *spent, f"{e['whole']:.0f}", memory])
    return markdown(["method, effort", *stages, f"all {made['blocks']} blocks", "GPU memory"], rows)
