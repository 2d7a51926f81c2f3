"""The short tables of docs/results.md, which guides share: how small, how fast, at what loss."""

import re
from math import exp
from statistics import fmean
from typing import Any

from model_tables import processor
from tables import Lines, markdown, paired


def overview(made: Any, measured: Any) -> Lines:
    """What compress makes of a model: its size, what it loses on each text, and how fast it writes."""
    (whole,) = [cell for cell in made["cells"] if cell["recipe"] == "dense"]
    speeds = {cell["size"]: cell["tokens_per_second"] for cell in measured["cells"]}
    texts, rows = list(whole["losses"]), []
    for cell in sorted(made["cells"], key=lambda cell: -cell["size"]):
        if cell["recipe"] not in ("dense", "compress") or cell["size"] not in speeds:
            continue
        lost = [paired(cell["losses"][text], whole["losses"][text])[0] for text in texts]
        name = "in transformers" if cell is whole else f"`--size {cell['size']:g}`"
        shown = ["", *[""] * len(texts)] if cell is whole else [f"{nats:.3f}" for nats in (fmean(lost), *lost)]
        perplexity = f"{exp(fmean(cell['losses']['wikitext2'])):.1f}"
        rows.append([name, f"{cell['bytes'] / 2**20:.0f} MiB", f"{speeds[cell['size']]:.0f}", perplexity, *shown])
    heads = ["", "size", "tokens/s", "perplexity, WikiText-2", "nats lost, mean", *texts]
    return [
        *markdown(heads, rows),
        "",
        f"Calibrated on {made['samples']} x {made['length']} tokens of books, measured on {made['text_samples']} x "
        f"{made['length']} of each text; {measured['machine']}.",
    ]


#: Of the forms in a record of benchmarks/runtimes.py, what they are called in the short table.
_FORMS = {
    "transformers, bfloat16": "transformers, bfloat16",
    "packed, 50% zeros": "niwaki, 50 % zeros in bfloat16",
    "packed, 0% zeros, int8:64, embeddings int8:64": "niwaki, 8 bits, embeddings too",
    "llama.cpp in Python, Q8_0": "llama.cpp by its package for Python, Q8_0",
    "llama.cpp, Q8_0": "llama.cpp by its package for Node, Q8_0",
    "packed, 0% zeros, int4:64, embeddings int8:64": "niwaki, 4 bits, embeddings of 8",
    "llama.cpp in Python, Q4_0": "llama.cpp by its package for Python, Q4_0",
    "llama.cpp, Q4_0": "llama.cpp by its package for Node, Q4_0",
}


def fast(made: Any) -> Lines:
    """Tokens a second of SmolLM2 beside transformers and llama.cpp, of two threads of each processor."""
    usual = ("smollm2-o", 2, 64)
    runs = [run for run in made["runs"] if (run["model"], run["threads"], run["prompt"]) == usual]
    found = [{form["form"]: form for form in run["forms"]} for run in runs]
    rows = [
        [
            name,
            f"{found[0][form]['bytes'] / 2**20:.0f} MiB",
            *(f"{each[form]['tokens_per_second']:.0f}" if form in each else "" for each in found),
            *(f"{each[form]['first_token'] * 1e3:.0f} ms" if form in each else "" for each in found),
        ]
        for form, name in _FORMS.items()
    ]
    names = [re.sub(r"AMD EPYC \(|\)|, AVX-512.*", "", processor(run)) for run in runs]
    rounds = " or ".join(str(each) for each in sorted({run["rounds"] for run in runs}))
    processors = " and ".join(dict.fromkeys(processor(run).partition(",")[0] for run in runs))
    heads = ["", "size", *(f"{value}, {name}" for value in ("tokens/s", "first token") for name in names)]
    return [
        *markdown(heads, rows),
        "",
        f"Two threads of {processors}, with AVX-512 or with AVX2 alone; medians of {rounds} rounds. "
        "Other models and processors: [beside llama.cpp](results-speed.md#beside-llamacpp).",
    ]


