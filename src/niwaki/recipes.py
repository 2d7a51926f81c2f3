"""Lists of stages: what pruning, shrinking and healing are made of, and any list of the user's own."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from niwaki.arguments import checked
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import HealingMethod
from niwaki.effort import Effort
from niwaki.errors import UsageError, named
from niwaki.healing.heal import Heal, refusal
from niwaki.layer.grid import AnyGrid
from niwaki.layer.patterns import Pattern
from niwaki.layer.solvers import Solver
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.locate import locate_model
from niwaki.options import (
    HEALING_BATCH,
    HEALING_TOKENS,
    OWN_TEXT,
    USUAL_SAMPLES,
    Calibration,
    Compute,
    Measurement,
    Text,
)
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Prune, Quantize
from niwaki.quantities import parse_share
from niwaki.records.progress import Progress
from niwaki.records.recipe import Recipe
from niwaki.records.record import Record
from niwaki.runs.card import begin_recipe
from niwaki.runs.execute import check_order, execute
from niwaki.runs.stage import Run, Stage, current_session, label
from niwaki.runs.workplace import check_output
from niwaki.shrinking.shrink import SHARES, Shrink
from niwaki.shrinking.vocabulary import ShrinkVocabulary
from niwaki.stages import make_stages, stages_of, table_of
from niwaki.texts.conversations import has_images
from niwaki.texts.sources import usual_calibration
from niwaki.windows import Windows


@checked
def run(
    model: str | Path,
    out: str | Path,
    stages: Sequence[Stage | str] | Recipe,
    *,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Applies several stages to a model, one after the other: shrink, prune, quantize, heal, export.

    For example ``run(model, out, [Shrink(neurons=0.25), Prune("2:4"), Heal(max_time="30m")], calibration="text.txt")``.
    All stages are checked before the first one begins. Each stage reads what the one before it wrote. An interrupted
    run resumes in the stage that it had reached, and the result has the same bytes as one that was not interrupted.

    Args:
        model: A directory with config.json and safetensors, a GGUF file, or a Hugging Face hub id.
        out: Output directory, new or empty. It appears once everything is written and checked.
        stages: The stages in order: :class:`~niwaki.ShrinkVocabulary`, which must be the first;
            :class:`~niwaki.Shrink`, which nothing else may precede; :class:`~niwaki.Prune` and
            :class:`~niwaki.Quantize`; :class:`~niwaki.Heal`, which trains towards ``model`` and so cannot be the first;
            :class:`~niwaki.QuantizeEmbeddings`, which only a format may follow; and the formats :class:`~niwaki.Export`
            and :class:`~niwaki.Pack`, one of which may be the last. Text will do too, such as "shrink neurons=0.25" or
            "export gguf-q8_0". Or a :class:`~niwaki.Recipe`, which has stages and options: options given here override
            its own, and a note says whether the result has the bytes that the recipe names.
        calibration: The text that all stages calibrate and train on, as a name or a
            :class:`~niwaki.options.Calibration`. Healing needs more text and reads on where the other stages stop.
        measurement: The text that perplexity is measured on after each stage, as a name or a
            :class:`~niwaki.options.Measurement`; by default 16 windows that no stage has calibrated or trained on.
        compute: The device, as a name or a :class:`~niwaki.options.Compute`.
        restart: Discard what an interrupted run has left for ``out`` instead of resuming it.
        progress: Receives the progress of the run.

    Returns:
        The record of all stages together, with each of them in its ``stages``. It is also in ``out/niwaki.json``,
        except for an export at the end.

    Raises:
        UsageError: a stage cannot follow those before it, or has an invalid parameter; nothing is written.
        NiwakiError: see :mod:`niwaki.errors`. Finished work is kept, and the same call resumes.
    """
    if not isinstance(stages, Recipe):
        made = make_stages(stages)
        return _execute("run", model, out, made, calibration, measurement, compute, restart, progress)
    calibration = Calibration.of(calibration).over(stages.calibration)
    measurement = Measurement.of(measurement).over(stages.measurement)
    compute = Compute.of(compute).over(stages.compute)
    made = stages_of(stages)
    return _execute("run", model, out, made, calibration, measurement, compute, restart, progress, follows=stages)


