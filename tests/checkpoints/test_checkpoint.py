"""Reading and writing model directories: the safetensors library is the judge, and files are cut and bent."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from niwaki.checkpoints.reading import INDEX_NAME, SINGLE_NAME, Checkpoint
from niwaki.checkpoints.tensors import new_shard
from niwaki.checkpoints.writing import CheckpointWriter, verify
from niwaki.errors import CheckpointError, NiwakiError, OutputError, UsageError
from niwaki.models.locate import locate_model
from niwaki.runs.carried import find_carried
from support.models import edit_json, message, reference, save_model, weight

Q = "model.layers.1.self_attn.q_proj.weight"
KINDS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(params=["single", "shards"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", "llama grouped", shards=request.param == "shards")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", shards=True)


def contents(directory: Path) -> dict[str, Tensor]:
    """All tensors, as the safetensors library reads them."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - is no mapping
    return found


def shard_of(directory: Path, key: str) -> Path:
    return directory / Checkpoint(directory).entries[key].shard


def refused(call: Callable[[], object], *said: str, kind: type[NiwakiError] = CheckpointError) -> None:
    """Asserts that it is, in a line that has all that is ``said``."""
    text = message(call, kind)
    assert all(part in text for part in said), text


def bend_header(path: Path, bend: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the header of a safetensors file and leaves its data alone."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    bend(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])


# Reading


def test_reads_what_safetensors_reads(directory: Path) -> None:
    checkpoint, expected = Checkpoint(directory), contents(directory)
    assert set(checkpoint.entries) == set(expected)
    assert len(expected) == 30
    for key, value in expected.items():
        assert checkpoint.dtype(key) == torch.float32
        assert torch.equal(checkpoint.read(key), value)
    assert checkpoint.config["model_type"] == "llama"
    refused(lambda: checkpoint.read("nothing"), "has no tensor 'nothing'")


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = {
        "matrix": torch.arange(6).view(2, 3).to(dtype),
        "number": torch.tensor(1).to(dtype),
        "nothing": torch.empty(0, 4, dtype=dtype),
    }
    save_file(values, tmp_path / SINGLE_NAME)
    checkpoint = Checkpoint(tmp_path)
    for key, value in values.items():
        read = checkpoint.read(key)
        assert (read.dtype, read.shape) == (dtype, value.shape)
        assert torch.equal(read.double(), value.double())


def test_an_unknown_dtype_is_named_when_it_is_read(single: Path) -> None:
    bend_header(single / SINGLE_NAME, lambda header: header[Q].update(dtype="F8_E8M0", shape=[4096]))
    refused(lambda: Checkpoint(single).read(Q), Q, "F8_E8M0")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(single: Path, bad: float) -> None:
    values = contents(single)
    values[Q][3, 5] = bad
    save_file(values, single / SINGLE_NAME, {"format": "pt"})
    checkpoint = Checkpoint(single)
    refused(lambda: checkpoint.read(Q), Q, "NaN or infinite")
    checkpoint.read(UP)  # the others are fine


#: By what is left, how many bytes of a file, from its size and where its data begins.
CUTS: dict[str, Callable[[int, int], int]] = {
    "nothing": lambda size, data: 0,
    "some of the length": lambda size, data: 5,
    "the length": lambda size, data: 8,
    "some of the header": lambda size, data: data // 2,
    "the header": lambda size, data: data,
    "some of the data": lambda size, data: (data + size) // 2,
    "all but a byte": lambda size, data: size - 1,
}


@pytest.mark.parametrize("left", CUTS)
def test_a_truncated_shard(directory: Path, left: str) -> None:
    path = shard_of(directory, Q)
    with path.open("r+b") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        file.truncate(CUTS[left](path.stat().st_size, header + 8))
    refused(lambda: Checkpoint(directory), path.name, "truncated")


def test_a_shard_that_shrinks_after_it_was_opened(single: Path) -> None:
    checkpoint = Checkpoint(single)
    entry = checkpoint.entries[Q]
    os.truncate(single / SINGLE_NAME, entry.offset + entry.size - 1)
    refused(lambda: checkpoint.read(Q), f"ends inside '{Q}'")
    (single / SINGLE_NAME).unlink()
    refused(lambda: checkpoint.read(Q), SINGLE_NAME)


def test_a_missing_shard(shards: Path) -> None:
    path = shard_of(shards, Q)
    path.unlink()
    refused(lambda: Checkpoint(shards), path.name, "download")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "truncated"),
        (b"<!DOCTYPE html><html>Repository not found</html>", "not a safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "git lfs pull"),
        (struct.pack("<Q", 2) + b"{}", "lacks"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors"),
        (struct.pack("<Q", 4) + b"null", "not a safetensors"),
        (struct.pack("<Q", 4) + b"{{{{", "not a safetensors"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xff\xfe", "not a safetensors"),
        (struct.pack("<Q", 1 << 63), "header"),
    ],
)
def test_files_that_are_no_safetensors(shards: Path, raw: bytes, said: str) -> None:
    path = shard_of(shards, Q)
    path.write_bytes(raw)
    refused(lambda: Checkpoint(shards), path.name, said)


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        *(("dtype", lie) for lie in (..., "F16", ["F32"])),
        *(("shape", lie) for lie in (..., "big", [32, 33], [-32, -32], [1 << 63, 1 << 63])),
        *(("data_offsets", lie) for lie in (..., [0], [-4096, 0], [4096, 0], [0.0, 4096.0], [0, 4096])),
        ("data_offsets", [1 << 40, (1 << 40) + 4096]),
    ],
    ids=str,
)
def test_headers_that_lie(single: Path, name: str, lie: Any) -> None:
    def bend(header: dict[str, Any]) -> None:
        header[Q][name] = lie
        if lie is ...:
            del header[Q][name]

    bend_header(single / SINGLE_NAME, bend)
    refused(lambda: Checkpoint(single), SINGLE_NAME)


