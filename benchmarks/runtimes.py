"""Writing text on a CPU: packed models beside the dense one in transformers and in llama.cpp, in turns.

    npm install --ignore-scripts --prefix PEER node-llama-cpp@3.22.1
    python benchmarks/runtimes.py DENSE PEER PRUNED... --record benchmarks/results/speed.json

The package brings llama.cpp with kernels for each kind of processor. DENSE is one of the models that `niwaki export
--gguf` knows, PRUNED are results of `niwaki prune` on it; what zeros are where makes no difference here. In each round
every form has a turn, in a process of its own, and medians over rounds count. llama.cpp is timed from its
package's interface, with the greedy choice of the next token, as niwaki's and transformers' times have it. What was
measured on other processors, with other instructions, of other models and with other prompts stays in the record.
Where llama-cpp-python is installed llama.cpp is timed through it, too. `--peers PEERS/bin/python` has ik_llama.cpp and
OpenVINO read the same files, and ONNX Runtime what its model builder makes of DENSE in 4 bits; peers.py says how PEERS
is made.
"""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated

os.environ["GOMP_SPINCOUNT"] = "10000"  # as `niwaki generate` has it

import common
import torch
from common import Record, Rounds
from rich.console import Console
from typer import Argument, BadParameter, Option

import niwaki
from niwaki.choices import NO_ZEROS
from niwaki.evaluation.llama_cpp import absence
from niwaki.exports.gguf_file import KINDS
from niwaki.packed import kernels

#: What a form is called, and its runtime in peers.py.
READ_GGUF = {"ik_llama.cpp": "ik_llama.cpp", "OpenVINO": "openvino"}


@dataclass(frozen=True)
class Turn:
    """What one form of the model took once: bytes of its file, and speed as in :class:`niwaki.Speed`."""

    bytes: int
    first_token: float
    tokens_per_second: float


def turn(command: list[str], *files: Path) -> Turn:
    """A turn of what reads ``files``: a program that prints, as JSON and last, lists of seconds like llama_cpp.mjs."""
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=sys.stderr, check=True, text=True)
    took = json.loads(ran.stdout.splitlines()[-1])
    return Turn(sum(file.stat().st_size for file in files), took["first"][0], 1 / took["rest"][0])


def peers_of(
    python: Path, dense: Path, ggufs: dict[str, Path], scratch: Path
) -> dict[str, tuple[list[str], list[Path]]]:
    """By form, the command of a turn of other runtimes, without its numbers, and the files that it reads."""
    run = [str(python), str(Path(__file__).with_name("peers.py"))]
    forms: dict[str, tuple[list[str], list[Path]]] = {}
    for kind, file in ggufs.items():
        for name, runtime in READ_GGUF.items():
            forms[f"{name}, {kind}"] = [*run, runtime, str(file)], [file]
    onnx = scratch / "onnx"
    builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
    subprocess.run([*builder, "-i", str(dense), "-o", str(onnx)], stdout=sys.stderr, check=True)
    forms["ONNX Runtime, int4"] = [*run, "onnxruntime", str(onnx)], [*onnx.glob("model.onnx*")]
    return forms


def form_of(model: Path) -> str:
    """What a pruned model is called here: the share of zeros that was asked for or was there, and its grids."""
    record = niwaki.Record.load(model / "niwaki.json")
    before = sum(int(matrix.stats.get("zeros_before", 0)) for matrix in record.matrices)
    there = before / max(1, sum(math.prod(matrix.shape) for matrix in record.matrices))
    asked = 0.0 if record.pattern == NO_ZEROS else float(record.pattern.rpartition(":")[2])
    sparsity = max(asked, there)
    grids = [record.quantization or "", f"embeddings {record.embeddings}" if record.embeddings else ""]
    return ", ".join(["packed", f"{sparsity:.0%} zeros", *filter(None, grids)])


