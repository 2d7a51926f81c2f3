"""Runs all that needs a GPU, in order of worth and within a budget of time, and writes one JSON file.

    python scripts/gpu_day.py --out gpu_day.json
    python scripts/gpu_day.py --parts blocks,efforts      # only these; --list names all
    python scripts/gpu_day.py --device cpu                # tiny sizes, to try the parts without a GPU

niwaki need not be installed, only what it depends on. Each part is a shell command in a process group of its own, which
is killed at the part's limit; a part that fails does not stop the others. It starts if at least half of its limit is
left of the budget. The file is replaced before and after each part, so a run that is killed keeps what it finished. For
each part it has the end of what was printed and the records that were written. The exit status is 0 if all parts that
ran passed, 1 if one did not, and 2 if nothing can run here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "src"))
TAIL = 6000  # characters of what a part printed that are kept
#: Modules of the dependencies in pyproject.toml.
REQUIRED = (
    *("accelerate", "huggingface_hub", "msgspec", "numpy", "psutil", "rich", "safetensors", "torch", "transformers"),
    *("typer", "yaml"),
)
VERSIONS = """
import platform, torch, transformers
print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
for number in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(number))
"""


SERVED = """
import sys, transformers, vllm
path, asked = sys.argv[1], "The tree in the garden"
tokenizer = transformers.AutoTokenizer.from_pretrained(path)
model = transformers.AutoModelForCausalLM.from_pretrained(path, device_map="cuda")
found = model.generate(**tokenizer(asked, return_tensors="pt").to("cuda"), max_new_tokens=16, do_sample=False)
print("transformers:", tokenizer.decode(found[0]))
served = vllm.LLM(path, max_model_len=64, enforce_eager=True, gpu_memory_utilization=0.2)
print("vLLM:", served.generate(asked, vllm.SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text)
"""


@dataclass(frozen=True)
class Part:
    """A shell command, run from the root of the checkout.

    Attributes:
        limit: Seconds.
        command: With ``{python}``, ``{device}`` and ``{out}``, a directory whose ``*.json`` become the part's records,
            and with the names in ``SIZES``.
        needs: Modules without which the part is skipped.
        gpu: Whether it is skipped on a CPU.
    """

    name: str
    shows: str
    limit: float
    command: str
    needs: tuple[str, ...] = ()
    gpu: bool = False


PARTS = [
    Part(
        "machine",
        "the GPU, its driver, and versions",
        60,
        "git log -1 --oneline || true; lscpu || true; nvidia-smi || true; {python} -c {versions}",
    ),
    Part(
        "tests",
        "whether the tests that need a GPU pass",
        120,
        "{python} -m pytest $(grep -rl cuda.is_available tests --include='test_*.py') {tests} -W default --durations 5",
        needs=("pytest", "pytest_timeout", "hypothesis"),
    ),
    Part(
        "blocks",
        "seconds for a block of a 7B model, method by method, and for all 32",
        200,
        "{python} scripts/random_checkpoint.py {out}/model {blocks}\n"
        "{python} benchmarks/large.py {out}/model --device {device} {windows} --of 32 --record {out}/blocks.json "
        "--solvers continuation,continuation@balanced,wanda,sparsegpt",
    ),
    Part(
        "decode",
        "products of a few vectors, packed and 2:4 against dense, and of many, 2:4 against dense",
        120,
        "{python} benchmarks/gpu.py decode --sizes 4096x14336,14336x4096,4096x4096 --dtype bfloat16 "
        "--record {out}/decode.json\n"
        "{python} benchmarks/gpu.py decode --sizes 4096x14336,14336x4096,4096x4096 --dtype bfloat16 --kinds 2:4 "
        "--batches 256,4096 --record {out}/prompts.json",
        needs=("triton",),
        gpu=True,
    ),
    Part(
        "devices",
        "whether models pruned, shrunk, healed, packed and 2:4 are the same as from the CPU",
        100,
        "{python} benchmarks/gpu.py devices --device {device} {devices} --record {out}/devices.json",
    ),
    Part(
        "compress",
        "seconds to compress a model of a billion weights to a size, and the model that ships, to each program's files",
        200,
        "{python} scripts/random_checkpoint.py {out}/dense {whole}\n"
        'niwaki() {{ {python} -m niwaki "$@" --calibration demo --text-samples 4 --device {device}; }}\n'
        "niwaki compress {out}/dense {out}/half --size 0.5 --samples 16 --length {length}\n"
        "cp {out}/half/niwaki.json {out}/half.json\n"
        "for goal in '--size 0.4' '--parameters 0.9' '--loss 0.02' '--size 0.4 --for llama.cpp'; do\n"
        "  rm -rf {out}/demo; niwaki compress demo {out}/demo $goal {few}; done",
        needs=("gguf",),
    ),
    Part(
        "generate",
        "tokens a second of a model of a billion weights, packed against dense",
        120,
        "{python} scripts/random_checkpoint.py {out}/dense {whole}\n"
        'niwaki() {{ {python} -m niwaki "$@" --device {device}; }}\n'
        "niwaki prune {out}/dense {out}/pruned --solver wanda --sparsity 0.5 --calibration demo --samples 16 "
        "--length 512 --text-samples 4 --record {out}/prune.json\n"
        "niwaki bench {out}/pruned {tokens} --record {out}/bench.json",
    ),
    Part(
        "heal",
        "whether the model that ships has the same bytes when it is pruned and healed again, and healing a large one",
        200,
        'niwaki() {{ {python} -m niwaki "$@" --calibration demo --text-samples 4 --device {device}; }}\n'
        "for run in 1 2; do\n"
        "  niwaki prune demo {out}/pruned$run --sparsity 0.5 --effort balanced --samples 8 --length 64\n"
        "  niwaki heal {out}/pruned$run {out}/healed$run --teacher demo --tokens 4k; done\n"
        "for kind in pruned healed; do for file in {out}/${{kind}}1/*.safetensors; do\n"
        "  cmp $file {out}/${{kind}}2/$(basename $file); done; done\n"
        "{python} scripts/random_checkpoint.py {out}/dense {whole}\n"
        "niwaki prune {out}/dense {out}/pruned --solver wanda --sparsity 0.5 --samples 4 --length {length}\n"
        "niwaki heal {out}/pruned {out}/healed --teacher {out}/dense {heal}\n"
        "cp {out}/healed/niwaki.json {out}/heal.json",
    ),
    Part(
        "vllm",
        "whether vLLM loads integers of 4, 8, mixed bits, NVFP4, MXFP4, W8A8, FP8, and writes what transformers does",
        300,
        "for grid in int4:64 int8:64 int4.5:64 nvfp4 mxfp4; do\n"
        "  {python} -m niwaki run demo {out}/$grid -s \"quantize $grid\" -s 'export compressed-tensors' "
        "--calibration demo --text-samples 4 {few}\n"
        "  {python} -c {served} {out}/$grid; done\n"
        "{python} -m niwaki run demo {out}/w8a8 -s 'quantize int8' -s 'export w8a8' --text-samples 0\n"
        "{python} -m niwaki export demo {out}/fp8 --format fp8\n"
        "for form in w8a8 fp8; do {python} -c {served} {out}/$form; done",
        needs=("vllm", "compressed_tensors"),
        gpu=True,
    ),
    Part(
        "efforts",
        "seconds for a block of a 7B model with ADMM-Grad, and with --effort best",
        150,
        "{python} scripts/random_checkpoint.py {out}/model {blocks}\n"
        "{python} benchmarks/large.py {out}/model --device {device} {windows} --of 32 --record {out}/efforts.json "
        "--solvers admm-grad,continuation@best",
    ),
    Part(
        "train",
        "whether a model can be trained from scratch",
        60,
        "{python} scripts/train_reference.py src/niwaki/data/calibration.txt.xz {out}/model --device {device} {train}",
    ),
    Part(
        "examples",
        "whether the examples run",
        90,
        "for file in examples/*.py; do {python} $file; done",
    ),
    Part(
        "processor",
        "products with packed matrices on this machine's processor",
        60,
        "{python} benchmarks/processor.py decode {products} --record {out}/processor.json",
        needs=("niwaki._kernels",),
    ),
]
SIZES = {
    "cuda": {
        "tests": "-k gpu",
        "blocks": "--like llama-2-7b --blocks 2",
        "windows": "--samples 128 --length 2048",
        "devices": "",
        "whole": "--like 1b",
        "length": "512",
        "few": "--samples 64 --length 256",
        "tokens": "--tokens 64",
        "heal": "--tokens 200k --max-time 30s",
        "train": "--tokens 4000000",
        "products": "--sizes 14336x4096,4096x14336 --sparsities 0.5,0.7 --batches 1 --threads 1,8 --rounds 3",
    },
    "cpu": {
        "tests": "-k 'a_gpu or layout'",
        "blocks": "--like tiny",
        "windows": "--samples 4 --length 64",
        "devices": "--runs wanda,admm-grad,heal --samples 4 --length 64 --tokens 4k",
        "whole": "--like tiny",
        "length": "64",
        "few": "--samples 4 --length 64",
        "tokens": "--prompt-tokens 8 --tokens 4 --repeats 1",
        "heal": "--tokens 4k --max-time 20s",
        "train": "--tokens 4096 --batch 4 --hidden 32 --heads 2 --mlp 64 --vocab 512 --tokenizer-chars 100000",
        "products": "--sizes 2048x2048 --sparsities 0.5 --batches 1 --threads 1 --rounds 1",
    },
}


def missing(modules: Sequence[str]) -> list[str]:
    """Those that are not there to be imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def run(part: Part, device: str, limit: float, entry: dict[str, Any]) -> None:
    """Runs a part and puts what came of it into its ``entry``, also where an exception ends the wait."""
    with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as out:
        words = {"python": sys.executable, "out": out, "device": device, "versions": VERSIONS, "served": SERVED}
        command = part.command.format(**{name: shlex.quote(word) for name, word in words.items()}, **SIZES[device])
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": out}
        printed, began = Path(out, "printed.txt"), time.monotonic()
        entry["status"] = "stopped"  # also by a signal that comes while it starts
        with printed.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - from the table above
                ["/bin/sh", "-ec", command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            entry["exit"] = process.wait(limit)
            entry["status"] = "failed" if entry["exit"] else "passed"
        except subprocess.TimeoutExpired:
            entry["status"] = "over its limit"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what an ended part has left running
            process.wait()
            entry["seconds"] = time.monotonic() - began
            entry["tail"] = printed.read_text(errors="replace")[-TAIL:]
            entry["records"] = {}
            for each in sorted(Path(out).glob("*.json")):
                with contextlib.suppress(ValueError):  # killed while it was written
                    entry["records"][each.stem] = json.loads(each.read_text())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; returns the exit status."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--parts", metavar="NAME,NAME", help="these alone")
    parser.add_argument("--list", action="store_true", help="name the parts and run nothing")
    parser.add_argument("--budget", type=float, default=9, metavar="MINUTES", help="for all parts together (9)")
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"), metavar="FILE", help="(gpu_day.json)")
    arguments = parser.parse_args(argv)
    names = [part.name for part in PARTS]
    chosen = arguments.parts.split(",") if arguments.parts else names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"there is no part {unknown[0]!r}; parts are {', '.join(names)}")
    if arguments.list:
        for part in PARTS:
            print(f"{part.name:10}{part.limit:4.0f} s  {part.shows}")
        return 0
    if lacking := missing(REQUIRED):
        parser.exit(2, f"error: niwaki needs {', '.join(lacking)}; install that, or put it on PYTHONPATH\n")
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.exit(2, "error: torch finds no GPU with CUDA; --device cpu tries the parts without one\n")
    entries: dict[str, dict[str, Any]] = {name: {"status": "left out"} for name in names if name in chosen}
    record = {"device": arguments.device, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "parts": entries}

    def save() -> None:
        record.update(budget=60 * arguments.budget, seconds=time.monotonic() - began)
        temporary = arguments.out.with_name(f"{arguments.out.name}.partial")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.replace(arguments.out)

    try:
        save()
    except OSError as error:
        parser.exit(2, f"error: {arguments.out} cannot be written: {error.strerror}\n")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it also ends the part that runs
    for part in PARTS:
        if part.name not in entries:
            continue
        entry, left = entries[part.name], 60 * arguments.budget + began - time.monotonic()
        entry.update(shows=part.shows, limit=part.limit)
        if lacking := missing(part.needs):
            entry.update(status="skipped", why=f"it needs {', '.join(lacking)}, not installed here")
        elif part.gpu and arguments.device == "cpu":
            entry.update(status="skipped", why="it needs a GPU")
        elif left < part.limit / 2:
            entry["why"] = f"{max(0, left):.0f} s of the budget were left"
        else:
            entry["status"] = "running"
            try:
                save()
                run(part, arguments.device, min(part.limit, left), entry)
            except KeyboardInterrupt:
                parser.exit(130, f"error: stopped in {part.name}\n")
            finally:
                save()
        print(f"{part.name}: {entry['status']}", entry.get("why", f"{entry.get('seconds', 0):.1f} s"), flush=True)
        if entry["status"] in ("failed", "over its limit"):
            print(entry["tail"][-1000:], flush=True)
    save()
    return int(any(entry["status"] in ("failed", "over its limit") for entry in entries.values()))


if __name__ == "__main__":
    sys.exit(main())