def _add(dtype: str, shape: list[int], size: int) -> Callable[[Path], None]:
    """A tensor of ``size`` bytes after all others."""

    def add(path: Path) -> None:
        entries = Checkpoint(path.parent).entries.values()
        start, end = min(each.offset for each in entries), max(each.offset + each.size for each in entries)
        ends = [end - start, end - start + size]
        bend_header(path, lambda header: header.update(more={"dtype": dtype, "shape": shape, "data_offsets": ends}))
        path.write_bytes(path.read_bytes() + bytes(size))

    return add


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes() + b"x"),  # bytes that no tensor has
        lambda path: bend_header(path, lambda header: header.pop(Q)),  # a hole
        lambda path: bend_header(path, lambda header: header.update({Q: header[UP]})),
        lambda path: bend_header(path, lambda header: header.update(__metadata__=["x"])),
        lambda path: bend_header(path, lambda header: header.update(__metadata__={"x": 1})),
        lambda path: bend_header(path, lambda header: header.update(dict(reversed(header.items())))),
        _add("F32", [0, 3], 0),
        _add("F32", [1 << 63, 4, 0], 0),
        _add("U16", [2], 4),
        _add("F4", [4], 2),
        _add("X5", [4], 2),
    ],
)
def test_safetensors_is_the_judge(single: Path, out: Path, change: Callable[[Path], None]) -> None:
    path = single / SINGLE_NAME
    change(path)
    try:
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
    except SafetensorError:
        refused(lambda: Checkpoint(single), SINGLE_NAME)
        return
    checkpoint = Checkpoint(single)
    assert set(checkpoint.entries) == keys
    with CheckpointWriter(checkpoint, out):
        pass
    assert (out / SINGLE_NAME).read_bytes() == path.read_bytes()
    verify(out, checkpoint, {})


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "JSON"),
        ("[]", "JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": ["model.safetensors"]}', "weight_map"),
        ('{"weight_map": {"a": 7}}', "7"),
        ('{"weight_map": {"a": ["x"]}}', "x"),
        ('{"weight_map": {"a": ".."}}', ".."),
        ('{"weight_map": {"a": ""}}', "not a safetensors file: ''"),
        ('{"weight_map": {"a": "config.json"}}', "not a safetensors file: 'config.json'"),
        ('{"weight_map": {"a": "\\u0000.safetensors"}}', "lacks the shard"),
        ('{"weight_map": {"a": "\\ud800.safetensors"}}', "cannot be read"),
        (f'{{"weight_map": {{"a": "{"a" * 300}.safetensors"}}}}', "lacks the shard"),
        ('{"a": ' + "1" * 5000 + "}", "JSON"),
    ],
)
def test_an_index_that_makes_no_sense(shards: Path, index: str, said: str) -> None:
    (shards / INDEX_NAME).write_text(index)
    text = message(lambda: Checkpoint(shards), CheckpointError)
    assert INDEX_NAME in text or str(shards) in text
    assert said in text


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "sub/inside.safetensors"])
def test_sound_weights_elsewhere_are_not_read(single: Path, name: str) -> None:
    # All that the index says is true but for the place, which could be any file of the machine.
    name = str(single.parent) + name if name.startswith("/") else name
    keys = list(Checkpoint(single).entries)
    (single / "sub").mkdir()
    shutil.move(single / SINGLE_NAME, single / name)
    (single / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(keys, name)}))
    refused(lambda: Checkpoint(single), "outside its directory", name)