def zeros(made: Any) -> Lines:
    """The mean of nats lost on all texts after calibration on books, a method a row and a pattern a column."""
    cells = [cell for cell in made["cells"] if cell["calibration"] == "books"]
    (dense,) = [cell["perplexity"] for cell in cells if not cell["pattern"]]
    names = {
        "wanda": "Wanda",
        "sparsegpt": "SparseGPT",
        "admm-grad": "ADMM-Grad",
        "continuation": "niwaki, `--effort fast`",
        "continuation@balanced": "niwaki, the default (`balanced`)",
        "continuation@best": "niwaki, `--effort best`",
    }
    lost = {
        (cell["method"], cell["pattern"]): fmean(
            paired(measured["losses"], dense[text]["losses"])[0] for text, measured in cell["perplexity"].items()
        )
        for cell in cells
        if cell["pattern"]
    }
    patterns = ("50 %", "60 %", "2:4")
    rows = [
        [name, *(f"{lost[method, each]:.2f}" if (method, each) in lost else "" for each in patterns)]
        for method, name in names.items()
    ]
    return [
        *markdown(["nats lost, mean", *patterns], rows),
        "",
        f"Calibrated on {made['samples']} x {made['length']} tokens of books, measured on {made['text_samples']} x "
        f"{made['length']} of each text. Empty cells were not measured.",
    ]


def shrunk(removals: Any, combinations: Any) -> Lines:
    """What fewer blocks, fewer neurons and both cost by the default effort of shrinking."""
    rows = []
    for made, size in ((removals, ""), (combinations, "`--parameters 0.75`: ")):
        (whole,) = [cell for cell in made["cells"] if not cell["removed"]]
        for cell in made["cells"]:
            is_meant = cell["effort"] != "fast" if made is removals else not cell.get("tried")
            if not cell["removed"] or not is_meant:
                continue
            lost = {text: paired(cell["losses"][text], losses)[0] for text, losses in whole["losses"].items()}
            name = f"`--{cell['removed'].replace('=', ' ')}`" if made is removals else size + cell["went"]
            rows.append((name, fmean(lost.values()), lost))
    best = min((row for row in rows if row[0].startswith("`--parameters")), key=lambda row: row[1])
    rows = [row for row in rows if row is best or not row[0].startswith("`--parameters")]
    return [
        *markdown(
            ["what goes", "nats lost, mean", *rows[0][2]],
            [[name, f"{mean:.2f}", *(f"{nats:.2f}" for nats in lost.values())] for name, mean, lost in rows],
        ),
        "",
        f"By the default effort, calibrated on {removals['samples']} x {removals['length']} tokens of books, before "
        "healing.",
    ]


def healed(*records: Any) -> Lines:
    """What healing leaves, on the two texts that are trained on and on all others."""
    rows = []
    for made in records:
        dense, before = made["results"][0]["losses"], [0.0]
        for result in made["results"][1:]:
            above = [paired(losses, dense[text])[0] for text, losses in result["losses"].items()]
            if result["healing"] is None:
                before, effort = above, result["effort"]
            elif effort != "fast" and result["pattern"] != "4 blocks":  # measured before blocks were repaired
                parts = [(fmean(before[cut]), fmean(above[cut])) for cut in (slice(2), slice(2, None))]
                shown = [f"{start:.2f} to {end:.2f}" for start, end in parts]
                tokens = f"{result['healing']['points'][-1]['tokens'] // 1000:,} k"
                rows.append([result["pattern"].replace("neurons", "of the neurons"), result["time"], tokens, *shown])
    return [
        *markdown(["pruned", "time", "tokens", "nats lost on the kinds trained on", "on code and answers"], rows),
        "",
        "Healed on books and WikiText-2's validation text. 2:4 and 50 % ran on one core, before windows were drawn "
        "from all of the text; the neurons on two.",
    ]


def factors(made: Any) -> Lines:
    """One matrix and two factors of the same bytes: the mean of nats lost on all texts."""
    (dense,) = [cell["perplexity"] for cell in made["cells"] if not cell["pattern"]]
    lost = {
        (cell["method"], cell["pattern"]): fmean(
            paired(measured["losses"], dense[text]["losses"])[0] for text, measured in cell["perplexity"].items()
        )
        for cell in made["cells"]
        if cell["pattern"]
    }
    rows = []
    for (method, pattern), nats in lost.items():
        if method.startswith("continuation"):
            other = lost[method.replace("continuation", "double-sparse"), pattern]
            bits = 16 * (1 - float(pattern.split()[0]) / 100) + 1
            effort = method.partition("@")[2] or "fast"
            rows.append([pattern, f"{bits:.1f}", f"`{effort}`", f"{nats:.2f}", f"{other:.2f}"])
    return [
        *markdown(["bytes of zeros", "bits a weight", "effort", "nats lost, one matrix", "two factors"], rows),
        "",
        f"Calibrated on {made['samples']} x {made['length']} tokens of books; mean of four texts.",
    ]
