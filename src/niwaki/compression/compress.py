"""One number instead of many commands: how small, how fast or at what loss, for the program that runs the result."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from niwaki.arguments import checked
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import Runtime
from niwaki.compression.foresight import Foresight, TokenCosts, foresee
from niwaki.compression.trials import (
    LossBound,
    SpeedBound,
    Throughput,
    Trials,
    check_memory,
    check_windows,
    throughput,
    with_notes,
)
from niwaki.compression.ways import Composition, DenseWays, PackedWays, Way, Ways
from niwaki.errors import NiwakiError, UnsupportedModelError, UsageError, first_line
from niwaki.evaluation import llama_cpp
from niwaki.files import weights_size
from niwaki.healing.heal import Heal
from niwaki.models.formats import check_one_matrix
from niwaki.models.layout import fused
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute, Measurement, Text
from niwaki.pruning.mixed_bits import CLOSE, COARSE, Look, Place, summed
from niwaki.quantities import check_how_small, parse_compressed_size, parse_parameters, parse_positive
from niwaki.recipes import begun, run
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.records.wording import size as in_bytes
from niwaki.runs.execute import check as check_run
from niwaki.runs.stage import USUAL_WINDOWS, Stage, current_session, remembering, session
from niwaki.runs.workplace import check_output
from niwaki.shrinking.configuration import numbers
from niwaki.shrinking.tokens import PRIOR
from niwaki.stages import text_of
from niwaki.texts.sources import usual_calibration
from niwaki.texts.texts import read_heldout

# What a model becomes for a size, a loss or a speed, and what else was considered, before it is made.

#: Nats a token beyond which foreseen ones say nothing but that.
_USELESS = 5.0
#: Programs whose speed is measured before a model is made for them.
_TIMED = ("niwaki", "llama.cpp")

#: Raises what a run of such stages with this text would before anything is computed.
Check = Callable[[Sequence[Stage], Calibration], None]


@dataclass(frozen=True)
class Asked:
    """What is asked of :func:`niwaki.compress`: see there. UsageError where that is contradictory."""

    model: str | Path
    size: float | str | None = None
    parameters: float | str | None = None
    loss: float | str | None = None
    speed: float | str | None = None
    runtime: Runtime | None = None
    max_time: float | str | None = None
    also: Sequence[str] = ()
    #: Whether what matrices lose by rounding is trained back, unless there is a ``max_time`` to heal in.
    training: bool = True
    #: Whether little time is to be taken: the effort of stages is "fast", and what is rounded is not trained.
    quick: bool = False
    #: Whether the model is only looked at coarsely.
    coarse: bool = False

    def __post_init__(self) -> None:
        check_how_small(self.size, self.parameters, self.loss, self.speed, self.runtime)
        if self.speed is not None and self.program == "llama.cpp":
            llama_cpp.package()
        if self.also and self.loss is None:
            raise UsageError("more texts to measure on are for a loss; give one too, or measure the result with eval")

    @property
    def program(self) -> Runtime:
        """What will run the result."""
        if self.runtime == "ollama":
            return "llama.cpp"
        return self.runtime or ("niwaki" if self.parameters is None else "transformers")

    @property
    def look(self) -> Look:
        """How closely the model is looked at."""
        return COARSE if self.coarse or self.quick else CLOSE

    @property
    def effort(self) -> str | None:
        """That of stages; None for the usual one of each."""
        return "fast" if self.quick else None

    @property
    def searches(self) -> bool:
        """Whether sizes are tried until a loss or a speed is reached."""
        return self.loss is not None or self.speed is not None

    @property
    def heal(self) -> tuple[Stage, ...]:
        """The stage that takes what is left of the time."""
        return () if self.max_time is None else (Heal(max_time=self.max_time, whole=True),)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model's files."""
        return Checkpoint(locate_model(str(self.model)))

    @property
    def before(self) -> int:
        """Bytes of the weights now, in the files as they are."""
        return self.checkpoint.size_in_files

    @property
    def ways(self) -> Ways:
        """All ways, of which nothing is foreseen yet; UnsupportedModelError where the program cannot have the model."""
        check_one_matrix(self.checkpoint, "compressing")
        model = StreamedModel(self.checkpoint, "cpu")
        if self.program != "transformers" or self.searches:
            model.check_head()
        if self.program == "transformers":
            return DenseWays.of(model, self.heal, self.effort)
        return PackedWays(
            heal=self.heal,
            effort=self.effort,
            parts=Composition.of(model, self.program),
            runtime=self.program,
            trains=self.training and not self.quick and self.max_time is None,
        )


