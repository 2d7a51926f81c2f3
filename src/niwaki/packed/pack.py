"""``niwaki pack`` and ``niwaki unpack``: a pruned model directory without its zeros, and back, byte for byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError
from niwaki.files import output_errors, write_json
from niwaki.layer.grid import Grid, parse_grid
from niwaki.models.checkpoint import (
    DTYPES,
    INDEX_NAME,
    Checkpoint,
    Entry,
    header_bytes,
    locate_model,
    read_header,
    read_tensor,
)
from niwaki.models.layout import Matrix
from niwaki.models.output import Workplace, check_output, fingerprint, workplace
from niwaki.models.scales import FILE as SCALES
from niwaki.models.scales import read_scales
from niwaki.models.shards import Shards
from niwaki.models.streamed import StreamedModel
from niwaki.packed import card
from niwaki.packed.format import INDEX, Index, PackedCheckpoint, Shard, Stored, dense, marked, raw
from niwaki.packed.matrix import PADDING, PackedMatrix, groups_fit
from niwaki.packed.matrix import pack as pack_matrix
from niwaki.records.progress import Progress

#: Files of the dense model whose text is in the index.
_TEXTS = ("config.json", INDEX_NAME)


@dataclass(frozen=True)
class Sizes:
    """What packing saves, in bytes.

    Attributes:
        matrices: Of the matrices that are packed, before.
        packed: And afterwards.
        dense: Of all weights, before.
        total: And afterwards.
        negative_zeros: How many of the packed values are -0.0, which other pruners leave: kept, and of no use.
    """

    matrices: int = 0
    packed: int = 0
    dense: int = 0
    total: int = 0
    negative_zeros: int = 0

    def __str__(self) -> str:
        return (
            f"pruned matrices: {self.matrices / 2**20:,.1f} MiB became {self.packed / 2**20:,.1f} "
            f"({self.packed / self.matrices:.3f}); all weights: {self.dense / 2**20:,.1f} MiB became "
            f"{self.total / 2**20:,.1f} ({self.total / self.dense:.3f})"
        )

    @classmethod
    def of(cls, checkpoint: PackedCheckpoint) -> Sizes:
        """Those of a packed model, all of which is read and checked against its digests.

        Raises:
            CheckpointError: it is not what was meant to be written.
        """
        found = cls()
        for key, entry in checkpoint.entries.items():
            parts = checkpoint.parts(key)
            packed, new = checkpoint.is_packed(key), sum(part.nbytes for part in parts)
            found = cls(
                found.matrices + packed * entry.size,
                found.packed + packed * new,
                found.dense + entry.size,
                found.total + new,
                found.negative_zeros + packed * int((parts[-1][:-PADDING] == 0).sum()),
            )
        return found


def pack(model: str | Path, out: str | Path, progress: Progress | None = None) -> Sizes:
    """Writes the pruned model in directory ``model`` to ``out`` without its zeros.

    Each matrix that is smaller so is written as a mask and its values, everything else as it is. Of weights that
    ``prune(..., quantize=...)`` put on a grid the values are whole numbers of 8 bits, with scales. Every file is put
    together again in memory and compared with the original before it counts as written.

    Args:
        model: A directory, a hub id, or "demo".
        out: A directory that does not exist or is empty.
        progress: Receives how it goes.

    Raises:
        UsageError: no matrix would be smaller, or the model is packed.
        UnsupportedModelError: a weight file has bytes that are no tensor's, or two files have the same one.
        OutputError: it cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if (path / INDEX).exists():
        raise UsageError(f"{model} is packed already")
    progress, target = progress or Progress(), check_output(path, Path(out))
    checkpoint = Checkpoint(path)
    matrices: dict[str, list[Matrix]] = {}
    for matrix in StreamedModel(checkpoint, "cpu").matrices():
        matrices.setdefault(matrix.key, []).append(matrix)
    grid = _grid(checkpoint)
    headers = {shard: read_header(path / shard) for shard in checkpoint.shards}
    count = sum(map(len, headers.values()))
    sizes: Sizes | None = None
    with workplace(target, {"pack": fingerprint(checkpoint)}, resume=False) as place:
        if not place.journal.complete:
            place.clear([])
            _carry_over(place, checkpoint)
            shards: list[Shard] = []
            tensors: dict[str, Stored] = {}
            writer = Shards(place.directory)
            for number, (name, entries) in enumerate(headers.items()):
                file = f"packed-{number + 1:05d}-of-{len(headers):05d}.safetensors"
                written: dict[str, Tensor] = {}
                start = header_bytes(path / name)
                digest = hashlib.sha256(start)
                keys = sorted(entries, key=lambda key: entries[key].offset)
                for key in keys:
                    value = _read(path, key, entries[key], tensors)
                    W = _packed(checkpoint, value, matrices.get(key, []), grid)
                    parts = _parts(value, W)
                    transposed = W is not None and matrices[key][0].transposed
                    tensors[key] = _stored(file, entries[key], W, parts, transposed)
                    written |= dict(zip(tensors[key].parts(key), parts, strict=True))
                    digest.update(raw(value if W is None else dense(W, tensors[key])))
                    progress.status("packing, tensor", len(tensors), count)
                shards.append(Shard(name, start[8:].decode(), keys, digest.hexdigest()))
                _check_whole(path, shards[-1])
                writer.write(file, written)
            _check_names(path, tensors)
            config, index = (_text(path / name) for name in _TEXTS)
            write_json(place.directory / INDEX, Index(config, index, shards, tensors).to_json())
            (place.directory / INDEX_NAME).unlink(missing_ok=True)
            write_json(place.directory / "config.json", json.dumps(marked(checkpoint.config), indent=2) + "\n")
            sizes = Sizes.of(PackedCheckpoint(place.directory))
            if not sizes.matrices:
                raise UsageError(f"no matrix of {model} would be smaller without its zeros; is it pruned?")
            # Of a hub id it is a folder of the cache that is read.
            name = (path.resolve() if path == Path(model).expanduser() else Path(model)).name
            card.write(place.directory, name, str(sizes))
            place.save(complete=True)
        place.move()
    return Sizes.of(PackedCheckpoint(target)) if sizes is None else sizes