def test_an_index_that_is_not_true(shards: Path) -> None:
    places = json.loads((shards / INDEX_NAME).read_text())["weight_map"]
    shutil.copyfile(shards / places[Q], shards / "copy.safetensors")
    for wrong, said in (
        ({"model.extra": places[Q]}, "lacks the tensor 'model.extra'"),
        ({Q: next(shard for shard in places.values() if shard != places[Q])}, Q),
        # Other programs read all of both shards, and may take the other one.
        ({"model.extra": "copy.safetensors"}, "twice, in copy.safetensors and in"),
    ):
        edit_json(shards / INDEX_NAME, weight_map={**places, **wrong})
        refused(lambda: Checkpoint(shards), said)


def test_one_file_counts_before_an_index(single: Path) -> None:
    # transformers prefers the single file where a directory has both; they should not read different weights.
    other = save_model(single.parent / "other", shards=True, seed=1)
    for path in other.glob("model*"):
        shutil.copyfile(path, single / path.name)
    expected = weight(reference(single), Q.removesuffix(".weight"))
    assert torch.equal(Checkpoint(single).read(Q), expected)


def test_config_json(single: Path) -> None:
    config = single / "config.json"
    for raw in (b"{", b"\xff\xfe", b"[1]", b""):
        config.write_bytes(raw)
        refused(lambda: Checkpoint(single), "config.json")
    config.unlink()
    for path in (single, single / "nowhere"):
        refused(lambda path=path: Checkpoint(path), "no config.json")  # type: ignore[misc]


# Finding


