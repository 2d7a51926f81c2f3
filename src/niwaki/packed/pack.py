"""``niwaki pack``: a pruned model directory without its zeros."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niwaki.arguments import checked
from niwaki.checkpoints.reading import INDEX_NAME, Checkpoint, without_index
from niwaki.checkpoints.tensors import DTYPES, Entry, header_bytes, raw_bytes, read_header, read_tensor
from niwaki.checkpoints.writing import Shards, write_file
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError, raised_as
from niwaki.files import digest as file_digest, given_path, input_errors, output_errors, replace_file
from niwaki.layer.grid import Grid
from niwaki.models.formats import FACTORS_FILE, factor_keys, format_of, is_product
from niwaki.models.layout import Matrix
from niwaki.models.locate import locate_model
from niwaki.models.outside import embedding_keys
from niwaki.models.scales import (
    EMBEDDINGS,
    FILE as SCALES,
    embedding_numbers_of,
    read_embedding_scales,
    read_scales,
    scale_key,
    whole_numbers_of,
)
from niwaki.models.streamed import StreamedModel
from niwaki.packed.format import INDEX, Index, PackedCheckpoint, PackedTensor, Shard, dense, marked, sha256
from niwaki.packed.kernels import expand
from niwaki.packed.matrix import (
    DTYPES as PACKABLE,
    PADDING,
    WHOLE_BITS,
    WORD,
    PackedMatrix,
    groups_fit,
    pack as pack_matrix,
)
from niwaki.records.progress import Progress
from niwaki.runs.card import DENSE_CARD, check_card, top, write_card_of_form
from niwaki.runs.conversion import Conversion, convert

#: The library_name of a packed model's card, which loads in niwaki only, and of no other card.
_LIBRARY = "niwaki"
_CARD = """
# {name}, packed

The weights of a model without its zeros, or as whole numbers of a few bits ({sizes}).
Only niwaki reads this format: transformers
says that there are no weights, and to delete `quantization_config`, which does not help.

    niwaki generate DIR "The old man"
    niwaki unpack DIR DENSE    # the dense model, which loads everywhere

```python
import niwaki

model = niwaki.load("DIR")  # a model of transformers
```
"""


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
            f"packed matrices: {self.matrices / 2**20:,.1f} MiB became {self.packed / 2**20:,.1f} "
            f"({self.packed / self.matrices:.3f}); all weights: {self.dense / 2**20:,.1f} MiB became "
            f"{self.total / 2**20:,.1f} ({self.total / self.dense:.3f})"
        )

    @property
    def described(self) -> list[str]:
        """Sentences that describe the sizes."""
        kept = (
            f"{self.negative_zeros:,} of the values that are kept are -0.0, as W * mask leaves them: the model would "
            "be smaller with 0.0 (docs/packed.md)"
        )
        return [str(self), kept] if self.negative_zeros else [str(self)]

    @classmethod
    def of(cls, checkpoint: PackedCheckpoint) -> Sizes:
        """The sizes of a packed model, all of which is read and checked against its digests (CheckpointError)."""
        sizes = cls()
        for key, entry in checkpoint.entries.items():
            tensors, stored = checkpoint.components(key), checkpoint.index.tensors[key]
            size = sum(tensor.nbytes for tensor in tensors)
            sizes.dense += entry.size
            sizes.total += size
            if stored.packed:
                sizes.matrices += entry.size
                sizes.packed += size
                named = zip(stored.components(key), tensors, strict=True)
                values = [tensor for name, tensor in named if name.endswith(".values") and not stored.bits]
                sizes.negative_zeros += sum(int((each[:-PADDING] == 0).sum()) for each in values)
        return sizes


@checked
def pack(model: str | Path, out: str | Path, progress: Progress | None = None) -> Sizes:
    """Writes a pruned or quantized model without its zeros and with few bits a weight, to save disk and memory.

    Each matrix that gets smaller becomes a mask and its values; if it is on a grid, the values are whole numbers of a
    few bits, with scales. A matrix with hardly any zeros has no mask. Everything else stays as it is. Every file is
    rebuilt in memory and compared. The call is the same as :func:`niwaki.export` with ``format="packed"``, and also
    returns the sizes.

    Args:
        model: A directory or hub id.
        out: Output directory, new or empty.
        progress: Receives the progress of packing.

    Returns:
        How much smaller the matrices and the whole model have become.

    Raises:
        UsageError: no matrix would be smaller, or the model is packed already.
        UnsupportedModelError: a tensor has an unknown dtype, or a name that packing uses too.
        OutputError: the result cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if (path / INDEX).exists():
        raise UsageError(f"{model} is packed already")
    form = Packed(Checkpoint(path), progress)
    convert(form, model, out, "pack")
    return form.sizes or Sizes.of(PackedCheckpoint(given_path(out)))


