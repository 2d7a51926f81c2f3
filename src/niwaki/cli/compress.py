"""``niwaki compress``."""

import os
from pathlib import Path
from typing import Annotated, Any

from niwaki.choices import Runtime
from niwaki.cli.common import out
from niwaki.cli.display import Display
from niwaki.cli.options import Model, Output, options
from niwaki.cli.work import Work
from niwaki.errors import UsageError
from niwaki.quantities import check_how_small


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
    plan: bool = False,
    closely: bool = False,
    work: Work = Work(),
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
        runtime: What will run the result: niwaki, llama.cpp, ollama, transformers or 2:4. niwaki gets a packed model,
            llama.cpp and Ollama a GGUF file, transformers a smaller dense model; 2:4, for hardware with that sparsity,
            is a dense model with two zeros in every four weights. [default: niwaki; transformers with --parameters]
        max_time: Heal the result until this much time has passed, such as 1h. Healing trains it to match the original
            model. With --loss or --speed the time is for each trial. [default: no healing]
        plan: Only show the plan and its alternatives. Losses are foreseen from a short look at the model.
        closely: With --plan, look as closely as the run itself does. The run that follows uses what is found. Tokens
            per second of packed models are measured too.
    """
    check_how_small(size, parameters, loss, speed, runtime)
    if also and loss is None:
        raise UsageError("--also is for --loss; measure the result on other texts with 'niwaki eval'")
    asked: dict[str, Any] = {"parameters": parameters, "loss": loss, "speed": speed, "also": also or ()}
    asked |= {"runtime": runtime, "max_time": max_time}
    if closely and not plan:
        raise UsageError("--closely is for --plan; a run always looks closely")
    if plan:
        with Display(f"looking at {model}") as display:
            from niwaki.compression.plan import plan_compression

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
    from niwaki.checkpoints.reading import PACKED_INDEX

    directory = Path(output)
    if files := sorted(directory.glob("*.gguf")):
        return f"llama-cli -m {files[0]}"
    if (directory / PACKED_INDEX).exists():
        return f'niwaki generate {output} "PROMPT"'
    return f'AutoModelForCausalLM.from_pretrained("{output}") in transformers, or niwaki generate {output} "PROMPT"'
