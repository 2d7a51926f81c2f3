"""What several processes share out, and how they find each other."""

from __future__ import annotations

import pytest
import torch

from niwaki.errors import UsageError
from niwaki.models.processes import World, world
from support.models import message


@pytest.mark.parametrize(("count", "size"), [(5, 1), (5, 2), (5, 3), (5, 5), (6, 3), (128, 7)])
def test_samples_are_shared_out_evenly_and_in_order(count: int, size: int) -> None:
    tokens = torch.arange(2 * count).view(count, 2)
    shares = [World(rank, size).share(tokens) for rank in range(size)]
    assert torch.equal(torch.cat(shares), tokens)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_fewer_samples_than_processes() -> None:
    for rank in range(3):
        with pytest.raises(UsageError, match="2 samples cannot be shared out to 3 processes"):
            World(rank, 3).share(torch.zeros(2, 8))


def test_owners() -> None:
    assert World(0, 1).owners([3.0, 1.0, 2.0]) == [0, 0, 0]
    assert World(0, 2).owners([]) == []
    # The largest first, each to the one that has least to do.
    assert World(0, 2).owners([1.0, 1.0, 4.0, 3.0]) == [1, 0, 0, 1]
    assert World(0, 3).owners([5.0, 5.0, 5.0, 1.0, 1.0, 1.0]) == [0, 1, 2, 0, 1, 2]
    assert World(0, 3).owners([0.0, 0.0]) == [0, 0]  # magnitude costs nothing
    costs = [float((7 * i) % 11 + 1) for i in range(50)]
    every = [World(rank, 4).owners(costs) for rank in range(4)]
    assert every[0] == every[1] == every[2] == every[3]
    loads = [sum(c for c, owner in zip(costs, every[0], strict=True) if owner == r) for r in range(4)]
    assert max(loads) - min(loads) <= 2


def test_what_all_processes_do_together() -> None:
    """Rows of a piece that one process alone would still be at when the others are done."""
    costs = [10.0, 2.0, 1.0, 1.0]
    assert World(0, 2).owners(costs, lambda _: 5.5) == [None, 0, 1, 1]
    assert World(0, 2).owners(costs, lambda _: 8.0) == World(0, 2).owners(costs) == [0, 1, 1, 1]
    block = [47.0, 14.7, 14.7, 5.7, 5.7, 5.7, 5.7]
    asked: list[int] = []

    def together(i: int) -> float:
        asked.append(i)
        return block[i] / 4

    assert World(0, 8).owners(block, together) == [None, None, None, 0, 1, 2, 3]
    assert asked == [0, 1, 2]  # others take less than a fair share
    assert World(0, 8).owners(block, lambda i: together(i) if i else None)[0] == 0
    assert World(0, 1).owners(costs, together) == [0] * 4


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_processes_that_nobody_introduced(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Some schedulers set the number of processes for purposes of their own."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    said = message(world("cpu").__enter__)
    assert "WORLD_SIZE is 2 here, but the processes do not find each other (" in said
    assert missing in said
    assert "start them with torchrun" in said


@pytest.mark.parametrize("value", ["y", "", "-1", "0", "1.5"])
def test_variables_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    said = f"the environment variable WORLD_SIZE is {value!r}, and not a whole number from 1"
    assert said in message(world("cpu").__enter__)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "z")
    said = "the environment variable LOCAL_RANK is 'z', and not a whole number from 0"
    assert said in message(world("cpu").__enter__)


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.cuda.device_count()
    monkeypatch.setenv("WORLD_SIZE", "99")
    monkeypatch.setenv("LOCAL_RANK", str(count))
    said = f"no GPU for process {count + 1} on this machine, which has {count}; start as many"
    assert said in message(world("cuda").__enter__)


def test_one_process_has_nobody_to_talk_to() -> None:
    tensor = torch.arange(3.0)
    with world("mps:7") as (one, device):
        assert device == "mps:7"
        one.sum([tensor])
        assert tensor.tolist() == [0, 1, 2]
        assert one.send(tensor, 0) is tensor
        assert one.collected("x") == ["x"]
        assert one.received("x") == "x"
        assert one.first
