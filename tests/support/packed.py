"""The packed format as docs/format.md has it, in numpy and without niwaki: what a directory says, right or wrong."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

#: By safetensors' names, how many bytes a number takes.
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1}

#: dtype, shape and bytes.
Raw = tuple[str, tuple[int, ...], bytes]


def read_file(path: Path) -> dict[str, Raw]:
    """The tensors of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for key, entry in header.items():
        first, last = entry["data_offsets"]
        data = content[start + first : start + last]
        assert len(data) == math.prod(entry["shape"]) * SIZES[entry["dtype"]]
        found[key] = entry["dtype"], tuple(entry["shape"]), data
    return found


def write_file(path: Path, tensors: dict[str, Raw]) -> None:
    header, end = {}, 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def component_names(key: str, stored: dict[str, Any]) -> list[str]:
    """What a tensor consists of, in the order of its digest."""
    if not stored["packed"]:
        return [key]
    masks = [] if stored.get("whole") else [f"{key}.mask"]
    return [*masks, *[f"{key}.scales"] * bool(stored["groups"]), f"{key}.values"]


def decode(directory: Path) -> dict[str, Raw]:
    """The dense tensors; an exception where the directory cannot be read in this way."""
    index = json.loads((directory / "packed.json").read_text())
    files = {name: read_file(directory / name) for name in {stored["file"] for stored in index["tensors"].values()}}
    found = {}
    for key, stored in index["tensors"].items():
        there = files[stored["file"]]
        parts = [there[name] for name in component_names(key, stored)]
        found[key] = _dense(stored, parts) if stored["packed"] else parts[0]
        assert found[key][:2] == (stored["dtype"], tuple(stored["shape"]))
    return found


