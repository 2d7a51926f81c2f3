"""Makes a process end, or its disk fail, at a call that changes the disk, through a library before the system's own.

``preload()`` once, early; then :meth:`Calls.arm` in a fork. Linux with a compiler.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: What happens at the call: nothing, it is killed (in the middle of a write), the disk is full from then on, this one
#: call fails, or SIGTERM.
COUNT, KILL, FULL, IO, STOP = range(5)
#: Whether all that is possible here.
POSSIBLE = sys.platform == "linux" and shutil.which("cc") is not None

_OURS = "NIWAKI_FAULTS"


def preload() -> None:
    """Starts this process again with the library, unless it has it."""
    if not POSSIBLE:
        return
    if library := os.environ.pop(_OURS, None):
        del os.environ["LD_PRELOAD"]  # processes that this one starts do without
        shutil.rmtree(Path(library).parent)
        return
    library = str(Path(tempfile.mkdtemp(prefix="faults-")) / "faults.so")
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": library, _OURS: library}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


class Calls:
    """Of a fork, those that change the disk: counted, and what happens at one of them."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        """How many there were in the fork that was armed last."""
        return int.from_bytes(self._shared[:], sys.byteorder)

    def arm(self, at: int = 0, mode: int = COUNT) -> None:
        """From now on calls of this process count, and what ``mode`` says happens at number ``at``."""
        self._shared[:] = bytes(8)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))
        ctypes.CDLL(None).arm(ctypes.c_void_p(address), ctypes.c_long(at), mode)
