"""``niwaki unpack``: the dense model that a packed one was made from."""

import functools
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from niwaki.arguments import checked
from niwaki.checkpoints.reading import INDEX_NAME, Checkpoint, without_index
from niwaki.checkpoints.shards import write_file
from niwaki.checkpoints.tensors import DTYPES, raw_bytes
from niwaki.errors import CheckpointError, OutputError, UsageError
from niwaki.files import digest as file_digest, output_errors
from niwaki.models.factors import FILE as FACTORS, factor_keys
from niwaki.models.locate import locate_model
from niwaki.models.scales import EMBEDDINGS, FILE as SCALES
from niwaki.packed import card
from niwaki.packed.format import INDEX, PackedCheckpoint
from niwaki.packed.kernels import expand
from niwaki.packed.matrix import PackedMatrix
from niwaki.records.progress import Progress
from niwaki.runs.conversion import Form, convert

#: Files of the dense model whose text is in the index.
_TEXTS = ("config.json", INDEX_NAME)


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


class Unpacked(Form):
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
        card.restore(directory)
        with output_errors(directory):
            for file, text in zip(_TEXTS, (checkpoint.index.config, checkpoint.index.index), strict=True):
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
            rows, columns = stored.untransposed
            shapes = [(rows, stored.inner), (stored.inner, columns)]
            if stored.bits:
                shapes += [(rows, stored.groups), (stored.inner, stored.groups_right)]
            for part, (name, shape) in enumerate(zip(factor_keys(key, bool(stored.bits)), shapes, strict=True)):
                places[name] = key, part, torch.empty(shape, dtype=DTYPES[stored.dtype], device="meta")
    if places:
        with output_errors(directory):
            (directory / FACTORS).parent.mkdir()

        packed = functools.lru_cache(maxsize=1)(checkpoint.packed)  # one part of a matrix comes after the other

        def read(name: str) -> Tensor:
            key, part, _ = places[name]
            factor = packed(key)[part % 2]
            return expand(factor) if part < 2 else _scales(factor)

        write_file(directory / FACTORS, {name: like for name, (_, _, like) in places.items()}, read)


def _scales(factor: PackedMatrix) -> Tensor:
    """The scales of a factor on a grid, as they were read."""
    assert factor.scales is not None
    return factor.scales.to(factor.dtype)


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