@checked
def prune(
    model: str | Path,
    out: str | Path,
    pattern: float | str | Pattern | None = None,
    *,
    solver: str | Solver | None = None,
    effort: str | Effort | None = None,
    mask_from: str | Path | None = None,
    quantize: str | AnyGrid | None = None,
    keep_format: bool = False,
    revive: bool = False,
    blocks: tuple[int, int] | str | None = None,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Prunes the model in directory ``model`` and writes the result to directory ``out``.

    Only one decoder block is in memory at a time, with its Gram matrices and the hidden states of the calibration text.
    Embeddings, norms, biases and the head are copied.

    Args:
        model: A directory with config.json and safetensors, a GGUF file, or a Hugging Face hub id.
        out: Output directory, new or empty. It appears once everything is written and checked.
        pattern: A fraction of zeros, such as 0.6 or "60 %", in the kind of pattern that the solver's paper uses; or a
            pattern, such as "2:4" or ``PerRow(0.6)``.
        solver: A name in ``SOLVERS``, with parameters as in "adam:iterations=50", or a solver; by default continuation.
        effort: What is done for the model as a whole, beyond each matrix: a name in ``EFFORTS``, with parameters as in
            "best:epochs=3", or an effort. The default is "balanced", or "fast", which is the method as published, if a
            solver or a mask is given.
        mask_from: Another solver, by name, or a pruned model whose mask is used. A model's mask is kept as it is,
            whatever its pattern. If a pattern is given too, the mask gets the zeros that it lacks for that pattern.
        quantize: A grid for the remaining weights. "int4:128" stands for whole numbers of 4 bits with a scale for each
            row and 128 inputs, "int8" has one scale for each row. Weights that round to 0 are zeros in addition to the
            pattern's. Scales are written to ``out/quantization/scales.safetensors``; two factors have 8 bits, and their
            scales are stored with the factors.
        keep_format: Write the pruned matrices of an FP8 or MXFP4 model in that format again, instead of bfloat16. All
            that is not pruned keeps its bytes, and the zeros are those of the solver: weights that would round to 0
            become the smallest number. UsageError for other models, and together with ``quantize``.
        revive: Let weights that are 0 in ``model`` become nonzero. By default they stay 0 and count among the zeros
            that the pattern asks for; if there are more of them, all stay.
        blocks: Prune only the blocks from the first number up to, but not including, the second; (0, 2) or "0:2" stands
            for the first two.
        calibration: The text to calibrate on, as a name or a :class:`~niwaki.options.Calibration`.
        measurement: The text to measure perplexity on, as a name or a :class:`~niwaki.options.Measurement`; by default
            16 windows of the calibration text after the calibration windows.
        compute: The device, as a name or a :class:`~niwaki.options.Compute`.
        restart: Discard what an interrupted run has left for ``out`` instead of resuming it.
        progress: Receives the progress of the run.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. After an error before the first block is done, nothing is left; later,
            the same call resumes after the last finished block, as it does after an interruption.
    """
    stage = Prune(pattern, solver, effort, mask_from, quantize, keep_format, revive, blocks)
    return _execute("prune", model, out, [stage], calibration, measurement, compute, restart, progress)


@checked
def quantize(
    model: str | Path,
    out: str | Path,
    grid: str | AnyGrid,
    *,
    embeddings: str | AnyGrid | None = None,
    effort: str | Effort | None = None,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Puts the weights of the decoder blocks on a grid and writes the model to directory ``out``; zeros stay zeros.

    The result loads wherever the dense model does and is as large; :func:`niwaki.pack` makes it small and fast, and
    :func:`niwaki.export` writes it for transformers and vLLM. The call is the same as :func:`niwaki.prune` with the
    pattern 0 and ``quantize=grid``.

    Args:
        model: A directory with config.json and safetensors, a GGUF file, or a Hugging Face hub id.
        out: Output directory, new or empty. It appears once everything is written and checked.
        grid: "int4:64" stands for whole numbers of 4 bits with a scale for each row and 64 inputs; "int8" has one scale
            for each row.
        embeddings: A grid for the token embeddings and the head, such as "int8:64"; they are quantized last. By default
            they stay as they are.
        effort: How hard to compensate for rounding. "none" rounds each weight to the nearest number of the grid and
            reads no text. A name in ``EFFORTS``, or an effort, compensates on the calibration text: "fast" within each
            matrix, "balanced" and "best" within each block too. The default is "none" for 8 bits, where the others gain
            next to nothing, and "balanced" for fewer.
        calibration: As in :func:`niwaki.prune`, like all arguments that follow. If nothing is calibrated, perplexity is
            measured on this text from its beginning, unless ``measurement`` names another.
        measurement: The text to measure perplexity on.
        compute: The device.
        restart: Discard what an interrupted run has left for ``out`` instead of resuming it.
        progress: Receives the progress of the run.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. After an error before the first block is done, nothing is left; later,
            the same call resumes after the last finished block.
    """
    stages: list[Stage] = [Quantize(grid, effort=effort)]
    if embeddings is not None:
        stages.append(QuantizeEmbeddings(embeddings, effort))
    return _execute("quantize", model, out, stages, calibration, measurement, compute, restart, progress)


@checked
def shrink(
    model: str | Path,
    out: str | Path,
    *,
    vocabulary: int | float | str | None = None,
    blocks: int = 0,
    neurons: float | str = 0.0,
    heads: float | str = 0.0,
    experts: float | str = 0.0,
    parameters: float | str | None = None,
    effort: str | Effort | None = None,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Writes a smaller dense model to directory ``out``, which transformers loads like any other.

    Blocks are removed first: those without which the model's predictions change least
    (:func:`niwaki.shrinking.search.costs_of_runs`). As much of their effect as a linear map can reproduce goes into the
    last matrix of the block before them (:func:`niwaki.shrinking.trial.bridge`). Then, block by block and with the
    inputs from the smaller blocks before it, the heads and neurons are removed whose absence costs the outputs of
    o_proj and down_proj least, and these two matrices are refitted (:func:`niwaki.layer.unit_removal.remove_units`).
    The experts that contribute least are removed too, and the others fitted to replace them
    (:func:`niwaki.shrinking.experts.fit_experts`). By default all that is left of each block is then fitted to the
    outputs of the dense model, see ``effort``.

    Args:
        model: A directory with config.json and safetensors, or a Hugging Face hub id.
        out: Output directory, new or empty. It appears once everything is written and checked.
        vocabulary: Number of tokens to keep, such as 24576; or the fraction to remove, such as 0.5 or "50 %"; or "used"
            for all tokens of the calibration text, and "used:0.9995" for the most common ones that make up this share
            of it. The whole text is counted, not only its windows. Bytes, special tokens and the tokens that others are
            merged from are kept, so any text can still be encoded. For byte-level BPE, BPE with byte fallback, and
            Unigram.
        blocks: Number of decoder blocks to remove.
        neurons: Fraction of the MLP neurons of each block to remove, such as 0.25 or "25 %". If a block has a multiple
            of 32 neurons, the nearest multiple of 32 is kept; of 64 from 2,048 neurons on.
        heads: Fraction of the attention heads of each block to remove; heads that share keys and values go together.
        experts: Fraction of the experts of each block to remove, in a mixture of experts.
        parameters: Largest size of the result: a fraction of the model's parameters, such as 0.75 or "75 %", or their
            number, such as "110M". The blocks, heads and neurons are removed that together cost the predictions least
            (:mod:`niwaki.shrinking.search`). With ``vocabulary`` the fraction refers to what that leaves.
        effort: A name in ``EFFORTS``, with parameters as in "balanced:epochs=0.5", or an effort. It sets how much text
            the dense model adds to the calibration text, how outputs are weighted when heads and neurons are chosen,
            how the rest of each block is fitted, and healing. The default is "balanced:synthetic=0.5"; for experts it
            is "fast", which uses the given text alone and fits only the matrices that lose columns or precede a removed
            block. If only tokens are removed, an effort such as "best" is for healing, and the default is none.
        calibration: As in :func:`niwaki.prune`, like all arguments that follow.
        measurement: The text to measure perplexity on.
        compute: The device; ``tf32`` and ``max_memory`` are not used.
        restart: Discard what an interrupted run has left for ``out`` instead of resuming it.
        progress: Receives the progress of the run.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. After an error before the first block is done, nothing is left; later,
            the same call resumes after the last finished block.
    """
    Compute.of(compute).only("shrink", "device", "dtype")
    shares = map(parse_share, SHARES, (neurons, heads, experts))
    only_tokens = vocabulary is not None and parameters is None and not any((blocks, *shares))
    stages: list[Stage] = []
    if vocabulary is not None:
        stages.append(ShrinkVocabulary(vocabulary, effort if only_tokens else None))
    if not only_tokens:
        stages.append(Shrink(blocks, neurons, heads, experts, parameters, effort))
    return _execute("shrink", model, out, stages, calibration, measurement, compute, restart, progress)


@checked
def heal(
    pruned: str | Path,
    out: str | Path,
    teacher: str | Path,
    *,
    method: HealingMethod = "auto",
    tokens: int | str = HEALING_TOKENS,
    max_time: float | str | None = None,
    rate: float | None = None,
    batch: int | str = HEALING_BATCH,
    own_text: float | str = OWN_TEXT,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Trains the nonzero weights of a pruned model towards the dense model's predictions and writes them to ``out``.

    This is distillation with the dense model as the teacher (:mod:`niwaki.healing.whole`,
    :class:`niwaki.healing.blocks.BlockRun`). It works on any pruned model, by niwaki or others, with zeros or of a
    smaller shape; all zeros stay zero. The dense model is in memory one block at a time, the pruned one as a whole if
    it fits.

    Args:
        pruned: The pruned model: a directory with config.json and safetensors, or a Hugging Face hub id.
        out: Output directory, new or empty. It appears once everything is written and checked.
        teacher: The dense model, likewise; it must have the same tokens, or more.
        method: "full" trains all remaining weights and needs three more float32 numbers for each; "lora" adds low-rank
            products to them, in little more memory than the weights take; "norms" trains norms and biases alone;
            "scales" trains these and the scales of a grid; "blocks" trains one block after the other towards the dense
            model's, with one block of each model in memory.
            "auto" is the first of "full", "lora" and "blocks" that fits in memory; on a grid the first of "scales",
            "norms" and "blocks".
        tokens: Number of tokens to train on, such as "2M". A text with fewer is used repeatedly. As a stage it may be a
            multiple, such as "1x", of those that a stage before was calibrated on.
        max_time: Limit for the whole call, in seconds or as text such as "1h"; None for no limit. The same number of
            tokens gives the same bytes, the same time does not.
        rate: Learning rate, relative to the root mean square of each parameter's weights, or, of norms and biases with
            "lora", "norms" and "scales", to the size of each of their numbers; None for 0.0007 or, with the method
            "blocks", 0.01. With "scales" it is then 0.002 where 0.3 nats a token or more are lost at first, and goes
            down with the root of what is lost.
        batch: Tokens per step, such as 512 or "1k"; at least one window.
        own_text: Fraction of the training text that the dense model generates, from 0 to less than 1.
        calibration: The text to train on, as a name or a :class:`~niwaki.options.Calibration`, whose ``samples`` are
            not used; by default in windows of 512 tokens.
        measurement: The text to measure perplexity on, as in :func:`niwaki.prune`.
        compute: The device; ``tf32`` is not used. Half precision is bfloat16, with weights in float32. On processors
            with units for bfloat16 (AMX or AVX512-BF16), "auto" is bfloat16 too if the files are.
        restart: Discard what an interrupted run has left for ``out`` instead of resuming it.
        progress: Receives the progress of the run.

    Returns:
        The record, which is also in ``out/niwaki.json``; that of the pruned model is in ``out/niwaki.base.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. Once a first point has been saved, the same call resumes at the last one.
    """
    known = ("text", "length", "order", "seed", "answers", "bos", "field")
    Calibration.of(calibration).only("heal", *known, hint="; how much it trains on is tokens")
    Compute.of(compute).only("heal", "device", "dtype", "max_memory")
    stage = Heal(method, tokens, max_time, rate, batch, own_text, teacher)
    return _execute("heal", pruned, out, [stage], calibration, measurement, compute, restart, progress)


def _execute(
    caller: str,
    model: str | Path,
    out: str | Path,
    stages: Sequence[Stage],
    calibration: Calibration | Text,
    measurement: Measurement | Text | None,
    compute: Compute | str,
    restart: bool,
    progress: Progress | None,
    follows: Recipe | None = None,
) -> Record:
    """Does ``stages``, with the healing that their efforts ask for as stages too; errors name the ``caller``."""
    with begun(caller, model, out, stages, calibration, measurement, compute, progress) as run:
        run.follows = follows
        try:
            tables = [table_of(stage) for stage in stages]
            run.recipe = begin_recipe(tables, run.model, run.calibration, run.measurement, run.compute)
        except UsageError as error:  # such as what is of the caller's own making
            run.progress.note(f"the result will have no recipe.toml: {error}")
        return execute(run, restart)


@contextlib.contextmanager
def begun(
    caller: str,
    model: str | Path,
    out: str | Path,
    given: Sequence[Stage],
    calibration: Calibration | Text,
    measurement: Measurement | Text | None,
    compute: Compute | str,
    progress: Progress | None = None,
) -> Iterator[Run]:
    """A run of the stages ``given``, and of the healing of their efforts, of which none is opened.

    The calibration text is there, the order of the stages is right and so is the place of the output. Errors also say
    which of several stages they come from, or the ``caller``.
    """
    calibration, measurement, compute = Calibration.of(calibration), Measurement.of(measurement), Compute.of(compute)
    measurement.only_text(caller)
    world = current_session().world
    progress = progress if progress and world.first else Progress()
    names = [label(number, len(given), stage.name) for number, stage in enumerate(given)]
    check_order(given, names)
    calibrates = any(not (stage.is_format or stage.rounds_to_nearest) for stage in given)
    if calibrates and not any(stage.reads_on for stage in given):
        calibration = usual_calibration(calibration, progress)
    progress.status(f"reading {model}")
    source = locate_model(str(model))
    stages, labels, reads = list[Stage](), list[str](), list[Path]()
    for stage, name in zip(given, names, strict=True):
        with named(name):
            own = _with_healing(stage, source, calibration, compute)
            reads += [locate_model(str(path)) for path in stage.reads]
        stages += own
        labels += [name] * len(own)
    check_order(stages, labels)
    target = check_output(source, out, *reads) if world.first else Path(out)
    asked = tuple(stages), tuple(labels), calibration, measurement, compute
    with contextlib.closing(MemoryBudget()) as budget:
        yield Run(str(model), source, target, *asked, world, progress, budget)


def _with_healing(stage: Stage, source: Path, calibration: Calibration, compute: Compute) -> list[Stage]:
    """``stage``, and what its effort heals as a stage behind it.

    What cannot be healed as a whole is left as it is, with a note that says so first.
    """
    if not (times := stage.settled_effort.healing):
        return [stage]
    # The memory that is left may differ between processes.
    if why := current_session().world.received(_refusal(stage, source, calibration, compute)):
        return [dataclasses.replace(cast("Any", stage), left_out=f"skipping the effort's healing: {why}")]
    return [stage, Heal(tokens=f"{times:g}x")]


def _refusal(stage: Stage, source: Path, calibration: Calibration, compute: Compute) -> str:
    """Why what ``stage`` leaves of the model in ``source`` is not to be healed; "" where it is."""
    if stage.not_healed:
        return stage.not_healed
    if has_images(calibration):
        return "it is calibrated on images"
    if _windows(calibration) <= current_session().world.size:
        return "some text is held out, and there is only one window of it for each process"
    return refusal(Checkpoint(source), compute)


def _windows(calibration: Calibration) -> int:
    """How many there are of the text."""
    given = [text.tokens if isinstance(text, Windows) else text for text in calibration.texts]
    return sum(len(text) for text in given if isinstance(text, Tensor)) or calibration.samples or USUAL_SAMPLES
