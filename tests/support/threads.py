"""Processes played by threads, so that what several of them do together is tested in one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from niwaki.models.processes import World

T = TypeVar("T")


class Thread(World):
    """One of several threads that talk by a table, as processes do by gloo; each waits for all others."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[Any]) -> None:
        super().__init__(rank, size)
        self._barrier, self._table = barrier, table

    def collected(self, value: T) -> list[T]:
        self._barrier.wait()
        self._table[self.rank] = value
        self._barrier.wait()
        return list(self._table)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            values = self.collected(tensor.clone())
            assert {value.shape for value in values} == {tensor.shape}, "not the same call"
            tensor.copy_(torch.stack(values).sum(dim=0))

    def send(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self.collected(tensor.clone())[source])


def in_threads(size: int, work: Callable[[World], T]) -> list[T]:
    """What ``work`` gives each of ``size`` threads; if one fails, all do."""
    barrier, table = threading.Barrier(size, timeout=60), [None] * size

    def do(rank: int) -> T:
        try:
            return work(Thread(rank, size, barrier, table))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(do, range(size)))
