"""Several processes that prune one model together, as ``torchrun`` starts them.

Each process walks through all blocks, with its share of the calibration text. Gram matrices are summed over the
processes, the matrices of a block are shared out to be solved, the rows of the largest ones too, and the first process
writes. Sums over processes have a fixed order, so the same number of processes gives the same bytes.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from niwaki.errors import UsageError, WorkerError, one_line, shown
from niwaki.layer.patterns.rows import Rows

T = TypeVar("T")

#: A matrix of a large model may take hours, and a process that ends is noticed at once.
_PATIENCE = timedelta(hours=24)


@dataclass(eq=False)
class World:
    """The ``size`` processes of a run, of which this is number ``rank``, from 0; the first one writes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and shows progress."""
        return self.rank == 0

    def share(self, tokens: Tensor) -> Tensor:
        """This process's share of ``tokens`` (samples, length), consecutive, as many as the others' to within one."""
        if len(tokens) < self.size:
            shortage = f"{len(tokens)} samples cannot be shared out to {self.size} processes"
            raise UsageError(f"{shortage}; start fewer processes or give more samples")
        return tokens.tensor_split(self.size)[self.rank]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Adds up each tensor over the processes, in place."""
        if self.size > 1:
            with _lost():
                for tensor in tensors:
                    dist.all_reduce(tensor)

    def collected(self, value: T) -> list[T]:
        """The value of each process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _lost():
            dist.all_gather_object(values, value)
        return values

    def check_same(self, asked: dict[str, Any]) -> None:
        """Raises UsageError where the processes were not asked for the same."""
        for rank, other in enumerate(self.collected(asked)):
            differing = [name for name in asked if asked[name] != other[name]]
            if differing:
                other_run = f"process {rank} was asked for another run than process {self.rank}"
                raise UsageError(f"{other_run}: they differ in {', '.join(differing)}")

    def received(self, value: T, source: int = 0) -> T:
        """What process ``source`` has as ``value``."""
        return self.collected(value)[source]

    def send(self, tensor: Tensor, source: int) -> Tensor:
        """``tensor`` as process ``source`` has it; the others give one of the same shape and dtype to write to."""
        if self.size > 1:
            with _lost():
                dist.broadcast(tensor, source)
        return tensor

    def rows(self, count: int) -> Rows:
        """This process's rows of a matrix with ``count``, consecutive and as many as the others' to within one."""
        return _SharedRows(self, count)

    def owners(
        self, costs: Sequence[float], together: Callable[[int], float | None] = lambda _: None
    ) -> list[int | None]:
        """The process that does each task, so that all are done early; None: all do it together, before the others.

        ``costs`` are those for one process, ``together`` is the cost for each if all do a task; None if they cannot.
        Together is worth it only for a task that takes one process longer than all of them need for everything.
        """
        order = sorted(range(len(costs)), key=lambda i: -costs[i])
        large = [i for i in order if costs[i] * self.size > sum(costs)]
        shared = {i: cost for i in large if (cost := together(i)) is not None}

        def plan(shared: dict[int, float]) -> tuple[float, list[int | None]]:
            """(when all is done, the owners): the largest tasks first, each to the process with the least to do."""
            owners: list[int | None] = [None] * len(costs)
            loads = [0.0] * self.size
            for i in order:
                if i not in shared:
                    owner = owners[i] = loads.index(min(loads))
                    loads[owner] += costs[i]
            return sum(shared.values()) + max(loads), owners

        plans = [plan(dict(itertools.islice(shared.items(), n))) for n in range(len(shared) + 1)]
        return min(plans, key=lambda plan: plan[0])[1]


class _SharedRows(Rows):
    """The rows of a matrix that this process has, where all processes have some."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._ends = [count * i // world.size for i in range(world.size + 1)]

    def of(self, rows: int) -> int:
        return self._ends[-1]

    def own(self, whole: Tensor) -> Tensor:
        return self._of(self._world.rank, whole).clone()  # so that the whole can be freed

    def sum(self, values: Tensor) -> Tensor:
        self._world.sum([values])
        return values

    def sum_after(self, count: int) -> int:
        counts = torch.zeros(self._world.size, dtype=torch.int64)
        counts[self._world.rank] = count
        return int(self.sum(counts)[self._world.rank + 1 :].sum())

    def joined(self, own: Tensor) -> Tensor:
        whole = own.new_empty(self._ends[-1], *own.shape[1:])
        self._of(self._world.rank, whole).copy_(own)
        for source in range(self._world.size):
            self._world.send(self._of(source, whole), source)
        return whole

    def _of(self, rank: int, whole: Tensor) -> Tensor:
        return whole[self._ends[rank] : self._ends[rank + 1]]


@contextlib.contextmanager
def world(device: str) -> Iterator[tuple[World, str]]:
    """(the processes that ``torchrun`` started, or one alone; this one's device).

    When a process ends with an error, the others end with a WorkerError as soon as they wait for it. UsageError for a
    numbered device, which all would share, for too few GPUs, where the processes do not find each other, and for
    variables of ``torchrun`` that are no numbers.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield World(), device
        return
    if device.startswith("cuda:"):
        raise UsageError(f"each of the {size} processes has a GPU of its own; use --device cuda instead of {device}")
    local = _number("LOCAL_RANK", 0)
    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if gpu:
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"there is no GPU for process {local + 1} on this machine, which has {torch.cuda.device_count()}; "
                "start as many processes as GPUs, or use --device cpu"
            )
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    # Objects and tensors on the CPU go by gloo, tensors on GPUs by nccl.
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"WORLD_SIZE is {size} here, but the processes do not find each other ({one_line(error)}); "
            "start them with torchrun, or unset WORLD_SIZE for one alone"
        ) from error
    try:
        yield World(dist.get_rank(), size), device
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _number(name: str, least: int) -> int:
    """A variable of the environment, ``least`` where it is not set; UsageError where it is not a number from there."""
    value = os.environ.get(name, str(least))
    if not value.isdecimal() or int(value) < least:
        raise UsageError(
            f"the environment variable {name} is {shown(value)}, and not a whole number from {least}; start the "
            "processes with torchrun, or unset it for one alone"
        )
    return int(value)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WorkerError("another process of this run has ended; see what it said") from error
