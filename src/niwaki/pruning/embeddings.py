"""The stage that puts token embeddings and the head on a grid."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from niwaki.arguments import checked_names
from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import CheckpointWriter, verify
from niwaki.choices import LEAST_SQUARES, NEAREST, NO_ZEROS
from niwaki.effort import NO_EFFORT, Effort, make_effort
from niwaki.errors import OutputError, UnsupportedModelError, UsageError
from niwaki.layer.grid import AnyGrid, FloatGrid, parse_grid, scale_dtype
from niwaki.layer.linalg import STRIP, products
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.rounding import flops, onto_grid, to_nearest, unsolved
from niwaki.models.outside import embedding_keys, head_gram
from niwaki.models.scales import EMBEDDINGS, embedding_places, read_embedding_scales
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.request import read_texts, rounds_to_nearest
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.runs.card import write_config
from niwaki.runs.duration import measuring, nearest, passes
from niwaki.runs.stage import Run, Stage, Task, usually_asked
from niwaki.texts.conversations import has_images
from niwaki.texts.texts import Texts


@checked_names
@dataclass(frozen=True)
class QuantizeEmbeddings(Stage):
    """The stage that puts the token embeddings and the head on a ``grid``, such as "int8:64".

    In small models these are a large part of what is stored and read for each token. The stage comes after all that
    change weights. With 8 bits each weight is rounded to the nearest number, and no text is read. With fewer bits the
    head, which is often the embeddings too, is rounded like any other matrix, in a way that preserves its outputs on
    the calibration text (:func:`niwaki.layer.rounding.onto_grid`); separate embeddings are rounded to the nearest. The
    ``effort`` "none" rounds everything to the nearest; any other effort compensates for the rounding with 8 bits too.
    """

    grid: str | AnyGrid = "int8:64"
    effort: str | Effort | None = None

    name: ClassVar[str] = "embeddings"
    keeps_factors: ClassVar[bool] = True
    keeps_matrices: ClassVar[bool] = True
    only_formats_follow: ClassVar[bool] = True

    @property
    def wanted(self) -> AnyGrid:
        """The grid as an object."""
        return parse_grid(self.grid) if isinstance(self.grid, str) else self.grid

    @property
    def rounds_to_nearest(self) -> bool:
        return rounds_to_nearest(self.wanted, self.effort)

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if self.wanted.is_mixed:
            raise UsageError(f"embeddings and head have one number of bits each; got {self.wanted}")
        if isinstance(self.wanted, FloatGrid):
            raise UsageError(f"no program has embeddings in {self.wanted}; take int8:64")
        if isinstance(self.effort, str) and self.effort != NO_EFFORT:
            make_effort(self.effort)  # or it has no such name
        if any(stage.keep_format for stage in before):
            raise UsageError(
                "a model that stays in FP8 or MXFP4 has no embeddings on a grid; prune without keep_format"
            )

    def open(self, run: Run) -> QuantizingEmbeddings:
        return QuantizingEmbeddings(self, run)

    def __str__(self) -> str:
        return ", ".join([str(self.grid), *([f"effort {self.effort}"] if self.effort == NO_EFFORT else [])])


class QuantizingEmbeddings(Task):
    """:class:`QuantizeEmbeddings`, opened for a run: the tensors, and the text to measure on."""

    texts: Texts

    def __init__(self, stage: QuantizeEmbeddings, run: Run) -> None:
        self.grid = stage.wanted
        self._open(run)
        self._fits = not stage.rounds_to_nearest and self.model.has_head
        if self._fits and has_images(run.calibration):
            self._fits = False
            self.notes = ("calibrated on images: embeddings and head are rounded to the nearest",)
        run.foreseen["pruning_config"] = {**run.foreseen.get("pruning_config", {}), "embeddings": str(self.grid)}

    def read(self, run: Run) -> None:
        measurement = run.measured if self.model.has_head else dataclasses.replace(run.measured, samples=0)
        self.texts = read_texts(self.model, run, measurement, calibrates=self._fits)
        self._before = run.measured.before
        method = LEAST_SQUARES if self._fits else NEAREST
        self._begun = self.begin_record(
            run,
            self.model,
            method=method,
            solver={"name": method},
            pattern=NO_ZEROS,
            mask_from=None,
            embeddings=str(self.grid),
        )

    def _open(self, run: Run) -> None:
        """Opens the model that is read, and checks that its embeddings can be on the grid."""
        self.checkpoint = checkpoint = Checkpoint(run.reading)
        if run.is_first and "pruning_config" in checkpoint.config:
            raise UsageError(
                f"{run.model} was made by niwaki, and its record would be lost: put embeddings on a grid in the run "
                "that makes it, as in niwaki quantize --embeddings, or in a list of stages"
            )
        self.model = StreamedModel(checkpoint, run.compute.device, run.compute.dtype, run.budget)
        if run.is_first and checkpoint.is_encoded:  # what a stage before writes is not
            raise UnsupportedModelError(
                f"{run.model} is in {checkpoint.encoded_as}; quantize it first, and its embeddings then"
            )
        self.keys = embedding_keys(self.model)
        self.grid.check(checkpoint.entries[key].shape[1] for key in self.keys)
        self.carried = run.carried(checkpoint, checkpoint.size)

    def asked(self) -> dict[str, Any]:
        return {**usually_asked(self.model, self.texts), "embeddings": str(self.grid)}

    def expected(self, speed: float) -> float:
        operations = measuring(self.model, self.texts, self._before)
        if self._fits:
            operations += passes(self.model, self.texts.windows.tokens.numel())
            operations += flops(*self.checkpoint.entries[self.keys[-1]].shape)
        else:
            operations += sum(nearest(*self.checkpoint.entries[key].shape) for key in self.keys)
        return operations / speed

    def work(self, run: Run) -> Record:
        if not run.is_first:
            self._open(run)
        record = self._record(run)
        run.progress.begin(dataclasses.replace(self._begun, perplexity={}), len(self.model.blocks), 0)
        with products(tf32=False):
            gram = self._head_gram(run) if self._fits else None
        if not (run.place and self.carried):
            return record
        heldout = self.texts.only
        with products(tf32=False):
            if heldout and run.measured.before:
                record.perplexity["before"] = run.dense_perplexity(self.model, heldout)
            self._write(run, record, gram)
            if heldout:
                written = StreamedModel(Checkpoint(run.place.directory), run.compute.device, run.compute.dtype)
                record.perplexity["after"] = run.perplexity(written, heldout)
        return record

    def _head_gram(self, run: Run) -> Gram:
        """The Gram matrix of what the head receives on the calibration text, in all processes."""
        states = self.model.embed(self.texts.shared(run.world).windows.tokens)
        for block in self.model.stream():
            run.progress.stage(block.index, "advance", len(states.hidden))
            block.advance(states, run.progress.step)
        gram = head_gram(self.model, states, run.world)
        run.clock.lap("capture")
        return gram

    def _write(self, run: Run, record: Record, gram: Gram | None) -> None:
        checkpoint = self.checkpoint
        assert self.carried
        directory = run.begin_output(self.carried, [*checkpoint.shards, EMBEDDINGS])
        places = embedding_places(checkpoint, self.keys, self.grid)
        zeros = {}
        run.progress.stage(0, "rounding", sum(math.ceil(checkpoint.entries[key].shape[0] / STRIP) for key in self.keys))
        with CheckpointWriter(checkpoint, directory, added=places) as writer:
            for key, scale_key in zip(self.keys, places, strict=True):
                # The last one is the head, where there is one.
                weights, scales = self._rounded(key, gram if key == self.keys[-1] else None, run.progress)
                writer.write(key, weights)
                writer.write(scale_key, scales)
                zeros[key] = weights.numel() - int(weights.count_nonzero())
        run.clock.lap("solve")
        write_config(directory, checkpoint.config, record)
        verify(directory, checkpoint, zeros)
        written = Checkpoint(directory)
        for key in self.keys:
            scales = read_embedding_scales(written, key, self.grid)
            if not all(map(self.grid.has, written.read(key).split(STRIP), scales.split(STRIP))):
                raise OutputError(f"{directory}: {key!r} has weights on disk that are not on its grid {self.grid}")
        run.clock.lap("check")

    def _rounded(self, key: str, gram: Gram | None, progress: Progress) -> tuple[Tensor, Tensor]:
        """The tensor as the file has it, on the grid, and its scales; with a ``gram`` fitted to the inputs of that."""
        value = self.checkpoint.read(key)
        of_scales, strips = self.grid.scale_dtype(value.dtype), []
        for rows in value.split(STRIP):  # in float32 some at a time, as such tables are large
            W = rows.float()
            if gram is None:
                weights, scales = to_nearest(W, self.grid, scale_dtype(value.dtype))
            else:
                problem = LayerProblem(W.to(self.model.device), gram)
                solution, scales = onto_grid(problem, unsolved(problem), self.grid, scale_dtype(value.dtype))
                weights, scales = solution.W.cpu(), scales.cpu()
            rows.copy_(weights.to(value.dtype).add_(0.0))
            strips.append(scales.to(of_scales))
            progress.step()
        return value, torch.cat(strips)

    def _record(self, run: Run) -> Record:
        """The record before anything is measured: that of the stages before, if there were any."""
        if not run.earlier:
            return dataclasses.replace(self._begun, perplexity={})
        before = {name: value for name, value in run.earlier.perplexity.items() if name != "after"}
        return dataclasses.replace(run.earlier, embeddings=str(self.grid), perplexity=before)
