"""``niwaki pack`` and ``niwaki unpack``: a pruned model directory without its zeros, and back, byte for byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from niwaki.blocks import StreamedModel
from niwaki.checkpoint import (
    DTYPES,
    INDEX_NAME,
    Checkpoint,
    Entry,
    carry_over,
    header_bytes,
    locate_model,
    output_errors,
    read_header,
    read_tensor,
)
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError
from niwaki.layout import Matrix
from niwaki.output import Shards, check_output, fingerprint, workplace
from niwaki.packed.files import FORMAT, INDEX, VERSION, Index, PackedCheckpoint, Shard, Stored, dense, raw
from niwaki.packed.matrix import PADDING, PackedMatrix, groups_fit
from niwaki.packed.matrix import pack as pack_matrix
from niwaki.quantization import Grid, parse_grid
from niwaki.record import write_json
from niwaki.scales import FILE as SCALES
from niwaki.scales import read_scales

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

    def plus(self, value: Tensor, parts: Sequence[Tensor]) -> Sizes:
        """With one more tensor, that became ``parts``, the last of which are the values."""
        new = sum(part.nbytes for part in parts)
        changed = (value.nbytes, new) if len(parts) > 1 else (0, 0)
        useless = int((parts[-1][:-PADDING] == 0).sum()) if len(parts) > 1 else 0
        return Sizes(
            self.matrices + changed[0],
            self.packed + changed[1],
            self.dense + value.nbytes,
            self.total + new,
            self.negative_zeros + useless,
        )


def pack(model: str | Path, out: str | Path, done: Callable[[int, int], None] = lambda *_: None) -> Sizes:
    """Writes the pruned model in directory ``model`` to ``out`` without its zeros.

    Each matrix that is smaller so is written as a mask and its values, everything else as it is. Of weights that
    ``prune(..., quantize=...)`` put on a grid the values are whole numbers of 8 bits, with scales. Every file is put
    together again in memory and compared with the original before it counts as written.

    Args:
        model: A directory, a hub id, or "demo".
        out: A directory that does not exist or is empty.
        done: Called as done(tensors, of) after each tensor.

    Raises:
        UsageError: no matrix would be smaller, or the model is packed.
        UnsupportedModelError: a weight file has bytes that are no tensor's, or two files have the same one.
        OutputError: it cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if (path / INDEX).exists():
        raise UsageError(f"{model} is packed already")
    target = check_output(path, Path(out), None)
    checkpoint = Checkpoint(path)
    matrices: dict[str, list[Matrix]] = {}
    for matrix in StreamedModel(checkpoint, "cpu").matrices():
        matrices.setdefault(matrix.key, []).append(matrix)
    grid = _grid(checkpoint)
    headers = {shard: read_header(path / shard) for shard in checkpoint.shards}
    count = sum(map(len, headers.values()))
    with workplace(target, {"pack": fingerprint(checkpoint)}) as place:
        place.clear([])
        carry_over(path, place.directory, checkpoint.shards)
        if (path / SCALES).exists():
            _copy(path / SCALES, place.directory / SCALES)
        tensors: dict[str, Stored] = {}
        sizes = Sizes()
        writer = Shards(place.directory)
        names = [f"packed-{i + 1:05d}-of-{len(headers):05d}.safetensors" for i in range(len(headers))]
        shards = []
        for (shard, entries), name in zip(headers.items(), names, strict=True):
            start = header_bytes(path / shard)
            digest = hashlib.sha256(start)
            written: dict[str, Tensor] = {}
            keys = sorted(entries, key=lambda key: entries[key].offset)
            for key in keys:
                if key in tensors:
                    raise UnsupportedModelError(f"{path} has the tensor {key!r} in two files")
                if entries[key].dtype not in DTYPES:
                    raise UnsupportedModelError(f"{path} has {key!r} in {entries[key].dtype}, unknown here")
                value = read_tensor(path / shard, key, entries[key])
                W = _packed(checkpoint, value, matrices.get(key, []), grid)
                parts = [value] if W is None else [p for p in (W.mask, W.scales, W.values) if p is not None]
                stored = _stored(
                    name, entries[key], W, parts, any(m.transposed for m in matrices.get(key, []))
                )
                tensors[key] = stored
                written |= dict(zip(stored.parts(key), parts, strict=True))
                digest.update(raw(value if W is None else dense(W, stored)))
                sizes = sizes.plus(value, parts)
                done(len(tensors), count)
            found = _sha256(path / shard)
            if digest.hexdigest() != found:
                raise UnsupportedModelError(
                    f"{path / shard} has bytes that are no tensor's, or overlapping tensors; load the model in "
                    "transformers and save it again"
                )
            shards.append(Shard(shard, start[8:].decode(), keys, found))
            writer.write(name, written)
        if not any(stored.packed for stored in tensors.values()):
            raise UsageError(f"no matrix of {model} would be smaller without its zeros; is it pruned?")
        config, index = (_text(path / name) for name in _TEXTS)
        write_json(place.directory / INDEX, Index(config, index, shards, tensors).to_json())
        (place.directory / INDEX_NAME).unlink(missing_ok=True)
        # Who knows nothing of the format stops here: its weights look like those of no other.
        marked = {**checkpoint.config, "quantization_config": {"quant_method": FORMAT, "version": VERSION}}
        write_json(place.directory / "config.json", json.dumps(marked, indent=2) + "\n")
        place.save(complete=True)
        place.move()
    return sizes


