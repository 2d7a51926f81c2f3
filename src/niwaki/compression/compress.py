"""One number instead of many commands: how small, how fast or at what loss, for the program that runs the result."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from niwaki.arguments import checked
from niwaki.choices import Runtime
from niwaki.compression.part import with_notes
from niwaki.compression.plan import Asked, Compression, planned, searched
from niwaki.compression.trials import Trials, check_windows
from niwaki.errors import UsageError
from niwaki.files import weights_size
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute, Measurement, Text
from niwaki.recipes import check_run, run
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.records.wording import size as in_bytes
from niwaki.runs.session import current_session, remembering
from niwaki.runs.stage import USUAL_WINDOWS, Stage
from niwaki.runs.workplace import check_output
from niwaki.texts.sources import usual_calibration
from niwaki.texts.texts import read_heldout


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
    wanted = Asked(model, size, parameters, loss, speed, runtime, max_time, also)
    world = current_session().world
    if world.first:
        check_output(wanted.checkpoint.path, out)
    if not world.first:
        progress = None  # of several processes the first says how it goes
    calibration, where, measured = Calibration.of(calibration), Compute.of(compute), Measurement.of(measurement)
    measured.only_text("compress")

    def check(stages: Sequence[Stage], text: Calibration) -> None:
        texts = check_run(model, out, stages, text, measured, where) if stages else []
        if loss is not None and texts:
            check_windows(min(len(each.only.tokens) if each.only else 0 for each in texts))

    if not wanted.searches:
        plan, text = planned(wanted, calibration, where, progress, check)
        if progress:
            progress.note(str(plan))
        how: dict[str, Any] = {"calibration": text, "measurement": measurement, "compute": where}
        record = run(model, out, plan.way.stages, **how, restart=restart, progress=progress)
        told = world.received([*_compared(plan, record, Path(out))] if world.first else [])
        for note in told:
            (progress or Progress()).note(note)
        return with_notes(record, told, Path(out))
    if loss is not None and measured.samples is not None:
        check_windows(measured.samples)
    if loss is not None and max_time is not None and measured.text is None:
        raise UsageError("healing trains on what is left of the calibration text; name another text to measure on")
    calibration = usual_calibration(calibration, progress or Progress())
    length, samples = measured.length or calibration.length, measured.samples or USUAL_WINDOWS
    dense = StreamedModel(wanted.checkpoint, where.device, where.dtype)
    texts = tuple(_there(dense, replace(measured, text=text, samples=samples, length=length)) for text in also)
    ways, bound = searched(wanted, texts, calibration, where, progress, check)
    trials = Trials(model, out, calibration, measurement, compute, restart, progress or Progress())
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