@dataclass(frozen=True)
class Compression:
    """A plan to compress a model: what will be done, and what else was considered.

    Attributes:
        model: The model's name.
        runtime: The program that will run the result.
        before: Bytes of the weights now; of a quantized model, those of its own files.
        asked: Bytes that the result may have; for a loss or a speed, those that are foreseen to reach it.
        way: What will be done.
        others: The best way of each other kind to this size, in ascending order of the foreseen loss.
        reach: The largest and the smallest form for this program; empty if it has no sizes.
        all_tokens: Why ways with fewer tokens were not considered; "" if they were, or if the model was not looked at.
        speed: Tokens a second of the dense model and of forms of it; None if they were not measured.
        not_timed: Why they were not, if that was asked for; "" otherwise.
        coarse: Whether the model was only looked at coarsely: losses are of the right order, and no more.
        searches: Whether a run tries several sizes, this one first, because a loss or a speed is asked for.
        quick: Whether it is to take little time.
    """

    model: str
    runtime: Runtime
    before: int
    asked: int
    way: Way
    others: tuple[Way, ...] = ()
    reach: tuple[Way, ...] = ()
    all_tokens: str = ""
    speed: Throughput | None = None
    not_timed: str = ""
    searches: bool = False
    coarse: bool = False
    quick: bool = False

    def __str__(self) -> str:
        now = in_bytes(self.before) + (f" and {_rate(self.speed.dense)}" if self.speed else "")
        lines = [f"{now} now; plan for {self.runtime}: {self.way.words}", f"  {self._told(self.way)}"]
        lines += [f"  stage {i}: {text_of(stage)}" for i, stage in enumerate(self.way.stages, 1)]
        weighted = f", where other kinds of text count for {100 * PRIOR:g} %" if self._has_other_texts else ""
        for title, ways in ((f"foreseen to lose more{weighted}:", self.others), ("other sizes:", self.reach)):
            if ways:
                lines += [title, *(f"  {self._told(way)}: {way.words}" for way in ways)]
        if self.all_tokens:
            lines.append(f"fewer tokens were not considered: {self.all_tokens}")
        if self.not_timed:
            lines.append(f"tokens a second were not measured: {self.not_timed}")
        if self.coarse and self.way.nats is not None:
            more = "" if self.quick else "; --closely looks as the run itself does"
            lines.append(f"losses are coarse, from a short look at the model{more}")
        if self.searches:
            lines.append("this size is only foreseen: without --plan, several are tried and measured")
        by_hand = [word for stage in self.way.stages for word in ("--stage", text_of(stage))]
        lines.append(f"stage by stage, with the same options: niwaki run {shlex.join([self.model, 'OUT', *by_hand])}")
        return "\n".join(lines)

    @property
    def _has_other_texts(self) -> bool:
        """Whether other kinds of text tell the ways apart: only fewer tokens cost them more than all else does."""
        return self.searches or any(way.tokens for way in (self.way, *self.others))

    def _told(self, way: Way) -> str:
        foreseen = []
        if self.speed:
            foreseen.append(_rate(self.speed.of(way.size)))
        if way.nats is not None:
            others = f" ({way.nats + way.elsewhere:.2g} on other kinds of text)" if self._has_other_texts else ""
            told = f"{way.nats:.2g} nats a token{others}"
            foreseen.append(told if way.nats < _USELESS else f"more than {_USELESS:g} nats a token, which is of no use")
        size = f"{in_bytes(way.size):>8} ({way.size / self.before:.2f})"
        return f"{size}, about {', '.join(foreseen)}" if foreseen else size


def _rate(speed: float) -> str:
    return f"{float(f'{speed:.2g}'):,g} tokens/s"


