"""``niwaki pack`` and ``niwaki unpack``: a pruned model directory without its zeros, and back, byte for byte."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from niwaki.arguments import checked
from niwaki.checkpoints.reading import INDEX_NAME, Checkpoint, without_index
from niwaki.checkpoints.shards import Shards
from niwaki.checkpoints.tensors import DTYPES, header_bytes, raw_bytes, read_header, read_tensor
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError
from niwaki.files import given_path, input_errors, output_errors, write_json
from niwaki.models.layout import Matrix
from niwaki.models.locate import locate_model
from niwaki.models.scales import FILE as SCALES, grid_of, read_scales, scale_key
from niwaki.models.streamed import StreamedModel
from niwaki.packed import card
from niwaki.packed.format import INDEX, Index, PackedCheckpoint, PackedTensor, Shard, dense, marked, sha256
from niwaki.packed.matrix import DTYPES as PACKABLE, PADDING, WORD, PackedMatrix, groups_fit, pack as pack_matrix
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.runs.carried import find_carried
from niwaki.runs.stage import Run, Stage
from niwaki.runs.workplace import check_output, new_directory
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

#: Files of the dense model whose text is in the index.
_TEXTS = ("config.json", INDEX_NAME)


@dataclass
class Sizes:
    """What packing saves, in bytes."""

    matrices: int = 0  # the packed matrices, before
    packed: int = 0  # the packed matrices, after
    dense: int = 0  # all weights, before
    total: int = 0  # all weights, after
    negative_zeros: int = 0  # the number of values that are -0.0, which other pruners leave: kept, and of no use

    def __str__(self) -> str:
        return (
            f"pruned matrices: {self.matrices / 2**20:,.1f} MiB became {self.packed / 2**20:,.1f} "
            f"({self.packed / self.matrices:.3f}); all weights: {self.dense / 2**20:,.1f} MiB became "
            f"{self.total / 2**20:,.1f} ({self.total / self.dense:.3f})"
        )

    @classmethod
    def of(cls, checkpoint: PackedCheckpoint) -> Sizes:
        """Those of a packed model, all of which is read and checked against its digests (CheckpointError)."""
        sizes = cls()
        for key, entry in checkpoint.entries.items():
            tensors = checkpoint.components(key)
            size = sum(tensor.nbytes for tensor in tensors)
            sizes.dense += entry.size
            sizes.total += size
            if checkpoint.index.tensors[key].packed:
                sizes.matrices += entry.size
                sizes.packed += size
                sizes.negative_zeros += int((tensors[-1][:-PADDING] == 0).sum())
        return sizes


@checked
def pack(model: str | Path, out: str | Path, progress: Progress | None = None) -> Sizes:
    """Writes the pruned ``model``, a directory or hub id, without its zeros to ``out``, a new or empty directory.

    Each matrix that gets smaller becomes a mask and its values, which are whole numbers of 4 or 8 bits with scales if
    ``prune(..., quantize=...)`` put it on a grid. All else stays. Every file is rebuilt in memory and compared.

    Raises:
        UsageError: no matrix would be smaller, or the model is packed.
        UnsupportedModelError: a tensor has a dtype that is unknown here, or a name that packing gives too.
        OutputError: it cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if (path / INDEX).exists():
        raise UsageError(f"{model} is packed already")
    progress, target = progress or Progress(), check_output(path, out)
    checkpoint = Checkpoint(path)
    card.check(path)
    carried = find_carried(checkpoint, target, keep=SCALES)
    packer = _Packer(checkpoint, progress)
    packer.check(str(model))
    sizes: Sizes | None = None
    with new_directory(target, {"pack": checkpoint.fingerprint()}) as directory:
        if directory:
            carried.copy(directory)
            # The path of a hub id is a folder of the cache.
            name = (path.resolve() if path == given_path(model) else Path(model)).name
            sizes = _write(packer, checkpoint, name, directory)
    return sizes or Sizes.of(PackedCheckpoint(target))


def _write(packer: _Packer, checkpoint: Checkpoint, name: str, directory: Path) -> Sizes:
    """Writes the packed form of ``checkpoint`` beside its other files, which are in ``directory``, and checks it."""
    config = _text(checkpoint.path / "config.json")
    index = _text(checkpoint.path / checkpoint.index_name) if checkpoint.index_name else ""
    shards = packer.write(directory)
    write_json(directory / INDEX, Index(config, index, shards, packer.tensors).to_json())
    (directory / INDEX_NAME).unlink(missing_ok=True)
    write_json(directory / "config.json", json.dumps(marked(checkpoint.config), indent=2) + "\n")
    sizes = Sizes.of(PackedCheckpoint(directory))
    card.write(directory, name, str(sizes))
    return sizes


