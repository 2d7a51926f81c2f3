"""Tables of real models, of quality and of speed, each from one or two records."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from math import exp
from statistics import fmean, median
from typing import Any

from picture import Form
from tables import Cell, Lines, markdown, paired


def real(made: Any) -> Lines:
    """Perplexity, and nats above the dense model with the error of that difference, for each text."""
    header, rows = _above_dense(made)
    return [
        *markdown(header, rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens, measured on "
        f"{made['text_samples']} x {made['length']} of each text; in brackets nats a token above the dense model, with "
        "the standard error of that difference; the last column is their mean, relative to ADMM-Grad's. "
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
            difference, error = paired(pair["continuation"], pair["admm-grad"])
            below, above, count = below + (difference < -2 * error), above + (difference > 2 * error), count + 1
    return (
        f"Window by window, continuation is below ADMM-Grad by more than two standard errors on {below} of {count} "
        f"pairs of texts and patterns, and above it on {above}."
    )


#: Of the models for llama.cpp and for transformers, those that README's table has.
_FOR_LLAMA_CPP, _PARAMETERS = (0.45, 0.35), 0.9


def small(made: Any, measured: Any, others: Any) -> Lines:
    """README's: what compress makes of a model, in words that people know."""
    found = {cell["size"]: cell for cell in made["cells"] if cell["recipe"] in ("dense", "compress")}
    speeds = {cell["size"]: cell["tokens_per_second"] for cell in measured["cells"]}
    rows = []

    def add(name: str, cell: Cell, speed: str) -> None:
        perplexities = [f"{exp(fmean(cell['losses'][text])):.1f}" for text in ("wikitext2", "books")]
        rows.append([name, f"{cell['bytes'] / 2**20:.0f} MiB", *perplexities, speed])

    for size in sorted(speeds, reverse=True):
        name = "the model, in transformers" if size == 1 else f"`--size {size:g}`"
        add(name, found[size], f"{speeds[size]:.0f}")
    for cell in others["cells"]:
        if cell.get("size") in _FOR_LLAMA_CPP:
            add(f"`--size {cell['size']:g} --for llama.cpp`", cell, "")
        elif cell.get("parameters") == _PARAMETERS:
            add(f"`--parameters {cell['parameters']:g}`, in transformers", cell, "")
    return [
        *markdown(["SmolLM2-135M", "size", "perplexity, WikiText-2", "perplexity, books", "tokens a second"], rows),
        "",
        f"Calibrated on {made['samples']} x {made['length']} tokens of other books, measured on "
        f"{made['text_samples']} x {made['length']} of each text (lower is better; where tokens were removed, "
        "for each token that there was); "
        f"{measured['machine']}. "
        "`python benchmarks/compress.py recipes`, `programs` and `speeds` measure it again ([beside other recipes of "
        "these sizes](results-quality.md#beside-other-recipes)).",
    ]


#: Directories of scripts/real_models.py, by the names of their models.
_MODELS = {
    "qwen-0.5b-o": "Qwen2.5-Coder-0.5B",
    "qwen-1.5b-o": "Qwen2.5-Coder-1.5B",
    "gemma-270m-o": "Gemma 3 270M",
    "smollm2-o": "SmolLM2-135M",
    "llama-7b-8": "8 of 32 blocks of LLaMA 2 7B, random",
}
#: The commands of benchmarks/commands.py that README shows, in words.
_COMMANDS = {
    "plan": "`compress --size 0.4 --plan`",
    "size": "`compress --size 0.4`",
    "llama.cpp": "`compress --size 0.4 --for llama.cpp`",
    "loss": "`compress --loss 0.05`",
    "vocabulary": "`shrink --vocabulary used:0.9995`",
    "parameters": "`compress --parameters 0.75`",
    "prune": "`prune --sparsity 0.6`",
    "best": "`prune --sparsity 0.6 --effort best`",
    "heal": "`heal --max-time 6m` of that",
}


def commands(made: Any) -> Lines:
    """README's: what its commands take and give on real models."""
    cells = {(cell["model"], cell["name"]): cell for cell in made["cells"] if not cell["exit"]}
    rows, machines = [], ", ".join(sorted({cell["machine"] for cell in made["cells"]}))
    for (name, words), model in itertools.product(_COMMANDS.items(), _MODELS):
        if cell := cells.get((model, name)):
            size = cell.get("size") or {}
            speeds = cells.get((model, "bench"), {}).get("tokens_per_second", {}) if name == "size" else {}
            row = [
                words,
                _MODELS[model],
                f"{size['before'] / 2**20:.0f} to {size['after'] / 2**20:.0f} MiB" if size else "",
                f"{cell['loss']:.4f}" if "loss" in cell else "",
                f"{speeds['dense']:.0f} to {speeds['packed']:.0f}" if speeds else "",
                f"{cell['seconds'] / 60:.1f} min",
                f"{cell['peak'] / 2**30:.1f} GiB",
            ]
            rows.append(row)
    return [
        *markdown(["command", "model", "weights", "nats lost", "tokens a second", "time", "peak memory"], rows),
        "",
        f"Calibrated on {made['samples']} x {made['length']} tokens of books, Wikipedia and Python (1 MB), measured on "
        "as many of other such texts; nats lost a token: 0.01 is a perplexity 1 % higher. Two threads of "
        f"{machines} (AVX-512 with bfloat16), at times beside other work. `python benchmarks/commands.py` "
        "measures it again.",
    ]


