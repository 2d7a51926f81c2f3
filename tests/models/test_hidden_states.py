"""Hidden states in memory and in a file: the same numbers, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from niwaki.errors import OutputError
from niwaki.models import streamed as blocks
from niwaki.models.hidden_states import MemoryBudget, SpillList
from niwaki.quantities import parse_size
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord, Record
from support.models import message, random_tokens, save_model
from support.runs import files, listing, raw, run as run_wanda

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


def links_of_this_process() -> list[str]:
    """What it has open, where the system says that."""
    found = Path("/proc/self/fd")
    return [os.readlink(path) for path in found.iterdir() if path.is_symlink()] if found.exists() else []


def open_files() -> int:
    """How many files of no name this process has open."""
    return sum("(deleted)" in link for link in links_of_this_process())


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
    assert message(lambda: parse_size(text)) == f"invalid size {text!r}; try 8GiB or 500MB"


# MemoryBudget


@pytest.fixture
def on_disk(temporary: Path) -> Iterator[MemoryBudget]:
    """All is spilled."""
    with contextlib.closing(MemoryBudget(0)) as budget:
        yield budget


def test_room_for_everything() -> None:
    budget = MemoryBudget()
    assert all(budget.take(2**60) for _ in range(3))
    assert budget.spilled == 0
    budget.close()


def test_room_is_taken_until_none_is_left() -> None:
    budget = MemoryBudget(100)
    assert [budget.take(size) for size in (60, 41, 40, 1, 0)] == [True, False, True, False, True]
    budget.left = 5
    assert [budget.take(size) for size in (5, 1)] == [True, False]


def test_places_in_the_file_do_not_overlap(on_disk: MemoryBudget) -> None:
    places = [on_disk.spill(torch.zeros(size, dtype=torch.uint8)) for size in (10, 0, 7)]
    assert [place.start for place in places] == [0, 10, 10]
    assert on_disk.spilled == 17


# SpillList


def random_batches(dtype: torch.dtype) -> list[Tensor]:
    """Of different numbers of samples."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 5, 7, generator=generator).to(dtype) for n in (3, 3, 1, 4)]


def spilled(budget: MemoryBudget, tensors: Iterable[Tensor]) -> SpillList:
    batches = SpillList(budget)
    for tensor in tensors:
        batches.append(tensor)
    return batches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fits", [0, 1, 2, 4])
def test_batches_are_what_was_put_in(dtype: torch.dtype, fits: int, temporary: Path) -> None:
    wanted = random_batches(dtype)
    sizes = [tensor.nbytes for tensor in wanted]
    budget = MemoryBudget(sum(sizes[:fits]))
    batches = spilled(budget, wanted)
    assert len(batches) == 4
    assert budget.spilled == sum(sizes[fits:])
    assert [batches[i] is tensor for i, tensor in enumerate(wanted)] == [i < fits for i in range(4)]

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
    wanted = [torch.arange(n, dtype=torch.float32) for n in (20, 10, 5, 1)]
    batches = spilled(budget, wanted)
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


def test_tensors_that_are_not_contiguous(on_disk: MemoryBudget) -> None:
    wanted = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    batches = spilled(on_disk, [wanted])
    assert torch.equal(batches[0], wanted)
    batches[0] = wanted.flip(0).expand(2, 4, 3)
    assert torch.equal(batches[0], wanted.flip(0))


def test_the_directory_of_the_file(temporary: Path, on_disk: MemoryBudget) -> None:
    """On Linux the file has no name, but a place."""
    spilled(on_disk, [torch.zeros(3)])
    if links := links_of_this_process():
        assert any(link.startswith(str(temporary)) for link in links)
    assert list(temporary.iterdir()) == []
    on_disk.close()  # once is enough, twice does no harm


def test_a_directory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(OutputError, match=r"cannot write .*nowhere: No such file"):
        spilled(MemoryBudget(0), [torch.zeros(3)])


# Whole runs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", "mixtral")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """SpillList of two samples, so that the last of five is smaller."""
    monkeypatch.setattr(blocks, "TOKENS_PER_BATCH", 48)


def run(model: Path, out: Path, **changes: Any) -> Record:
    texts = {"calibration": random_tokens(5, 24), "text": random_tokens(3, 24, seed=1)}
    return run_wanda(model, out, **texts, **changes)


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
    assert listing(tmp_path / "a") == listing(tmp_path / "b")
    assert files(tmp_path / "a", "README.md") == files(tmp_path / "b", "README.md")


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
def test_no_space_for_hidden_states(tmp_path: Path, on_disk: MemoryBudget, limit: int) -> None:
    """Files may have ``limit`` bytes: the first batch does not fit, or does in part, or a later one does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        said = message(lambda: spilled(on_disk, [torch.zeros(1000)] * 3), OutputError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in said


def test_a_full_disk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    said = message(lambda: run(model, tmp_path / "out", max_memory=1), OutputError)
    assert "no space left on disk for " in said
    assert "hidden states go there; give more --max-memory, or another place as TMPDIR" in said
    assert "as large as the model" not in said
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
