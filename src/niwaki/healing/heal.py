"""The stage that heals: what is left of a pruned model is trained towards the dense model's predictions."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from niwaki.arguments import checked_names
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import HealingMethod
from niwaki.errors import CalibrationError, UnsupportedModelError, UsageError
from niwaki.files import input_errors
from niwaki.healing.blocks import BlockRun
from niwaki.healing.objective import find_logits
from niwaki.healing.run import HealingRun, choose, trains_parts
from niwaki.healing.translation import Translation
from niwaki.healing.whole import WholeRun
from niwaki.layer.grid import parse_grid
from niwaki.layer.linalg import products
from niwaki.models.device import training_dtype
from niwaki.models.formats import format_of, zeros_of
from niwaki.models.locate import locate_model
from niwaki.models.outside import notes_of
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.options import (
    BLOCKS_RATE,
    HEALING_BATCH,
    HEALING_LENGTH,
    HEALING_RATE,
    HEALING_TOKENS,
    OWN_TEXT,
    SCALES_RATE,
    Calibration,
    Compute,
)
from niwaki.quantities import parse_multiple, parse_number, parse_share, parse_time
from niwaki.records.record import CalibrationRecord, HealingRecord, Record, calibration_tokens
from niwaki.records.wording import counted
from niwaki.runs.carried import BASE
from niwaki.runs.duration import passes, training
from niwaki.runs.stage import USUAL_WINDOWS, Run, Stage, Task, usually_asked
from niwaki.texts.same_text import same_text
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

# What has to be true of a pruned and a dense model before one is trained towards the other.

#: By how much the fraction of zeros may differ from what a record says.
_OFF = 1e-3


def base_record(path: Path) -> Record | None:
    """How a model was pruned, where niwaki did that; of a healed one how it was before."""
    for name in (BASE, "niwaki.json"):
        if (path / name).is_file():
            return Record.load(path / name)
    return None


def find_translation(model: StreamedModel, teacher: StreamedModel) -> Translation | None:
    """From the tokens of the teacher to those of the model, where these are fewer; None where they are the same.

    UsageError where the two do not mean the same by a token.
    """
    sizes = teacher.config.vocab_size, model.config.vocab_size
    paths = teacher.checkpoint.path, model.checkpoint.path
    tokenizers = []
    with contextlib.suppress(CalibrationError):  # a model may come without one
        tokenizers = [load_tokenizer(path) for path in paths]
    if len(tokenizers) < 2:
        if sizes[0] == sizes[1]:
            return None
        raise UsageError(
            f"{paths[0]} has a vocabulary of {sizes[0]:,} tokens and {paths[1]} one of {sizes[1]:,}, and without "
            "tokenizer.json in both it is not known which these are"
        )
    one, other = tokenizers
    words, own = one.get_vocab(), other.get_vocab()
    if sizes[0] == sizes[1]:
        if words == own:
            return None
        raise UsageError(
            f"{paths[0]} and {paths[1]} have vocabularies of the same size and with other words; give the model that "
            "it was pruned from"
        )
    if one.is_fast and other.is_fast and own.keys() < words.keys():
        return Translation(one, other, sizes)
    raise UsageError(
        f"{paths[0]} has a vocabulary of {sizes[0]:,} tokens and {paths[1]} another, of {sizes[1]:,}; give the model "
        "that it was pruned from"
    )


def check_zeros(model: StreamedModel, dense: StreamedModel, record: Record | None) -> None:
    """UsageError where nothing of the model was pruned, or not what ``record``, of how it was pruned, says."""
    path, matrices = model.checkpoint.path, model.matrices()
    with input_errors(path):
        is_same = dense.checkpoint.path.samefile(path)
    if is_same:
        raise UsageError(f"{path} cannot teach itself; --teacher is the dense model that it was pruned from")
    zeros = {matrix.place: zeros_of(matrix, model.checkpoint) for matrix in matrices}
    solved = record.matrices if record and not record.of_shrinking else []
    said = {(matrix.block, matrix.name) for matrix in solved}
    pruned = [matrix for matrix in matrices if matrix.place in said]
    if record and pruned:
        sparsity = sum(zeros[matrix.place] for matrix in pruned) / sum(matrix.size for matrix in pruned)
        if abs(sparsity - record.sparsity) > _OFF:
            raise UsageError(
                f"{path} has {100 * sparsity:.2f} % zeros and its record says {100 * record.sparsity:.2f} %; was it "
                "trained without its mask? Prune it again, or remove the record, niwaki.json"
            )
    is_smaller = [matrix.shape for matrix in matrices] != [matrix.shape for matrix in dense.matrices()]
    is_smaller |= model.config.vocab_size < dense.config.vocab_size
    is_as_dense = sum(zeros.values()) < _OFF * sum(matrix.size for matrix in matrices)
    if is_as_dense and not is_smaller and not model.checkpoint.pruning.quantization:
        raise UsageError(
            f"{path} has no zeros and the shape of {dense.checkpoint.path}: nothing of it was pruned; the pruned model "
            "comes first, and the dense one is its --teacher"
        )


#: Tokens that are held out: enough for an error that means something, and, because they are measured at each point, no
#: more than that share of those to train on, but for the smaller number.
_LEAST_HELD, _MOST_HELD, _SHARE_HELD = 2048, 8192, 1 / 50
#: Tokens of a pair, where it is to be said how many pairs are enough.
_PAIR = 64
#: Above any number that makes sense, and below what a record can have.
_LIMIT = 1 << 50


@checked_names
@dataclass(frozen=True)
class Heal(Stage):
    """The stage that trains the nonzero weights: see :func:`niwaki.heal` for its arguments.

    The dense model is the one that the run was given, unless ``teacher`` names another.
    """

    method: HealingMethod = "auto"
    tokens: int | str = HEALING_TOKENS
    max_time: float | str | None = None
    rate: float | None = None
    batch: int | str = HEALING_BATCH
    own_text: float | str = OWN_TEXT
    teacher: str | Path | None = None
    #: Whether ``max_time`` is that of the run so far, so that healing takes what is left of it.
    whole: bool = False

    name: ClassVar[str] = "heal"
    keeps_factors: ClassVar[bool] = True
    keeps_matrices: ClassVar[bool] = True
    reads_on: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = {
            "tokens": self.tokens_asked if self.times is None else self.times,
            "max_time": self.limit,
            "rate": self.rate,
            "batch": self.tokens_in_a_step,
        }
        for name, value in numbers.items():
            if value is not None and not 0 < value < _LIMIT:
                raise UsageError(f"{name} must be above 0 and below 2^50; got {value}")
        parse_share("own_text", self.own_text)

    @property
    def tokens_asked(self) -> int | None:
        """The number of tokens to train on, as an int; None where it is so many :attr:`times` another."""
        if self.times is not None:
            return None
        return parse_number(self.tokens) if isinstance(self.tokens, str) else self.tokens

    @property
    def times(self) -> float | None:
        """How many tokens there are for each that a stage before was calibrated on, as of "1x"; None of a number."""
        return parse_multiple(self.tokens) if isinstance(self.tokens, str) else None

    @property
    def limit(self) -> float | None:
        """The time limit in seconds; None for no limit."""
        return parse_time(self.max_time) if isinstance(self.max_time, str) else self.max_time

    @property
    def tokens_in_a_step(self) -> int:
        """The number of tokens per step."""
        return parse_number(self.batch) if isinstance(self.batch, str) else self.batch

    @property
    def reads(self) -> tuple[str | Path, ...]:
        return () if self.teacher is None else (self.teacher,)

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if not before and self.teacher is None:
            raise UsageError("there is nothing to heal yet: prune or shrink first, or name the dense model as teacher")
        if self.method == "blocks" and any(stage.removes_blocks for stage in before):
            raise UsageError(
                "the method blocks trains each block towards the dense one, and shrink leaves fewer of them"
            )
        if self.method == "blocks" and any(stage.changes_tokens for stage in before):
            raise UsageError(
                "the method blocks trains each block towards the dense one on the same tokens, and vocabulary removes "
                "some of them"
            )
        changed = [stage for stage in before if not stage.keeps_matrices]
        grid = parse_grid(str(changed[-1].grid)) if changed and changed[-1].grid else None
        has_scales = grid is not None and grid.trains_scales and not changed[-1].makes_factors
        if self.method == "scales" and changed and not has_scales:
            raise UsageError(
                "the method scales trains the scales of a grid, and the stages before it leave none that can be; "
                "quantize to whole numbers first, as in int4:64, or try another method"
            )
        if self.method == "lora" and any(stage.makes_factors for stage in before):
            raise UsageError("products of low rank would make dense matrices of two sparse factors: try full or norms")

    def open(self, run: Run) -> "Healing":
        return Healing(self, run)

    def __str__(self) -> str:
        tokens = f"tokens {self.tokens}" if self.times is None else f"{self.times:g} x the tokens calibrated on"
        time = self.max_time if not self.whole else f"what is left of {self.max_time}"
        given = {"max_time": time, "method": None if self.method == "auto" else self.method, "rate": self.rate}
        return ", ".join([tokens, *(f"{name} {value}" for name, value in given.items() if value is not None)])


class Healing(Task):
    """:class:`Heal`, opened for a run: both models as far as they are known, and the text to train on."""

    texts: Texts

    def __init__(self, stage: Heal, run: Run) -> None:
        self.stage, self.method, compute = stage, stage.method, run.compute
        self.teacher = run.model if stage.teacher is None else str(stage.teacher)
        knowing = Checkpoint(run.source if stage.teacher is None else locate_model(self.teacher))
        run.sentences.dense = knowing.path
        dtype = training_dtype(compute.dtype, compute.device, knowing)
        self.dense = StreamedModel(knowing, compute.device, dtype)
        self._settings = {"batch": stage.tokens_in_a_step, "own_text": parse_share("own_text", stage.own_text)}
        if self.dense.pairs is not None:  # it writes nothing without a source
            self._settings["own_text"] = 0.0
        self._identity: dict[str, Any] = {}
        self.translation: Translation | None = None  # where the model that is read has other tokens
        self._dense_heldout: Windows | None = None  # what is measured on, as the dense model's tokens
        if run.is_first:
            self._open(run, stage.method)
            self._identity = {"model": self.student.checkpoint.fingerprint()}
        elif stage.method == "blocks":
            self.dense.check_head()

    def read(self, run: Run) -> None:
        self.tokens = self._tokens(run)
        run.progress.status("reading the text to train on")
        self.texts, self.held = self._read(run)
        if run.is_first:
            self._look()
        elif self.stage.method != "blocks":
            find_logits(self.dense)

    def _tokens(self, run: Run) -> int:
        """How many tokens to train on; UsageError where that is a multiple of a number that is not known."""
        if (asked := self.stage.tokens_asked) is not None:
            return asked
        assert self.stage.times is not None
        if run.seen is None:
            raise UsageError(
                f"tokens {self.stage.tokens} are for each that a stage before was calibrated on, and none was; give a "
                "number, such as 500k"
            )
        return max(1, int(self.stage.times * calibration_tokens(run.seen)))

    def _look(self) -> None:
        """Checks what the weights of both models say."""
        check_zeros(self.student, self.dense, self.base)
        self._make_run = _make_run(self.student, self.method, self.translation)

    def _open(self, run: Run, method: HealingMethod) -> None:
        """Opens the model that is read, and checks that it can be trained."""
        checkpoint = Checkpoint(run.reading)
        self.format = format_of(checkpoint)
        self.student, self.method, self._notes = choose(checkpoint, self.dense, run.compute, method)
        self.carried = run.carried(checkpoint, checkpoint.size)
        if self.carried and trains_parts(self.format, self.method):
            self.carried = self.carried.only(lambda name: name.as_posix() not in self.format.files)
        self.translation = find_translation(self.student, self.dense)
        self.base = run.earlier or base_record(checkpoint.path)
        if "pruning_config" in self.dense.checkpoint.config:  # it may be meant: one with fewer zeros, say
            self._notes.append(
                f"{self.teacher} was pruned itself; the pruned model comes near it, and not the model before that"
            )

    def _read(self, run: Run) -> tuple[Texts, int]:
        """The texts, the windows to train on in the order in which that is done; how many of them are held out."""
        # Where tokens differ, texts are read as the dense model's.
        calibration, model = run.calibration, self.student if run.is_first and not self.translation else self.dense
        if run.seen and calibration.order is None:  # so that what comes after it is new
            calibration = replace(calibration, order="first")
        length = calibration.length
        are_texts = all(isinstance(text, str) for text in calibration.texts)  # and no windows, which have their length
        if length is None and are_texts and self.dense.pairs is None:
            length = min(HEALING_LENGTH, model.window_length(None))
        usual = length or HEALING_LENGTH if self.dense.pairs is None else _PAIR
        seen = _seen(calibration, run.seen, usual)
        samples = seen + math.ceil(self.tokens / usual) + _held(self.tokens, usual)
        more = replace(calibration, samples=max(samples, len(calibration.texts)), length=length)
        written = run.written(self.dense, more, fewer=True)
        texts = Texts.read(self.dense, written, run.measurement, USUAL_WINDOWS, fewer=True)
        model.check(texts.windows.tokens)
        windows, length = texts.windows.tokens.shape
        held = min(_held(self.tokens, length), max(1, windows // 8))
        if windows <= run.world.size:
            raise CalibrationError(
                f"the text to train on has {counted(windows, 'window')} of {length} tokens, one is held out, and each "
                "process needs one; give more text, or a shorter --length"
            )
        tokens = _drawn(texts.windows.tokens, seen, held, calibration.seed)
        if self.translation:
            texts = replace(texts, heldout={name: self._both(windows) for name, windows in texts.heldout.items()})
        texts = run.sentences.apart(self.dense, texts)
        return replace(texts, calibration=replace(texts.windows, tokens=tokens)), held

    def _both(self, windows: Windows) -> Windows:
        """The text of ``windows`` as tokens of the pruned model; as those of the dense one it is kept."""
        assert self.translation
        bos = None if windows.bos is None else self.translation.same(windows.bos)
        tokenizers = self.dense.tokenizer, self.student.tokenizer
        self._dense_heldout, own = same_text(windows, *tokenizers, bos, self.student.positions)
        return own

    def measure_on(self, heldout: dict[str, Windows]) -> None:
        if self._dense_heldout and heldout is not self.texts.heldout:
            self._dense_heldout = None  # another text, of which only the tokens of the pruned model are known
        super().measure_on(heldout)

    def asked(self) -> dict[str, Any]:
        return {
            **usually_asked(self.dense, self.texts),
            **self._identity,
            "teacher": self.dense.checkpoint.fingerprint(),
            "method": self.stage.method,
            "rate": self.stage.rate,
            **self._settings,
            "tokens": self.tokens,
        }

    def expected(self, speed: float) -> float:
        operations = training(self.dense, self.tokens, head=True) + passes(self.dense, self.tokens, head=True)
        return min(operations / speed, self.stage.limit or math.inf)

    def extent(self, run: Run) -> tuple[int, int]:
        return (run.journal.blocks, len(self.dense.blocks)) if self.method == "blocks" else (0, 0)

    def work(self, run: Run) -> Record:
        begun = Record.from_json(run.journal.record).healing if run.journal.blocks else None
        if not run.is_first or (begun and begun.method != self.method):
            self._open(run, begun.method if begun else self.stage.method)  # type: ignore[arg-type]
            self._look()
        healing = self._make_run(self.dense, self.student, self.held, self._record(run), run)
        with products(tf32=False):
            if self.carried:
                dense_windows = self._dense_heldout or (None if self.translation else self.texts.only)
                healing.write(self.texts, dense_windows if run.measurement.before else None, self.carried)
            else:
                healing.train(self.texts.windows)
        return healing.record

    def _limit(self, run: Run) -> float | None:
        """Seconds that it may take, of which stages before may have used some; a twentieth is for those after it."""
        if self.stage.limit is None or not self.stage.whole:
            return self.stage.limit
        spent = math.fsum(stage.seconds for stage in run.earlier.stages) if run.earlier else 0.0
        return max(1.0, 0.95 * self.stage.limit - spent)

    def _record(self, run: Run) -> Record:
        """The record, as far as it is known before the work."""
        base, length, made = self.base, self.texts.windows.tokens.shape[1], self.student.checkpoint.pruning
        rate = self.stage.rate or {"blocks": BLOCKS_RATE, "scales": SCALES_RATE}.get(self.method, HEALING_RATE)
        settings: dict[str, Any] = {"method": self.method, "rate": rate, **self._settings}
        solver = {"name": "heal", **settings}
        if self.stage.rate is None and self.method == "scales" and self.dense.has_head:
            del solver["rate"]  # what is lost at first says it; a distance of states is no such measure
        record = self.begin_record(
            run,
            self.dense,
            self.student.checkpoint,
            method="heal",
            solver=solver,
            pattern=base.pattern if base else made.pattern or "as it came",
            mask_from=None,
            healing=HealingRecord(
                self.teacher,
                **settings,
                tokens=self.tokens,
                limit=self._limit(run),
                held=self.held * length,
                of_states=not self.dense.has_head,
            ),
        )
        # A format that comes after it stores weights in its own way.
        stored = [] if run.stages[-1].is_format else self.format.notes(self.student.matrices())
        record.notes += [*self._notes, *stored, *notes_of(self.student)]
        return record


def refusal(checkpoint: Checkpoint, compute: Compute) -> str:
    """Why a pruned model of this one cannot be healed as a whole; "" where it can."""
    name = training_dtype(compute.dtype, compute.device, checkpoint)
    dense = StreamedModel(checkpoint, compute.device, name)
    try:
        find_logits(choose(checkpoint, dense, compute, "auto", is_whole=True)[0])
    except UnsupportedModelError as error:
        return str(error)
    return ""


def _make_run(
    model: StreamedModel, method: HealingMethod, translation: Translation | None
) -> Callable[..., HealingRun]:
    """What heals ``model`` by a method; UnsupportedModelError where it cannot be healed."""
    if method == "blocks":
        model.check_head()
        return BlockRun
    return partial(WholeRun, logits=find_logits(model), translation=translation)


def _seen(calibration: Calibration, before: CalibrationRecord | None, length: int) -> int:
    """How many windows of the text the model was pruned on, where it has more: what is new is worth more."""
    if before is None or calibration.order != "first":
        return 0
    if any(calibration.answered) or not all(isinstance(text, str) for text in calibration.texts):  # answers take long
        return 0
    if "pairs" in before:
        return before["samples"]
    first = "bos" in before  # which each window has beside the text
    return math.ceil(before["samples"] * (before["sequence_length"] - first) / (length - first))


def _drawn(tokens: Tensor, seen: int, held: int, seed: int) -> Tensor:
    """All windows in an order that ``seed`` draws, so that the first ones, as time ends, are of all kinds of text.

    Those that were ``seen`` come after the others, but for the last ``held``, which are new too.
    """
    drawing = torch.Generator().manual_seed(seed)
    old, new = (part[torch.randperm(len(part), generator=drawing)] for part in (tokens[:seen], tokens[seen:]))
    held = min(held, len(new))
    return torch.cat([new[: len(new) - held], old, new[len(new) - held :]])


def _held(tokens: int, length: int) -> int:
    """Windows to hold out of so many tokens to train on."""
    return max(1, min(_MOST_HELD, max(_LEAST_HELD, int(tokens * _SHARE_HELD))) // length)
