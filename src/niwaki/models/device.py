"""The device and dtype that a model runs in, and the memory that the process takes."""

import contextlib
import ctypes
import re
import sys
from pathlib import Path

import psutil
import torch

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UsageError, raised_as
from niwaki.layer.linalg import has_bfloat16_units
from niwaki.models.processes import World
from niwaki.options import DTYPES, check_device, check_dtype
from niwaki.records.wording import counted

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def find_device(name: str) -> torch.device:
    """The device called ``name``; "auto" is a GPU if there is one. Raises UsageError if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    with raised_as(UsageError, f"the device {name!r} cannot be used", (RuntimeError, AssertionError)):
        torch.zeros(1, device=name)
    return torch.device(name)


def find_dtype(name: str, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype called ``name``; "auto": float32 on a CPU, else the checkpoint's. Raises UsageError for others."""
    if name == "auto":  # half precision is 100 times slower on a CPU without instructions for it
        return torch.float32 if device.type == "cpu" else stored_dtype(checkpoint)
    check_dtype(name)
    return _DTYPES[name]


def training_dtype(name: str, device: str, checkpoint: Checkpoint) -> str:
    """``name``, but "auto" is bfloat16 where files are in it and the processor has units for products of it.

    With AVX-512's a step of training takes two thirds of float32's time, with AMX half of it.
    """
    return "bfloat16" if name == "auto" and _has_units(find_device(device), checkpoint) else name


def writing_dtype(dtype: torch.dtype, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """What a model that runs in ``dtype`` writes text in: bfloat16 if its files are and the processor has units for it.

    That takes half of float32's time and memory.
    """
    return torch.bfloat16 if _has_units(device, checkpoint) else dtype


def _has_units(device: torch.device, checkpoint: Checkpoint) -> bool:
    """Whether ``device`` is a processor with units for bfloat16, and files are in it."""
    return device.type == "cpu" and stored_dtype(checkpoint) == torch.bfloat16 and has_bfloat16_units()


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What ``config.json`` says that the weights are in; float32 where it says nothing that a model can run in."""
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return _DTYPES.get(str(stored), torch.float32)


def resident() -> int:
    """Bytes of memory that the process has now."""
    return int(psutil.Process().memory_info().rss)


def most_resident() -> int:
    """Bytes of memory that the process has had at most."""
    with contextlib.suppress(OSError):
        # Its own: getrusage also counts what the parent had before it started this process.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        if peak := re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE):
            return int(peak[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def return_freed() -> None:
    """Returns freed memory to the system, where the C library keeps it for the process, as glibc does.

    It keeps what lies between things that stay, which large arrays after that have no use for.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_memory(device: torch.device) -> dict[str, int]:
    """``Record.peak_memory``."""
    gpu = {"device": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    return {"resident": most_resident(), **gpu}


def device_name(device: torch.device, world: World) -> str:
    """``Record.device``."""
    gpu = device.type == "cuda"
    detail = torch.cuda.get_device_name(device) if gpu else counted(torch.get_num_threads(), "thread")
    if not gpu and has_bfloat16_units():  # which sweeps of rounding use
        detail += ", units for bfloat16"
    first = f"{device} ({detail})"
    return first if world.size == 1 else f"{world.size} processes, the first on {first}"