def test_where_models_are(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(name: str, **_: object) -> str:
        raise ConnectionError(f"{name}: no route to host\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert locate_model(str(single)) == single
    assert (locate_model("demo") / SINGLE_NAME).exists()
    for name in (str(tmp_path / "nowhere"), "./nowhere", "a/b/c", "nowhere/"):
        refused(lambda name=name: locate_model(name), name, kind=UsageError)  # type: ignore[misc]
    refused(lambda: locate_model(str(single / "config.json")), "is a file", kind=UsageError)
    name = "someone/something"
    refused(lambda: locate_model(name), name, "the Hugging Face hub cannot be reached", kind=UsageError)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(single, tmp_path / "demo")
    assert locate_model("demo").resolve() == tmp_path / "demo"


def test_of_the_hub_neither_pickles_nor_code(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils._paths import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(name: str, **others: Any) -> str:
        asked.update(others, name=name)
        return str(single)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate_model("someone/something") == single
    assert asked["name"] == "someone/something"
    names = [
        *("model.safetensors", INDEX_NAME, "config.json", "tokenizer.json", "tokenizer.model", "vocab.txt"),
        *("pytorch_model.bin", "modeling_x.py", "model.gguf"),
    ]
    allowed = list(filter_repo_objects(names, allow_patterns=asked["allow_patterns"]))
    assert allowed == names[:6]


# Writing


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def test_changed_tensors_in_place_and_all_else_byte_for_byte(directory: Path, out: Path) -> None:
    checkpoint = Checkpoint(directory)
    generator = torch.Generator().manual_seed(0)
    changed = {key: torch.randn(*checkpoint.entries[key].shape, generator=generator) for key in (UP, Q)}
    with CheckpointWriter(checkpoint, out) as writer:
        writer.write(Q, changed[Q])  # not in the order of the file
        writer.write(UP, changed[UP].T.contiguous().T)  # not contiguous
    assert sorted(p.name for p in out.iterdir()) == checkpoint.shards
    for key, value in contents(out).items():
        assert torch.equal(value, changed.get(key, checkpoint.read(key)))
    for shard in checkpoint.shards:
        expected = bytearray((directory / shard).read_bytes())
        for key, value in changed.items():
            entry = checkpoint.entries[key]
            if entry.shard == shard:
                expected[entry.offset : entry.offset + entry.size] = value.numpy().tobytes()
        assert (out / shard).read_bytes() == expected


@pytest.mark.parametrize("name", ["added.safetensors", "folder/added.safetensors"])
def test_tensors_in_a_file_besides(directory: Path, out: Path, name: str) -> None:
    """As the safetensors library reads them; written in parts and in any order, also by two writers."""
    checkpoint = Checkpoint(directory)
    values = {
        "one": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "of each": torch.arange(24, dtype=torch.float16).view(4, 2, 3),
        'a name with " and é': torch.tensor([1.5]),
    }
    added = new_shard(name, {key: (value.dtype, tuple(value.shape)) for key, value in values.items()})
    with CheckpointWriter(checkpoint, out, added=added) as writer:
        writer.write("of each", values["of each"][2], 2)
        writer.write("of each", values["of each"][0], 0)
        writer.write("one", values["one"])
        assert torch.equal(writer.read("one"), values["one"])
    with CheckpointWriter(checkpoint, out, resume=True, added=added) as writer:
        for key, value in values.items():
            if key != "of each":
                writer.write(key, value)
        writer.write("of each", values["of each"][1], 1)
        writer.write("of each", values["of each"][3], 3)
        writer.sync()
    found = load_file(out / name)
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)
    for shard in checkpoint.shards:
        assert (out / shard).read_bytes() == (directory / shard).read_bytes()


def test_digests_see_what_is_not_what_was_written(directory: Path, out: Path) -> None:
    """Of parts, after a change, in a file that was cut off, and in one that is gone."""
    checkpoint = Checkpoint(directory)
    added = new_shard("added.safetensors", {"each": (torch.float32, (4, 2, 3)), "one": (torch.float32, (5,))})
    places = [("each", 1), ("each", 3), ("one", None)]
    with CheckpointWriter(checkpoint, out, added=added) as writer:
        for key, index in places:
            writer.write(key, torch.zeros(added[key].at(index).shape), index)
            writer.write(key, torch.rand(added[key].at(index).shape), index)
        digest = writer.digest(places)
    file = out / "added.safetensors"
    content = file.read_bytes()

    def found() -> str:
        with CheckpointWriter(checkpoint, out, resume=True, added=added) as writer:
            return writer.digest(places)

    assert found() == digest
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], None):
        file.write_bytes(damaged or b"")
        if damaged is None:
            file.unlink()
        assert found() != digest
        assert file.stat().st_size == len(content)


# Parts of tensors: experts that are stacked in one


