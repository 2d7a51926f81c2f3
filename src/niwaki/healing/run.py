"""A healing from its first measurement to a directory that only has to be moved into place."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import CheckpointWriter
from niwaki.errors import UnsupportedModelError
from niwaki.healing import own_text
from niwaki.healing.method import trains_factors
from niwaki.models.formats import format_of, zeros_of
from niwaki.models.streamed import StreamedModel
from niwaki.records.healing import HealingRecord
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import Record
from niwaki.runs.card import write_config
from niwaki.runs.carried import CarriedFiles
from niwaki.runs.kept import Kept, kept_once
from niwaki.runs.stage import Run
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

#: The share of a limit of time that writing own text may take.
_WRITING_TIME = 0.1


@dataclass(frozen=True)
class _OwnText(Kept):
    text: Tensor  # (windows, length) int64


@dataclass
class HealingRun(ABC):
    """A healing of ``model`` towards the ``dense`` one, by one of the methods."""

    dense: StreamedModel
    model: StreamedModel
    held: int  # windows
    record: Record
    run: Run
    measuring: float = 0.0  # seconds that a perplexity takes, which is measured in the end

    def __post_init__(self) -> None:
        limit = self.healing.limit
        self.record = self.run.resumed(self.record, len(self.model.blocks))
        self.healing.limit = limit  # another one may be given

    def train(self, windows: Windows) -> None:
        """Trains on ``windows``, of which the last are held out; the first process writes the weights."""
        self._train(self._with_own_text(windows))

    @abstractmethod
    def _train(self, tokens: Tensor) -> None:
        """Likewise, on these windows alone (windows, length)."""

    @property
    def healing(self) -> HealingRecord:
        """That of the record."""
        assert self.record.healing
        return self.record.healing

    def write(self, texts: Texts, dense_text: Windows | None, carried: CarriedFiles) -> None:
        """Trains, writes the model and checks it; the dense model is measured on ``dense_text``, where there is one."""
        run, heldout = self.run, texts.only
        run.progress.begin(self.record, len(self.model.blocks), len(self.model.matrices()))
        if heldout and not run.journal.blocks and not run.earlier:
            self._measure_first(heldout, dense_text)
        directory = run.begin_output(carried, self._kept)
        self.train(texts.windows)
        if run.earlier:
            self.record = self.record.after(run.earlier)
        self._check(directory)
        run.clock.lap("write")
        if heldout:
            self.record.perplexity["after"] = self._perplexity(self._opened(directory), heldout)

    @property
    def _kept(self) -> list[str]:
        """Names of the files of the output that have what an earlier run has done."""
        return []

    def _writer(self, directory: Path, resume: bool = False) -> CheckpointWriter:
        """What writes the weights, and the factors of those that are products of two."""
        checkpoint, weight_format = self.model.checkpoint, format_of(self.model.checkpoint)
        is_added = trains_factors(weight_format, self.healing.method)
        added = weight_format.added(checkpoint, self.model.matrices()) if is_added else {}
        return CheckpointWriter(checkpoint, directory, resume, added)

    def _with_own_text(self, windows: Windows) -> Tensor:
        """Tokens of ``windows``, with text of the dense model's own among those to train on, and as what is held out.

        A text has often been pruned on: on that the pruned model is better than elsewhere, and the more it is trained
        the less so.
        """
        tokens = windows.tokens
        if not self.healing.own_text:
            return tokens
        share, length = self.healing.own_text, tokens.shape[1]
        chosen, count = own_text.windows(self.healing.tokens, length, len(tokens), share)
        own = self._own_text(count + self.held, length, windows.bos)
        self.record.calibration["synthetic"] = len(own) if len(own) > self.held else 0
        if len(own) <= self.held:
            if 0 < len(own) < count + self.held:  # where it cannot write, that is said
                self.run.note(
                    self.record, "there was no time for the dense model to write text to train on; give more --max-time"
                )
            return tokens
        own, held = own.split([len(own) - self.held, self.held])
        return torch.cat([own_text.mixed(tokens[:chosen], own, share), held])

    def _own_text(self, count: int, length: int, bos: int | None) -> Tensor:
        """Up to ``count`` windows of it, the same in all processes; a resumed run has those that it began with."""
        own = kept_once(self.run, _OwnText, lambda: _OwnText(self._written(count, length, bos)))
        self.run.clock.lap("plan")
        return own.text

    def _written(self, count: int, length: int, bos: int | None) -> Tensor:
        """Text of the dense model; none, with a note, where it cannot write."""
        began, limit, run = monotonic(), self.healing.limit, self.run
        budget, world, progress = run.compute.budget, run.world, run.progress

        def is_enough() -> bool:
            return limit is not None and monotonic() - began > _WRITING_TIME / 2 * limit

        try:
            return own_text.written(self.dense, count, length, budget, world, progress, is_enough, bos)
        except UnsupportedModelError as error:
            run.note(self.record, f"the dense model wrote no text to train on: {error}")
            return torch.empty(0, length, dtype=torch.int64)

    def note_reuse(self, there: int) -> None:
        """Notes that the text has fewer tokens than are to be trained on, only ``there``."""
        times = f"{self.healing.tokens / there:.3g} times"
        self.run.note(self.record, f"the text has {there:,} tokens to train on, each of which is used {times}")

    def share(self, tokens: Tensor) -> Tensor:
        """Those that are held out, for the first process, and this one's of the others, as many as each has."""
        world = self.run.world
        count = (len(tokens) - self.held) // world.size
        own = tokens[: len(tokens) - self.held][world.rank :: world.size][:count]
        return torch.cat([tokens[-self.held :], own]) if world.first else own

    def write_signless_zeros(self, writer: CheckpointWriter) -> None:
        """Writes what would be copied of matrices that have -0.0, as of ``W * mask``, with +0.0 in their place."""
        checkpoint = self.model.checkpoint
        for key, index in (matrix.entry for matrix in self.model.matrices()):
            if not writer.is_written(key, index):
                value = checkpoint.read(key, index)
                if bool(((value == 0) & value.signbit()).any()):
                    writer.write(key, value.add_(0.0), index)

    def _check(self, directory: Path) -> None:
        """Writes the configuration and reads weights back: zeros are to be as before, and weights on their grid."""
        checkpoint, matrices, zeros = self.model.checkpoint, self.model.matrices(), Counter[str]()
        claimed, size = 0, 0  # of the blocks that were pruned
        for matrix in matrices:
            found = zeros_of(matrix, checkpoint)
            zeros[matrix.key] += found
            if checkpoint.pruning.includes(matrix.block):
                claimed, size = claimed + found, size + matrix.size
        self.record.sparsity = claimed / size
        write_config(directory, checkpoint.config, self.record)
        format_of(checkpoint).verify(directory, checkpoint, matrices, zeros)

    def _measure_first(self, heldout: Windows, dense_text: Windows | None) -> None:
        """The perplexity of the pruned model as it came, and of the dense one on the same text as its tokens."""
        perplexity = self.record.perplexity
        if dense_text:
            perplexity["before"] = self._perplexity(self.dense, dense_text)
        perplexity["pruned"] = self._perplexity(self._opened(self.model.checkpoint.path), heldout)
        if dense_text and perplexity["before"].above(perplexity["pruned"]).nats > 0:
            self.run.note(
                self.record, "the dense model's perplexity is higher than the pruned model's; is it the right one?"
            )

    def _opened(self, path: Path) -> StreamedModel:
        return StreamedModel(Checkpoint(path), str(self.dense.device), self.record.dtype)

    def _perplexity(self, model: StreamedModel, heldout: Windows) -> Perplexity:
        began = monotonic()
        measured = self.run.perplexity(model, heldout)
        self.measuring = monotonic() - began
        return measured