@checked
def plan_compression(
    model: str | Path,
    size: float | str | None = None,
    *,
    parameters: float | str | None = None,
    loss: float | str | None = None,
    speed: float | str | None = None,
    also: Sequence[str] = (),
    runtime: Runtime | None = None,
    max_time: float | str | None = None,
    training: bool = True,
    quick: bool = False,
    calibration: Calibration | Text = Calibration(),
    compute: Compute | str = Compute(),
    measure_speed: bool = False,
    coarse: bool = False,
    progress: Progress | None = None,
) -> Compression:
    """Plans what :func:`compress` would do and what else is possible; arguments and errors are the same.

    It looks at the model on a little of the calibration text, which takes seconds to minutes, and takes the way that is
    foreseen to lose least. For "niwaki": matrices of 2 to 8 bits, with more bits where they matter most, and embeddings
    and head of 4 to 8. For "llama.cpp": types of 2.6 to 8.5 bits, with embeddings and head in one of them. For "vllm":
    2 to 8 bits, the same for matrices that it computes as one. For "transformers": a smaller dense model in the same
    dtype. All of them may have fewer tokens, if their tokenizer is of a known kind and the calibration text is long
    enough to choose them by, half as many tokens as the model has. It does not look at the model for sizes of 8 bits a
    weight or more, which there is only one way to.

    For a ``loss`` or a ``speed`` the plan is the size that is foreseen to reach it; :func:`compress` tries several and
    measures them. A loss is foreseen for text like the calibration text, and for texts of ``also`` as for other kinds.

    With ``measure_speed``, and for a ``speed``, plans for "niwaki" and "llama.cpp" also have tokens a second on this
    machine. The dense model, the smallest form and the largest one are timed, which takes about a minute for a small
    model, memory for the dense model, and disk space for a form. llama.cpp's are timed by llama-cpp-python.

    What is found is kept on disk, where :func:`compress` and the same call, also after an interruption, find it. With
    ``coarse`` it looks at an eighth of the text and rounds to the nearest instead of fitting, which takes about a
    twentieth of the time: losses are then of the right order, and :func:`compress` still looks closely.
    """
    asked = Asked(
        model, size, parameters, loss, speed, runtime, max_time, also, training=training, quick=quick, coarse=coarse
    )
    where, progress = Compute.of(compute), progress or Progress()
    plan, _ = planned(asked, Calibration.of(calibration), where, progress, lambda *_: None)
    if not measure_speed or plan.runtime not in _TIMED or plan.speed:
        return plan
    timed, why = _timed(asked, where, progress)
    return replace(plan, speed=timed, not_timed=why)


def planned(
    asked: Asked, calibration: Calibration, compute: Compute, progress: Progress, check: Check
) -> tuple[Compression, Calibration]:
    """The plan, and the calibration text, which is another one where the usual is not available.

    ``check`` is called with stages of that kind before the model is looked at.
    """
    bound: LossBound | SpeedBound | None = None
    if asked.searches:
        calibration = usual_calibration(calibration, progress)
        texts = tuple(Measurement(text) for text in asked.also)
        ways, bound = searched(asked, texts, calibration, compute, progress, check, plans=True)
        way, *others = _foreseen(ways, bound)
    else:
        limit = _limit(asked)
        ways = asked.ways
        ways.check(limit)
        if not ways.reach or limit < ways.reach[0].size:
            calibration = usual_calibration(calibration, progress)
            check(ways.stages, calibration)
            ways = _with_foresight(ways, asked, calibration, compute, progress)
        way, *others = ways.to(limit)
    plan = Compression(
        model=str(asked.model),
        runtime=asked.program,
        before=asked.before,
        asked=way.size if asked.size is None else int(limit),
        way=way,
        others=tuple(others),
        reach=tuple(each for each in ways.reach if each.words != way.words),
        all_tokens=ways.costs.unknown,
        speed=bound.throughput if isinstance(bound, SpeedBound) else None,
        searches=asked.searches,
        coarse=asked.look == COARSE,
        quick=asked.quick,
    )
    return plan, calibration


def searched(
    asked: Asked,
    also: tuple[Measurement, ...],
    calibration: Calibration,
    compute: Compute,
    progress: Progress,
    check: Check,
    plans: bool = False,
) -> tuple[Ways, LossBound | SpeedBound]:
    """The ways among which sizes are tried, and the bound that they have to keep; a loss ``also`` on other texts.

    Where it only ``plans``, UsageError if a speed is not foreseen.
    """
    checkpoint, ways = asked.checkpoint, asked.ways
    check(ways.stages, calibration)
    bound: LossBound | SpeedBound
    if asked.loss is not None:
        bound = LossBound(parse_positive("loss", asked.loss), also, checkpoint.path, compute)
    else:
        assert asked.speed is not None
        limit = parse_positive("speed", asked.speed)
        check_memory(checkpoint, compute.device)
        timed, why = _timed(asked, compute, progress)
        if why and plans:
            raise UsageError(f"a plan needs speeds that are foreseen: {why}; without --plan, sizes are tried")
        if why:
            progress.note(f"sizes are only tried: {why}")
        bound = SpeedBound(limit, checkpoint.size, checkpoint.path, compute, timed)
    return _with_foresight(ways, asked, calibration, compute, progress), bound