def check_packable(path: Path, name: str) -> None:
    """Raises what :func:`pack` does where no matrix of the dense model in ``path`` would be smaller; writes nothing."""
    Packed(Checkpoint(path)).check(name)


class Packed(Conversion):
    """A dense checkpoint, to be written without its zeros; ``sizes`` is what that saved, when it is done.

    UnsupportedModelError where no matrix has a dtype that can be packed.
    """

    kept = (SCALES, EMBEDDINGS)

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        super().__init__(checkpoint, progress)
        check_card(checkpoint.path)
        self.sizes: Sizes | None = None
        self._path = checkpoint.path
        self._tensors: dict[str, PackedTensor] = {}  # those that are written
        self._names: set[str] = set()
        self._matrices: dict[str, list[Matrix]] = defaultdict(list)
        streamed = StreamedModel(checkpoint, "cpu")
        for matrix in streamed.matrices():
            self._matrices[matrix.key].append(matrix)
        stored = sorted({checkpoint.entries[key].dtype for key in self._matrices})
        if not any(DTYPES.get(dtype) in PACKABLE for dtype in stored):
            raise UnsupportedModelError(
                f"the matrices of {checkpoint.path} are in {' and '.join(stored)}; only BF16, F16 and F32 can be packed"
            )
        self._grid, self._embedding_grid = whole_numbers_of(checkpoint), embedding_numbers_of(checkpoint)
        self._embeddings = embedding_keys(streamed) if self._embedding_grid else []

    @cached_property
    def _headers(self) -> dict[str, dict[str, Entry]]:
        return {shard: read_header(self._path / shard) for shard in self.checkpoint.shards}

    @cached_property
    def _scaled(self) -> dict[str, Entry]:
        return read_header(self._path / SCALES) if (self._path / SCALES).exists() else {}

    def check(self, name: str) -> None:
        """UsageError, which calls the model ``name``, unless a matrix would be smaller; reads up to that one."""
        if self.checkpoint.is_encoded:
            raise UnsupportedModelError(
                f"{self._path} is in {self.checkpoint.encoded_as}; prune or quantize it first, and pack the result"
            )
        if self._grid and self._grid.group and self._grid.group % WORD:
            self.progress.note(
                f"groups of {self._grid.group} cannot be packed as whole numbers, so values stay as they are stored; "
                f"multiples of {WORD} can, as in int4:{WORD}"
            )
        if any(map(self._can_pack, self._embeddings)):
            return
        count = kept = 0
        for shard, entries in self._headers.items():
            for key in self._matrices.keys() & entries.keys():
                if DTYPES.get(entries[key].dtype) not in PACKABLE:
                    continue
                value = read_tensor(self._path / shard, key, entries[key])
                count, kept = count + value.numel(), kept + (there := int(value.count_nonzero()))
                # A bit for each weight says where the others are; without a grid nothing else makes it smaller.
                is_dense = there + value.numel() / (8 * value.element_size()) >= value.numel()
                if is_dense and not (self._grid or self.checkpoint.pruning.has_factors):
                    continue
                if self._factors(key, value) or self._packed(value, self._matrices[key]):
                    return
        self.check_groups(name)
        zeros = f"{100 * (1 - kept / max(1, count)):.2g} %"
        raise UsageError(
            f"no matrix of {name} would be smaller without its zeros; {zeros} of its weights are zeros: prune or "
            "quantize it first"
        )

    def check_groups(self, name: str) -> None:
        """UsageError where only zeros could make matrices smaller, as the groups of the grids show."""
        grid = self._grid or self._embedding_grid
        if grid and grid.group and grid.group % WORD and not any(map(self._can_pack, self._embeddings)):
            raise UsageError(
                f"{name} on {grid} would hardly be smaller packed: whole numbers are in groups of a multiple of "
                f"{WORD}, as in int{grid.bits}:{WORD}"
            )

    def write(self, directory: Path, name: str) -> list[str]:
        """Writes the packed form beside the other files, and checks it."""
        checkpoint = self.checkpoint
        config = _text(self._path / "config.json")
        index = _text(self._path / checkpoint.index_name) if checkpoint.index_name else ""
        shards = self._write_shards(directory)
        packed = Index(config, index, shards, self._tensors)
        replace_file(directory / INDEX, packed.to_json())
        (directory / INDEX_NAME).unlink(missing_ok=True)
        replace_file(directory / "config.json", json.dumps(marked(checkpoint.config), indent=2) + "\n")
        self.sizes = sizes = Sizes.of(PackedCheckpoint(directory))
        text, own = _CARD.format(name=name, sizes=sizes), "the dense model's card: what it is, how it was pruned"
        write_card_of_form(directory, _LIBRARY, {"niwaki", "packed"}, text, own)
        return sizes.described

    def _write_shards(self, directory: Path) -> list[Shard]:
        """Writes a packed file for each file; these are what it returns."""
        shards, writer = [], Shards(directory)
        count = sum(map(len, self._headers.values()))
        for number, (name, entries) in enumerate(self._headers.items()):
            file = f"packed-{number + 1:05d}-of-{len(self._headers):05d}.safetensors"
            header = header_bytes(self._path / name)
            # Products have other bits on other processors: in the packed model's digest factors stand for them.
            digest = hashlib.sha256(header)
            digest_packed = hashlib.sha256(header) if self.checkpoint.pruning.has_factors else digest
            keys = sorted(entries, key=lambda key: entries[key].offset)
            written: dict[str, Tensor] = {}
            for key in keys:
                tensors, dense_value = self._stored(file, name, key)
                written |= tensors
                digest.update(raw_bytes(dense_value))
                if digest_packed is not digest:
                    for value in tensors.values() if self._tensors[key].inner else [dense_value]:
                        digest_packed.update(raw_bytes(value))
                self.progress.status("packing, tensor", len(self._tensors), count)
            with input_errors(self._path / name):
                is_same = digest.hexdigest() == file_digest(self._path / name)
            if not is_same:
                raise CheckpointError(f"{self._path / name} was changed while it was packed; repeat the command")
            shards.append(Shard(name, header[8:].decode(), keys, digest_packed.hexdigest()))
            writer.write(file, written, written.__getitem__)
        return shards

    def _stored(self, file: str, shard: str, key: str) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors that go to ``file`` for one of the dense checkpoint, and what a reader makes of them."""
        entry = self._headers[shard][key]
        if entry.dtype not in DTYPES:
            raise UnsupportedModelError(f"{self._path} has {key!r} in {entry.dtype}, unknown here")
        value, matrices = read_tensor(self._path / shard, key, entry), self._matrices[key]
        W = self._factors(key, value) or self._packed(value, matrices) or self._embedding(key, value)
        tensors = [tensor for each in W for tensor in _written(each)] or [value]
        transposed, bits = bool(W and matrices) and matrices[0].is_stored_transposed, W[0].bits if W else 0
        counts = [each.count for each in W] or [0]
        groups = [0 if each.scales is None else each.scales.shape[1] for each in W] or [0]
        digest, inner = sha256(map(raw_bytes, tensors)), W[0].columns if len(W) > 1 else 0
        given = (file, entry.dtype, entry.shape, bool(W), transposed, counts[0], bits, groups[0], digest, inner)
        right: dict[str, Any] = {} if len(W) < 2 else {"count_right": counts[1], "groups_right": groups[1]}
        whole = any(each.mask is None for each in W)
        self._tensors[key] = stored = PackedTensor(*given, **right, whole=whole)
        named = dict(zip(stored.components(key), tensors, strict=True))
        if taken := sorted(self._names & named.keys()):
            raise UnsupportedModelError(
                f"{self._path} has a tensor {taken[0]!r}, a name that packing gives too; rename it"
            )
        self._names |= named.keys()
        return named, value if inner or not W else dense(W, stored)

    def _factors(self, key: str, value: Tensor) -> tuple[PackedMatrix, ...]:
        """The two factors whose product ``value`` is; none if it is no product, or one that is not smaller so."""
        weight_format, matrices = format_of(self.checkpoint), self._matrices[key]
        if not weight_format.has_factors or not matrices:
            return ()
        matrix = matrices[0]
        if not (parts := weight_format.read_parts(self.checkpoint, matrix)):  # in a block that was left as it was
            return ()
        left, right, *scales = parts
        if not is_product(value.T if matrix.is_stored_transposed else value, (left, right)):
            raise CheckpointError(f"{self._path}: {key!r} is not the product of its factors any more; prune it again")
        if self._grid is None:
            return _if_smaller((pack_matrix(left), pack_matrix(right)), value)
        both = zip((left, right), scales, strict=True)
        packed = [_on_grid(factor, each, self._grid, whole=False) for factor, each in both]
        if not all(packed):
            raise CheckpointError(f"{self._path}: {key!r} has factors that are not on {self._grid}; prune it again")
        return _if_smaller(tuple(filter(None, packed)), value)

    def _packed(self, value: Tensor, matrices: list[Matrix]) -> tuple[PackedMatrix, ...]:
        """``value`` without its zeros; none if that is not smaller."""
        if not matrices or value.dtype not in PACKABLE:
            return ()
        if matrices[0].is_stored_transposed:
            value = value.transpose(-1, -2).contiguous()
        W = value.flatten(0, -2)
        return _if_smaller((self._in_whole_numbers(W, matrices) or pack_matrix(W),), value)

    def _embedding(self, key: str, value: Tensor) -> tuple[PackedMatrix, ...]:
        """The token embeddings or the head as numbers of their grid; none of another tensor.

        CheckpointError where they are not on it.
        """
        grid = self._embedding_grid
        if grid is None or key not in self._embeddings:
            return ()
        if not self._can_pack(key):
            self.progress.note(
                f"{key} stays as it is stored: only groups of {WORD} inputs and their multiples can be packed, of "
                "numbers in bfloat16, float16 or float32"
            )
            return ()
        scales = read_embedding_scales(self.checkpoint, key, grid)
        # Without a mask, so that any row can be read by itself.
        if (packed := _on_grid(value, scales, grid, whole=True)) is None:
            raise CheckpointError(f"{self._path}: {key!r} is not on its grid {grid} any more; quantize the model again")
        return (packed,)

    def _can_pack(self, key: str) -> bool:
        """Whether these embeddings are of a dtype and in groups that the format has."""
        columns = self.checkpoint.entries[key].shape[1]
        assert self._embedding_grid
        groups = self._embedding_grid.groups(columns)
        return DTYPES.get(self.checkpoint.entries[key].dtype) in PACKABLE and groups_fit(columns, groups)

    def _in_whole_numbers(self, W: Tensor, matrices: list[Matrix]) -> PackedMatrix | None:
        """``W`` as numbers of its grid and their scales; None if it is not on the grid, or has groups of odd sizes."""
        grid = self._grid
        if grid is None or not all(scale_key(matrix) in self._scaled for matrix in matrices):
            return None  # also of a block that was left as it is
        scales = torch.cat([read_scales(self.checkpoint, matrix, grid) for matrix in matrices])
        return _on_grid(W, scales, grid)


def _on_grid(W: Tensor, scales: Tensor, grid: Grid, whole: bool | None = None) -> PackedMatrix | None:
    """``W`` as numbers of ``grid`` with these ``scales``; None if it is not on the grid, or has groups of odd sizes."""
    scales = scales.float()
    if len(scales) != len(W) or not groups_fit(W.shape[1], scales.shape[1]):
        return None
    codes = grid.codes(W.float(), scales).to(torch.int8)  # which have no -0
    values = grid.values(codes.float(), scales, W.dtype).to(W.dtype)
    if bytes(raw_bytes(values)) != bytes(raw_bytes(W)):
        return None
    fewest = grid.fewest(codes)
    return pack_matrix(W, codes, scales, next(bits for bits in WHOLE_BITS if bits >= fewest), whole)


def _if_smaller(packed: tuple[PackedMatrix, ...], value: Tensor) -> tuple[PackedMatrix, ...]:
    """``packed``; nothing if that is not smaller than ``value``."""
    return packed if sum(tensor.nbytes for each in packed for tensor in _written(each)) < value.nbytes else ()


def _written(W: PackedMatrix) -> list[Tensor]:
    """The tensors of ``W`` that are written, in the order of :meth:`PackedTensor.components`."""
    mask = [] if W.mask is None else [W.mask]
    scales = [] if W.scales is None else [W.scales.to(W.dtype)]  # as they were read
    return [*mask, *scales, W.values]


def _text(path: Path) -> str:
    with raised_as(CheckpointError, f"{path} is not in UTF-8", UnicodeDecodeError), input_errors(path):
        return path.read_bytes().decode()


# ``niwaki unpack``: the dense model that a packed one was made from.


@checked
def unpack(model: str | Path, out: str | Path, progress: Progress | None = None) -> None:
    """Writes the dense model from which :func:`pack` made ``model``, byte for byte.

    Only products of two factors are computed again, and another processor may round them differently.

    Args:
        model: A directory that ``pack`` wrote.
        out: Output directory, new or empty.
        progress: Receives the progress of unpacking.

    Raises:
        UsageError: the model is not packed.
        CheckpointError: the model is damaged.
        OutputError: the result cannot be written.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    path = locate_model(str(model))
    if not (path / INDEX).exists():
        raise without_index(path) or UsageError(f"{model} is not packed: it has no {INDEX}")
    convert(Unpacked(PackedCheckpoint(path), progress), model, out, "unpack")


