"""Hidden states in memory and in a file: the same numbers, and nothing left behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from niwaki import prune
from niwaki.errors import OutputError, UsageError
from niwaki.models import streamed as blocks
from niwaki.models.hidden_states import MemoryBudget, SpillList
from niwaki.quantities import parse_size
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord, Record
from support.arguments import arguments
from support.models import random_tokens, save_model
from support.runs import raw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of the system, which has to be empty again, and no file still open, in the end."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    before = open_files()
    yield path
    assert list(path.iterdir()) == []
    assert open_files() == before


def open_files() -> int:
    """How many files of no name this process has open."""
    found = Path("/proc/self/fd")
    if not found.exists():
        return 0
    return sum("(deleted)" in os.readlink(path) for path in found.iterdir() if path.is_symlink())


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1b", 1), ("100000", 100_000), ("500MB", 500 * 10**6), ("8GiB", 8 * 2**30), ("8 gib", 8 * 2**30)),
        *((" 1.5G ", 1_500_000_000), ("0.5KiB", 512), ("3k", 3000), ("2Ti", 2 * 2**40), ("7b", 7), ("1TB", 10**12)),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "0", "0.0G", "-1G", "8 apples", "8i", "8iB", "1e9", "1,5G", "8G 1", ".5G", "nan", "8GG"]
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert str(caught.value) == f"invalid size {text!r}; try 8GiB or 500MB"


# MemoryBudget


def test_room_for_everything() -> None:
    budget = MemoryBudget()
    assert all(budget.take(2**60) for _ in range(3))
    assert budget.spilled == 0
    budget.close()


def test_room_is_taken_until_none_is_left() -> None:
    budget = MemoryBudget(100)
    assert budget.take(60)
    assert not budget.take(41)  # and nothing is taken then
    assert budget.take(40)
    assert not budget.take(1)
    assert budget.take(0)
    budget.left = 5
    assert budget.take(5)
    assert not budget.take(1)


def test_places_in_the_file_do_not_overlap() -> None:
    budget = MemoryBudget(0)
    places = [budget.spill(torch.zeros(size, dtype=torch.uint8)) for size in (10, 0, 7)]
    assert [place.start for place in places] == [0, 10, 10]
    assert budget.spilled == 17
    budget.close()


# SpillList


def random_batches(dtype: torch.dtype) -> list[Tensor]:
    """Of different numbers of samples."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 5, 7, generator=generator).to(dtype) for n in (3, 3, 1, 4)]


