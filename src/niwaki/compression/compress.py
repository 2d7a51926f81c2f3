"""One number instead of many commands: how small, how fast or at what loss, for the program that runs the result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from niwaki.arguments import checked
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import Runtime
from niwaki.compression.foresight import foresee
from niwaki.compression.part import PartOf, with_notes
from niwaki.compression.trials import LossBound, SpeedBound, Trials
from niwaki.compression.ways import Parts, SmallerWays, Way, Ways
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.healing.heal import Heal
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute, Measurement, Text
from niwaki.pruning.prune import Prune
from niwaki.quantities import check_how_small, parse_compressed_size, parse_parameters, parse_positive
from niwaki.recipes import run
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.records.wording import size as in_bytes
from niwaki.runs.session import current_session, remembering
from niwaki.runs.stage import USUAL_WINDOWS, Stage
from niwaki.shrinking.configuration import numbers
from niwaki.texts.sources import usual_calibration


@dataclass(frozen=True)
class Compression:
    """A plan to compress a model: what will be done, and what else was considered.

    Attributes:
        model: The model's name.
        runtime: The program that will run the result.
        before: Bytes of the weights now.
        asked: Bytes that the result may have; for 2:4, which has no sizes, those of the weights now.
        way: What will be done.
        others: The best way of each other kind to this size, in ascending order of the foreseen loss.
        reach: The largest and the smallest form for this program; empty if it has no sizes.
        all_tokens: Why ways with fewer tokens were not considered; "" if they were, or if the model was not looked at.
    """

    model: str
    runtime: Runtime
    before: int
    asked: int
    way: Way
    others: tuple[Way, ...] = ()
    reach: tuple[Way, ...] = ()
    all_tokens: str = ""

    def __str__(self) -> str:
        lines = [f"{in_bytes(self.before)} now; plan for {self.runtime}: {self.way.words}", f"  {self._told(self.way)}"]
        lines += [f"  stage {i}: {stage.name} {stage}".rstrip() for i, stage in enumerate(self.way.stages, 1)]
        for title, ways in (("foreseen to lose more:", self.others), ("other sizes:", self.reach)):
            if ways:
                lines += [title, *(f"  {self._told(way)}: {way.words}" for way in ways)]
        if self.all_tokens:
            lines.append(f"fewer tokens were not considered: {self.all_tokens}")
        return "\n".join(lines)

    def _told(self, way: Way) -> str:
        size = f"{in_bytes(way.size):>8} ({way.size / self.before:.2f})"
        if way.nats is None:
            return size
        told = f"{size}, about {way.nats:.2g} nats a token"
        return f"{told} ({way.nats + way.elsewhere:.2g} on other kinds of text)" if way.tokens else told


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
        speed: Tokens a second on this machine, as a multiple of the dense model's. The result is the largest model
            tried that reaches it.
        also: With ``loss``, more texts on which the limit must hold, such as other kinds of text that the model is
            for: kinds other than that of ``calibration`` lose more. As many windows of each as of ``measurement``.
        runtime: The program that will run the result: "niwaki" (a packed model), "llama.cpp" (a GGUF file),
            "transformers" (a smaller dense model) or "2:4" (a dense model with two zeros in every four weights, which
            has no sizes). By default transformers if ``parameters`` are given, and niwaki otherwise.
        max_time: Heal the result until this much time has passed since the beginning, such as "1h". None for no
            healing.
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
    check_how_small(size, parameters, loss, speed, runtime)
    if also and loss is None:
        raise UsageError("more texts to measure on are for a loss; give one too, or measure the result with eval")
    if not current_session().world.first:
        progress = None  # of several processes the first says how it goes
    if loss is None and speed is None:
        where = Compute.of(compute)
        wanted = model, size, parameters, runtime, max_time
        planned, text = _planned(*wanted, Calibration.of(calibration), where, progress)
        if progress:
            progress.note(str(planned))
        how: dict[str, Any] = {"calibration": text, "measurement": measurement, "compute": where}
        record = run(model, out, planned.way.stages, **how, restart=restart, progress=progress)
        return with_notes(record, _compared(planned.way, record), Path(out))
    runtime, calibration, asked = runtime or "niwaki", Calibration.of(calibration), Measurement.of(measurement)
    if loss is not None and asked.samples is not None and asked.samples < 2:
        raise UsageError(f"a bound on the loss needs 2 windows to measure on, or more; got {asked.samples}")
    if loss is not None and max_time is not None and asked.text is None:
        raise UsageError("healing trains on what is left of the calibration text; name another text to measure on")
    calibration = usual_calibration(calibration, progress or Progress())
    checkpoint, before, _ = _numbers(model)
    bound: LossBound | SpeedBound
    if loss is not None:
        length = asked.length or calibration.length
        texts = tuple(replace(asked, text=text, samples=asked.samples or USUAL_WINDOWS, length=length) for text in also)
        bound = LossBound(parse_positive("loss", loss), texts, checkpoint.path, Compute.of(compute))
    else:
        assert speed is not None
        bound = SpeedBound(parse_positive("speed", speed), before, checkpoint.path, Compute.of(compute))
    ways = _ways(checkpoint, runtime, max_time)
    ladder = _with_foresight(ways, checkpoint, calibration, Compute.of(compute), progress).ladder()
    trials = Trials(model, out, calibration, measurement, compute, restart, progress or Progress())
    return trials.best(ladder, bound)


@checked
def plan_compression(
    model: str | Path,
    size: float | str | None = None,
    *,
    parameters: float | str | None = None,
    runtime: Runtime | None = None,
    max_time: float | str | None = None,
    calibration: Calibration | Text = Calibration(),
    compute: Compute | str = Compute(),
    progress: Progress | None = None,
) -> Compression:
    """Plans what :func:`compress` would do and what else is possible; arguments and errors are the same.

    It looks at the model on a little of the calibration text, which takes seconds to minutes, and takes the way that
    is foreseen to lose least. For "niwaki": matrices of 2 to 8 bits, with more bits where they matter most, and
    embeddings and head of 4 to 8; or zeros with 4 or 8 bits. For "llama.cpp": 4 to 8 bits in groups of 32, with
    embeddings and head in Q8_0; or the same for a model with parts removed. For "transformers": a smaller dense model
    in the same dtype. All of them may have fewer tokens, if their tokenizer is of a known kind and the calibration text
    is long enough to choose them by: four tokens of it for each of the model's. It does not look at the model if there
    is only one way: for "2:4", and for sizes of 8 bits a weight or more.
    """
    calibration, compute = Calibration.of(calibration), Compute.of(compute)
    check_how_small(size, parameters, None, None, runtime)
    return _planned(model, size, parameters, runtime, max_time, calibration, compute, progress)[0]


def _planned(
    model: str | Path,
    size: float | str | None,
    parameters: float | str | None,
    runtime: Runtime | None,
    max_time: float | str | None,
    calibration: Calibration,
    compute: Compute,
    progress: Progress | None,
) -> tuple[Compression, Calibration]:
    """As :func:`plan_compression`, and the calibration text, which is another one where the usual is not available."""
    runtime = runtime or ("niwaki" if parameters is None else "transformers")
    checkpoint, before, there = _numbers(model)
    if runtime == "2:4":
        way = Way("two zeros in every four weights, stored dense", before, (Prune("2:4"), *_heal(max_time)))
        return Compression(str(model), runtime, before, before, way), calibration
    if parameters is not None:
        asked = parse_parameters(parameters)
        if asked >= there:
            raise UsageError(f"the model has {there:,} parameters, which is not more than the {asked:,.0f} asked for")
    else:
        assert size is not None
        share = parse_compressed_size(size)
        asked = int(share * before if share <= 1 else share)
        if asked >= before:
            raise UsageError(
                f"the weights take {in_bytes(before)}, which is not more than the {in_bytes(asked)} asked for"
            )
    ways = _ways(checkpoint, runtime, max_time)
    ways.check(asked)
    if isinstance(ways, SmallerWays) or asked < ways.largest.size:
        calibration = usual_calibration(calibration, progress or Progress())
        ways = _with_foresight(ways, checkpoint, calibration, compute, progress)
    way, others = ways.to(asked)
    ends = (ways.largest, ways.smallest) if isinstance(ways, Ways) else ()
    reach = tuple(each for each in ends if each.words != way.words)
    limit = way.size if isinstance(ways, SmallerWays) else int(asked)
    return Compression(str(model), runtime, before, limit, way, tuple(others), reach, ways.all_tokens), calibration


def _compared(way: Way, record: Record) -> Iterator[str]:
    """What was foreseen of ``way`` beside what was measured."""
    if way.nats is not None:
        told = f"foreseen to lose about {way.nats:.2g} nats a token"
        if {"before", "after"} <= record.perplexity.keys():
            told += f"; measured: {record.perplexity['after'].lost_from(record.perplexity['before']).words}"
        yield told


def _with_foresight(
    ways: Ways | SmallerWays,
    checkpoint: Checkpoint,
    calibration: Calibration,
    compute: Compute,
    progress: Progress | None,
) -> Ways | SmallerWays:
    """``ways``, with what they are foreseen to cost; without that where smaller dense models cannot be looked at."""
    part = PartOf(progress or Progress(), "looking at what each step would cost")
    grid, ends = (ways.grid, ways.ends_bits) if isinstance(ways, Ways) else (None, ())
    try:
        return replace(ways, foresight=foresee(checkpoint, grid, ends, calibration, compute, part))
    except UnsupportedModelError:
        if isinstance(ways, Ways):
            raise
        return ways


def _ways(checkpoint: Checkpoint, runtime: Runtime, max_time: float | str | None) -> Ways | SmallerWays:
    """UnsupportedModelError where the program cannot have the model."""
    model, heal = StreamedModel(checkpoint, "cpu"), _heal(max_time)
    return SmallerWays.of(model, heal) if runtime == "transformers" else Ways(Parts.of(model, runtime), runtime, heal)


def _numbers(model: str | Path) -> tuple[Checkpoint, int, int]:
    """The model's files, the bytes of its weights, and how many there are."""
    checkpoint = Checkpoint(locate_model(str(model)))
    return checkpoint, sum(each.size for each in checkpoint.entries.values()), numbers(checkpoint, checkpoint.entries)


def _heal(max_time: float | str | None) -> tuple[Stage, ...]:
    return () if max_time is None else (Heal(max_time=max_time, whole=True),)
