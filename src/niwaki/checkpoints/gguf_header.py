"""Headers of GGUF files, checked against the file before any library reads it: a count may say anything.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What is refused here is refused by llama.cpp,
but for the limits on the header as a whole, which are far above what models need.
"""

import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from niwaki.errors import CheckpointError, one_line, raised_as
from niwaki.files import input_errors

#: What to try where a file is not as it should be, or has what niwaki cannot take; what is cut off may be a download.
ORIGINAL = "prune the model that the file was made from"
ANOTHER = f"get another file of the model, or {ORIGINAL}"
#: What fields of tokenizers begin with.
TOKENIZER = "tokenizer.ggml."
#: By their numbers, struct's letters for the types of values that have one size.
_SCALARS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?"])) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
#: Bytes before the tensors, and elements of all arrays together: libraries make an object of each.
_LONGEST, _MOST_ELEMENTS = 1 << 28, 1 << 22
#: The fewest bytes of a field and of what is said of a tensor.
_FIELD, _TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


class CutOffError(ValueError):
    """More should be in a file than there is."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its type by ggml's number, its shape as torch has it, and ``offset`` of its bytes in the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """All that a file says: values by key, arrays as lists, and its tensors in their order.

    ``places`` are those of the fields, by key, and that of what is said of tensors: from byte to byte of the file.
    """

    fields: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    places: tuple[Mapping[str, tuple[int, int]], tuple[int, int]]


def checked_header(file: Path) -> tuple[Header, dict[int, str]]:
    """The header of a GGUF file, and the names of llama.cpp's types by their numbers.

    CheckpointError for a file that is damaged or has types that are not known, and where the package gguf is missing.
    """
    gguf = package_for(file)
    sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    with raised_as(CheckpointError, f"{file} cannot be read as GGUF", reason=_damage), input_errors(file):
        return read_header(file, sizes), {kind.value: kind.name for kind in gguf.GGML_QUANT_SIZES}


def package_for(file: Path) -> Any:
    """The package gguf; CheckpointError where it is missing, which ``file`` needs."""
    try:
        import gguf
    except ImportError as error:
        hint = "pip install gguf"
        raise CheckpointError(f"{file} is a GGUF file, and reading it needs gguf: {hint}") from error
    return gguf


def _damage(error: Exception) -> str:
    """What is wrong with a file by the ``error`` that its header is read with, and what to do."""
    return f"{one_line(error)}; {'is the download complete?' if isinstance(error, CutOffError) else ANOTHER}"


def read_header(path: Path, sizes: Mapping[int, tuple[int, int]]) -> Header:
    """The header of a GGUF file; ValueError where anything in it cannot be, or is more than the file has.

    ``sizes`` are (elements, bytes) of a block of each type of tensors.
    """
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        if reader.take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = reader.number("I")
        if not version & 0xFFFF:
            raise ValueError("its numbers are in the order of bytes of other machines (big-endian)")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version} of the format, and niwaki reads 2 and 3")
        tensor_count, field_count = (reader.number("Q") for _ in range(2))
        if _TENSOR * tensor_count + _FIELD * field_count > reader.left:
            raise CutOffError(f"it says that it has {tensor_count:,} tensors and {field_count:,} fields, more than fit")
        fields: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        alignment = 32
        for _ in range(field_count):
            at = reader.at
            key, kind = reader.text("the name of a field"), reader.number("I")
            if key in fields:
                raise ValueError(f"it has the field {key!r} twice")
            fields[key] = reader.value(kind, key)
            places[key] = (at, reader.at)
            if key == "general.alignment":
                alignment = fields[key]
                if kind != _UINT32 or alignment < 1 or alignment & (alignment - 1):
                    raise ValueError(f"its alignment is {alignment!r}, no power of two")
        tensors: dict[str, GgufTensor] = {}
        free, at = 0, reader.at  # tensors lie one after the other
        for _ in range(tensor_count):
            tensor = _tensor(reader, sizes)
            if tensor.name in tensors:
                raise ValueError(f"it has the tensor {tensor.name!r} twice")
            if tensor.offset != free:
                raise ValueError(f"the tensor {tensor.name!r}, {tensor.shape}, is not in its place")
            tensors[tensor.name] = tensor
            free += tensor.size + -tensor.size % alignment
        start = reader.at + -reader.at % alignment
        placed = [replace(each, offset=start + each.offset) for each in tensors.values()]
        for each in placed:
            if each.offset + each.size > reader.size:
                where = f"is not in the file, which ends at byte {reader.size:,}"
                raise CutOffError(f"the tensor {each.name!r}, {each.shape}, {where}")
        return Header(fields, tuple(placed), (places, (at, reader.at)))


def write_without_tokens(file: Path, header: Header, out: Path) -> None:
    """Copies a GGUF file without the lists of its tokenizer, of which libraries make an object for each element.

    What is left of them is one empty token: some libraries count the tokens.
    """
    fields, said = header.places
    lists = {key for key, value in header.fields.items() if isinstance(value, list) and key.startswith(TOKENIZER)}
    token = f"{TOKENIZER}tokens".encode()
    with file.open("rb") as source, out.open("wb") as target:
        pieces = [(0, 8)] + [place for key, place in fields.items() if key not in lists] + [said]
        first, *others, tensors = (_bytes(source, *piece) for piece in pieces)
        others.append(struct.pack("<Q", len(token)) + token + struct.pack("<IIQQ", _ARRAY, _STRING, 1, 0))
        target.write(first + struct.pack("<QQ", len(header.tensors), len(others)) + b"".join(others) + tensors)
        target.write(bytes(-target.tell() % header.fields.get("general.alignment", 32)))
        source.seek(min(tensor.offset for tensor in header.tensors))
        shutil.copyfileobj(source, target, 1 << 20)


def _bytes(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _tensor(reader: "_Reader", sizes: Mapping[int, tuple[int, int]]) -> GgufTensor:
    """The next tensor, with its offset behind the header."""
    name, dimensions = reader.text("the name of a tensor"), reader.number("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"the tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed([reader.number("Q") for _ in range(dimensions)]))
    kind, offset = reader.number("I"), reader.number("Q")
    if kind not in sizes:
        raise ValueError(f"the tensor {name!r} has the unknown type {kind}")
    elements, size = sizes[kind]
    if 0 in shape or shape[-1] % elements:
        raise ValueError(f"the tensor {name!r} cannot have the shape {shape}")
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // elements * size)


class _Reader:
    """Reads ``file``, which has ``size`` bytes; ValueError for what is beyond its end, or a header's."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.size = file, size
        self.at, self._elements = 0, 0

    @property
    def left(self) -> int:
        """Bytes up to the end of the file, or up to where every header has ended."""
        return min(self.size, _LONGEST) - self.at

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > self.left:
            if self.left + self.at == self.size:
                raise CutOffError(f"the file ends at byte {self.size:,}, and should have {size:,} from {self.at:,} on")
            raise ValueError(f"its header has too many bytes: {size:,} more at {self.at:,}")
        self.at += size
        data = self._file.read(size)
        if len(data) < size:
            raise CutOffError("it became shorter")
        return data

    def number(self, letter: str) -> Any:
        """The next value of one size."""
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self, what: str) -> str:
        """The next string, which is ``what``."""
        size, at = self.number("Q"), self.at
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what}, at byte {at:,}, is not in UTF-8 ({error.reason})") from error

    def value(self, kind: int, key: str) -> Any:
        """The next value of the type ``kind``, of the field ``key``."""
        if kind == _STRING:
            return self.text(f"the field {key!r}")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"the field {key!r} has the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner != _STRING and inner not in _SCALARS:
            raise ValueError(f"the field {key!r} is an array of the type {inner}")
        self._elements += count
        if self._elements > _MOST_ELEMENTS:
            raise ValueError(f"the field {key!r} has {count:,} elements, more than any model")
        if inner == _STRING:
            return [self.text(f"an element of the field {key!r}") for _ in range(count)]
        letter = _SCALARS[inner]
        return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(f"<{letter}"))))
