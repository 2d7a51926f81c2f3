"""Headers of GGUF files: whatever they say is checked against the file, before the package gguf sees it."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from niwaki.checkpoints.gguf_header import Header, read_header
from niwaki.errors import CheckpointError
from niwaki.models.locate import locate_model
from support.gguf_files import field, header, tensor, text
from support.models import message

gguf: Any = pytest.importorskip("gguf")

SIZES = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
WORD, LONG = struct.Struct("<I").pack, struct.Struct("<Q").pack
DATA = bytes(4096)


def aligned(value: int, kind: int = 4) -> list[bytes]:
    return [field("general.alignment", kind, WORD(value))]


CASES: dict[str, tuple[bytes, str]] = {
    "an array without end": (header([field("a", 9, WORD(0) + LONG(1 << 40))], []), "1,099,511,627,776 elements"),
    "strings without end": (header([field("a", 9, WORD(8) + LONG(1 << 21))], []), "the file ends"),
    "an array of arrays": (header([field("a", 9, WORD(9) + LONG(1) + WORD(0) + LONG(0))], []), "array of the type 9"),
    "an array of nothing": (header([field("a", 9, WORD(77) + LONG(0))], []), "array of the type 77"),
    "a long string": (header([field("a", 8, LONG(1 << 63))], []), "should have 9,223,372,036,854,775,808 from 45 on"),
    "a long key": (header([LONG(1 << 50)], []), "should have 1,125,899,906,842,624 from"),
    "many fields": (header([], [], (0, 1 << 63)), "fields, more than fit"),
    "many tensors": (header([], [], (1 << 62, 0)), "tensors and"),
    "a field twice": (header([field("a", 0, b"1")] * 2, []), "the field 'a' twice"),
    "an unknown type": (header([field("a", 13, b"1")], []), "unknown type 13"),
    "no text": (header([LONG(1) + b"\xff" + WORD(0) + b"1"], []), "the name of a field, at byte 32, is not in UTF-8"),
    "a value that is no text": (
        header([field("a", 8, LONG(2) + b"\xff\xfe")], []),
        "the field 'a', at byte 45, is not in UTF-8",
    ),
    "alignment 0": (header(aligned(0), [tensor()]), "alignment is 0"),
    "alignment 24": (header(aligned(24), [tensor()]), "alignment is 24"),
    "an alignment of another type": (header(aligned(32, 5), [tensor()]), "alignment is 32"),
    "a tensor twice": (header([], [tensor(), tensor(offset=32)]), "the tensor 'a' twice"),
    "no dimensions": (header([], [tensor(shape=())]), "0 dimensions"),
    "five dimensions": (header([], [tensor(shape=(1,) * 5)]), "5 dimensions"),
    "endless dimensions": (header([], [text("a") + WORD(1 << 31)]), "2147483648 dimensions"),
    "an empty tensor": (header([], [tensor(shape=(4, 0))]), "cannot have the shape"),
    "a tensor beyond the end": (header([], [tensor(shape=(1 << 12,))]), "not in the file"),
    "more numbers than there are": (header([], [tensor(shape=(1 << 63, 1 << 63, 16))]), "not in the file"),
    "half a block": (header([], [tensor(shape=(33,), kind=8)]), "cannot have the shape (33,)"),
    "an unknown kind": (header([], [tensor(kind=4)]), "unknown type 4"),
    "below 0": (header([], [tensor(offset=2**64 - 32)]), "not in its place"),
    "between": (header([], [tensor(offset=4)]), "not in its place"),
    "one over the other": (header([], [tensor(), tensor("b")]), "'b', (8,), is not in its place"),
    "version 1": (header([], [], version=1), "version 1 of the format, and niwaki reads 2 and 3"),
    "the other order of bytes": (header([], [], version=3 << 24), "big-endian"),
    "no GGUF": (b"GGML" + header([], [])[4:], "does not begin with GGUF"),
}


#: What a download that stopped may look like; of all else it is not asked.
CUT_OFF = {"strings without end", "a long string", "a long key", "many fields", "many tensors"}
CUT_OFF |= {"a tensor beyond the end", "more numbers than there are"}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    content, said = CASES[case]
    (tmp_path / "model.gguf").write_bytes(content + DATA)
    monkeypatch.setattr(gguf, "GGUFReader", lambda *_: pytest.fail("the package reads it"))
    answer = message(lambda: locate_model(str(tmp_path / "model.gguf")), CheckpointError)
    assert said in answer
    another = "get another file of the model, or prune the model that the file was made from"
    assert answer.endswith("; is the download complete?" if case in CUT_OFF else f"; {another}")


@pytest.fixture
def whole() -> bytes:
    """A file with some of everything."""
    fields = [
        *(field("a", 9, WORD(8) + LONG(2) + text("x") + text("é")), field("b", 9, WORD(5) + LONG(1) + b"\xff" * 4)),
        *(field("c", 7, b"\1"), field("d", 12, struct.pack("<d", 0.1)), *aligned(64)),
    ]
    content = header(fields, [tensor(shape=(4, 2)), tensor("b", (32,), 8, 64)])
    return content + bytes(-len(content) % 64) + bytes(64 + 34)


def same(found: Header, file: Path) -> None:
    """Asserts that the package reads ``file`` in the same way."""
    reader = gguf.GGUFReader(file)
    assert found.fields == {key: each.contents() for key, each in reader.fields.items() if not key.startswith("GGUF.")}
    for ours, theirs in zip(found.tensors, reader.tensors, strict=True):
        place = theirs.name, theirs.tensor_type.value, theirs.data_offset, theirs.n_bytes
        assert (ours.name, ours.kind, ours.offset, ours.size) == place
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))


def test_what_the_package_reads(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(whole)
    found = read_header(tmp_path / "model.gguf", SIZES)
    assert found.fields == {"a": ["x", "é"], "b": [-1], "c": True, "d": 0.1, "general.alignment": 64}
    same(found, tmp_path / "model.gguf")


def test_bytes_at_random(tmp_path: Path, whole: bytes) -> None:
    """A header that is taken is read in the same way by the package; tests/campaign makes models of such files."""
    chance, file, taken = random.Random(0), tmp_path / "model.gguf", 0
    for _ in range(600):
        content = bytearray(whole)
        content[chance.randrange(len(content) - 98)] = chance.randrange(256)
        file.write_bytes(content)
        try:
            found = read_header(file, SIZES)
        except ValueError:
            continue
        same(found, file)
        taken += 1
    assert 60 < taken < 540
