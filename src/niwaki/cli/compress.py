"""``niwaki compress``."""

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
    work: Work = Work(),
) -> None:
    """Compress MODEL to a given size, loss or speed and write it to OUT; niwaki chooses how.

    Interrupted runs resume when the command is repeated.

    Example: niwaki compress MODEL OUT --size 0.4

    Options:
        size: Size of the weight files: a fraction of the current size, such as 0.4, or 80MB. Never exceeded.
        loss: Largest allowed increase in loss, in nats per token; 0.05 is a perplexity 5 % higher. It is measured on
            --text. Some sizes are tried; the smallest whose 95 % upper bound is within the limit is written.
        also: With --loss, another text on which the limit must also hold. May be given several times.
        speed: Tokens per second, as a multiple of the dense model's, such as 2.0. Measured on this machine; the largest
            model that reaches it is written.
        parameters: For transformers: parameters to keep, such as 0.75 or 110M.
        runtime: Program that will run the result: niwaki, llama.cpp, transformers or 2:4. The result is a packed model,
            a GGUF file, a smaller dense model, or a dense model with two zeros in every four weights. [default: niwaki;
            transformers with --parameters]
        max_time: Time limit, such as 1h; any remaining time is spent on healing. With --loss or --speed it is for each
            trial. [default: no healing]
        plan: Show the plan for --size and its alternatives; write nothing.
    """
    check_how_small(size, parameters, loss, speed, runtime)
    asked: dict[str, Any] = {"parameters": parameters, "runtime": runtime, "max_time": max_time}
    if plan and (loss is not None or speed is not None):
        raise UsageError("--plan is for sizes: what a loss or a speed takes is found by trying")
    if plan:
        with Display(f"looking at {model}") as display:
            from niwaki.compression.compress import plan_compression

            texts: dict[str, Any] = {"calibration": work.calibration, "compute": work.compute, "progress": display}
            planned = str(plan_compression(model, size, **asked, **texts))
        out.print(planned, markup=False, highlight=False, soft_wrap=True)
        return
    with work.begun(f"compressing {model}", output) as common:
        from niwaki.compression.compress import compress as run

        run(model, output, size, loss=loss, speed=speed, also=also or (), **asked, **common)
