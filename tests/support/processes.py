"""Runs the command line in several processes at once, as ``torchrun`` would start them.

    python processes.py

reads jobs, a line of JSON each: {"directory": where what they print goes, "commands": the arguments of each process,
"hook": what happens to one of them, or null}. It answers with a line: the exit code of each, null for one that had to
be killed after a minute.

All is imported once and processes are forks of this one, which is why there is only one thread.

    python -m torch.distributed.run ... processes.py HOOK ARGUMENTS

does a job's part in a process that is there already.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from niwaki.cli import main as cli
from niwaki.errors import NumericalError
from niwaki.healing.whole import Training
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.models.block import DecoderBlock
from niwaki.models.layout import Matrix
from niwaki.pruning import prune as pipeline, solve

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.forks import finish, warm_up

PATIENCE = 60.0


def install(hook: dict[str, Any] | None, rank: int) -> None:
    """Makes process ``hook["rank"]`` end in block ``hook["block"]`` in the way of ``hook["how"]``.

    Before Gram matrices are made, or where it solves the matrix called ``hook["matrix"]``, or "any". With "watch" for
    a way each process writes the shapes of the matrices that it solves to a file in the directory ``hook["to"]``, with
    "draw" they draw as on a terminal.
    """
    if hook is not None and hook["how"] == "draw":
        os.environ["FORCE_COLOR"] = "1"
    elif hook is not None and hook["how"] == "watch":

        def watched(W: Tensor, gram: Gram) -> LayerProblem:
            with open(f"{hook['to']}/{rank}", "a") as file:
                file.write(f"{json.dumps(W.shape)}\n")
            return LayerProblem(W, gram)

        vars(solve)["LayerProblem"] = watched
    elif hook is not None and hook["rank"] == rank and "step" in hook:
        step = Training._step

        def before_step(self: Training, windows: Tensor, share: float) -> bool:
            if self.schedule.steps == hook["step"]:
                end(hook["how"])
            return step(self, windows, share)

        Training._step = before_step  # type: ignore[method-assign]
    elif hook is not None and hook["rank"] == rank:
        input_grams, weight = DecoderBlock.input_grams, DecoderBlock.weight

        def before_grams(self: DecoderBlock, *args: Any, **others: Any) -> Any:
            if self.index == hook["block"] and "matrix" not in hook:
                end(hook["how"])
            return input_grams(self, *args, **others)

        def before_solving(self: DecoderBlock, matrix: Matrix) -> Tensor:
            if self.index == hook["block"] and hook.get("matrix") in (matrix.name, "any"):
                end(hook["how"])
            return weight(self, matrix)

        DecoderBlock.input_grams, DecoderBlock.weight = before_grams, before_solving  # type: ignore[method-assign]


def end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "unforeseen":
        raise ZeroDivisionError("nobody thought of this")
    raise NumericalError("this process is out of luck")


def child(job: dict[str, Any], rank: int, port: int) -> int:
    """The process id of a fork that does the job's part ``rank``."""

    def work() -> None:
        install(job["hook"], rank)
        sys.argv = ["niwaki", *job["commands"][rank]]
        cli.main()

    process = os.fork()
    if not process:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{job['directory']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(job["commands"]))}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        finish(work)
    return process


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def do(job: dict[str, Any]) -> list[int | None]:
    port = free_port()
    running = {child(job, rank, port): rank for rank in range(len(job["commands"]))}
    codes: list[int | None] = [None] * len(running)
    deadline = time.monotonic() + PATIENCE
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            codes[running.pop(process)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for process in running:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            break
        else:
            time.sleep(0.01)
    return codes


def main() -> None:
    if len(sys.argv) > 1:
        install(json.loads(sys.argv[1]), int(os.environ["RANK"]))
        sys.argv = ["niwaki", *sys.argv[2:]]
        cli.main()
        return
    assert pipeline  # imported before the first fork
    warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        Path(job["directory"]).mkdir(parents=True, exist_ok=True)
        print(json.dumps(do(job)), flush=True)


if __name__ == "__main__":
    main()
