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

from niwaki import cli, pipeline
from niwaki.blocks import Block
from niwaki.errors import NumericalError

PATIENCE = 60.0


def install(hook: dict[str, Any] | None, rank: int) -> None:
    """Makes process ``hook["rank"]`` end in block ``hook["block"]`` in the way of ``hook["how"]``."""
    if hook is None or hook["rank"] != rank:
        return
    real = Block.input_grams

    def input_grams(self: Block, *args: Any, **others: Any) -> Any:
        if self.index == hook["block"]:
            if hook["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if hook["how"] == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            if hook["how"] == "unforeseen":
                raise ZeroDivisionError("nobody thought of this")
            raise NumericalError("this process is out of luck")
        return real(self, *args, **others)

    Block.input_grams = input_grams  # type: ignore[method-assign]


def child(job: dict[str, Any], rank: int, port: int) -> int:
    """The process id of a fork that does the job's part ``rank``."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        for stream, name in ((1, "out"), (2, "err")):
            file = os.open(f"{job['directory']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, stream)
        size = str(len(job["commands"]))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        install(job["hook"], rank)
        sys.argv = ["niwaki", *job["commands"][rank]]
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    cli._quiet_libraries()
    for line in sys.stdin:
        job = json.loads(line)
        Path(job["directory"]).mkdir(parents=True, exist_ok=True)
        print(json.dumps(do(job)), flush=True)


if __name__ == "__main__":
    main()
