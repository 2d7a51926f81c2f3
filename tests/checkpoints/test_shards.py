"""New files: byte for byte those of the safetensors library, with one tensor in memory at a time."""

from __future__ import annotations

import errno
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from niwaki.checkpoints.reading import INDEX_NAME
from niwaki.checkpoints.tensors import DTYPES
from niwaki.checkpoints.writing import Shards, write_file, write_tensors
from niwaki.errors import OutputError

ALL = {f"of {name}": torch.arange(6).view(2, 3).to(dtype) for name, dtype in reversed(DTYPES.items())}
ODD = {
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    'with " and é and \n': torch.tensor([1.5]).half(),
    "Z before a": torch.zeros(1),
    "a": torch.ones(1),
}


@pytest.mark.parametrize("tensors", [ALL, ODD, ALL | ODD, {"one": torch.zeros(3, dtype=torch.uint8)}, {}])
def test_files_are_those_of_the_library(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(dict(reversed(tensors.items())), tmp_path / "expected", {"format": "pt"})
    write_tensors(tmp_path / "file", tensors)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "expected").read_bytes()


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4).T[1:]
    write_tensors(tmp_path / "file", {"turned": value})
    assert torch.equal(load_file(tmp_path / "file")["turned"], value)


@pytest.mark.slow
def test_one_tensor_is_there_at_a_time(tmp_path: Path) -> None:
    there: list[weakref.ref[Tensor]] = []

    def read(key: str) -> Tensor:
        gc.collect()
        assert [each() for each in there] == [None] * len(there)
        value = torch.full((2, 3), float(key))
        there.append(weakref.ref(value))
        return value

    like = {str(number): torch.empty(2, 3, device="meta") for number in range(4)}
    write_file(tmp_path / "file", like, read)
    assert {key: value[0, 0].item() for key, value in load_file(tmp_path / "file").items()} == {
        str(number): number for number in range(4)
    }


def test_a_full_disk_shows_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("niwaki.checkpoints.writing.reserve", full)
    with pytest.raises(OutputError, match="no space left on disk"):
        write_file(tmp_path / "file", {"one": torch.empty(2, device="meta")}, lambda _: pytest.fail("read"))


def test_the_index_of_several_files(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.write("first", ALL, ALL.__getitem__)
    shards.finish()
    assert not (tmp_path / INDEX_NAME).exists()
    shards.write("second", ODD, ODD.__getitem__)
    shards.finish()
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["weight_map"] == dict.fromkeys(ALL, "first") | dict.fromkeys(ODD, "second")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in (ALL | ODD).values())