def tutorial(made: Any) -> Lines:
    """What each model of the tutorial is worth."""
    rows, healed = [], ""
    for each in filter(lambda each: each["before"], made["models"]):
        cells = [f"`{each['model']}`", "", f"{each['bytes'] / 2**20:.0f}", *[""] * 4]
        if speed := each["speed"]:
            cells[1] = "niwaki, packed" if speed["weights"] == "packed" else "transformers"
            cells[2], cells[6] = f"{speed['disk'] / 2**20:.0f}", f"{speed['tokens_per_second']:.0f}"
        cells[3] = f"{(each['after'] or each['before'])['value']:.1f}"
        if each["after"]:
            cells[4] = "{:.3f} ±{:.3f}".format(*paired(each["after"]["losses"], each["before"]["losses"]))
        if task := each["task"]:
            cells[5] = f"{100 * task['value']:.0f} ±{100 * task['standard_error']:.0f} %"
        if each["healed_on"] is not None:
            healed = f" Healed on {each['healed_on']:,} tokens."
        rows.append(cells)
    measured = made["models"][0]["before"]
    header = ["model", "run by", "MiB", "perplexity", "nats above dense", "which-follows", "tokens a second"]
    return [
        *markdown(header, rows),
        "",
        f"Perplexity on {measured['windows']} x {measured['context']} tokens of {measured['text']}.{healed}",
    ]


def tutorial_output(page: str, made: Any) -> str:
    """The page with what each command printed below it, as the record has it."""
    said = {step["command"]: step["said"] for step in made["steps"]}

    def filled(found: re.Match[str]) -> str:
        lines = said.get(found[1])
        return found[0] if lines is None else "".join(f"    {line}\n" for line in (f"$ {found[1]}", *lines))

    return re.sub(r"^ {4}\$ (.*)\n(?: {4}(?!\$ ).*\n)*", filled, page, flags=re.MULTILINE)


def tutorial_steps(made: Any) -> Lines:
    """What each command of the tutorial took, those that took a while."""
    steps = [each for each in made["steps"] if each["cpu"] >= 30]
    names = [each["command"].partition(" --")[0] + " --plan" * ("--plan" in each["command"]) for each in steps]
    rows = [
        [f"`{name}`", f"{each['seconds'] / 60:.1f}", f"{each['cpu'] / 60:.1f}"]
        for name, each in zip(names, steps, strict=True)
    ]
    busy = any(each["cpu"] < each["seconds"] for each in steps)
    beside = ", while other programs were running" if busy else ""
    return [
        *markdown(["command", "minutes", "minutes of a core"], rows),
        "",
        f"On {made['threads']} cores of {made['machine']}{beside}; commands of under half a core minute are left out.",
    ]


def two_factors(made: Any) -> Lines:
    """Two factors beside one matrix of the same bytes, for each effort."""
    header, rows = _above_dense(made, lambda method: method.replace("double-sparse", "continuation"))
    header = ["bytes of", *header[2:-1], "of one matrix's"]
    return [
        *markdown(header, [row[1:] for row in rows]),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens of books, measured on "
        f"{made['text_samples']} x {made['length']} of each text; in brackets nats a token above the dense model, with "
        "the standard error of that difference; the last column is their mean, relative to that of one matrix with the "
        "same effort.",
    ]


def _above_dense(made: Any, beside: Callable[[str], str] = lambda _: "admm-grad") -> tuple[list[str], list[list[str]]]:
    """The heads and rows of a table; in its last column a method is relative to the one ``beside`` it."""
    patterns = ["", "50 %", "60 %", "70 %", "80 %", "2:4"]

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
            difference, error = paired(measured["losses"], dense[calibration][text]["losses"])
            above.append(difference)
            row.append(f"{measured['value']:.2f} ({above[-1]:.3f} ±{error:.3f})")
        gaps[calibration, pattern, method] = fmean(above)
        rows.append(row)
    for row in rows[1:]:
        other = gaps.get((row[0], row[1], beside(row[2])))
        row.append(f"{gaps[row[0], row[1], row[2]] / other:.2f}" if other else "")
    return ["calibrated on", "zeros", "method", *texts, "of ADMM-Grad's"], rows


