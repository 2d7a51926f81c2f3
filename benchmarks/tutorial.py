"""The figures of docs/tutorial.md: does all that the page says, as it stands there, and takes the time of each command.

    python benchmarks/tutorial.py SMOLLM2 WORK --record benchmarks/results/tutorial.json

WORK keeps what is made: the same command resumes after the last finished step. With NIWAKI_LLAMA_CPP, a directory where
npm installed node-llama-cpp, the model also runs in llama.cpp, and without it that step is left out.
"""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from common import Model, Record, Work

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
#: The models of the last table, by the names that the page gives them.
MODELS = ("smollm2", "small", "pruned", "healed")
#: The lines of what a command prints that the page shows, where it does not show all of them.
SHOWN = {
    "niwaki inspect": r" matrix|.*\d+x\d+ ",
    "niwaki compress smollm2 small --size 0.35 --calibration demo --samples 16 --length 512 --plan": "",
    "niwaki compress": r"perplexity|above|quantize|embeddings|pack|written",
    "niwaki prune": r"effort|zeros|fit|own text|perplexity|above|written",
    "niwaki heal": r"KL|  +tokens|  +[\d,]+  |healed|perplexity|above|written",
    "niwaki eval": r"which-follows|perplexity",
    "niwaki bench": r"weights|dense|packed",
    "python tune.py": r".*train_loss",
}


def files(page: str) -> dict[str, str]:
    """The programs that the page has its reader save, by their names."""
    blocks = re.findall(r"`(\w+\.(?:py|mjs))`[^\n]*:\n\n```\w+\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return dict(blocks)


def commands(page: str) -> list[str]:
    """The commands of the page that make or measure something, in order; not those that fetch or install."""
    lines = re.findall(r"^ {4}\$ ((?:niwaki|python|node) .*)$", page, re.MULTILINE)
    return [line.partition(" #")[0].strip() for line in lines]


def _shown(command: str, said: str) -> list[str]:
    """The lines that the page shows."""
    wanted = re.compile(next((each for start, each in SHOWN.items() if command.startswith(start)), ""))
    return [line.rstrip() for line in said.splitlines() if line.strip() and wanted.match(line)]


def _cpu() -> float:
    """The seconds of processors that finished commands took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _prepare(model: Path, work: Path, page: str) -> None:
    """Puts the model where the page has it, and beside it the page's programs and llama.cpp."""
    if not (work / MODELS[0]).exists():
        shutil.copytree(model, work / MODELS[0])
    for name, text in files(page).items():
        (work / name).write_text(text)
    if "NIWAKI_LLAMA_CPP" in os.environ and not (work / "node_modules").exists():
        (work / "node_modules").symlink_to(Path(os.environ["NIWAKI_LLAMA_CPP"]) / "node_modules")


def _run(page: str, work: Path) -> Iterator[common.Cell]:
    """Each command with its times and what it printed; those that finished before are not repeated."""
    path = work / "steps.json"
    steps = json.loads(path.read_text()) if path.exists() else {}
    for command in commands(page):
        name, *arguments = shlex.split(command)
        if name == "node" and not (work / "node_modules").exists():
            continue
        if command not in steps:
            called = {"niwaki": [sys.executable, "-m", "niwaki"], "python": [sys.executable]}.get(name, [name])
            cpu, began = _cpu(), time.perf_counter()
            done = subprocess.run([*called, *arguments], cwd=work, stdout=subprocess.PIPE)
            seconds, cpu, said = time.perf_counter() - began, _cpu() - cpu, done.stdout.decode()
            print(f"$ {command}\n{said}\n({seconds:.0f} s, {cpu:.0f} s of processors)\n", flush=True)
            done.check_returncode()
            steps[command] = {"seconds": seconds, "cpu": cpu, "said": said}
            path.write_text(json.dumps(steps, indent=2))
        yield {"command": command, **steps[command], "said": _shown(command, steps[command]["said"])}


def _json(path: Path) -> Any:
    """What the file has; {} where it is not there yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def result(name: str, work: Path) -> common.Cell:
    """What the commands so far have measured of a model."""
    dense = name == MODELS[0]
    made = _json(work / (MODELS[1] if dense else name) / "niwaki.json")
    scores = _json(work / f"{name}.json").get("tasks", {}).get("scores", [])
    bench = _json(work / f"{name}-bench.json" if dense else work / name / "niwaki-bench.json")
    points = (made.get("healing") or {}).get("points", [])
    return {
        "model": name,
        "bytes": sum(file.stat().st_size for file in (work / name).glob("*.safetensors")),
        "before": made.get("perplexity", {}).get("before"),
        "after": None if dense else made.get("perplexity", {}).get("after"),
        "task": next((each for each in scores if each["metric"] == "acc"), None),
        "speed": next(iter(bench.get("speeds", [])[::-1]), None),  # the last one is packed, if any is
        "healed_on": points[made["healing"]["best"]]["tokens"] if points else None,
    }


def tutorial(model: Model, work: Work, record: Record = None) -> None:
    """Does all that docs/tutorial.md says, and records what it took and what came out, after each command."""
    page = PAGE.read_text(encoding="utf-8")
    work.mkdir(parents=True, exist_ok=True)
    _prepare(model, work, page)
    steps = []
    for step in _run(page, work):
        steps.append(step)
        models = [result(name, work) for name in MODELS]
        common.save(record, machine=common.processor(), steps=steps, models=models)


if __name__ == "__main__":
    common.main(tutorial, about=__doc__)