class Unpacked(Conversion):
    """A packed model, to be written as the dense one that it was made from."""

    kept = (SCALES, EMBEDDINGS)

    def __init__(self, checkpoint: PackedCheckpoint, progress: Progress | None = None) -> None:
        super().__init__(checkpoint, progress)
        self._packed = checkpoint
        self.size = sum(entry.size for entry in checkpoint.entries.values())

    def check(self, name: str) -> None:
        """Nothing: all of it is looked at while it is written."""

    def write(self, directory: Path, name: str) -> list[str]:
        """Writes the weight files as they were, and the card and the texts that packing replaced."""
        checkpoint = self._packed
        readme, kept = directory / "README.md", directory / DENSE_CARD
        with output_errors(directory):
            # A card that packing did not write, as of a model packed without one, stays.
            if kept.exists() or top(readme).get("library_name") == _LIBRARY:
                readme.unlink(missing_ok=True)
            if kept.exists():
                kept.replace(readme)
            for file, text in (("config.json", checkpoint.index.config), (INDEX_NAME, checkpoint.index.index)):
                if text:
                    (directory / file).write_bytes(text.encode())
        _write_dense(checkpoint, directory, self.progress)
        _write_factors(checkpoint, directory)
        try:
            Checkpoint(directory)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path / INDEX} is not of a whole model: {error}") from error
        return []