def own_answers(made: Any) -> Lines:
    """Calibrated on books and on the model's own answers: what becomes of its answers, and of plain text."""
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
    heads = ["calibrated on", "zeros", "effort", "KL", "tokens", "unfinished", "looping", "wikitext2", "books"]
    return [
        *markdown(heads, rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens; "
        f"{made['prompts']} other prompts, answers of at most {made['answer']} tokens.",
    ]


def heal(made: Any) -> Lines:
    """What healing leaves of the distance from the dense model, on each text."""
    dense, before, rows = made["results"][0]["losses"], [0.0], []
    for result in made["results"][1:]:
        pairs = [paired(losses, dense[text]) for text, losses in result["losses"].items()]
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
        f"on {made['text_samples']} x {made['length']} tokens of each text; the last columns are the share of it that "
        "healing closed: the mean over WikiText-2 and books, and over all texts.",
    ]


def removals(made: Any) -> Lines:
    """Nats a token above the whole model, by what was removed and the effort."""
    (whole,) = [cell for cell in made["cells"] if not cell["removed"]]
    texts, rows = list(whole["losses"]), []
    for cell in sorted(made["cells"], key=lambda cell: cell["removed"]):
        if not cell["removed"]:
            continue
        found = [paired(cell["losses"][text], whole["losses"][text]) for text in texts]
        shown = [f"{difference:.3f} ±{error:.3f}" for difference, error in found]
        mean = fmean(difference for difference, _ in found)
        rows.append([cell["removed"], f"`{cell['effort']}`", *shown, f"{mean:.3f}", f"{cell['seconds']:.0f}"])
    return [
        *markdown(["removed", "effort", *texts, "mean", "seconds"], rows),
        "",
        f"On {made['text_samples']} x {made['length']} tokens of each text; {made['threads']} thread(s), blocks in "
        f"{made['dtype']}.",
    ]


