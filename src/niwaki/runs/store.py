"""The blocks that a stage is done with, on disk: a run that is interrupted resumes after them."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from niwaki.checkpoints.writing import CheckpointWriter
from niwaki.errors import OutputError
from niwaki.files import output_errors
from niwaki.models.block import DecoderBlock
from niwaki.models.formats import WeightFormat
from niwaki.models.layout import Matrix
from niwaki.models.training import Projection, trained_weights
from niwaki.records.record import Record
from niwaki.runs.stage import Run

T = TypeVar("T")


class BlockStore:
    """Says which blocks an earlier run has done, and that blocks are done."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def earlier(self, block: int, load: Callable[[str], T | None]) -> T | None:
        """What an earlier run has kept of ``block``, the same in all processes; None where it has to be done.

        ``load`` makes it from its digest, in the first process; it gives None where what is on disk has another one.
        """
        run, digests = self.run, self.run.journal.digests
        if block >= len(digests):
            return None
        if (kept := run.world.received(load(digests[block]) if run.place else None)) is None:
            run.progress.note(f"block {block} of the earlier run is damaged on disk and done again")
        return kept

    def forget(self, block: int, record: Record) -> None:
        """Takes out of ``record`` what an earlier run did to ``block``."""
        record.matrices = [each for each in record.matrices if each.block != block]
        record.fits = [each for each in record.fits if each.block != block]

    def save(self, block: int, record: Record, digest: Callable[[], str]) -> None:
        """Makes sure that a run that is stopped from now on resumes after ``block``; ``digest`` is of what it keeps."""
        record.matrices.sort(key=lambda each: each.block)
        record.fits.sort(key=lambda each: each.block)
        if self.run.place:
            record.seconds = dict(self.run.clock.seconds)
            self.run.place.save_block(block, digest(), record)
        self.run.clock.lap("write")


class WeightStore(BlockStore):
    """Blocks whose matrices go to the ``writer`` of the first process, in their ``format``."""

    def __init__(self, run: Run, weight_format: WeightFormat) -> None:
        super().__init__(run)
        self.format = weight_format
        self.writer: CheckpointWriter | None = None
        self._parts: dict[str, Sequence[Tensor]] = {}  # of the present block's matrices, by name
        self._done: dict[int, bool] = {}  # by block, of those that an earlier run has done

    def is_done(self, block: int, matrices: Iterable[Matrix]) -> bool:
        """Whether an earlier run has written these ``matrices`` of ``block``, and they are still there."""
        if block not in self._done:
            done = self.earlier(block, lambda digest: self._digest(matrices) == digest or None)
            self._done[block] = done is not None
        return self._done[block]

    def begin(self, block: int, record: Record) -> None:
        """The next block to write to is ``block``."""
        self.forget(block, record)
        self._parts = {}

    def write(self, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor] = ()) -> None:
        """Writes a matrix of the present block, in the layout of the checkpoint, with the ``parts`` that it has."""
        if parts:
            self._parts[matrix.name] = parts
        if self.writer:
            self.format.write(self.writer, matrix, stored, self._parts.get(matrix.name, ()))

    def write_trained(self, block: DecoderBlock, factors: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        """Writes what training has made of the matrices of ``block``, and of their parts where two are factors."""
        for matrix, stored in trained_weights(block):
            self.write(matrix, stored, (factors or {}).get(matrix.name, ()))

    @property
    def factors(self) -> Mapping[str, Sequence[Tensor]] | None:
        """The parts of the present block's matrices, by name, of which two are factors; None where none are."""
        return self._parts if self.format.has_factors else None

    def restore(self, block: DecoderBlock, matrices: Iterable[Matrix]) -> None:
        """Puts the weights of ``matrices`` into ``block`` that were written, by this run or an earlier one."""
        for matrix in matrices:
            stored = block.empty(matrix)
            if self.writer:
                stored.copy_(self.format.read(self.writer, matrix))
            block.put(matrix, self.run.world.send(stored, 0))

    @property
    def on_grid(self) -> Projection | None:
        """What puts weights of the present block into their format; None where that is the usual one."""
        return self._projected if self._parts and not self.format.has_factors else None

    def _projected(self, matrix: Matrix, W: Tensor) -> Tensor:
        parts = self._parts.get(matrix.name)
        return self.format.project(matrix, W, parts) if parts else W

    def finish(self, block: int, matrices: Iterable[Matrix], record: Record) -> None:
        """Says that these ``matrices`` of ``block`` are written."""
        if self.writer:
            self.writer.sync()
        self.save(block, record, lambda: self._digest(matrices))

    def check_written(self, matrices: Callable[[int], Iterable[Matrix]]) -> None:
        """OutputError unless the ``matrices`` of each block are on disk as they were written, to the bit."""
        for block, digest in enumerate(self.run.journal.digests):
            if digest and self._digest(matrices(block), on_disk=True) != digest:
                raise OutputError(f"block {block} is not on disk as it was written; was the disk full?")

    def _digest(self, matrices: Iterable[Matrix], on_disk: bool = False) -> str:
        assert self.writer
        places = [place for matrix in matrices for place in self.format.places(matrix)]
        return self.writer.digest(places, on_disk)


# Tensors that a stage decides once and keeps until it is done, so that a resumed run has the same.

K = TypeVar("K", bound="Kept")
#: The entry of the file that has all metadata, as JSON.
_METADATA = "metadata"


class Kept:
    """A dataclass of tensors, of what JSON has, and of dicts of such by text or tuples: it can be kept on disk."""

    def save(self, path: Path, expected: str = "") -> str:
        """Writes it, on disk at the return; the file's SHA-256. OutputError if another one was ``expected``."""
        tensors: dict[str, Tensor] = {}
        rest = json.dumps(_taken_apart(vars(self), tensors))
        # In one entry: several are written in an order that changes.
        data = save(tensors, metadata={_METADATA: rest})
        digest = hashlib.sha256(data).hexdigest()
        if expected not in ("", digest):
            raise OutputError(f"{path} was damaged, and made again it is not what it was; start over with --restart")
        with output_errors(path):
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        return digest

    @classmethod
    def load(cls, path: Path, digest: str) -> Self | None:
        """What :meth:`save` wrote; None where it is not there or has another SHA-256."""
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return None
        try:
            with safe_open(path, "pt") as file:
                return cls(**_joined(json.loads(file.metadata()[_METADATA]), file.get_tensor))
        except (KeyError, TypeError, ValueError):  # another version wrote it
            return None


def kept_once(run: Run, kind: type[K], make: Callable[[], K]) -> K:
    """What a stage decides before its blocks, the same in all processes; a resumed run has what it began with."""
    place, journal = run.place, run.journal
    kept = kind.load(place.plan, journal.plan) if place and journal.blocks else None
    if (kept := run.world.received(kept)) is not None:
        return kept
    if journal.blocks:
        run.progress.note("the plan of the earlier run is damaged and made again")
    made = make()
    if place:
        journal.plan = made.save(place.plan, journal.plan)
    return made


def _taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON has it; its tensors, which JSON has not, go to ``tensors`` under numbers."""
    if isinstance(value, Tensor):
        value = value.cpu().contiguous()
        number = next((number for number, other in tensors.items() if other is value), str(len(tensors)))
        tensors[number] = value  # once, whatever is the same
        return {"tensor": number}
    if isinstance(value, dict):
        return {"items": [[key, _taken_apart(item, tensors)] for key, item in value.items()]}
    return value


def _joined(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of :func:`_taken_apart`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value["tensor"])
    return {tuple(key) if isinstance(key, list) else key: _joined(item, tensor) for key, item in value["items"]}
