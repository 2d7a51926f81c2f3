"""What all methods of healing share: their choice, the measurements, the dense model's own text, and the output."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import CheckpointWriter
from niwaki.choices import HealingMethod
from niwaki.errors import UnsupportedModelError
from niwaki.healing.student import RANK
from niwaki.models.formats import WeightFormat, format_of, zeros_of
from niwaki.models.generation import device_memory
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import COPIES
from niwaki.options import Compute
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.records.record import HealingRecord, Record
from niwaki.records.wording import duration, size
from niwaki.runs.card import write_config
from niwaki.runs.carried import CarriedFiles
from niwaki.runs.duration import passes, products_per_second
from niwaki.runs.stage import Run
from niwaki.runs.store import Kept, kept_once
from niwaki.texts.own import synthesize
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

# What is trained of a pruned model: as much as there is memory for.

#: Bytes of memory for each trained weight, in addition to it: its gradient, two moments, and the best so far.
_BYTES = 4 + 8 + 4
#: Bytes for each weight of a block whose changes are computed, and their gradients.
_BLOCK_BYTES = 24


def choose(
    checkpoint: Checkpoint, dense: StreamedModel, compute: Compute, asked: HealingMethod, is_whole: bool = False
) -> tuple[StreamedModel, HealingMethod, list[str]]:
    """The pruned model, the method by which it is healed towards ``dense``, and notes on that.

    ``auto`` is the first of full, lora (norms on a grid) and, unless the model ``is_whole`` in memory, blocks that
    memory is enough for; on a grid scales come in the place of full. UnsupportedModelError where memory is not enough,
    or the method does not suit the model.
    """
    weight_format, half = format_of(checkpoint), dense.dtype != torch.float32
    thin: HealingMethod = "norms" if weight_format.files else "lora"
    if asked == "lora" != thin:
        made = ("products of two sparse factors", "") if weight_format.has_factors else ("on a grid", ", scales")
        raise UnsupportedModelError(
            f"the weights of {checkpoint.path} are {made[0]}, which products of low rank would leave; try the method "
            f"full{made[1]} or norms"
        )
    if asked == "scales" and not weight_format.trains_scales:
        raise UnsupportedModelError(
            f"the weights of {checkpoint.path} are on no grid whose scales could be trained; quantize to whole numbers "
            "first, as in int4:64, or try another method"
        )
    there = device_memory(dense.device) if compute.budget is None else compute.budget
    first: HealingMethod = "scales" if weight_format.trains_scales else "full"
    usual: tuple[HealingMethod, ...] = (first, thin) if is_whole else (first, thin, "blocks")
    methods: tuple[HealingMethod, ...] = usual if asked == "auto" else (asked,)
    too_large = list[str]()
    for method in methods:
        dtype = "bfloat16" if half and method != "full" else "float32"
        model = StreamedModel(checkpoint, compute.device, dtype)
        if method == "blocks":
            _check_blocks(model, dense, too_large, there)
        needed = _needed(method, model, dense, weight_format)
        if needed <= there:
            tried = " and ".join(too_large)
            notes = [f"healing takes {tried}, and there are {size(there)} of memory: {method} instead"]
            return model, method, notes if too_large else []
        too_large.append(f"{size(needed)} ({method})")
    raise UnsupportedModelError(
        f"healing {checkpoint.path} takes {', '.join(too_large)} of memory, and there are {size(there)}"
        + ("" if method == "blocks" else "; try the method blocks")
    )


def trains_parts(weight_format: WeightFormat, method: str) -> bool:
    """Whether ``method`` changes parts of matrices in this format: factors with their weights, or scales alone."""
    return method == "scales" or (weight_format.has_factors and method != "norms")


def block_memory(model: StreamedModel, dense: StreamedModel, weight_format: WeightFormat) -> int:
    """Bytes that healing a block at a time takes, without hidden states."""
    blocks = [model.matrices(index) for index in range(len(model.blocks))]
    fits = (4 * COPIES * weights + extra for weights, extra in (_trained(block, weight_format) for block in blocks))
    return max(model.block_size + dense.block_size + max(fits), sum(_ends(each) for each in (model, dense)))


def _trained(matrices: list[Matrix], weight_format: WeightFormat) -> tuple[int, int]:
    """(How many weights are trained of these; bytes of what they are made in each step, and its gradient)."""
    size = sum(matrix.size for matrix in matrices)
    if weight_format.has_factors:
        shapes = (shape for matrix in matrices for shape, _ in weight_format.parts_like(matrix, torch.float32))
        return sum(map(math.prod, shapes)), 4 * 2 * size
    return size, 4 * size if weight_format.files else 0


def _needed(method: HealingMethod, model: StreamedModel, dense: StreamedModel, weight_format: WeightFormat) -> int:
    """Bytes of memory that a method takes."""
    if method == "blocks":
        return block_memory(model, dense, weight_format)
    if method == "full":
        weights, extra = _trained(model.matrices(), weight_format)
        half = dense.dtype != torch.float32
        return model.size + (_BYTES + 2 * half) * weights + extra
    factors = 0 if method == "norms" else RANK * sum(sum(matrix.shape) for matrix in model.matrices())
    codes = 0
    if method == "scales":
        parts = (shape for m in model.matrices() for shape, _ in weight_format.parts_like(m, torch.float32))
        scales = sum(map(math.prod, parts))
        # In llama.cpp's types at most a quarter of the numbers can be any.
        factors = scales if weight_format.keeps_zeros else scales // 4
        codes = sum(matrix.size for matrix in model.matrices()) + 4 * scales
    return model.size + codes + (4 + _BYTES) * factors + _BLOCK_BYTES * (model.block_size // model.dtype.itemsize)


def _ends(model: StreamedModel) -> int:
    """Bytes of all weights outside the blocks, which measuring takes."""
    return model.size - sum(value.nbytes for block in model.blocks for value in block.parameters())


def _check_blocks(model: StreamedModel, dense: StreamedModel, too_large: list[str], there: int) -> None:
    """UnsupportedModelError where blocks of the two models have no outputs to compare."""
    shapes = [(len(each.blocks), each.config.hidden_size) for each in (model, dense)]
    whole = f", which takes {', '.join(too_large)}, and there are {size(there)} of memory" if too_large else ""
    tokens = [each.config.vocab_size for each in (model, dense)]
    if tokens[0] != tokens[1]:
        raise UnsupportedModelError(
            f"{model.checkpoint.path} has {tokens[0]:,} tokens and {dense.checkpoint.path} {tokens[1]:,}, so that it "
            f"can only be healed as a whole (full, lora, norms){whole}"
        )
    if shapes[0] != shapes[1]:
        raise UnsupportedModelError(
            f"{model.checkpoint.path} has {shapes[0][0]} blocks of width {shapes[0][1]} and {dense.checkpoint.path} "
            f"{shapes[1][0]} of {shapes[1][1]}, so that it can only be healed as a whole{whole}"
        )


#: The share of a limit of time that writing own text may take; at least half of it is for training.
_WRITING_TIME = 0.1
#: The share that all perplexities may take.
_MEASURING_TIME = 0.25
#: The share that measuring what is held out may take, each time.
_HELD_TIME = 0.02
#: Perplexities of a run: of the dense model, and of the pruned one before and after.
_MEASURED = 3
#: The fewest windows that a perplexity is of, for its error.
_FEW = 2
#: Tokens after which it is known how long writing takes: the first ones take longer.
_FIRST_WORDS = 8


class _TooSlowError(Exception):
    """Writing would take too long: its argument says how many seconds."""


class _Watched(Progress):
    """Tells ``progress`` how far writing is, and ends its first part (_TooSlowError) if that takes over ``seconds``."""

    def __init__(self, progress: Progress, seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._parts = self._steps = self._done = 0
        self._began = monotonic()

    def stage(self, block: int, name: str, steps: int) -> None:
        self._progress.stage(block, name, steps)
        self._parts, self._steps = self._parts + 1, steps

    def step(self) -> None:
        self._progress.step()
        self._done += 1
        expected = (monotonic() - self._began) * max(1.0, self._steps / self._done)
        if self._parts == 1 and self._done >= min(_FIRST_WORDS, self._steps) and expected > self._seconds:
            raise _TooSlowError(expected)


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
        self.format = format_of(self.model.checkpoint)

    def train(self, windows: Windows) -> None:
        """Trains on ``windows``, of which the last are held out; the first process writes the weights."""
        length = windows.tokens.shape[1]
        if self.run.journal.blocks:
            self.held = self.healing.held // length
        elif self.healing.limit is not None:
            self.held = self.run.world.received(self._affordable(_HELD_TIME, length, 1, self.held))
            self.healing.held = self.held * length
        self._train(self._with_own_text(windows))

    def _affordable(self, share: float, length: int, least: int, most: int) -> int:
        """How many windows of this ``length`` a model can read in a ``share`` of the time, from ``least`` to ``most``.

        By an estimate, as nothing was measured yet.
        """
        assert self.healing.limit is not None
        device = self.dense.device
        window = passes(self.dense, length, head=self.dense.has_head) / products_per_second(device)
        return max(min(least, most), min(most, int(share * self.healing.limit / window)))

    @abstractmethod
    def _train(self, tokens: Tensor) -> None:
        """Trains on the windows ``tokens`` (windows, length) alone, of which the last are held out."""

    @property
    def healing(self) -> HealingRecord:
        """The record's part about healing."""
        assert self.record.healing
        return self.record.healing

    def write(self, texts: Texts, dense_text: Windows | None, carried: CarriedFiles) -> None:
        """Trains, writes the model and checks it; the dense model is measured on ``dense_text``, where there is one."""
        run = self.run
        heldout, dense_text = self._measurable(texts.only, dense_text)
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

    def _measurable(self, heldout: Windows | None, dense_text: Windows | None) -> tuple[Windows | None, Windows | None]:
        """The windows of both that there is time to measure on; a resumed run's are those that it began with."""
        there, measured = len(heldout.tokens) if heldout else 0, self.record.perplexity.get("pruned")
        if not heldout or self.healing.limit is None or self.run.earlier:
            return heldout, dense_text
        share = _MEASURING_TIME / _MEASURED
        count = self._affordable(share, heldout.tokens.shape[1], _FEW, there) if measured is None else measured.windows
        if count < there and measured is None:
            self.run.note(
                self.record, f"perplexity is of {count} of {there} windows; give more --max-time to measure on more"
            )
        first = torch.arange(count)
        return heldout.of(first), dense_text and dense_text.of(first)

    @property
    def _kept(self) -> list[str]:
        """Names of the files of the output that have what an earlier run has done."""
        return []

    def _writer(self, directory: Path, resume: bool = False) -> CheckpointWriter:
        """What writes the weights, and the factors of those that are products of two."""
        checkpoint, is_added = self.model.checkpoint, trains_parts(self.format, self.healing.method)
        pruned = [matrix for matrix in self.model.matrices() if checkpoint.pruning.includes(matrix.block)]
        added = self.format.added(checkpoint, pruned) if is_added else {}
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
        chosen, count = own_text_windows(self.healing.tokens, length, len(tokens), share)
        made = count + self.held
        # The same in all processes, and in a resumed run.
        own = kept_once(self.run, _OwnText, lambda: _OwnText(self._written(made, length, windows.bos))).text
        self.run.clock.lap("plan")
        self.record.calibration["synthetic"] = len(own) if len(own) > self.held else 0
        if len(own) <= self.held:
            if 0 < len(own) < made:  # where it cannot write, that is said
                self.run.note(
                    self.record, "there was no time for the dense model to write text to train on; give more --max-time"
                )
            return tokens
        own, held = own.split([len(own) - self.held, self.held])
        return torch.cat([mixed_texts(tokens[:chosen], own, share), held])

    def _written(self, count: int, length: int, bos: int | None) -> Tensor:
        """Up to ``count`` windows of text of the dense model; none, with a note, where it cannot write."""
        began, run = monotonic(), self.run
        limit = math.inf if self.healing.limit is None else self.healing.limit
        # Several processes end together, after a part.
        seconds = math.inf if run.world.size > 1 else _WRITING_TIME * limit
        budget, world, progress = run.compute.budget, run.world, _Watched(run.progress, seconds)

        def is_enough() -> bool:
            return monotonic() - began > _WRITING_TIME / 2 * limit

        try:
            return written_text(self.dense, count, length, budget, world, progress, is_enough, bos)
        except _TooSlowError as error:
            (needed,) = error.args
            reason = f"it would take {duration(needed)} of {duration(limit)}; give more --max-time"
        except UnsupportedModelError as error:
            reason = str(error)
        run.note(self.record, f"the dense model wrote no text to train on: {reason}")
        return torch.empty(0, length, dtype=torch.int64)

    def note_reuse(self, there: int) -> None:
        """Notes that the text has fewer tokens than are to be trained on, only ``there``."""
        times = f"{self.healing.tokens / there:.3g} times"
        self.run.note(self.record, f"the text has {there:,} tokens to train on, each of which is used {times}")

    def share(self, tokens: Tensor) -> Tensor:
        """This process's share of the windows to train on, as many as each has; in the first behind those held out."""
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
        # In types without a 0 what is 0 is by chance, where a minimum is a multiple of a scale.
        stay = not (self.healing.method == "scales" and not self.format.keeps_zeros)
        counted_in = checkpoint if stay else Checkpoint(directory)
        for matrix in matrices:
            found = zeros_of(matrix, counted_in)
            zeros[matrix.key] += found
            if checkpoint.pruning.includes(matrix.block):
                claimed, size = claimed + found, size + matrix.size
        self.record.sparsity = claimed / size
        write_config(directory, checkpoint.config, self.record)
        self.format.verify(directory, checkpoint, matrices, zeros)

    def _measure_first(self, heldout: Windows, dense_text: Windows | None) -> None:
        """The perplexity of the pruned model as it came, and of the dense one on the same text as its tokens."""
        perplexity = self.record.perplexity
        if dense_text:
            perplexity["before"] = self.run.dense_perplexity(self.dense, dense_text)
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


