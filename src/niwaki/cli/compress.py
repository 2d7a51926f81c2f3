"""``niwaki compress``."""

from typing import Annotated, Any

from niwaki.choices import Runtime
from niwaki.cli.common import out
from niwaki.cli.display import Display
from niwaki.cli.options import Model, Output, options
from niwaki.cli.work import Work
from niwaki.errors import UsageError


@options()
def compress(
    model: Model,
    output: Output,
    size: Annotated[str | None, "SIZE"] = None,
    loss: Annotated[str | None, "NATS"] = None,
    speed: Annotated[str | None, "TIMES"] = None,
    parameters: Annotated[str | None, "COUNT"] = None,
    also: Annotated[list[str] | None, "TEXT"] = None,
    runtime: Annotated[Runtime | None, "--for"] = None,
    max_time: Annotated[str | None, "TIME"] = None,
    plan: bool = False,
    work: Work = Work(),
) -> None:
    """Make MODEL as small or as fast as you ask for, and write it to OUT; all else is decided by the model.

    For example 'niwaki compress MODEL OUT --size 0.4', or '--loss 0.05' for the smallest model that loses no more than
    that. An interrupted run resumes when the command is repeated.

    Options:
        size: What the weights may take in files: a share of what they take now, such as 0.4, or 80MB. Never exceeded.
        loss: The loss that may be added, in nats a token of --text: 0.05 is a perplexity 5 % higher. Some sizes are
            tried, and the smallest whose 95 % upper bound is within the limit is written.
        also: With --loss, another text on which it has to be kept, such as another kind of text that the model is for.
            May be given several times.
        speed: Tokens a second, as a multiple of the dense model's on this machine, such as 2.0; the largest model that
            reaches it is written.
        parameters: For transformers: how many of the parameters stay, such as 0.75 or 110M.
        runtime: What runs the result: niwaki (packed), llama.cpp (GGUF), transformers (a smaller dense model) or 2:4
            (two zeros in every four weights). [default: niwaki, or transformers with --parameters]
        max_time: What the run may take (with --loss or --speed each trial), such as 1h: healing gets what is left.
            [default: no healing]
        plan: Only say what would be done for a size, and what else there is; not for --loss and --speed.
    """
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