def llama_cpp(
    dense: Annotated[Path, Argument(help="A model that niwaki export has a format of llama.cpp for.")],
    peer: Annotated[Path, Argument(help="Where npm installed node-llama-cpp.")],
    pruned: Annotated[list[Path] | None, Argument(help="Results of niwaki prune on it.")] = None,
    formats: Annotated[str, Option(help="Of llama.cpp.")] = "gguf-f16,gguf-q8_0,gguf-q4_0",
    prompt: Annotated[int, Option(help="Tokens that are given.")] = 64,
    tokens: Annotated[int, Option(help="Tokens that are written.")] = 64,
    rounds: Rounds = 5,
    peers: Annotated[Path | None, Option(help="The python of an environment with other runtimes.")] = None,
    record: Record = None,
) -> None:
    """Writing text on a CPU: packed models beside the dense one in transformers and in llama.cpp.

    Every turn of a form is a process of its own, and medians over rounds count.
    """
    package = peer / "node_modules" / "node-llama-cpp" / "package.json"
    if not package.exists():
        print(f"nothing is measured: {package} is not there; npm installs it, see the head of {Path(__file__).name}")
        return
    turns: dict[str, list[Turn]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        ggufs: dict[str, Path] = {}
        for each in common.chosen(formats, KINDS):
            ggufs[KINDS[each]] = Path(scratch) / f"{KINDS[each]}.gguf"
            niwaki.export(dense, ggufs[KINDS[each]], each)
        others = peers_of(peers, dense, ggufs, Path(scratch)) if peers else {}
        packed = {form_of(path): Path(scratch) / path.name for path in pruned or ()}
        for source, target in zip(pruned or (), packed.values(), strict=True):
            niwaki.pack(source, target)
        in_python = ggufs if importlib.util.find_spec("llama_cpp") else {}
        measured = {**{f"llama.cpp in Python, {kind}": file for kind, file in in_python.items()}, **packed}
        for _ in range(rounds):
            numbers = [str(prompt), str(tokens), str(torch.get_num_threads())]
            for kind, file in ggufs.items():
                command = [*common.node_script(peer, "llama_cpp.mjs"), str(file), *numbers[:2], "1", numbers[2]]
                turns[f"llama.cpp, {kind}"].append(turn(command, file))
            for form, (command, files) in others.items():
                turns[form].append(turn([*command, *numbers], *files))
            for name, model in measured.items():
                for speed in niwaki.bench(model, prompt_tokens=prompt, tokens=tokens, repeats=1).speeds:
                    if model.suffix == ".gguf" and speed.weights != "gguf":
                        raise BadParameter(f"{model} was not read by llama.cpp: {absence()}")
                    form = "transformers, bfloat16" if speed.weights == "dense" else name
                    turns[form].append(Turn(speed.disk, speed.first_token, speed.tokens_per_second))
    forms = []
    for form, those in turns.items():
        rates = [turn.tokens_per_second for turn in those]
        first = statistics.median(turn.first_token for turn in those)
        middle = Turn(those[0].bytes, first, statistics.median(rates))
        forms.append({"form": form, **asdict(middle), "slowest": min(rates), "fastest": max(rates)})
        Console().print(
            f"{form:25s} {middle.bytes / 2**20:6.0f} MiB  first token {first * 1e3:6.1f} ms  "
            f"{middle.tokens_per_second:6.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})",
            highlight=False,
            soft_wrap=True,
        )
    settings = {"prompt": prompt, "tokens": tokens, "rounds": rounds, "threads": torch.get_num_threads()}
    version, where = json.loads(package.read_text())["version"], common.processor()
    run = {"machine": where, "kernels": kernels.describe(), "model": dense.name, "node_llama_cpp": version, **settings}
    if record:
        keys = ("machine", "kernels", "model", "prompt", "threads")
        runs = common.with_earlier([{**run, "forms": forms}], record, "runs", itemgetter(*keys))
        common.save(record, runs=runs)


if __name__ == "__main__":
    common.main(llama_cpp, about=__doc__)