def unpack(model: str | Path, out: str | Path, done: Callable[[int, int], None] = lambda *_: None) -> None:
    """Writes the dense model that ``model`` was packed from to ``out``; its weight files are the same, byte for byte.

    Args:
        model: What :func:`pack` wrote.
        out: A directory that does not exist or is empty.
        done: Called as done(tensors, of) after each tensor.

    Raises:
        UsageError: the model is not packed.
        CheckpointError: it is damaged.
        OutputError: it cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if not (path / INDEX).exists():
        raise UsageError(f"{model} is not packed: it has no {INDEX}")
    target = check_output(path, Path(out), None)
    checkpoint = PackedCheckpoint(path)
    with workplace(target, {"unpack": fingerprint(checkpoint)}) as place:
        place.clear([])
        carry_over(path, place.directory, checkpoint.shards)
        (place.directory / INDEX).unlink()
        if (path / SCALES).exists():
            _copy(path / SCALES, place.directory / SCALES)
        for name, text in zip(_TEXTS, (checkpoint.index.config, checkpoint.index.index), strict=True):
            if text:
                write_json(place.directory / name, text)
        count = 0
        for shard in checkpoint.index.shards:
            if Path(shard.name).name != shard.name:
                raise CheckpointError(f"{path / INDEX} names a file outside its directory: {shard.name!r}")
            file = place.directory / shard.name
            with output_errors(place.directory), file.open("wb") as write:
                start = shard.header.encode()
                write.write(len(start).to_bytes(8, "little") + start)
            for key in shard.keys:
                value = checkpoint.read(key)
                with output_errors(place.directory), file.open("ab") as write:
                    write.write(raw(value))
                count += 1
                done(count, len(checkpoint.entries))
            if _sha256(file) != shard.sha256:
                raise OutputError(f"{file} is not what it was before packing; was the disk full?")
        place.save(complete=True)
        place.move()


def _packed(
    checkpoint: Checkpoint, value: Tensor, matrices: Sequence[Matrix], grid: Grid | None
) -> PackedMatrix | None:
    """``value`` without its zeros; None if nothing is won."""
    if not matrices or not value.is_floating_point() or value.itemsize > 4:
        return None
    if any(matrix.transposed for matrix in matrices):
        value = value.transpose(-1, -2).contiguous()
    W = value.flatten(0, -2)
    found = _in_whole_numbers(checkpoint, W, matrices, grid) or pack_matrix(W)
    parts = (found.mask, found.values, found.scales)
    return found if sum(part.nbytes for part in parts if part is not None) < value.nbytes else None


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
    codes = grid.codes(W.float(), scales)
    values = grid.values(codes, scales, W.dtype).to(W.dtype)
    if len(scales) != len(W) or bytes(raw(values)) != bytes(raw(W)):
        return None
    return pack_matrix(W, codes.to(torch.int8), scales)


def _stored(
    name: str, entry: Entry, W: PackedMatrix | None, parts: Sequence[Tensor], transposed: bool
) -> Stored:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(raw(part))
    return Stored(
        file=name,
        dtype=entry.dtype,
        shape=entry.shape,
        packed=W is not None,
        transposed=transposed and W is not None,
        count=0 if W is None else int(W.starts[-1]),
        groups=0 if W is None or W.scales is None else W.scales.shape[1],
        sha256=digest.hexdigest(),
    )


def _grid(checkpoint: Checkpoint) -> Grid | None:
    """That of weights which ``prune --quantize`` wrote."""
    text = checkpoint.config.get("pruning_config", {}).get("quantization")
    return parse_grid(text) if text and (checkpoint.path / SCALES).exists() else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _copy(source: Path, target: Path) -> None:
    with output_errors(target.parent.parent):
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()