def _write_factors(checkpoint: PackedCheckpoint, directory: Path) -> None:
    """Writes the two factors of matrices beside them, and the scales of both, where they have any."""
    places = {}
    for key, stored in checkpoint.index.tensors.items():
        if stored.inner:
            shapes = [(part.rows, part.columns) for part in stored.parts]
            if stored.bits:
                shapes += [(part.rows, part.groups) for part in stored.parts]
            for part, (name, shape) in enumerate(zip(factor_keys(key, bool(stored.bits)), shapes, strict=True)):
                places[name] = key, part, torch.empty(shape, dtype=DTYPES[stored.dtype], device="meta")
    if places:
        with output_errors(directory):
            (directory / FACTORS_FILE).parent.mkdir()

        packed = functools.lru_cache(maxsize=1)(checkpoint.packed)  # one part of a matrix comes after the other

        def read(name: str) -> Tensor:
            key, part, _ = places[name]
            factor = packed(key)[part % 2]
            return expand(factor) if part < 2 else _written(factor)[1]

        write_file(directory / FACTORS_FILE, {name: like for name, (_, _, like) in places.items()}, read)


def _write_dense(checkpoint: PackedCheckpoint, directory: Path, progress: Progress) -> None:
    """Writes the weight files, and compares them with their digests."""
    count = 0
    for shard in checkpoint.index.shards:
        path, header = directory / shard.name, shard.header.encode()
        with output_errors(directory), path.open("wb") as file:
            begin = len(header).to_bytes(8, "little") + header
            file.write(begin)
            written = hashlib.sha256(begin)
            has_products = any(checkpoint.index.tensors[key].inner for key in shard.keys)
            packed = hashlib.sha256(begin) if has_products else written  # where factors stand for their product
            for key in shard.keys:
                data = raw_bytes(checkpoint.read(key))
                file.write(data)
                written.update(data)
                if packed is not written:
                    is_product = checkpoint.index.tensors[key].inner
                    for piece in map(raw_bytes, checkpoint.components(key)) if is_product else [data]:
                        packed.update(piece)
                count += 1
                progress.status("unpacking, tensor", count, len(checkpoint.entries))
        if packed.hexdigest() != shard.sha256 or file_digest(path) != written.hexdigest():
            raise OutputError(
                f"{shard.name} is not what it was before packing; was the disk full, or the packed model changed?"
            )
