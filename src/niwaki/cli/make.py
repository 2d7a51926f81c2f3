"""The commands that make a model of a model: prune, quantize, shrink, heal, compress and run."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Context

from niwaki.choices import HealingMethod, Runtime
from niwaki.cli.common import in_session, out, record_file, written
from niwaki.cli.options import Model, Output, RecordFile, chosen, options
from niwaki.cli.screen import Display
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.files import is_model
from niwaki.options import HEALING_BATCH, HEALING_TOKENS, OWN_TEXT, Calibration, Compute, Measurement
from niwaki.quantities import HOW_SPARSE, NOTHING_TO_REMOVE, check_how_small
from niwaki.records.recipe import Recipe


@dataclass(frozen=True)
class WorkArguments:
    """Texts, where to compute, and how to begin: arguments that all functions of ``niwaki.recipes`` take."""

    calibration: Calibration = Calibration()
    measurement: Measurement = Measurement(samples=16)
    compute: Compute = Compute()
    restart: bool = False

    @contextlib.contextmanager
    def begun(self, what: str, output: str) -> Iterator[dict[str, Any]]:
        """These arguments and the progress on the screen, for ``what`` is done within, such as "pruning demo"."""
        with Display(what, output=output) as display:
            from niwaki.models.processes import world

            with world(self.compute.device) as (team, device), in_session(team):
                here = dataclasses.replace(self, compute=dataclasses.replace(self.compute, device=device))
                yield {**vars(here), "progress": display}
        if team.first:
            written(output)


@dataclass(frozen=True)
class PruningArguments:
    """How to prune, apart from the method: arguments of :func:`niwaki.prune`.

    Options:
        quantize: Also quantize the remaining weights, to a grid such as int4:128. int4:128 has 4 bits and a scale for
            each row and 128 inputs, int8 a scale for each row. To quantize without pruning, use 'niwaki quantize'.

    More options:
        mask_from: Take the mask from this solver or pruned model and only update the weights. With --pattern, zeros
            that a model's mask lacks are added.
        keep_format: Write the pruned matrices of an FP8 or MXFP4 model in that format again instead of bfloat16.
        revive: Allow weights that are 0 in MODEL to become nonzero; otherwise they stay 0.
        blocks: Prune only these decoder blocks, such as 0:2 for the first two.
    """

    mask_from: Annotated[str | None, "SOURCE"] = None
    quantize: Annotated[str | None, "GRID"] = None
    keep_format: bool = False
    revive: bool = False
    blocks: Annotated[str | None, "FROM:TO"] = None


@options()
def prune(
    model: Model,
    output: Output,
    sparsity: Annotated[str | None, "FRACTION"] = None,
    pattern: Annotated[str | None, "PATTERN"] = None,
    solver: Annotated[str | None, "NAME"] = None,
    effort: Annotated[str | None, "NAME"] = None,
    pruning: PruningArguments = PruningArguments(),
    work: WorkArguments = WorkArguments(),
    record: RecordFile = None,
) -> None:
    """Prune MODEL and write the result to OUT.

    If a run is interrupted, repeat the command to resume it.

    Example: niwaki prune MODEL OUT --sparsity 0.6 --calibration text.txt

    Options:
        sparsity: Fraction of the weights to set to zero, such as 0.6 or 60%.
        pattern: Pattern of zeros instead of --sparsity, such as 2:4. Available: {patterns}.
        solver: Pruning method, such as {solver} or wanda; 'niwaki solvers' lists them. Available: {solver} (the
            default), {solvers}; for masks {masks}; for weights {weights}; or several combined, as in wanda+exact.
            Parameters can be set, as in admm1:rho=0.5.
        effort: How much to do for the model as a whole, beyond pruning each matrix: {efforts}. Efforts distribute zeros
            over matrices, fit blocks and heal; heal is best with three times as much training. Parameters can be set,
            as in best:healing=0. [default: balanced; fast with --solver or --mask-from]
    """
    if sparsity is not None and pattern is not None:
        raise UsageError("give --sparsity or --pattern, not both")
    if sparsity is None and pattern is None and (pruning.mask_from is None or not is_model(pruning.mask_from)):
        raise UsageError(HOW_SPARSE)
    with work.begun(f"pruning {model}", output) as common:
        from niwaki.recipes import prune as run

        file = record_file(record, "matrices")
        zeros = sparsity if pattern is None else pattern
        result = run(model, output, zeros, solver=solver, effort=effort, **vars(pruning), **common)
        if file is not None:
            result.save(file)


@options()
def quantize(
    model: Model,
    output: Output,
    grid: Annotated[str, "GRID"],
    embeddings: Annotated[str | None, "GRID"] = None,
    effort: Annotated[str | None, "NAME"] = None,
    work: WorkArguments = WorkArguments(),
    record: RecordFile = None,
) -> None:
    """Quantize the weights of MODEL and write the result to OUT.

    Files only become smaller when you then run 'niwaki pack' on OUT.

    Example: niwaki quantize MODEL OUT int8:64

    Options:
        grid: Bits and group size, such as int8 or int4:64. Each group of inputs shares a scale; int8 has one scale per
            row. Or a type of llama.cpp, such as q4_k; or nvfp4 or mxfp4, for servers.
        embeddings: Also quantize token embeddings and the head, to a grid such as int8:64. In small models they are a
            large part of the size, and a packed model reads them for each token.
        effort: How hard to compensate for rounding: none, fast, balanced, best or heal. none rounds to the nearest, in
            seconds and without text; the others use --calibration, and heal is best with three times as much training.
            [default: none for 8 bits, where compensation gains almost nothing; balanced for fewer]
    """
    with work.begun(f"quantizing {model}", output) as common:
        from niwaki.recipes import quantize as run

        file = record_file(record, "matrices")
        result = run(model, output, grid, embeddings=embeddings, effort=effort, **common)
        if file is not None:
            result.save(file)


@dataclass(frozen=True)
class RemovalArguments:
    """What is removed: arguments of :func:`niwaki.shrink`.

    Options:
        parameters: Parameters to keep, such as 0.75 or 110M. The blocks, heads and neurons that together cost least are
            removed. With --vocabulary, a fraction refers to what that leaves.
        vocabulary: Number of tokens to keep, such as 24576, or fraction to remove, such as 0.5. 'used' keeps the tokens
            that occur in the calibration text, and 'used:0.9995' the most common ones that make up this share of it.
            The whole text is counted. Any text can still be encoded.
        blocks: Number of decoder blocks to remove. Those that change the predictions least are chosen.
        neurons: Fraction of the MLP neurons of each block to remove. Rounded so that the number left is a multiple of
            32 if it was one before (of 64 from 2,048 neurons on): formats with groups of 32, such as Q8_0, need that.
        heads: Fraction of the attention heads of each block to remove.
        experts: Fraction of the experts of each block to remove.
        effort: How well to fit the remaining weights: fast, balanced, best or heal. fast fits the matrices that lose
            columns or precede a removed block; the others fit all of each block, also on text that the model writes;
            best then heals, and heal does so three times as long. Parameters can be set, as in best:healing=0.
            [default: balanced:synthetic=0.5; fast with --experts]
    """

    vocabulary: Annotated[str | None, "SIZE"] = None
    blocks: Annotated[int, "N"] = 0
    neurons: Annotated[str, "FRACTION"] = "0"
    heads: Annotated[str, "FRACTION"] = "0"
    experts: Annotated[str, "FRACTION"] = "0"
    parameters: Annotated[str | None, "SIZE"] = None
    effort: Annotated[str | None, "NAME"] = None


@options(without=("tf32", "max_memory"))
def shrink(
    model: Model, output: Output, removal: RemovalArguments = RemovalArguments(), work: WorkArguments = WorkArguments()
) -> None:
    """Remove tokens, blocks, attention heads, neurons or experts from MODEL; write a smaller dense model to OUT.

    If a run is interrupted, repeat the command to resume it.

    Example: niwaki shrink MODEL OUT --parameters 0.75
    """
    if removal == RemovalArguments(effort=removal.effort):
        raise UsageError(NOTHING_TO_REMOVE)
    with work.begun(f"shrinking {model}", output) as common:
        from niwaki.recipes import shrink as run

        run(model, output, **vars(removal), **common)


@dataclass(frozen=True)
class TrainingArguments:
    """How long and how to train: arguments of :func:`niwaki.heal`.

    Options:
        method: What to train: auto, full, lora, norms, scales or blocks. full: all weights; lora: low-rank products;
            norms: norms and biases; scales: these and the scales of a grid; blocks: one block after the other, in the
            memory of one; auto: the first of full, lora and blocks that fits in memory,
            on a grid of scales, norms and blocks.
        tokens: Tokens to train on, such as 500k or 2M.
        max_time: Time limit, such as 90m or 2h.
        own_text: Fraction of the training text that the dense model generates; 0 for none.

    More options:
        rate: Learning rate, relative to the size of the weights. [default: {healing_rate}, {blocks_rate} for blocks,
            {scales_rate} for scales and less where little is lost]
        batch: Tokens per step, such as 512 or 1k.
    """

    method: Annotated[HealingMethod, "METHOD"] = "auto"
    tokens: Annotated[str, "N"] = HEALING_TOKENS
    max_time: Annotated[str | None, "TIME"] = None
    rate: Annotated[float | None, "RATE"] = None
    batch: Annotated[str, "TOKENS"] = str(HEALING_BATCH)
    own_text: Annotated[str, "SHARE"] = str(OWN_TEXT)


@options(without=("samples", "tf32"))
def heal(
    pruned: Annotated[str, "PRUNED"],
    output: Output,
    teacher: Annotated[str, "DENSE", "--teacher"],
    training: TrainingArguments = TrainingArguments(),
    work: WorkArguments = WorkArguments(),
) -> None:
    """Train PRUNED to match its dense model and write the result to OUT; zeros stay zero.

    If a run is interrupted, repeat the command to resume it.

    Example: niwaki heal PRUNED OUT --teacher MODEL --max-time 2h

    Options:
        pruned: The pruned model: a directory or a hub id.
        teacher: The dense model that PRUNED was made from.
        calibration: Text to train on. {text} May be repeated; each text then gets an equal share.

    More options:
        length: Tokens per window. [default: {healing_length}, or the model's positions if fewer]
        order: Train on random windows of the text, or on its first ones. [default: random; first for data sets]
    """
    with work.begun(f"healing {pruned}", output) as common:
        from niwaki.recipes import heal as run

        run(pruned, output, teacher, **vars(training), **common)


@options()
def compress(
    model: Model,
    output: Output,
    size: Annotated[str | None, "SIZE"] = None,
    loss: Annotated[str | None, "NATS"] = None,
    speed: Annotated[str | None, "TIMES"] = None,
    parameters: Annotated[str | None, "COUNT"] = None,
    also: Annotated[list[str] | None, "TEXT"] = None,
    runtime: Annotated[Runtime | None, "PROGRAM", "--for"] = None,
    max_time: Annotated[str | None, "TIME"] = None,
    training: bool = True,
    quick: bool = False,
    plan: bool = False,
    closely: bool = False,
    work: WorkArguments = WorkArguments(),
) -> None:
    """Compress MODEL to a given size, loss or speed and write it to OUT; niwaki chooses how.

    If a run is interrupted, repeat the command to resume it.

    Example: niwaki compress MODEL OUT --size 0.4

    Options:
        size: Size of the weight files: a fraction of the current size, such as 0.4, or an absolute size, such as 80MB.
            Never exceeded.
        loss: Largest allowed increase in loss, in nats per token: 0.05 means a perplexity 5 % higher. It is measured on
            --text. niwaki tries several sizes and writes the smallest whose 95 % upper bound is within the limit.
        also: With --loss, another text to keep the limit on. May be repeated.
        speed: Speed as a multiple of the dense model's, such as 2.0. It is measured on this machine, in tokens per
            second; the largest model that reaches it is written.
        parameters: Parameters to keep, such as 0.75 or 110M; for transformers.
        runtime: What will run the result: niwaki, llama.cpp, ollama, vllm or transformers. niwaki gets a packed model,
            llama.cpp and Ollama a GGUF file, vLLM packed integers, transformers a smaller dense model. [default:
            niwaki; transformers with --parameters]
        max_time: Heal the result until this much time has passed, such as 1h. Healing trains it to match the original
            model. With --loss or --speed the time is for each trial. [default: no healing]
        quick: Take a fraction of the time, and lose more. The model is looked at briefly, the effort is fast, and
            rounded matrices are not trained.
        plan: Only show the plan and its alternatives. Losses are foreseen from a short look at the model.

    More options:
        training: Train rounded matrices to match the original model, on as many tokens as they are calibrated on, where
            they are foreseen to lose 0.05 nats a token or more; that about doubles the time.
        closely: With --plan, look as closely as the run itself does. The run that follows uses what is found. Tokens
            per second are measured too, for niwaki and llama.cpp.
    """
    check_how_small(size, parameters, loss, speed, runtime)
    if also and loss is None:
        raise UsageError("--also is for --loss; measure the result on other texts with 'niwaki eval'")
    asked: dict[str, Any] = {"parameters": parameters, "loss": loss, "speed": speed, "also": also or ()}
    asked |= {"runtime": runtime, "max_time": max_time, "training": training, "quick": quick}
    if closely and (quick or not plan):
        raise UsageError("--closely is for --plan without --quick; a run always looks closely, unless it is --quick")
    if plan:
        with Display(f"looking at {model}") as display:
            from niwaki.compression.compress import plan_compression

            texts: dict[str, Any] = {"calibration": work.calibration, "compute": work.compute, "progress": display}
            planned = str(plan_compression(model, size, **asked, **texts, measure_speed=closely, coarse=not closely))
        out.print(planned, markup=False, highlight=False, soft_wrap=True)
        return
    with work.begun(f"compressing {model}", output) as common:
        from niwaki.compression.compress import compress as run

        record = run(model, output, size, **asked, **common)
    if os.environ.get("RANK", "0") == "0":  # of several processes the first one speaks
        lines = [record.summary, f"next: {_next(output)}"]
        out.print("\n".join(filter(None, lines)), markup=False, highlight=False, soft_wrap=True)


def _next(output: str) -> str:
    """How to run what is in the directory ``output``."""
    from niwaki.checkpoints.reading import PACKED_INDEX, Checkpoint
    from niwaki.models.locate import check_continues

    directory = Path(output)
    if files := sorted(directory.glob("*.gguf")):
        return f"llama-cli -m {files[0]}"
    if (directory / PACKED_INDEX).exists():
        return f'niwaki generate {output} "PROMPT"'
    checkpoint = Checkpoint(directory)
    if checkpoint.config.get("quantization_config") is not None:
        return f"vllm serve {output}"
    try:
        check_continues(checkpoint, "generate")
    except UnsupportedModelError:
        kind = next(iter(checkpoint.config.get("architectures") or ()), "AutoModel")
        return f'{kind}.from_pretrained("{output}") in transformers'
    return f'AutoModelForCausalLM.from_pretrained("{output}") in transformers, or niwaki generate {output} "PROMPT"'


@options()
def run(
    context: Context,
    model: Model,
    output: Output,
    stages: Annotated[list[str] | None, "STAGE", "--stage", "-s"] = None,
    recipe: Annotated[str | None, "FILE"] = None,
    work: WorkArguments = WorkArguments(),
) -> None:
    """Run stages such as shrink, prune, quantize, heal and export on MODEL and write the result to OUT.

    Perplexity is measured after each stage. If a run is interrupted, repeat the command to resume it.

    Example: niwaki run MODEL OUT -s 'shrink neurons=0.25' -s 'prune 2:4' -s 'heal max_time=30m'

    Options:
        stages: A stage with its parameters, in quotes, such as 'prune 2:4'; may be repeated. Stages run in the order
            given. More examples: 'shrink neurons=0.25', 'quantize int4:128', 'heal max_time=30m', 'embeddings int8:64',
            'pack' and 'export gguf-q8_0'.
        recipe: TOML file with the stages instead, such as the recipe.toml of an earlier result. It has tables called
            [[stages]] and may set options; options on the command line override them.
    """
    if bool(stages) == (recipe is not None):
        raise UsageError("say what to do, by --stage or by --recipe FILE; such as --stage 'prune 0.5' --stage heal")
    read = None if recipe is None else Recipe.read(recipe)
    with work.begun(f"running {model}", output) as common:
        from niwaki.recipes import run as work_on

        if read is not None:
            given = chosen(work, context)
            # What was given goes into the recipe; but of several processes each has its own device.
            common |= {name: type(common[name])() for name in given if common[name] == getattr(work, name)}
            work_on(model, output, read.with_options(**given), **common)
        else:
            work_on(model, output, stages or [], **common)