def _foreseen(ways: Ways, bound: LossBound | SpeedBound) -> list[Way]:
    """The way that is foreseen to be the best within the bound, and others to its size; UsageError where none is."""
    ladder = ways.ladder()
    if isinstance(bound, LossBound) and ladder[0].nats is None:
        raise UsageError(
            "what these forms would lose is not foreseen, so there is no plan; without --plan, sizes are tried"
        )
    fit = [way for way in ladder if bound.within(bound.expected(way))]
    if not fit:
        raise UsageError(bound.refusal(bound.told(ladder[0 if bound.from_large else -1])))
    way = fit[-1] if bound.from_large else fit[0]
    return [way, *(each for each in ways.beside(way) if each.words != way.words)]


def _limit(asked: Asked) -> float:
    """The bytes or parameters that may be left of the model; UsageError where it has no more."""
    if asked.parameters is not None:
        left, there = parse_parameters(asked.parameters), numbers(asked.checkpoint, asked.checkpoint.entries)
        if left >= there:
            raise UsageError(f"the model has {there:,} parameters, which is not more than the {left:,.0f} asked for")
        return left
    assert asked.size is not None
    share, before = parse_compressed_size(asked.size), asked.before
    size = int(share * before if share <= 1 else share)
    if size >= before:
        raise UsageError(f"the weights take {in_bytes(before)}, which is not more than the {in_bytes(size)} asked for")
    return size


def _with_foresight(ways: Ways, asked: Asked, calibration: Calibration, compute: Compute, progress: Progress) -> Ways:
    """``ways``, with what they are foreseen to cost; nothing is known of smaller dense models that do not predict."""
    try:
        sight = foresee(asked.checkpoint, ways.grid, ways.rounded_ends, calibration, compute, progress, asked.look)
    except UnsupportedModelError:
        if ways.grid:
            raise
        sight = Foresight(TokenCosts())
    if asked.program == "vllm":  # which computes some matrices as one
        matrices, first = StreamedModel(asked.checkpoint, "cpu").matrices(), dict[Any, Place]()
        which = {matrix.place: first.setdefault(fused(matrix), matrix.place) for matrix in matrices}
        sight = replace(sight, bits=[*summed(dict(sight.bits), which).items()])
    return replace(ways, foresight=sight)


def _timed(asked: Asked, compute: Compute, progress: Progress) -> tuple[Throughput | None, str]:
    """:func:`throughput`, or why it is not known; the first of several processes tells the others."""
    if asked.program not in _TIMED:
        return None, "how fast smaller dense models are is not foreseen"
    world = current_session().world
    timed: Throughput | None = None
    why = ""
    if world.first:
        with session():  # no other process takes part in it
            try:
                timed = throughput(asked.checkpoint, asked.program, compute, progress)
            except (NiwakiError, RuntimeError) as error:  # the latter where a GPU's memory is full
                why = first_line(error)
    return world.received((timed, why))