@dataclass(frozen=True)
class Pack:
    """Writes the pruned model without its zeros, as :func:`niwaki.pack` does: the last stage of a run."""

    name: ClassVar[str] = "pack"
    is_format: ClassVar[bool] = True

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if not any(stage.name in ("prune", "quantize") for stage in before):
            raise UsageError("pack comes after prune or quantize: there are no zeros to leave out yet")

    def open(self, run: Run) -> Packing:
        return Packing(run)

    def __str__(self) -> str:
        return ""


class Packing:
    """:class:`Pack`, opened for a run."""

    texts: ClassVar[Texts | None] = None

    def __init__(self, run: Run) -> None:
        run.carried(Checkpoint(run.reading))

    def asked(self) -> dict[str, Any]:
        return {}

    def measure_on(self, heldout: dict[str, Windows]) -> None:
        """It measures nothing."""

    def extent(self, run: Run) -> tuple[int, int]:
        return 0, 0

    def work(self, run: Run) -> Record:
        assert run.earlier
        if run.place:
            checkpoint, directory = Checkpoint(run.reading), run.place.directory
            carried = run.carried(checkpoint, keep=SCALES)
            packer = _Packer(checkpoint, run.progress)
            packer.check(run.model)
            run.place.clear([])
            assert carried
            carried.copy(directory)
            _write(packer, checkpoint, Path(run.model).name, directory)
            run.clock.lap("write")
        return dataclasses.replace(run.earlier)


def check_packable(path: Path, name: str) -> None:
    """Raises what :func:`pack` does where no matrix of the dense model in ``path`` would be smaller; writes nothing."""
    _Packer(Checkpoint(path), Progress()).check(name)


