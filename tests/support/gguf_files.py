"""GGUF files with other fields and tensors, or other bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

#: Fields are (value, types), as the package has them.
Fields = dict[str, tuple[Any, list[Any]]]


def changed(file: Path, change: Callable[[Fields, dict[str, Any]], object], out: Path | None = None) -> Path:
    """Writes ``file`` anew, to ``out`` or in its place; ``change`` gets its fields and tensors by name."""
    reader = gguf.GGUFReader(file)
    fields: Fields = {
        name: (field.contents(), field.types) for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    kept = {tensor.name: tensor.data.copy() for tensor in reader.tensors}
    change(fields, kept)
    writer = gguf.GGUFWriter(out or file, fields.pop("general.architecture")[0])
    for name, (value, types) in fields.items():
        writer.add_key_value(name, value, types[0], types[-1] if types[0].name == "ARRAY" else None)
    for name, value in kept.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out or file


def summary(file: Path) -> dict[str, Any]:
    """The architecture of a file, its keys, and by name the shape of each tensor and a sum that order matters to."""
    reader = gguf.GGUFReader(file)
    name = reader.fields["general.architecture"].contents()
    keys = {key: field.contents() for key, field in reader.fields.items() if key.startswith(f"{name}.")}
    tensors = {}
    for each in sorted(reader.tensors, key=lambda tensor: tensor.name):
        values = each.data.astype(np.float64).ravel()
        tensors[each.name] = [each.shape.tolist(), round(float(values @ np.cos(np.arange(len(values)))), 4)]
    return {"name": name, "keys": {key.removeprefix(f"{name}."): keys[key] for key in sorted(keys)}, "tensors": tensors}


def text(value: str) -> bytes:
    """A string as files have it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    """A field of the type with this number."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    """What a header says of a tensor."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def header(fields: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None = None, version: int = 3) -> bytes:
    """A file up to its tensors; ``counts`` of tensors and fields are those that there are."""
    tensor_count, field_count = counts or (len(tensors), len(fields))
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, field_count) + b"".join([*fields, *tensors])
