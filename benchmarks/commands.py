"""The commands of README on a model, to the end, each in a process of its own: time, peak memory and last lines.

    python benchmarks/commands.py MODEL text.txt held.txt WORK --record benchmarks/results/commands.json

Calibrated on SAMPLES x LENGTH tokens of the first text, measured on as many of the second. Files for llama.cpp are
run in it if NIWAKI_LLAMA_CPP names a directory with node-llama-cpp (docs/llama-cpp.md). A command that the record has
for this model is not run again.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import common
from common import Length, Model, Samples, Work
from typer import Argument, Option

from niwaki import Record
from niwaki.records.speed import SpeedRecord

PROMPT, QUESTION = "def fibonacci(n):", "Write a Python function that reverses a string."
#: Made by name, and what each needs of those before it.
COMMANDS = {
    "inspect": "inspect MODEL",
    "plan": "compress MODEL size --size 0.4 --plan CALIBRATED",
    "size": "compress MODEL size --size 0.4 CALIBRATED MEASURED",
    "generate": "generate size PROMPT --tokens 48",
    "bench": "bench size --record bench.json",
    "llama.cpp": "compress MODEL llama --size 0.4 --for llama.cpp CALIBRATED MEASURED",
    "chat": "chat llama",
    "loss": "compress MODEL loss --loss 0.05 CALIBRATED MEASURED",
    "vocabulary": "shrink MODEL vocabulary --vocabulary used:0.9995 --calibration TEXT MEASURED",
    "parameters": "compress MODEL parameters --parameters 0.75 CALIBRATED MEASURED",
    "prune": "prune MODEL pruned --sparsity 0.6 CALIBRATED MEASURED",
    "pack": "pack pruned packed",
    "best": "prune MODEL best --sparsity 0.6 --effort best CALIBRATED MEASURED",
    "heal": "heal pruned healed --teacher MODEL --max-time 6m --calibration TEXT MEASURED",
}


def commands(
    model: Model,
    text: Annotated[Path, Argument(help="To calibrate on.")],
    held: Annotated[Path, Argument(help="To measure on.")],
    work: Work,
    record: Annotated[Path, Option(help="Write JSON there after each command.")],
    only: Annotated[str, Option(help="Names of commands, as in the record.")] = ",".join(COMMANDS),
    samples: Samples = 16,
    length: Length = 512,
) -> None:
    """Runs them one after the other; those that fail are in the record, too."""
    texts = {"text": text.name, "held": held.name}
    sheet = common.Sheet(record, {"samples": samples, "length": length, **texts})
    work.mkdir(parents=True, exist_ok=True)
    sizes = f"--samples {samples} --length {length}"
    given = {
        "MODEL": [str(model.absolute())],
        "TEXT": [str(text.absolute())],
        "CALIBRATED": ["--calibration", str(text.absolute()), *sizes.split()],
        "MEASURED": ["--text", str(held.absolute()), "--text-samples", str(samples)],
        "PROMPT": [PROMPT],
    }
    for name in common.chosen(only, COMMANDS):
        if sheet.has(model=model.name, name=name):
            continue
        command = COMMANDS[name]
        words = [part for word in command.split() for part in given.get(word, [word])]
        out = work / (words[2] if len(words) > 2 else "none")
        if words[0] in ("compress", "shrink", "prune", "heal", "pack"):
            shutil.rmtree(out, ignore_errors=True)
        whole = [sys.executable, "-m", "niwaki", *words]
        if name == "chat":
            file, place = next((work / "llama").glob("*.gguf"), None), os.environ.get("NIWAKI_LLAMA_CPP")
            if not (file and place):
                continue
            script = common.node_script(Path(place), "llama_cpp_chat.mjs")
            whole = ["timeout", "300", *script, str(file), QUESTION, "64"]
        ran, made = _timed(whole, work), dict[str, Any]()
        if name == "bench" and (work / "bench.json").exists():
            speeds = SpeedRecord.load(work / "bench.json").speeds
            made["tokens_per_second"] = {speed.weights: speed.tokens_per_second for speed in speeds}
        elif (out / "niwaki.json").exists() and "--plan" not in words:
            record_of_it = Record.load(out / "niwaki.json")
            made |= {"size": record_of_it.size, "loss": record_of_it.loss}
        sheet.add(model=model.name, name=name, command=command, machine=common.processor(), **ran, **made)
    print("done")


def _timed(words: list[str], work: Path) -> common.Cell:
    """Seconds, the processor's seconds, the largest memory of it and what it starts (bytes), and its last lines."""
    print(" ".join(words[2:]), flush=True)
    began = time.perf_counter()
    with (work / "output.txt").open("w") as output:
        process = subprocess.Popen(words, cwd=work, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    seconds, code = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
    lines = (work / "output.txt").read_text(errors="replace").splitlines()[-6:]
    print(f"  {code}: {seconds:.0f} s, {used.ru_maxrss / 2**20:.2f} GiB", *lines, sep="\n  ")
    return {
        "exit": code,
        "seconds": round(seconds, 1),
        "processor": round(used.ru_utime + used.ru_stime, 1),
        "peak": used.ru_maxrss * 1024,
        "lines": [line.replace(str(work), "").strip() for line in lines],
    }


if __name__ == "__main__":
    common.main(commands, about=__doc__)