def _dense(stored: dict[str, Any], parts: list[Raw]) -> Raw:
    dtype, shape, groups = stored["dtype"], tuple(stored["shape"]), stored["groups"]
    *experts, rows, columns = shape
    if stored["transposed"]:
        rows, columns = columns, rows
    lines = math.prod(experts) * rows
    kind = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}[dtype]
    assert bool(stored["bits"]) == bool(groups)
    assert stored["bits"] in ((2, 3, 4, 5, 6, 8) if stored.get("whole") else (0, 4, 8))
    assert parts[-1][0] == {0: dtype, 8: "I8"}.get(stored["bits"], "U8")
    values = np.frombuffer(parts[-1][2], {0: kind, 8: "i1"}.get(stored["bits"], "u1"))
    assert len(values) == stored["count"] + 64
    assert not values[-64:].any()
    values = values[:-64]
    if stored.get("whole"):
        W = _all_numbers(values.reshape(lines, -1), stored["bits"])
        assert W.shape == (lines, math.ceil(columns / 64) * 64)
        assert not W[:, columns:].any()
        W = W[:, :columns]
    else:
        assert parts[0][:2] == ("U8", (lines, math.ceil(columns / 64) * 8))
        mask = np.frombuffer(parts[0][2], np.uint8).reshape(parts[0][1])
        bits = np.unpackbits(mask, axis=1, bitorder="little").astype(bool)
        assert not bits[:, columns:].any()
        values = _from_halves(values, bits) if stored["bits"] == 4 else values
        assert len(values) == bits.sum()
        W = np.zeros((lines, columns), values.dtype)
        W[bits[:, :columns]] = values
    if groups:
        assert parts[-2][:2] == (dtype, (lines, groups))
        scales = np.frombuffer(parts[-2][2], "<f2" if dtype == "F16" else kind)
        if dtype == "BF16":
            scales = (scales.astype("<u4") << 16).view("<f4")
        scales = scales.view("<f4") if dtype == "F32" else scales.astype("<f4")
        with np.errstate(all="ignore"):  # forged ones
            W = _rounded(W.astype("<f4") * scales.reshape(lines, groups).repeat(columns // groups, axis=1), dtype)
    W = W.reshape(*experts, rows, columns)
    return dtype, shape, (W.swapaxes(-1, -2) if stored["transposed"] else W).tobytes()


def _all_numbers(values: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of rows without a mask, whose words of 64 columns are fields of 4, 2 and 1 bits, the lowest first.

    Of 4 bits byte i of 32 has columns i and i + 32, of 2 bits byte i of 16 has columns i, i + 16, i + 32 and i + 48,
    and of 1 bit byte i of 8 has eight columns from 8 i on.
    """
    if bits == 8:
        return values
    words = values.reshape(len(values), -1, 8 * bits).astype(int)
    found = np.zeros((*words.shape[:2], 64), int)
    for column in range(64):
        at = unit = 0
        if bits in (4, 5, 6):
            found[..., column] += words[..., column % 32] >> 4 * (column // 32) & 15
            at, unit = 32, 4
        if bits in (2, 3, 6):
            found[..., column] += (words[..., at + column % 16] >> 2 * (column // 16) & 3) << unit
            at, unit = at + 16, unit + 2
        if bits in (3, 5):
            found[..., column] += (words[..., at + column // 8] >> column % 8 & 1) << unit
    return np.where(found >= 2 ** (bits - 1), found - 2**bits, found).reshape(len(values), -1).astype("i1")


def _from_halves(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The numbers of 4 bits in ``values``, in which each word of 64 columns of the mask ``bits`` begins with a byte."""
    found, at = [], 0
    for ones in bits.reshape(-1, 64).sum(axis=1):
        for i in range(ones):
            half = int(values[at + i // 2]) >> 4 * (i % 2) & 15
            found.append(half - 16 * (half > 7))
        at += (ones + 1) // 2
    assert at == len(values)
    return np.array(found, "i1")


def _rounded(W: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of float32 numbers rounded to ``dtype``, halves to even."""
    if dtype == "F16":
        return W.astype("<f2").view("<u2")
    bits = W.view("<u4")
    if dtype == "F32":
        return bits
    return ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def seal(directory: Path) -> None:
    """Writes all digests anew, as a forger would; what has no tensors any more keeps its digest."""
    path = directory / "packed.json"
    index = json.loads(path.read_text())
    files = {stored["file"]: read_file(directory / stored["file"]) for stored in index["tensors"].values()}
    for key, stored in index["tensors"].items():
        content = b"".join(files[stored["file"]][name][2] for name in component_names(key, stored))
        stored["sha256"] = hashlib.sha256(content).hexdigest()
    try:
        tensors = decode(directory)
        for shard in index["shards"]:
            header = shard["header"].encode()
            content = b"".join(tensors[key][2] for key in shard["keys"])
            shard["sha256"] = hashlib.sha256(len(header).to_bytes(8, "little") + header + content).hexdigest()
    finally:
        write_index(directory, index)


def write_index(directory: Path, index: dict[str, Any]) -> None:
    """Writes an index with its digest, right or wrong in all else."""
    index = {name: value for name, value in index.items() if name != "sha256"}
    (directory / "packed.json").write_text(json.dumps({**index, "sha256": digest_of(index)}))


def forged(
    packed: Path, directory: Path, change: Callable[[dict[str, Any], dict[str, Raw], str], None], name: str = ""
) -> Path:
    """A copy of a packed model with the right digests.

    ``change`` receives its index, its tensors and the key of a packed one with ``name`` in it.
    """
    shutil.copytree(packed, directory)
    index = json.loads((directory / "packed.json").read_text())
    key = next(key for key, stored in index["tensors"].items() if stored["packed"] and name in key)
    file = directory / index["tensors"][key]["file"]
    tensors = read_file(file)
    change(index, tensors, key)
    write_file(file, tensors)
    (directory / "packed.json").write_text(json.dumps(index))
    with contextlib.suppress(AssertionError, KeyError, ValueError):
        seal(directory)
    return directory


def scaled(scale: float) -> Callable[[dict[str, Any], dict[str, Raw], str], None]:
    """Such a change, of the first scale of a tensor in float32."""

    def change(_: dict[str, Any], tensors: dict[str, Raw], key: str) -> None:
        dtype, shape, data = tensors[f"{key}.scales"]
        tensors[f"{key}.scales"] = dtype, shape, struct.pack("<f", scale) + data[4:]

    return change


def digest_of(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