@pytest.fixture
def stacked(tmp_path: Path) -> Path:
    path = tmp_path / "stacked"
    path.mkdir()
    (path / "config.json").write_text("{}")
    generator = torch.Generator().manual_seed(0)
    values = {
        "before": torch.randn(3, generator=generator),
        "experts": torch.randn(4, 3, 5, generator=generator).bfloat16(),
        "after": torch.randn(2, 2, generator=generator),
    }
    save_file(values, path / SINGLE_NAME)
    return path


def test_reading_parts(stacked: Path) -> None:
    checkpoint, whole = Checkpoint(stacked), contents(stacked)["experts"]
    for part in range(4):
        read = checkpoint.read("experts", part)
        assert read.dtype == torch.bfloat16
        assert torch.equal(read, whole[part])
    assert torch.equal(checkpoint.read("after", 1), contents(stacked)["after"][1])
    # Of a part nothing else is looked at.
    spoilt = contents(stacked)
    spoilt["experts"][2, 0, 0] = float("nan")
    save_file(spoilt, stacked / SINGLE_NAME)
    assert torch.equal(Checkpoint(stacked).read("experts", 1), whole[1])
    refused(lambda: Checkpoint(stacked).read("experts", 2), "experts")


@pytest.mark.parametrize("parts", [[0], [3, 1], [2, 2], [3, 2, 1, 0]])
def test_parts_that_are_not_written_are_copied(stacked: Path, out: Path, parts: list[int]) -> None:
    checkpoint = Checkpoint(stacked)
    expected = contents(stacked)
    with CheckpointWriter(checkpoint, out) as writer:
        for part in parts:
            new = torch.full((3, 5), 10.0 + part, dtype=torch.bfloat16)
            writer.write("experts", new.T.contiguous().T, part)
            expected["experts"][part] = new
    written = contents(out)
    for key, value in expected.items():
        assert torch.equal(written[key], value), key
    entry = checkpoint.entries["experts"]
    was, now = ((path / SINGLE_NAME).read_bytes() for path in (stacked, out))
    for at, (a, b) in enumerate(zip(was, now, strict=True)):
        assert a == b or (at - entry.offset) // (entry.size // 4) in parts


def test_the_whole_and_then_a_part(stacked: Path, out: Path) -> None:
    with CheckpointWriter(Checkpoint(stacked), out) as writer:
        writer.write("experts", torch.zeros(4, 3, 5, dtype=torch.bfloat16))
        writer.write("experts", torch.ones(3, 5, dtype=torch.bfloat16), 2)
    assert contents(out)["experts"].sum(dim=(1, 2)).tolist() == [0, 0, 15, 0]


@pytest.mark.parametrize(
    "value", [torch.zeros(4, 3, 5, dtype=torch.bfloat16), torch.zeros(5, 3, dtype=torch.bfloat16), torch.zeros(3, 5)]
)
def test_parts_that_do_not_fit(stacked: Path, out: Path, value: Tensor) -> None:
    def write() -> None:
        with CheckpointWriter(Checkpoint(stacked), out) as writer:
            writer.write("experts", value, 1)

    refused(write, r"'experts' was BF16 (3, 5) and cannot become", kind=OutputError)


def test_tensors_that_the_index_does_not_name_move_along(shards: Path, out: Path) -> None:
    index = json.loads((shards / INDEX_NAME).read_text())
    shard = index["weight_map"].pop(Q)
    (shards / INDEX_NAME).write_text(json.dumps(index))
    checkpoint = Checkpoint(shards)
    assert Q not in checkpoint.entries
    with CheckpointWriter(checkpoint, out):
        pass
    assert (out / shard).read_bytes() == (shards / shard).read_bytes()