# Text of the dense model's own among the text that is trained on.

#: Tokens of the first part: each has twice as many as the one before.
_FIRST = 1 << 11
#: Tokens of the longest part.
_LONGEST = 1 << 15


def written_text(
    dense: StreamedModel,
    count: int,
    length: int,
    budget: int | None,
    world: World,
    progress: Progress,
    is_enough: Callable[[], bool],
    bos: int | None = None,
) -> Tensor:
    """(up to ``count``, ``length``) int64: text of ``dense``, see :func:`niwaki.texts.own.synthesize`.

    In parts, at least one, until ``is_enough``, which the first process decides; the next part takes about as long as
    all before it. UnsupportedModelError where the dense model cannot write.
    """
    parts, there, tokens = list[Tensor](), 0, _FIRST
    while there < count and not (there and world.received(is_enough())):
        # No fewer than one for each process, of which the last are left out.
        size = max(world.size, min(tokens // length, count - there))
        parts.append(synthesize(dense, size, length, budget, world, progress, len(parts), bos))
        there, tokens = there + size, min(2 * tokens, _LONGEST)
    return torch.cat(parts)[:count] if parts else torch.empty(0, length, dtype=torch.int64)


def own_text_windows(tokens: int, length: int, real: int, share: float) -> tuple[int, int]:
    """How many windows of ``real`` ones, and of own text, make up what is trained on, for so many ``tokens``."""
    wanted = math.ceil(tokens / length)
    chosen = max(1, min(real, wanted - round(share * wanted)))
    return chosen, round(chosen * share / (1 - share))


def mixed_texts(real: Tensor, own: Tensor, share: float) -> Tensor:
    """Windows of both in turn, so that the first ones have the same ``share`` of own text as all.

    Where there is less own text than that, it comes first.
    """
    places = [torch.arange(len(each)).add(0.5).div(part) for each, part in ((real, 1 - share), (own, share))]
    return torch.cat([real, own])[torch.cat(places).argsort(stable=True)]