def unpack(model: str | Path, out: str | Path, progress: Progress | None = None) -> None:
    """Writes the dense model that ``model`` was packed from to ``out``; its weight files are the same, byte for byte.

    Args:
        model: What :func:`pack` wrote.
        out: A directory that does not exist or is empty.
        progress: Receives how it goes.

    Raises:
        UsageError: the model is not packed.
        CheckpointError: it is damaged.
        OutputError: it cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if not (path / INDEX).exists():
        raise UsageError(f"{model} is not packed: it has no {INDEX}")
    progress, target = progress or Progress(), check_output(path, Path(out))
    checkpoint = PackedCheckpoint(path)
    with workplace(target, {"unpack": fingerprint(checkpoint)}, resume=False) as place:
        if place.journal.complete:
            place.move()
            return
        place.clear([])
        _carry_over(place, checkpoint)
        (place.directory / INDEX).unlink()
        card.restore(place.directory)
        for name, text in zip(_TEXTS, (checkpoint.index.config, checkpoint.index.index), strict=True):
            if text:
                with output_errors(place.directory):
                    (place.directory / name).write_bytes(text.encode())
        count = 0
        for shard in checkpoint.index.shards:
            file = place.directory / shard.name
            with output_errors(place.directory), file.open("wb") as write:
                start = shard.header.encode()
                write.write(len(start).to_bytes(8, "little") + start)
            for key in shard.keys:
                value = checkpoint.read(key)
                with output_errors(place.directory), file.open("ab") as write:
                    write.write(raw(value))
                count += 1
                progress.status("unpacking, tensor", count, len(checkpoint.entries))
            if _sha256(file) != shard.sha256:
                raise OutputError(f"{file} is not what it was before packing; was the disk full?")
        place.save(complete=True)
        place.move()


def _read(path: Path, key: str, entry: Entry, others: Collection[str]) -> Tensor:
    if key in others:
        raise UnsupportedModelError(f"{path} has the tensor {key!r} in two files")
    if entry.dtype not in DTYPES:
        raise UnsupportedModelError(f"{path} has {key!r} in {entry.dtype}, unknown here")
    return read_tensor(path / entry.shard, key, entry)


def _parts(value: Tensor, W: PackedMatrix | None) -> list[Tensor]:
    """What is written: in the order of :meth:`Stored.parts`."""
    return [value] if W is None else [part for part in (W.mask, W.scales, W.values) if part is not None]


def _check_whole(path: Path, shard: Shard) -> None:
    """Raises UnsupportedModelError unless the file is what its header and tensors make."""
    if shard.sha256 != _sha256(path / shard.name):
        raise UnsupportedModelError(
            f"{path / shard.name} has bytes that are no tensor's, or overlapping tensors; load the model in "
            "transformers and save it again"
        )


def _check_names(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Raises UnsupportedModelError where two tensors would have the same name in the packed files."""
    names = [name for key, stored in tensors.items() for name in stored.parts(key)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UnsupportedModelError(
            f"{path} has a tensor {twice!r}, as a part of a packed one would be called; rename it"
        )


def _packed(
    checkpoint: Checkpoint, value: Tensor, matrices: Sequence[Matrix], grid: Grid | None
) -> PackedMatrix | None:
    """``value`` without its zeros; None if nothing is won."""
    if not matrices or not value.is_floating_point() or value.itemsize not in (2, 4):  # float8 has no kernels
        return None
    if any(matrix.transposed for matrix in matrices):
        value = value.transpose(-1, -2).contiguous()
    W = value.flatten(0, -2)
    found = _in_whole_numbers(checkpoint, W, matrices, grid) or pack_matrix(W)
    return found if sum(part.nbytes for part in _parts(value, found)) < value.nbytes else None


def _in_whole_numbers(
    checkpoint: Checkpoint, W: Tensor, matrices: Sequence[Matrix], grid: Grid | None
) -> PackedMatrix | None:
    """``W`` as numbers of its grid and their scales; None if it is not on the grid, or has groups of odd sizes."""
    if grid is None or not groups_fit(W.shape[1], grid.groups(W.shape[1])):
        return None
    try:
        scales = torch.cat([read_scales(checkpoint.path, matrix) for matrix in matrices]).float()
    except CheckpointError:  # of a block that was left as it is
        return None
    codes = grid.codes(W.float(), scales).to(torch.int8)  # which have no -0
    values = grid.values(codes.float(), scales, W.dtype).to(W.dtype)
    if len(scales) != len(W) or bytes(raw(values)) != bytes(raw(W)):
        return None
    return pack_matrix(W, codes, scales)


def _stored(name: str, entry: Entry, W: PackedMatrix | None, parts: Sequence[Tensor], transposed: bool) -> Stored:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(raw(part))
    return Stored(
        file=name,
        dtype=entry.dtype,
        shape=entry.shape,
        packed=W is not None,
        transposed=transposed,
        count=0 if W is None else int(W.starts[-1]),
        groups=0 if W is None or W.scales is None else W.scales.shape[1],
        sha256=digest.hexdigest(),
    )


def _grid(checkpoint: Checkpoint) -> Grid | None:
    """That of weights which ``prune --quantize`` wrote."""
    text = checkpoint.config.get("pruning_config", {}).get("quantization")
    return parse_grid(text) if text and (checkpoint.path / SCALES).exists() else None


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode() if path.exists() else ""
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not in UTF-8: {error}") from error


def _carry_over(place: Workplace, checkpoint: Checkpoint) -> None:
    """Everything but weights, and the scales of weights on a grid, which are like weights to others."""
    place.carry_over(checkpoint)
    scales, target = checkpoint.path / SCALES, place.directory / SCALES
    if scales.exists():
        with output_errors(place.directory):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(scales, target)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()