def append_all(batches: SpillList, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        batches.append(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fits", [0, 1, 2, 4])
def test_batches_are_what_was_put_in(dtype: torch.dtype, fits: int, temporary: Path) -> None:
    wanted = random_batches(dtype)
    sizes = [tensor.nbytes for tensor in wanted]
    budget = MemoryBudget(sum(sizes[:fits]))
    batches = SpillList(budget)
    append_all(batches, wanted)
    assert len(batches) == 4
    assert budget.spilled == sum(sizes[fits:])
    inside = [batches[i] is tensor for i, tensor in enumerate(wanted)]
    assert inside == [i < fits for i in range(4)]

    def check() -> None:
        for one, other in zip(batches, wanted, strict=True):
            assert (one.dtype, one.shape) == (dtype, other.shape)
            assert raw(one) == raw(other)

    check()
    # In any order, and without touching the others.
    for i in (2, 0, 3, 1, 2):
        wanted[i] = wanted[i].neg() * 3
        batches[i] = wanted[i]
        check()
    # What comes out can be written to, and is no part of what is kept in the file.
    for i in range(fits, 4):
        batches[i].zero_()
    check()
    assert list(temporary.iterdir()) == []
    budget.close()


def test_a_smaller_batch_fits_in_between() -> None:
    budget = MemoryBudget(100)
    batches = SpillList(budget)
    wanted = [torch.arange(n, dtype=torch.float32) for n in (20, 10, 5, 1)]
    append_all(batches, wanted)
    assert budget.spilled == 4 * (10 + 1)
    assert all(torch.equal(a, b) for a, b in zip(batches, wanted, strict=True))
    budget.close()


def test_several_lists_share_a_room() -> None:
    budget = MemoryBudget(200)
    lists = [SpillList(budget) for _ in range(3)]
    for number in range(4):
        for which, batches in enumerate(lists):
            batches.append(torch.full((5, 2), float(10 * which + number)))
    assert budget.spilled == 12 * 40 - 200
    lists[1][3] = torch.full((5, 2), -1.0)
    for which, batches in enumerate(lists):
        assert [float(b[0, 0]) for b in batches] == [
            -1.0 if (which, number) == (1, 3) else 10.0 * which + number for number in range(4)
        ]
    budget.close()


def test_tensors_that_are_not_contiguous() -> None:
    budget = MemoryBudget(0)
    batches = SpillList(budget)
    wanted = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    batches.append(wanted)
    assert torch.equal(batches[0], wanted)
    batches[0] = wanted.flip(0).expand(2, 4, 3)
    assert torch.equal(batches[0], wanted.flip(0))
    budget.close()


def test_the_directory_of_the_file(temporary: Path) -> None:
    """On Linux the file has no name, but a place."""
    budget = MemoryBudget(0)
    SpillList(budget).append(torch.zeros(3))
    if Path("/proc/self/fd").exists():
        assert any(
            os.readlink(path).startswith(str(temporary))
            for path in Path("/proc/self/fd").iterdir()
            if path.is_symlink()
        )
    assert list(temporary.iterdir()) == []
    budget.close()
    budget.close()  # once is enough, twice does no harm


def test_a_directory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(OutputError, match=r"cannot write .*nowhere: No such file"):
        SpillList(budget).append(torch.zeros(3))


# Whole runs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", "mixtral")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """SpillList of two samples, so that the last of five is smaller."""
    monkeypatch.setattr(blocks, "TOKENS_PER_BATCH", 48)


def run(model: Path, out: Path, **changes: Any) -> Record:
    options: dict[str, Any] = {
        "solver": "wanda",
        "sparsity": 0.5,
        "calibration": random_tokens(5, 24),
        "text": random_tokens(3, 24, seed=1),
        "device": "cpu",
    }
    return prune(model, out, **arguments(**{**options, **changes}))


class Failing(Progress):
    """Ends the run at its end, when all files are still open."""

    def solved(self, matrix: MatrixRecord) -> None:
        if matrix.block == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.slow
def test_hidden_states_on_disk_make_no_difference(tmp_path: Path, model: Path, dtype: str) -> None:
    one = run(model, tmp_path / "a", dtype=dtype)
    other = run(model, tmp_path / "b", dtype=dtype, max_memory=1)
    # Three times: for the inputs, and for the text with the dense and the pruned weights.
    size = (5 + 3 + 3) * 24 * 32 * (4 if dtype == "float32" else 2)
    note = f"{size / 2**20:,.1f} MiB of hidden states were spilled to disk (memory limit reached)"
    assert [text for text in other.notes if text != note] == one.notes
    assert note in other.notes
    assert other.perplexity == one.perplexity
    assert [m.error for m in other.matrices] == [m.error for m in one.matrices]
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in set(names) - {"niwaki.json", "README.md"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_memory_enough(tmp_path: Path, model: Path) -> None:
    assert not any("spilled to disk" in note for note in run(model, tmp_path / "out", max_memory=2**40).notes)


@pytest.mark.slow
def test_a_run_that_goes_on(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "whole", max_memory=1)
    # The budget is no part of what was asked for, and may be another one.
    for number, memory in enumerate((1, None)):
        out = tmp_path / f"{number}"
        with pytest.raises(KeyboardInterrupt):
            run(model, out, max_memory=1, progress=Failing())
        record = run(model, out, max_memory=memory)
        assert record.resumed == [1]
        for name in ("model.safetensors", "README.md"):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert len([note for note in record.notes if "spilled to disk" in note]) == 1


def test_nothing_is_left_of_a_run_that_fails(tmp_path: Path, model: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", max_memory=1, progress=Failing(), blocks=(1, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "temporary"]


@pytest.mark.parametrize("limit", [0, 1000, 10_000])
def test_no_space_for_hidden_states(tmp_path: Path, limit: int) -> None:
    """Files may have ``limit`` bytes: the first batch does not fit, or does in part, or a later one does not."""
    budget = MemoryBudget(0)
    batches = SpillList(budget)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OutputError) as caught:
            append_all(batches, [torch.zeros(1000)] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    budget.close()


def test_a_full_disk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OutputError) as caught:
        run(model, tmp_path / "out", max_memory=1)
    assert "no space left on disk for " in str(caught.value)
    assert "hidden states go there; give more --max-memory, or another place as TMPDIR" in str(caught.value)
    assert "as large as the model" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "temporary"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts it so")
def test_memory_of_the_parent_does_not_count() -> None:
    """Of a process that a large one has started; its own is that of Python and torch."""
    code = """
import subprocess, sys
held = bytearray(1_500_000_000)
held[::4096] = bytes([1]) * len(held[::4096])
show = "from niwaki.models.device import most_resident; print(most_resident())"
print(subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 10_000_000 < int(run.stdout) < 1_200_000_000
