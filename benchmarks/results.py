"""Writes the tables of the documentation, and the pictures of README.md, from the records in benchmarks/results.

make results                           # or, without setting anything up:
python benchmarks/results.py           # after a benchmark with --record benchmarks/results/...
python benchmarks/results.py --check   # fails if they differ
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_tables
import summaries
import tables
from picture import pictures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

#: Between which marks of which file each table goes, and the records that it is made from.
TABLES: list[tuple[str, str, Callable[..., tables.Lines], tuple[str, ...]]] = [
    ("README.md", "commands", model_tables.commands, ("commands",)),
    ("docs/results.md", "small", model_tables.small, ("compress", "compress_speed", "compress_programs")),
    ("benchmarks/LOG.md", "ablation", tables.ablation, ("ablation", "table3")),
    ("benchmarks/LOG.md", "gpu_instructions", tables.gpu_instructions, ("gpu_instructions",)),
    ("benchmarks/LOG.md", "llama_cpp", model_tables.llama_cpp, ("llama_cpp",)),
    ("benchmarks/LOG.md", "paths", tables.paths, ("paths",)),
    ("docs/compress.md", "overview", summaries.overview, ("compress", "compress_speed")),
    ("docs/fine-tuning.md", "finetune", model_tables.finetune, ("finetune",)),
    ("docs/healing.md", "healed", summaries.healed, ("heal", "heal_neurons")),
    ("docs/llama-cpp.md", "llama_quantize", model_tables.llama_quantize, ("llama_quantize",)),
    ("docs/methods.md", "results", tables.methods, ("protocol", "table3")),
    ("docs/models.md", "families", model_tables.families, ("families",)),
    ("docs/models.md", "model_types", model_tables.model_types, ("model_types",)),
    ("docs/packed.md", "fast", summaries.fast, ("speed",)),
    ("docs/prune.md", "efforts", tables.efforts, ("protocol", "table3")),
    ("docs/quantization.md", "grids", model_tables.grids, ("grids",)),
    ("docs/results-quality.md", "bounds", model_tables.bounds, ("compress_bounds", "compress_bounds_smollm2")),
    (
        "docs/results-quality.md",
        "by_hand",
        model_tables.by_hand,
        ("compress", "compress_llama_cpp", "compress_demo", "compress_qwen3"),
    ),
    ("docs/results-quality.md", "combinations", model_tables.combinations, ("combinations",)),
    ("docs/results-quality.md", "combinations_qwen3", model_tables.combinations, ("combinations_qwen3",)),
    ("docs/results-quality.md", "embeddings", model_tables.grids, ("embeddings",)),
    ("docs/results-quality.md", "experts", model_tables.experts, ("experts",)),
    ("docs/results-quality.md", "figure1", tables.figure1, ("error_time",)),
    ("docs/results-quality.md", "figure2", tables.figure2, ("figure2",)),
    ("docs/results-quality.md", "heal", model_tables.heal, ("heal",)),
    ("docs/results-quality.md", "heal_demo", model_tables.heal, ("heal_demo",)),
    ("docs/results-quality.md", "heal_neurons", model_tables.heal, ("heal_neurons",)),
    ("docs/results-quality.md", "heal_two_factors", model_tables.heal, ("heal_two_factors",)),
    ("docs/results-quality.md", "layer_error", tables.layer_error, ("layer_error",)),
    (
        "docs/results-quality.md",
        "llama_cpp_loss",
        model_tables.llama_cpp_loss,
        ("llama_cpp_loss", "llama_cpp_loss_qwen3", "llama_cpp_loss_smollm2"),
    ),
    ("docs/results-quality.md", "llm_compressor", model_tables.llm_compressor, ("llm_compressor",)),
    ("docs/results-quality.md", "mixed", model_tables.grids, ("mixed_bits",)),
    ("docs/results-quality.md", "own_answers", model_tables.own_answers, ("own_answers",)),
    ("docs/results-quality.md", "precision", tables.precision, ("precision",)),
    ("docs/results-quality.md", "programs", model_tables.programs, ("compress_programs",)),
    ("docs/results-quality.md", "real", model_tables.real, ("real",)),
    ("docs/results-quality.md", "recipes", model_tables.recipes, ("compress",)),
    ("docs/results-quality.md", "removals", model_tables.removals, ("removals",)),
    ("docs/results-quality.md", "sizes", model_tables.sizes, ("sizes",)),
    ("docs/results-quality.md", "sizes_demo", model_tables.sizes, ("sizes_demo",)),
    ("docs/results-quality.md", "structured", tables.structured, ("structured",)),
    ("docs/results-quality.md", "table2", tables.table2, ("table2",)),
    ("docs/results-quality.md", "third", model_tables.real, ("third",)),
    ("docs/results-quality.md", "real_gemma", model_tables.real, ("real_gemma",)),
    ("docs/results-quality.md", "real_qwen", model_tables.real, ("real_qwen",)),
    ("docs/results-quality.md", "two_factors", model_tables.two_factors, ("two_factors",)),
    ("docs/results-quality.md", "two_factors_answers", model_tables.two_factors, ("two_factors_answers",)),
    ("docs/results-quality.md", "two_factors_demo", model_tables.two_factors, ("two_factors_demo",)),
    ("docs/results-quality.md", "two_factors_qwen3", model_tables.two_factors, ("two_factors_qwen3",)),
    ("docs/results-quality.md", "vocabulary", model_tables.vocabulary, ("vocabulary",)),
    ("docs/results-speed.md", "decode", tables.decode, ("decode",)),
    ("docs/results-speed.md", "gpu_blocks", tables.gpu_blocks, ("gpu_blocks",)),
    ("docs/results-speed.md", "gpu_decode", tables.gpu_decode, ("gpu_decode",)),
    ("docs/results-speed.md", "layer_time", tables.layer_time, ("layer_time",)),
    ("docs/results-speed.md", "peers", model_tables.peers, ("speed",)),
    ("docs/results-speed.md", "speed", model_tables.speed, ("speed",)),
    ("docs/results-speed.md", "speeds", model_tables.speeds, ("compress_speed",)),
    ("docs/results-speed.md", "table3", tables.table3, ("table3",)),
    ("docs/results.md", "factors", summaries.factors, ("two_factors_answers",)),
    ("docs/results.md", "fast", summaries.fast, ("speed",)),
    ("docs/results.md", "healed", summaries.healed, ("heal", "heal_neurons")),
    ("docs/results.md", "overview", summaries.overview, ("compress", "compress_speed")),
    ("docs/results.md", "shrunk", summaries.shrunk, ("removals", "combinations")),
    ("docs/results.md", "zeros", summaries.zeros, ("real",)),
    ("docs/structured.md", "shrunk", summaries.shrunk, ("removals", "combinations")),
    ("docs/tutorial.md", "tutorial", model_tables.tutorial, ("tutorial",)),
    ("docs/tutorial.md", "tutorial_steps", model_tables.tutorial_steps, ("tutorial",)),
    ("docs/when-to-prune.md", "smaller", model_tables.smaller, ("smaller",)),
    ("docs/two-factors.md", "factors", summaries.factors, ("two_factors_answers",)),
]


def record(name: str) -> Any:
    """The record of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def render() -> dict[Path, str]:
    """The text of each file with its tables as the records have them, and the pictures."""
    texts: dict[Path, str] = {}
    for file, mark, table, records in TABLES:
        path = ROOT / file
        texts[path] = between(texts.get(path) or path.read_text(), mark, table(*map(record, records)))
    tutorial = ROOT / "docs" / "tutorial.md"
    texts[tutorial] = model_tables.tutorial_output(texts[tutorial], record("tutorial"))
    forms = model_tables.forms(record("sizes"))
    return texts | dict(pictures(record("protocol"), tables.HELD, forms, ROOT / "docs" / "figures"))


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