@checked
def unpack(model: str | Path, out: str | Path, progress: Progress | None = None) -> None:
    """Writes to ``out``, new or empty, the dense model that :func:`pack` made ``model`` from, byte for byte.

    Raises:
        UsageError: the model is not packed.
        CheckpointError: it is damaged.
        OutputError: it cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if not (path / INDEX).exists():
        raise without_index(path) or UsageError(f"{model} is not packed: it has no {INDEX}")
    progress, target = progress or Progress(), check_output(path, out)
    checkpoint = PackedCheckpoint(path)
    dense = sum(entry.size for entry in checkpoint.entries.values())
    carried = find_carried(checkpoint, target, dense, keep=SCALES)
    with new_directory(target, {"unpack": checkpoint.fingerprint()}) as directory:
        if directory:
            carried.copy(directory)
            card.restore(directory)
            with output_errors(directory):
                for name, text in zip(_TEXTS, (checkpoint.index.config, checkpoint.index.index), strict=True):
                    if text:
                        (directory / name).write_bytes(text.encode())
            _write_dense(checkpoint, directory, progress)
            try:
                Checkpoint(directory)
            except CheckpointError as error:
                raise CheckpointError(f"{path / INDEX} is not of a whole model: {error}") from error


def _write_dense(checkpoint: PackedCheckpoint, directory: Path, progress: Progress) -> None:
    """Writes the weight files, and compares them with their digests."""
    count = 0
    for shard in checkpoint.index.shards:
        path, header = directory / shard.name, shard.header.encode()
        with output_errors(directory), path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for key in shard.keys:
                file.write(raw_bytes(checkpoint.read(key)))
                count += 1
                progress.status("unpacking, tensor", count, len(checkpoint.entries))
        if _digest(path) != shard.sha256:
            raise OutputError(
                f"{shard.name} is not what it was before packing; was the disk full, or the packed model changed?"
            )


class _Packer:
    """Packs the tensors of a dense checkpoint; ``tensors`` are those that are written."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        if checkpoint.is_encoded:
            raise UnsupportedModelError(f"{checkpoint.path} is in FP8 or MXFP4; prune it first, and pack the result")
        self.tensors: dict[str, PackedTensor] = {}
        self._names: set[str] = set()
        self._checkpoint, self._path, self._progress = checkpoint, checkpoint.path, progress
        self._headers = {shard: read_header(checkpoint.path / shard) for shard in checkpoint.shards}
        self._matrices: dict[str, list[Matrix]] = defaultdict(list)
        for matrix in StreamedModel(checkpoint, "cpu").matrices():
            self._matrices[matrix.key].append(matrix)
        stored = sorted({checkpoint.entries[key].dtype for key in self._matrices})
        if not any(DTYPES.get(dtype) in PACKABLE for dtype in stored):
            raise UnsupportedModelError(
                f"the matrices of {checkpoint.path} are in {' and '.join(stored)}; only BF16, F16 and F32 can be packed"
            )
        self._grid = grid_of(checkpoint)
        if self._grid and self._grid.group and self._grid.group % WORD:
            progress.note(
                f"groups of {self._grid.group} cannot be packed as whole numbers, so values stay as they are stored; "
                f"multiples of {WORD} can, as in int4:{WORD}"
            )
        self._scaled = read_header(checkpoint.path / SCALES) if (checkpoint.path / SCALES).exists() else {}

    def check(self, name: str) -> None:
        """Raises UsageError, which calls the model ``name``, unless a matrix would be smaller; reads up to that one."""
        for shard, entries in self._headers.items():
            for key in self._matrices.keys() & entries.keys():
                is_known = DTYPES.get(entries[key].dtype) in PACKABLE
                value = read_tensor(self._path / shard, key, entries[key]) if is_known else None
                if value is not None and self._packed(value, self._matrices[key]) is not None:
                    return
        raise UsageError(f"no matrix of {name} would be smaller without its zeros; is it pruned?")

    def write(self, directory: Path) -> list[Shard]:
        """Writes a packed file for each file; these are what it returns."""
        shards, writer = [], Shards(directory)
        count = sum(map(len, self._headers.values()))
        for number, (name, entries) in enumerate(self._headers.items()):
            file = f"packed-{number + 1:05d}-of-{len(self._headers):05d}.safetensors"
            header = header_bytes(self._path / name)
            digest = hashlib.sha256(header)
            keys = sorted(entries, key=lambda key: entries[key].offset)
            written: dict[str, Tensor] = {}
            for key in keys:
                tensors, dense_value = self._stored(file, name, key)
                written |= tensors
                digest.update(raw_bytes(dense_value))
                self._progress.status("packing, tensor", len(self.tensors), count)
            with input_errors(self._path / name):
                is_same = digest.hexdigest() == _digest(self._path / name)
            if not is_same:
                raise CheckpointError(f"{self._path / name} was changed while it was packed; repeat the command")
            shards.append(Shard(name, header[8:].decode(), keys, digest.hexdigest()))
            writer.write(file, written, written.__getitem__)
        return shards

    def _stored(self, file: str, shard: str, key: str) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors that go to ``file`` for one of the dense checkpoint, and what a reader makes of them."""
        entry = self._headers[shard][key]
        if entry.dtype not in DTYPES:
            raise UnsupportedModelError(f"{self._path} has {key!r} in {entry.dtype}, unknown here")
        value, matrices = read_tensor(self._path / shard, key, entry), self._matrices[key]
        W = self._packed(value, matrices)
        tensors = [value] if W is None else _written(W)
        transposed, count, bits, groups = False, 0, 0, 0
        if W is not None:
            transposed, count = matrices[0].is_stored_transposed, int(W.starts[-1])
            if W.scales is not None:
                bits, groups = (4 if W.values.dtype == torch.uint8 else 8), W.scales.shape[1]
        digest = sha256(map(raw_bytes, tensors))
        stored = PackedTensor(file, entry.dtype, entry.shape, W is not None, transposed, count, bits, groups, digest)
        self.tensors[key] = stored
        named = dict(zip(stored.components(key), tensors, strict=True))
        if taken := sorted(self._names & named.keys()):
            raise UnsupportedModelError(
                f"{self._path} has a tensor {taken[0]!r}, a name that packing gives too; rename it"
            )
        self._names |= named.keys()
        return named, value if W is None else dense(W, stored)

    def _packed(self, value: Tensor, matrices: list[Matrix]) -> PackedMatrix | None:
        """``value`` without its zeros; None if that is not smaller."""
        if not matrices or value.dtype not in PACKABLE:
            return None
        if matrices[0].is_stored_transposed:
            value = value.transpose(-1, -2).contiguous()
        W = value.flatten(0, -2)
        packed = self._in_whole_numbers(W, matrices) or pack_matrix(W)
        return packed if sum(tensor.nbytes for tensor in _written(packed)) < value.nbytes else None

    def _in_whole_numbers(self, W: Tensor, matrices: list[Matrix]) -> PackedMatrix | None:
        """``W`` as numbers of its grid and their scales; None if it is not on the grid, or has groups of odd sizes."""
        grid = self._grid
        if grid is None or not all(scale_key(matrix) in self._scaled for matrix in matrices):
            return None  # also of a block that was left as it is
        scales = torch.cat([read_scales(self._checkpoint, matrix, grid) for matrix in matrices]).float()
        if len(scales) != len(W) or not groups_fit(W.shape[1], scales.shape[1]):
            return None
        codes = grid.codes(W.float(), scales).to(torch.int8)  # which have no -0
        values = grid.values(codes.float(), scales, W.dtype).to(W.dtype)
        if bytes(raw_bytes(values)) != bytes(raw_bytes(W)):
            return None
        return pack_matrix(W, codes, scales, bits=4 if grid.bits <= 4 else 8)


def _written(W: PackedMatrix) -> list[Tensor]:
    """The tensors of ``W`` that are written, in the order of :meth:`PackedTensor.components`."""
    scales = [] if W.scales is None else [W.scales.to(W.dtype)]  # as they were read
    return [W.mask, *scales, W.values]


def _text(path: Path) -> str:
    try:
        with input_errors(path):
            return path.read_bytes().decode() if path.exists() else ""
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not in UTF-8: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha256(iter(lambda: file.read(1 << 24), b""))