def test_other_dtypes_or_shapes_are_refused(single: Path, out: Path) -> None:
    with CheckpointWriter(Checkpoint(single), out) as writer:
        for wrong in (torch.zeros(32, 32).half(), torch.zeros(32, 32).double(), torch.zeros(16, 64)):
            said = (Q, str(wrong.dtype), str(tuple(wrong.shape)))
            refused(lambda wrong=wrong: writer.write(Q, wrong), *said, kind=OutputError)  # type: ignore[misc]
    # A refused tensor is not half in the file.
    assert (out / SINGLE_NAME).read_bytes() == (single / SINGLE_NAME).read_bytes()


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_space_shows_before_the_work(shards: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space, raising=False)
    said = ("no space left on disk", "GiB are free", str(out))
    refused(CheckpointWriter(Checkpoint(shards), out).__enter__, *said, kind=OutputError)


@pytest.mark.slow
def test_no_space_for_the_second_shard(shards: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first file must be closed again; a warning about it is an error here.
    calls = []

    def second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            no_space()

    monkeypatch.setattr(os, "posix_fallocate", second, raising=False)
    refused(CheckpointWriter(Checkpoint(shards), out).__enter__, "no space left", kind=OutputError)
    assert len(calls) == 2
    gc.collect()


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Writing behind a byte fails with a real error of the system: a disk that fills up on the way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("at", ["pruned tensor", "copied tensor"])
def test_a_write_that_fails_midway(
    single: Path, out: Path, at: str, monkeypatch: pytest.MonkeyPatch, small_files: Callable[[int], None]
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None, raising=False)  # a file system that promises too much
    checkpoint = Checkpoint(single)
    last = max(checkpoint.entries, key=lambda key: checkpoint.entries[key].offset)
    entry = checkpoint.entries[last]

    def write() -> None:
        with CheckpointWriter(checkpoint, out) as writer:
            small_files(entry.offset + entry.size // 2)
            if at == "pruned tensor":
                writer.write(last, checkpoint.read(last))

    try:
        refused(write, str(out), kind=OutputError)
    finally:
        small_files(resource.RLIM_INFINITY)


class _Full:
    """A file on a disk that is full when the buffer is flushed, which may be as late as close()."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def flush(self) -> None:
        no_space()

    def close(self) -> None:
        self._file.close()
        no_space()


def test_no_space_when_files_are_closed(single: Path, out: Path) -> None:
    """An error of the work is not hidden by that."""

    def write(error: BaseException | None = None) -> None:
        with CheckpointWriter(Checkpoint(single), out) as writer:
            writer._files = {name: _Full(file) for name, file in writer._files.items()}  # type: ignore[misc]
            if error:
                raise error

    refused(write, "no space left", kind=OutputError)
    with pytest.raises(KeyboardInterrupt):
        write(KeyboardInterrupt())


def test_the_source_shrinks_on_the_way(single: Path, out: Path) -> None:
    def write() -> None:
        with CheckpointWriter(Checkpoint(single), out):
            os.truncate(single / SINGLE_NAME, (single / SINGLE_NAME).stat().st_size - 10)

    refused(write, SINGLE_NAME)


def test_a_directory_that_cannot_be_written(single: Path, tmp_path: Path) -> None:
    refused(CheckpointWriter(Checkpoint(single), tmp_path / "nowhere").__enter__, "nowhere", kind=OutputError)


# Carrying over


def test_what_is_carried_over(shards: Path, out: Path) -> None:
    (shards / "notes").mkdir()
    (shards / "notes" / "deep").mkdir()
    files = {"tokenizer.json": b"{}", "LICENSE": b"free", "notes/deep/a.txt": b"\x00\xff", ".gitattributes": b"* text"}
    left = ["pytorch_model.bin", "onnx/model.onnx", "model.gguf", "original/consolidated.00.pth"]
    left += ["other.safetensors", "tf_model.h5"]
    skipped = {".git/config": b"", ".cache/huggingface/x": b""}
    for name, raw in {**files, **dict.fromkeys(left, b"1"), **skipped}.items():
        (shards / name).parent.mkdir(parents=True, exist_ok=True)
        (shards / name).write_bytes(raw)
    blob = shards.parent / "blob"
    blob.write_bytes(b"template")
    (shards / "chat_template.jinja").symlink_to(blob)
    files["chat_template.jinja"] = b"template"
    (shards / "linked").symlink_to("notes/deep")
    files["linked/a.txt"] = b"\x00\xff"

    carried = find_carried(Checkpoint(shards), out)
    carried.copy(out)
    assert sorted(map(str, carried.left)) == sorted(left)
    (note,) = carried.notes
    heading, _, listed = note.partition(": ")
    assert "(6 files, 6 bytes)" in heading
    assert sorted(listed.split(", ")) == sorted(left)
    for name, raw in files.items():
        assert (out / name).read_bytes() == raw, name
        assert not (out / name).is_symlink()
    for name in (*left, *skipped, *Checkpoint(shards).shards):
        assert not (out / name).exists(), name
    assert (out / "config.json").read_bytes() == (shards / "config.json").read_bytes()
    assert (out / INDEX_NAME).exists()


# Verifying


def written(directory: Path, out: Path, tensor: Tensor) -> None:
    with CheckpointWriter(Checkpoint(directory), out) as writer:
        writer.write(Q, tensor)


@pytest.fixture
def sparse() -> Tensor:
    tensor = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    tensor[:, ::2] = 0.0
    return tensor


def test_a_sound_result_passes(directory: Path, out: Path, sparse: Tensor) -> None:
    written(directory, out, sparse)
    edit_json(directory / "config.json", model_type="other")  # nothing here depends on it
    for zeros in ({Q: 512}, {}):
        verify(out, Checkpoint(directory), zeros)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (31, 0.0, "513 zeros on disk instead of 512"),
        (31, float("nan"), "NaN"),
        (31, float("-inf"), "NaN or inf"),
        (0, 1e-30, "511 zeros"),  # where all are zero
        (0, -0.0, "negative zeros"),
    ],
)
def test_a_bad_value(directory: Path, out: Path, sparse: Tensor, place: int, value: float, said: str) -> None:
    sparse[place, place] = value
    written(directory, out, sparse)
    refused(lambda: verify(out, Checkpoint(directory), {Q: 512}), Q, said, kind=OutputError)


def test_a_missing_or_different_tensor(directory: Path, out: Path, sparse: Tensor) -> None:
    written(directory, out, sparse)
    path = out / Checkpoint(directory).entries[Q].shard
    values = load_file(path)
    without = {key: value for key, value in values.items() if key != Q}
    for changed, said in (
        (without, "does not have the tensors"),
        ({**values, Q: values[Q].half()}, "no longer F32"),
        ({**values, Q: values[Q].view(16, 64)}, "no longer F32"),
    ):
        save_file(changed, path)
        refused(lambda: verify(out, Checkpoint(directory), {Q: 512}), path.name, said, kind=OutputError)


def test_a_missing_or_truncated_file(directory: Path, out: Path, sparse: Tensor) -> None:
    checkpoint = Checkpoint(directory)
    written(directory, out, sparse)
    path = out / checkpoint.entries[Q].shard
    os.truncate(path, path.stat().st_size - 1)
    refused(lambda: verify(out, checkpoint, {}), path.name, kind=OutputError)
    path.unlink()
    refused(lambda: verify(out, checkpoint, {}), path.name, kind=OutputError)


def test_too_many_open_files(directory: Path, out: Path, sparse: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch, which opens them for safetensors, raises an error of its own."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("unable to open file <x> in read-only mode: Too many open files (24)\nfrom somewhere")

    source = Checkpoint(directory)
    written(directory, out, sparse)
    with monkeypatch.context() as changed:
        changed.setattr("niwaki.checkpoints.tensors.safe_open", full)
        refused(lambda: Checkpoint(directory), "Too many open files (24)")
    monkeypatch.setattr("niwaki.checkpoints.writing.safe_open", full)
    refused(lambda: verify(out, source, {}), "cannot be read back: unable to open file", kind=OutputError)