def grids(made: Any) -> Lines:
    """Nats a token above the dense model, by grid and how weights were put on it."""
    (whole,) = [cell for cell in made["cells"] if not cell["grid"]]
    texts, rows = list(whole["losses"]), []
    for cell in made["cells"]:
        if cell["grid"]:
            found = [paired(cell["losses"][text], whole["losses"][text]) for text in texts]
            shown = [f"{difference:.4f} ±{error:.4f}" for difference, error in found]
            mean = fmean(difference for difference, _ in found)
            rows.append([f"`{cell['grid']}`", f"`{cell['effort']}`", *shown, f"{mean:.4f}"])
    return [
        *markdown(["grid", "effort", *texts, "mean"], rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens of books where weights are fitted;"
        f" nats a token above the dense model, on {made['text_samples']} x {made['length']} tokens of each text.",
    ]


def smaller(made: Any) -> Lines:
    """A large model made as small as a small one, beside that one: nats a token above or below it."""
    dense, large = [cell for cell in made["cells"] if cell["way"] == "dense" and not cell["target"]]
    rows = []
    for cell in made["cells"]:
        found = [paired(cell["losses"][text], dense["losses"][text]) for text in dense["losses"]]
        shown = ["" if cell is dense else f"{difference:+.3f} ±{error:.3f}" for difference, error in found]
        mean = "" if cell is dense else f"{fmean(difference for difference, _ in found):+.3f}"
        stages = [f"`{stage.removesuffix(' effort=fast')}`" for stage in cell.get("stages", [])]
        way = "`compress --size` " * (cell["way"] == "compress") + (", ".join(stages) or "as it is, in 16 bits")
        rows.append([_MODELS[cell["model"]], way, f"{cell['size'] / 2**20:,.0f}", *shown, mean])
    return [
        *markdown(["model", "way", "MiB", *dense["losses"], "mean"], rows),
        "",
        f"Calibrated on {made['samples']} x {made['length']} tokens of books by `fast`; nats a token above those of "
        f"{_MODELS[dense['model']]} as it is, on {made['text_samples']} x {made['length']} tokens of each text, of "
        f"which the books are others: below 0, {_MODELS[large['model']]} made small is better than the small model.",
    ]


def recipes(made: Any) -> Lines:
    """Nats a token above the dense model for each size: the recipe of compress, and the best of the others."""
    whole, rows = _dense(made), []
    for size in sorted({cell["size"] for cell in made["cells"] if cell["size"] < 1}, reverse=True):
        cells = [cell for cell in made["cells"] if cell["size"] == size]
        cells.sort(key=lambda cell: _mean_above(cell, whole))
        zeros = next((cell for cell in cells if "zeros" in cell["recipe"]), None)
        shown = [*cells[:_SHOWN], *(cell for cell in cells[_SHOWN:] if cell is zeros or cell["recipe"] == "compress")]
        for cell in shown:
            chosen = cell["recipe"] == "compress"
            name = f"**{cell['stages'][0]}, {cell['stages'][1]}**" if chosen else cell["recipe"]
            rows.append([f"{size:g}", name, f"{cell['bytes'] / 2**20:.1f}", *_losses(cell, whole)])
    return [
        *markdown(["size", "recipe", "MiB", "foreseen", *whole["losses"], "mean"], rows),
        "",
        f"SmolLM2-135M, calibrated on {made['samples']} x {made['length']} tokens of books, nats a token above the "
        f"dense model on {made['text_samples']} x {made['length']} tokens of each text. In bold is what `compress` "
        "chooses; the foreseen loss is for text like the calibration text.",
    ]


def bounds(embedded: Any, real: Any) -> Lines:
    """Whether losses that were bounded on some windows are kept on others."""
    rows, told = [], []
    for made, name in ((real, "SmolLM2-135M"), (embedded, "embedded")):
        whole, *runs = made["cells"]
        kept = 0
        for cell in runs:
            lost = {text: paired(losses, whole["losses"][text]) for text, losses in cell["losses"].items()}
            is_kept = all(nats <= cell["loss"] for nats, _ in lost.values())
            kept += is_kept
            shown = [f"{nats:.4f} ±{error:.4f}" for nats, error in lost.values()]
            size, yes = f"{cell['bytes'] / 2**20:.2f}", "yes" if is_kept else "no"
            rows.append([name, f"{cell['loss']:g}", cell["calibration"], f"{cell['trials']}", size, *shown, yes])
        told.append(f"{name}: windows of {made['length']} tokens, kept in {kept} of {len(runs)} runs")
    return [
        *markdown(["model", "`--loss`", "calibrated on", "tried", "MiB", *whole["losses"], "kept"], rows),
        "",
        "Nats a token above the dense model on "
        f"{real['text_samples']} windows of each text; the limit was kept on {real['text_samples']} others of each. "
        f"Calibrated on {real['samples']} windows. {'; '.join(told)}. "
        "SmolLM2-135M has 257 MiB, the embedded model 6.57.",
    ]


def programs(made: Any) -> Lines:
    """What models for llama.cpp and for transformers lose."""
    whole = _dense(made)
    rows = []
    for cell in made["cells"]:
        if cell is not whole:
            asked = f"`--size {cell['size']:g}`" if "size" in cell else f"`--parameters {cell['parameters']:g}`"
            size = f"{cell['bytes'] / 2**20:.0f}"
            rows.append([cell["runtime"], asked, cell["recipe"], size, *_losses(cell, whole)])
    return [
        *markdown(["`--for`", "asked", "what is done", "MiB", "foreseen", *whole["losses"], "mean"], rows),
        "",
        f"SmolLM2-135M ({whole['bytes'] / 2**20:.0f} MiB), calibrated on {made['samples']} x {made['length']} tokens "
        "of books, nats above the dense model, for each of its tokens, on "
        f"{made['text_samples']} x {made['length']} of each text.",
    ]


def speeds(made: Any) -> Lines:
    """Tokens a second that plans foresee beside what is measured."""
    rows = [
        ["the model as it is" if cell["size"] == 1 else f"`--size {cell['size']:g}`"]
        + [f"{cell[name]:.1f}" for name in ("foreseen", "tokens_per_second")]
        for cell in made["cells"]
    ]
    return [
        *markdown(["", "tokens/s, foreseen", "measured"], rows),
        "",
        f"SmolLM2-135M on {made['machine']}; measured in turns, after {made['prompt']} tokens.",
    ]


#: Fewer recipes than these at one size are no search.
_A_FEW = 2
#: How many of the recipes at a size are shown.
_SHOWN = 4


def by_hand(*records: Any) -> Lines:
    """For each model and size what compress decides on beside the best of the recipes that somebody would make."""
    rows = []
    for made in records:
        whole = _dense(made)
        for size in sorted({cell["size"] for cell in made["cells"] if cell["size"] < 1}, reverse=True):
            cells = [cell for cell in made["cells"] if cell["size"] == size]
            others = [cell for cell in cells if cell["recipe"] != "compress"]
            if len(others) < _A_FEW:
                continue
            nats = {cell["recipe"]: _mean_above(cell, whole) for cell in cells}
            own, own_nats = next(cell for cell in cells if cell["recipe"] == "compress"), nats.pop("compress")
            best = min(nats, key=lambda recipe: nats[recipe])
            (beside,) = [cell for cell in others if cell["recipe"] == best]
            pooled = [[loss for losses in cell["losses"].values() for loss in losses] for cell in (own, beside)]
            difference, error = paired(*pooled)
            shown = [f"{own['stages'][0]}, {own['stages'][1]}", f"{own_nats:.4f}", str(len(others))]
            shown += [f"{best}: {nats[best]:.4f}", f"{difference:+.4f} ±{error:.4f}"]
            for kind in ("for all", "zeros"):
                alike = [value for recipe, value in nats.items() if kind in recipe]
                shown.append(f"{min(alike):.4f}" if alike else "")
            model = "SmolLM2-135M" if made["model"] == "smollm2" else made["model"]
            rows.append([", for ".join(filter(None, (model, made.get("runtime")))), f"{size:g}", *shown])
    kinds = ["best with the same bits for all", "best with zeros"]
    return [
        *markdown(["model", "size", "compress", "nats", "tried", "best of them", "difference", *kinds], rows),
        "",
        "Calibrated on books; nats a token above the dense model, on 16 windows of each of four texts (SmolLM2-135M) "
        "and 64 of books (the others). The difference is that of compress from the best, window by window.",
    ]


def _dense(made: Any) -> Cell:
    """What was measured of the dense model."""
    whole: Cell
    (whole,) = [cell for cell in made["cells"] if cell["recipe"] == "dense"]
    return whole


def _mean_above(cell: Cell, whole: Cell) -> float:
    """Nats a token above the dense model, the mean over texts."""
    return fmean(_above(cell, whole))


def _above(cell: Cell, whole: Cell) -> list[float]:
    """Nats a token above the dense model on each text."""
    return [paired(cell["losses"][text], losses)[0] for text, losses in whole["losses"].items()]


def _losses(cell: Cell, whole: Cell) -> list[str]:
    """What was foreseen, if it was, the nats above the dense model on each text, and their mean."""
    found = _above(cell, whole)
    foreseen = "" if cell.get("foreseen") is None else f"{cell['foreseen']:.4f}"
    return [foreseen, *(f"{value:.4f}" for value in (*found, fmean(found)))]


def llama_cpp_loss(*records: Any) -> Lines:
    """How far predictions in llama.cpp are from those of F16, by model, format and how weights were put on its grid."""
    texts, rows = records[0]["texts"], []
    for made in records:
        nearest = {cell["format"]: cell["texts"] for cell in made["cells"] if cell["effort"] == "none"}
        for cell in made["cells"]:
            row = [made["model"], f"`{cell['format']}`", f"`{cell['effort']}`"]
            for text in texts:
                measured, usual = cell["texts"][text], nearest[cell["format"]][text]
                share = fmean(measured["divergence"]) / fmean(usual["divergence"])
                lost, error = paired(measured["loss"], [0.0] * len(measured["loss"]))
                row += [f"{fmean(measured['divergence']):.5f}", f"{share:.2f}", f"{lost:.4f} ±{error:.4f}"]
            rows.append(row)
    heads = [head for text in texts for head in (f"{text}: KL", "of nearest's", "nats lost")]
    made = records[0]
    return [
        *markdown(["model", "format", "effort", *heads], rows),
        "",
        f"In llama.cpp (node-llama-cpp {made['node_llama_cpp']}), on {made['text_samples']} windows of each text; "
        f"fitted on {made['samples']} windows of {made['calibration']}.",
    ]


def llama_quantize(made: Any) -> Lines:
    """How far predictions are from those of F16, in files of llama-quantize and in niwaki's of the same bytes."""
    found = {(cell["model"], cell["mixture"], cell["by"]): cell for cell in made["cells"]}
    texts, rows = made["texts"], []
    for (model, mixture, by), ours in found.items():
        if by == "llama-quantize":
            continue
        theirs, how = found[model, mixture, "llama-quantize"], by.replace("niwaki", "compress")
        sizes = (f"{cell['bytes'] / 2**20:.1f}" for cell in (theirs, ours))
        row = [_MODELS.get(model, model), f"`{mixture}`", f"`{how}`", *sizes]
        means = []
        for text in texts:
            mine, other = (fmean(cell["texts"][text]["divergence"]) for cell in (ours, theirs))
            row.append(f"{other:.4f}, {mine:.4f}")
            means.append(mine / other)
        rows.append([*row, f"{fmean(means):.2f}"])
    return [
        *markdown(
            ["model", "of llama-quantize", "niwaki", "MiB", "niwaki's, MiB", *texts, "niwaki's / llama-quantize's"],
            rows,
        ),
        "",
        "KL divergence from the predictions of the `F16` file in llama.cpp, in nats a token: that of llama-quantize's "
        f"file, and that of niwaki's. Both from {made['samples']} x {made['length']} tokens of {made['calibration']}, "
        f"on {made['text_samples']} x {made['length']} of each text.",
    ]


def combinations(made: Any) -> Lines:
    """What ways to one size cost, and what the search for the best one foresaw, least first."""
    (whole,) = [cell for cell in made["cells"] if not cell["removed"]]
    foreseen = next(cell["tried"] for cell in made["cells"] if cell.get("tried"))
    texts, rows = list(whole["losses"]), []
    for cell in made["cells"]:
        if cell["removed"] and not cell["tried"]:
            lost = [paired(cell["losses"][text], whole["losses"][text]) for text in texts]
            shown = [f"{difference:.3f} ±{error:.3f}" for difference, error in lost]
            rows.append([cell["went"], f"{foreseen[cell['went']]:.3f}", fmean(each for each, _ in lost), *shown])
    rows.sort(key=lambda row: row[2])
    in_dtype = "" if made["dtype"] == "auto" else f", blocks in {made['dtype']}"
    return [
        *markdown(
            ["what goes", "foreseen", "mean", *texts], [[a, b, f"{mean:.3f}", *rest] for a, b, mean, *rest in rows]
        ),
        "",
        f"On {made['text_samples']} x {made['length']} tokens of each text{in_dtype}; "
        f"{len(foreseen)} ways were compared.",
    ]


def vocabulary(made: Any) -> Lines:
    """Bits a byte above the whole model, and sizes, by the number of tokens and the text that these are counted in."""
    (whole,) = [cell for cell in made["cells"] if not cell["counted"]]
    texts = list(whole["bits"])
    counted = {"books": "books", "three": "books, WikiText-2 and code"}
    rows = [
        [
            f"{whole['tokens']:,}",
            "",
            *(f"{fmean(whole['bits'][text]['cut']):.4f}" for text in texts),
            *_mebibytes(whole),
        ]
    ]
    for cell in sorted(made["cells"], key=lambda cell: (cell["counted"], -cell["tokens"], "healed" in cell)):
        if not cell["counted"]:
            continue
        shown = []
        for text in texts:
            dense, cut = (cell["bits"][text][which] for which in ("dense", "cut"))
            difference, error = paired(cut, dense)
            shown.append(f"{100 * difference / fmean(dense):+.2f} ±{100 * error / fmean(dense):.2f} %")
        healed = f"; healed, {cell['healed']} tokens" if "healed" in cell else ""
        rows.append([f"{cell['tokens']:,}", counted[cell["counted"]] + healed, *shown, *_mebibytes(cell)])
    return [
        *markdown(["tokens", "counted in", *texts, "MiB in bfloat16", "MiB in Q8_0"], rows),
        "",
        "Bits a byte, and how many more of them in %, with the standard error over windows, on "
        f"{made['text_samples']} x {made['length']} tokens of each text (WikiText-2's test text, books by other "
        "authors, Python's standard library from n to z), the same bytes for all.",
    ]


def _mebibytes(cell: Any) -> list[str]:
    """Of the weights, and of the file for llama.cpp."""
    return [f"{cell[name] / 2**20:.1f}" for name in ("size", "q8")]


def finetune(made: Any) -> Lines:
    """A pruned model trained further: what it loses then, its zeros, and what keeping them takes."""
    names = {
        "": "pruned",
        "plain": "all weights, zeros not kept",
        "kept": "all weights, `KeepZeros()`",
        "lora, filled": "LoRA, merged by PEFT",
        "lora": "LoRA, `merge_lora`",
        "lora, given back": "LoRA, merged by PEFT, zeros given back by `niwaki prune`",
        "lora kept": "LoRA with `KeepZeros()`, `merge_lora`",
    }
    cells = {cell["way"]: cell for cell in made["cells"] if "losses" in cell}
    pruned, rows = cells[""], []
    for way, name in names.items():
        if way not in cells:
            continue
        cell = cells[way]
        means = {text: fmean(losses) for text, losses in cell["losses"].items()}
        shown = [f"{exp(mean):.2f} ({mean:.3f})" for mean in means.values()]
        rows.append([name, f"{100 * cell['zeros'] / pruned['zeros']:.1f} %", *shown])
    times = {cell["lora"]: median(cell["ratios"]) for cell in made["cells"] if "ratios" in cell}
    return [
        *markdown(["trained", "zeros kept", "WikiText-2, the task", "other books"], rows),
        "",
        f"{made['model']} at 50 % zeros, {made['steps']} steps of 2 x {made['length']} tokens of WikiText-2's "
        "validation text with TRL's SFTTrainer: perplexity, and nats a token, on "
        f"{made['text_samples']} x 512 tokens of its test text and of books. A step of 4 x 512 tokens takes "
        f"{100 * (times[False] - 1):.1f} % longer with kept zeros where all weights are trained, and "
        f"{100 * (times[True] - 1):.0f} % with LoRA of rank 16.",
    ]


def sizes(made: Any) -> Lines:
    """What is lost at each size: perplexity, nats above the dense model, and their mean."""
    dense = made["cells"][0]["losses"]
    rows = []
    for cell in sorted(made["cells"], key=lambda cell: -cell["bits"]):
        pairs = {text: paired(losses, dense[text]) for text, losses in cell["losses"].items()}
        row = [f"{100 * cell['sparsity']:.0f} %", _values(cell), f"{cell['bits']:.2f}"]
        for text, (gap, error) in pairs.items():
            above = f" ({gap:.3f} ±{error:.3f})" if cell is not made["cells"][0] else ""
            row.append(f"{exp(fmean(cell['losses'][text])):.2f}{above}")
        row.append(f"{fmean(gap for gap, _ in pairs.values()):.3f}")
        rows.append(row)
    return [
        *markdown(["zeros", "values", "bits a weight", *dense, "mean of nats"], rows),
        "",
        f"{made['model']}, calibrated on {made['samples']} x {made['length']} tokens of books at the default effort; "
        f"perplexity on {made['text_samples']} x {made['length']} tokens of each text and, in brackets, nats a token "
        "above the dense model with the standard error of that difference. Bits are those of the pruned matrices, with "
        "mask and scales.",
    ]


def _values(cell: Cell) -> str:
    return f"{cell['grid'].removeprefix('int').partition(':')[0]} bits" if cell["grid"] else "bfloat16"


def forms(made: Any) -> list[Form]:
    """The same as points of a picture."""
    cells = made["cells"]
    dense = cells[0]["losses"]
    found = []
    for cell in sorted(cells[1:], key=lambda cell: cell["bits"]):
        nats = fmean(paired(losses, dense[text])[0] for text, losses in cell["losses"].items())
        zeros = f"{100 * cell['sparsity']:.0f} % zeros"
        kind = _values(cell) if cell["sparsity"] else "no zeros"
        found.append(Form(cell["bits"], nats, kind, f"{zeros}, {_values(cell)}" if cell["sparsity"] else _values(cell)))
    return found


def experts(made: Any) -> Lines:
    """Nats above the whole mixture after experts were removed, with and without the fit of the others."""
    cells = made["cells"]
    found = {(cell.get("calibration"), cell.get("experts"), cell["method"]): cell["losses"] for cell in cells}
    dense, rows = cells[0]["losses"], []
    for calibration, fraction in dict.fromkeys((cell["calibration"], cell["experts"]) for cell in cells[1:]):
        reap, fitted = (found[calibration, fraction, method] for method in ("reap", "fitted"))
        for text in dense:
            alone, error = paired(reap[text], dense[text])
            left, its_error = paired(fitted[text], dense[text])
            gaps = [f"{alone:.3f} ±{error:.3f}", f"{left:.3f} ±{its_error:.3f}", f"{left / alone:.2f}"]
            rows.append([f"{100 * fraction:.0f} %", calibration, text, *gaps])
    return markdown(["experts removed", "calibrated on", "measured on", "REAP alone", "fitted", "ratio"], rows)


#: The packages that llama.cpp was timed through.
_PACKAGES = {"Python": "llama.cpp in Python", "Node": "llama.cpp"}
#: By head of a column, other runtimes as they are called in records.
_RUNTIMES = {f"llama.cpp, {package}": name for package, name in _PACKAGES.items()}
_RUNTIMES |= {name: name for name in ("ik_llama.cpp", "OpenVINO", "ONNX Runtime")}


def _beside(made: Any) -> Iterator[tuple[Cell, Cell, tuple[str, ...], list[str]]]:
    """Of each run, for 8 and 4 bits: its forms, the packed one, names of these bits, and the first cells of a row."""
    for run in made["runs"]:
        forms = {form["form"]: form for form in run["forms"]}
        for bits, kinds in (("8 bits", ("Q8_0",)), ("4 bits", ("Q4_0", "int4"))):
            ours = next(f for name, f in forms.items() if f"int{bits[0]}:64, embeddings" in name)
            model = _MODELS.get(run["model"], run["model"])
            yield forms, ours, kinds, [processor(run), model, bits, str(run["threads"]), str(run["prompt"])]


def speed(made: Any) -> Lines:
    """Tokens a second and the first token, packed beside llama.cpp, by processor, model and bits."""
    rows = []
    for forms, ours, (kind, *_), row in _beside(made):
        names = {package: f"{name}, {kind}" for package, name in _PACKAGES.items()}
        theirs = {package: forms[name] for package, name in names.items() if name in forms}
        by = max(theirs, key=lambda package: theirs[package]["tokens_per_second"])
        rates = [
            f"{each['tokens_per_second']:.0f} ({each['slowest']:.0f} to {each['fastest']:.0f})"
            for each in (theirs[by], ours)
        ]
        ratio = ours["tokens_per_second"] / theirs[by]["tokens_per_second"]
        firsts = min(each["first_token"] for each in theirs.values()), ours["first_token"]
        usual = forms["transformers, bfloat16"]["tokens_per_second"]
        rows.append([*row, by, *rates, f"{ratio:.2f}", *(f"{first * 1e3:.0f}" for first in firsts), f"{usual:.0f}"])
    heads = ["processor", "model", "", "threads", "prompt", "by", "llama.cpp, tokens/s", "packed", "ratio"]
    return markdown([*heads, "first token, ms: llama.cpp", "packed", "transformers in bfloat16, tokens/s"], rows)


def peers(made: Any) -> Lines:
    """Tokens a second and milliseconds to the first, packed beside all runtimes that a run had."""
    rows = []
    for forms, ours, kinds, row in _beside(made):
        if f"ik_llama.cpp, {kinds[0]}" not in forms:
            continue
        names = ([f"{name}, {kind}" for kind in kinds] for name in _RUNTIMES.values())
        theirs = [next((forms[form] for form in those if form in forms), None) for those in names]
        rows.append(row)
        row += [
            f"{each['tokens_per_second']:.0f} ({each['first_token'] * 1e3:.0f})" if each else ""
            for each in (ours, *theirs)
        ]
    return markdown(["processor", "model", "", "threads", "prompt", "packed", *_RUNTIMES], rows)


#: What processors are called that have other names in records.
_GENERATIONS = {"family 25, model 17": "Zen 4", "family 26, model 2": "Zen 5"}


def processor(run: Any) -> str:
    """A processor and what was used of it, in short."""
    name = re.sub(r"\((R|TM|r|tm)\)| Processor| CPU.*", "", run["machine"])
    for numbers, generation in _GENERATIONS.items():
        name = name.replace(numbers, generation)
    return f"{name}, {run['kernels'].removeprefix('native, ')}"


def llama_cpp(made: Any) -> Lines:
    """The speed of each form of a model, beside transformers'."""
    forms = made["forms"]
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


def llm_compressor(made: Any) -> Lines:
    """Perplexity, time and memory beside those of llm-compressor."""
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


def model_types(made: Any) -> Lines:
    """What becomes of each type of language model that transformers has."""
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


#: By what an error's line has, what is the matter in a few words; others are shown as they are.
_REASONS = {
    "niwaki knows llama": "GGUF files are written of other types: [the list](llama-cpp.md#types-of-models)",
    "makes no predictions of words": "it predicts no words, which this needs",
    "only compressed for transformers": "an encoder with a decoder is compressed by `parameters` only",
    "is not made of q_proj": "not in every block is attention made of `q_proj`, `k_proj`, `v_proj`, `o_proj` alone",
    "MLPs of a known kind": "its MLPs are of no kind whose neurons niwaki finds",
    "has experts": "in models with experts these go, and not neurons",
    "has no entry for their number": "its configuration has no entry for one number of neurons",
    "self_attn.q_norm.weight would be": "a norm goes over all heads together",
    "self_attn.sinks": "each head has a sink, which would have to go with it",
    "Attempting to broadcast": "transformers takes the width of heads from their number",
    "refused by transformers": "blocks stay where they have embeddings of their own, or others' keys and values",
    "cannot load packed integers": "transformers cannot load packed integers into this type",
    "linear layers alone": "compressed-tensors has linear layers alone: not matrices with inputs before outputs",
    "of encoder with a decoder": "heads of encoders with decoders stay",
    "use_bidirectional_attention": "niwaki writes GGUF files with attention to one side only",
}
_PARTS = ("neurons", "heads", "experts", "blocks")


def families(made: Any) -> Lines:
    """What works with the families that people use most, and why the rest does not."""
    reasons: dict[str, int] = {}

    def note(line: str) -> str:
        words = next((words for part, words in _REASONS.items() if part in line), line)
        return f"({reasons.setdefault(words, len(reasons) + 1)})"

    def cell(line: str) -> str:
        return f"no {note(line)}" if line else "yes"

    rows = []
    for name, each in made["families"].items():
        lines = each["cells"]
        size = cell(lines["compress"])
        if lines["compress"] and not lines["parameters"]:
            size = f"to `parameters` {note(lines['compress'])}"
        elif lines["parameters"] and not lines["compress"]:
            size = f"to a size, not to `parameters` {note(lines['parameters'])}"
        parts = [part for part in _PARTS if not lines[part]]
        missing = [
            part for part in _PARTS if lines[part] and not re.search("^there are no experts|: experts of", lines[part])
        ]
        shrunk = [", ".join(parts), *(f"not {part} {note(lines[part])}" for part in missing)]
        rows.append(
            [
                f"{name}: `{each['type']}`",
                *(cell(lines[part]) for part in ("prune", "quantize")),
                size,
                "; ".join(filter(None, shrunk)),
                *(cell(lines[part]) for part in ("gguf", "compressed-tensors")),
            ]
        )
    columns = ["family", "prune", "quantize", "compress", "shrink", "GGUF", "compressed-tensors"]
    notes = [f"{number}. {words}" for words, number in reasons.items()]
    return [*markdown(columns, rows), "", *notes, "", f"With transformers {made['versions']['transformers']}."]
