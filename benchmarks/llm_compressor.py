"""niwaki against llm-compressor, the tool most people use: the same model, windows and machine, in turns.

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python benchmarks/llm_compressor.py MODEL CORPUS WORK PEER/bin/python --record RECORD

It needs an environment of its own, because it wants another transformers. Each run is a
process of its own, from its start to its end; its peak memory is what the system says of it. llm-compressor runs a
model in the dtype of its files, here bfloat16; --dtypes says what niwaki does. All results are measured by niwaki in
float32.
"""

import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import common  # first: it sets what OpenMP reads when torch is loaded
from common import Corpus, Length, Model, Record, Samples, TextSamples, Work, names
from corpus import Texts
from rich.console import Console
from typer import Argument, Option

from niwaki.models.locate import locate_model
from niwaki.models.tokens import load_tokenizer
from niwaki.texts.texts import read_windows

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


def llm_compressor(
    model: Model,
    corpus: Corpus,
    work: Work,
    peer: Annotated[Path, Argument(help="The Python of their environment.")],
    methods: Annotated[str, Option(help="sparsegpt or wanda, which both tools have.")] = "sparsegpt,wanda",
    also: Annotated[str, Option(help="Efforts of niwaki's own solver.")] = "balanced",
    dtypes: Annotated[str, Option(help="What niwaki runs blocks in.")] = "float32,bfloat16",
    sparsity: float = 0.5,
    samples: Samples = 16,
    length: Length = 512,
    text_samples: TextSamples = 24,
    record: Record = None,
) -> None:
    """Niwaki against llm-compressor, the tool most people use: the same model, windows and machine, in turns."""
    console = Console(width=140, highlight=False, emoji=False)
    texts, out = Texts(model, corpus, work, samples, length), work / "out"
    (source,) = texts.to_calibrate("books")
    held = {name: texts.to_measure(name, text_samples) for name in ("wikitext2", "books")}
    windows = work / "windows.json"
    tokens = read_windows(source, load_tokenizer(locate_model(str(model))), length, samples).tokens
    windows.write_text(json.dumps(tokens.tolist()))

    def theirs(method: str) -> list[str]:
        return [str(peer), "-c", _PEER, str(model), str(windows), str(out), method, str(sparsity)]

    def ours(*options: str) -> list[str]:
        command = [sys.executable, "-m", "niwaki", "prune", str(model), str(out), "--sparsity", str(sparsity)]
        command += ["--calibration", source, "--samples", str(samples), "--length", str(length)]
        return [*command, "--text-samples", "0", *options]

    commands = {}
    for method in names(methods):
        commands["llm-compressor", method, "bfloat16"] = theirs(method)
        for dtype in names(dtypes):
            commands["niwaki", method, dtype] = ours("--dtype", dtype, "--solver", method)
    for effort, dtype in itertools.product(names(also), names(dtypes)):
        commands["niwaki", effort, dtype] = ours("--dtype", dtype, "--effort", effort)
    results = []
    for (tool, method, dtype), command in commands.items():
        shutil.rmtree(out, ignore_errors=True)
        ended = run(command, work / f"{tool}-{method}.log")
        found = common.measured(out, held, text_samples, length)
        perplexity = {name: each.value for name, each in found.items()}
        results.append({"tool": tool, "method": method, "dtype": dtype, **ended._asdict(), "perplexity": perplexity})
        console.print(results[-1])
    sizes = {"sparsity": sparsity, "samples": samples, "length": length, "text_samples": text_samples}
    common.save(record, model=model.name, **sizes, results=results)


if __name__ == "__main__":
    common.main(llm_compressor, about=__doc__)
