"""niwaki against llm-compressor, the tool most people use: the same model, windows and machine, in turns.

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python benchmarks/llm_compressor.py MODEL CORPUS WORK PEER/bin/python --record RECORD

It needs an environment of its own, because it wants another transformers. CORPUS is that of real.py. Each run is a
process of its own, from its start to its end; its peak memory is what the system says of it. llm-compressor runs a
model in the dtype of its files, here bfloat16; --dtypes says what niwaki does. All results are measured by niwaki in
float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import common
from real import Texts
from rich.console import Console
from transformers.utils import logging

from niwaki.models.tokens import load_tokenizer
from niwaki.texts.reading import read_windows

#: What their environment runs, with the windows as token ids in a JSON file.
_PEER = """
import json, sys
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier

model, windows, out, method, sparsity = sys.argv[1:]
tokens = json.load(open(windows))
data = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(each) for each in tokens]})
modifier = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}[method]
oneshot(
    model=model,
    dataset=data,
    recipe=modifier(sparsity=float(sparsity), ignore=["re:.*lm_head"]),  # not "lm_head": that prunes a tied embedding
    max_seq_length=len(tokens[0]),
    num_calibration_samples=len(tokens),
    shuffle_calibration_samples=False,
    save_compressed=False,
    output_dir=out,
)
"""


class Ended(NamedTuple):
    """What a process took: its time from start to end, and its peak of resident memory."""

    seconds: float
    gigabytes: float


#: Starts a command from a small process: the system counts for a new process also the memory of the one it came from.
_SMALL = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[2:], stdout=open(sys.argv[1], "w"), stderr=subprocess.STDOUT)
json.dump([code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss], sys.stdout)
"""


def run(command: list[str], log: Path) -> Ended:
    """Runs it to its end, which has to be a good one; its output goes to ``log``."""
    began = time.perf_counter()
    said = subprocess.run([sys.executable, "-S", "-c", _SMALL, str(log), *command], stdout=subprocess.PIPE, check=True)
    code, kilobytes = json.loads(said.stdout)
    if code:
        sys.exit(f"{command[0]} ended with exit code {code}; see {log}")
    return Ended(time.perf_counter() - began, kilobytes * 1024 / 1e9)


def measured(model: Path, text: str, arguments: argparse.Namespace) -> float:
    """The perplexity of a model on a text."""
    record = arguments.work / "eval.json"
    windows = ["--text-samples", str(arguments.text_samples), "--length", str(arguments.length)]
    command = [sys.executable, "-m", "niwaki", "eval", str(model), "--text", text, *windows, "--record", str(record)]
    run(command, arguments.work / "eval.log")
    return float(json.loads(record.read_text())["perplexity"]["value"])


def main() -> None:
    """Measures, prints a line for each run and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "corpus", "work", "peer"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--methods", nargs="+", default=["sparsegpt", "wanda"])
    parser.add_argument("--also", nargs="*", default=["balanced"], help="efforts of niwaki's own solver")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="what niwaki runs blocks in")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--samples", type=int, default=16, help="windows to calibrate on")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--text-samples", type=int, default=24, help="windows of each text to measure on")
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console(width=140, highlight=False, emoji=False)
    model, work = arguments.model, arguments.work
    texts = Texts(model, arguments.corpus, work, arguments.samples, arguments.length)
    (source,) = texts.to_calibrate("books")
    measured_on = {name: texts.to_measure(name, arguments.text_samples) for name in ("wikitext2", "books")}
    windows = work / "windows.json"
    tokens = read_windows(source, load_tokenizer(model), arguments.length, arguments.samples).tokens
    windows.write_text(json.dumps(tokens.tolist()))

    def theirs(method: str, out: Path) -> list[str]:
        given = [str(model), str(windows), str(out), method, str(arguments.sparsity)]
        return [str(arguments.peer), "-c", _PEER, *given]

    def ours(out: Path, *options: str) -> list[str]:
        calibration = ["--calibration", source, "--samples", str(arguments.samples), "--length", str(arguments.length)]
        sparsity = ["--sparsity", str(arguments.sparsity), "--text-samples", "0"]
        return [sys.executable, "-m", "niwaki", "prune", str(model), str(out), *sparsity, *calibration, *options]

    out = work / "out"
    commands = {}
    for method in arguments.methods:
        commands["llm-compressor", method, "bfloat16"] = theirs(method, out)
        for dtype in arguments.dtypes:
            commands["niwaki", method, dtype] = ours(out, "--dtype", dtype, "--solver", method)
    for effort, dtype in itertools.product(arguments.also, arguments.dtypes):
        commands["niwaki", effort, dtype] = ours(out, "--dtype", dtype, "--effort", effort)
    results = []
    for (tool, method, dtype), command in commands.items():
        shutil.rmtree(out, ignore_errors=True)
        ended = run(command, work / f"{tool}-{method}.log")
        perplexity = {name: measured(out, text, arguments) for name, text in measured_on.items()}
        results.append({"tool": tool, "method": method, "dtype": dtype, **ended._asdict(), "perplexity": perplexity})
        console.print(results[-1])
    if arguments.record:
        sizes = {name: getattr(arguments, name) for name in ("sparsity", "samples", "length", "text_samples")}
        common.save(arguments.record, model=model.name, **sizes, results=results)


if __name__ == "__main__":
    main()