@checked
@remembering()
def compress(
    model: str | Path,
    out: str | Path,
    size: float | str | None = None,
    *,
    parameters: float | str | None = None,
    loss: float | str | None = None,
    speed: float | str | None = None,
    also: Sequence[str] = (),
    runtime: Runtime | None = None,
    max_time: float | str | None = None,
    training: bool = True,
    quick: bool = False,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Compresses a model to a given size, loss or speed, and writes it to ``out``.

    Use it when you know what you want and not how: it chooses the stages for the model and for the program that will
    run the result, and runs them as :func:`niwaki.run` does. For a ``size`` and for ``parameters`` it plans them as
    :func:`plan_compression` does. For a ``loss`` and a ``speed`` it tries a few sizes, in a hidden directory beside
    ``out``, and keeps one of them.

    Args:
        model: A directory with config.json and safetensors, a GGUF file, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        size: Size of the weight files: a share of what the weights take now, such as 0.4, or bytes, such as "80MB".
            It is never exceeded.
        parameters: For transformers, in place of a size: the parameters to keep, such as 0.75 or "100M".
        loss: The largest allowed increase of the loss in nats a token (0.05 is a perplexity 5 % higher), on the text
            of ``measurement``. The result is the smallest model tried whose 95 % upper bound is within it.
        speed: Tokens a second on this machine, as a multiple of the dense model's in transformers. The result is the
            largest model tried that reaches it. For "llama.cpp" llama-cpp-python has to be installed.
        also: With ``loss``, more texts on which the limit must hold, such as other kinds of text that the model is
            for: kinds other than that of ``calibration`` lose more. As many windows of each as of ``measurement``.
        runtime: The program that will run the result: "niwaki" (a packed model), "llama.cpp" (a GGUF file), "vllm"
            (packed integers of compressed-tensors, embeddings and head as they are) or "transformers" (a smaller dense
            model). By default transformers if ``parameters`` are given, and niwaki otherwise.
        max_time: Heal the result until this much time has passed since the beginning, such as "1h", instead of the
            ``training``.
        training: Whether rounded matrices are trained towards the dense model's predictions, on as many tokens as they
            are calibrated on, where they are foreseen to lose 0.05 nats a token or more. That about doubles the time;
            where memory is not enough, it is left out with a note.
        quick: Takes a fraction of the time: the model is looked at briefly, as by :func:`plan_compression` with
            ``coarse``, stages that fit have the effort "fast", and there is no ``training``. The result loses more.
        calibration: As in :func:`niwaki.run`.
        measurement: As in :func:`niwaki.run`.
        compute: As in :func:`niwaki.run`.
        restart: As in :func:`niwaki.run`.
        progress: Receives how it goes.

    Returns:
        The record of all stages. Its notes compare the foreseen loss with the measured one; for a loss or a speed
        they also say what was tried.

    Raises:
        UsageError: none or several of size, parameters, loss and speed are given; the one given cannot be reached
            (the message says how far one can go); or the model is no larger than that already.
        NiwakiError: see :mod:`niwaki.errors`. What is done is kept, and the same call resumes.
    """
    wanted = Asked(model, size, parameters, loss, speed, runtime, max_time, also, training=training, quick=quick)
    world = current_session().world
    if world.first:
        check_output(wanted.checkpoint.path, out)
    # Of several processes the first says how it goes.
    progress = progress if progress and world.first else Progress()
    calibration, where, measured = Calibration.of(calibration), Compute.of(compute), Measurement.of(measurement)
    measured.only_text("compress")

    def check(stages: Sequence[Stage], text: Calibration) -> None:
        if not stages:
            return
        with begun("run", model, out, stages, text, measured, where) as asked:
            texts = check_run(asked)
        if loss is not None and texts:
            check_windows(min(len(each.only.tokens) if each.only else 0 for each in texts))

    if not wanted.searches:
        plan, text = planned(wanted, calibration, where, progress, check)
        progress.note(str(plan))
        how: dict[str, Any] = {"calibration": text, "measurement": measurement, "compute": where}
        record = run(model, out, plan.way.stages, **how, restart=restart, progress=progress)
        told = world.received([*_compared(plan, record, Path(out))] if world.first else [])
        for note in told:
            progress.note(note)
        return with_notes(record, told, Path(out))
    if loss is not None and measured.samples is not None:
        check_windows(measured.samples)
    if loss is not None and max_time is not None and measured.text is None:
        raise UsageError("healing trains on what is left of the calibration text; name another text to measure on")
    calibration = usual_calibration(calibration, progress)
    length, samples = measured.length or calibration.length, measured.samples or USUAL_WINDOWS
    dense = StreamedModel(wanted.checkpoint, where.device, where.dtype)
    texts = tuple(_there(dense, replace(measured, text=text, samples=samples, length=length)) for text in also)
    ways, bound = searched(wanted, texts, calibration, where, progress, check)
    trials = Trials(model, out, calibration, measured, where, restart, progress)
    return trials.best(ways.ladder(), bound)


def _there(model: StreamedModel, measurement: Measurement) -> Measurement:
    """``measurement`` with the windows that its text has of those it says, and their length."""
    windows = read_heldout(model, measurement.texts[0], measurement, fewer=True)
    count, length = windows.tokens.shape
    check_windows(count, f" on {measurement.text}")
    return replace(measurement, samples=count, length=None if model.pairs is not None else length)


def _compared(plan: Compression, record: Record, out: Path) -> Iterator[str]:
    """How large the files in ``out`` are, and what was foreseen to be lost beside what was measured."""
    size = weights_size(out)
    yield f"{in_bytes(size)} of weights, {size / plan.before:.2f} of {in_bytes(plan.before)}"
    if plan.way.nats is not None:
        told = f"foreseen to lose about {plan.way.nats:.2g} nats a token"
        if {"before", "after"} <= record.perplexity.keys():
            told += f"; measured: {record.perplexity['after'].lost_from(record.perplexity['before']).words}"
        yield told
