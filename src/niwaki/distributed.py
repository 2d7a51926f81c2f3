"""Several processes that prune one model together, as ``torchrun`` starts them.

Each process walks through all blocks, with its share of the calibration text. Gram matrices are summed over the
processes, the matrices of a block are shared out to be solved, and the first process writes. Sums over processes have a
fixed order, so the same number of processes gives the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from niwaki.errors import NiwakiError, UsageError, WorkerError

T = TypeVar("T")

#: A matrix of a large model may take hours, and a process that ends is noticed at once.
_PATIENCE = timedelta(hours=24)


class World:
    """The processes of a run; this one is one of them. Alone, nothing here does anything.

    Attributes:
        rank: The number of this process, from 0; the first one writes.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def first(self) -> bool:
        """Whether this is the process that writes, and that tells how it goes."""
        return self.rank == 0

    def share(self, tokens: Tensor) -> Tensor:
        """This process's part of ``tokens`` (samples, length): a run of them, as long as the others' to within one.

        Raises:
            UsageError: there are more processes than samples.
        """
        if len(tokens) < self.size:
            raise UsageError(
                f"{len(tokens)} samples cannot be shared out to {self.size} processes; start fewer, or "
                "give more samples"
            )
        return tokens.tensor_split(self.size)[self.rank]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Adds up each tensor over the processes, in place."""
        if self.size > 1:
            with _lost():
                for tensor in tensors:
                    dist.all_reduce(tensor)

    def joined(self, rows: Tensor) -> Tensor:
        """(all rows, ...) on the CPU: the rows of all processes, one process's after the other's."""
        return rows if self.size == 1 else torch.cat(self.collected(rows.cpu()))

    def collected(self, value: T) -> list[T]:
        """The value of each process."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _lost():
            dist.all_gather_object(found, value)
        return found

    def told(self, value: T, source: int = 0) -> T:
        """What process ``source`` has as ``value``."""
        return self.collected(value)[source]

    def send(self, tensor: Tensor, source: int) -> Tensor:
        """``tensor`` as process ``source`` has it; the others give one of the same shape and dtype to write to."""
        if self.size > 1:
            with _lost():
                dist.broadcast(tensor, source)
        return tensor

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Which process does each of several pieces of work, so that all are done at about the same time."""
        owners, loads = [0] * len(costs), [0.0] * self.size
        for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += costs[i]
        return owners


@contextlib.contextmanager
def world(device: str) -> Iterator[tuple[World, str]]:
    """(the processes that ``torchrun`` started, this one's device); one process where nobody started more.

    When a process ends with an error, which it says itself, so do the others: with a WorkerError, as soon as they
    wait for it.

    Raises:
        UsageError: a device with a number, of which each process would take the same one, or too few GPUs; or the
            processes do not find each other.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(), device
        return
    if device.startswith("cuda:"):
        raise UsageError(
            f"each of the {size} processes has a GPU of its own; say --device cuda, and not {device}"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if gpu:
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"there is no GPU for process {local + 1} on this machine, which has {torch.cuda.device_count()}; "
                "start as many processes as GPUs, or say --device cpu"
            )
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    # Objects and tensors on the CPU go by gloo, tensors on GPUs by nccl.
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"WORLD_SIZE is {size} here, but the processes do not find each other ({' '.join(str(error).split())}); "
            "start them with torchrun, or unset WORLD_SIZE for one alone"
        ) from error
    try:
        yield World(dist.get_rank(), size), device
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, NiwakiError):
            raise
        raise WorkerError("another process of this run has ended; see what it said") from error
