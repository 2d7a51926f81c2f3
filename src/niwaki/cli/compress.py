"""``niwaki compress``."""

from typing import Annotated, Any

from niwaki.choices import Runtime
from niwaki.cli.common import out
from niwaki.cli.options import Model, Output, options
from niwaki.cli.work import Work


@options()
def compress(
    model: Model,
    output: Output,
    size: Annotated[str | None, "SIZE"] = None,
    parameters: Annotated[str | None, "SIZE"] = None,
    runtime: Annotated[Runtime | None, "--for"] = None,
    max_time: Annotated[str | None, "TIME"] = None,
    plan: bool = False,
    work: Work = Work(),
) -> None:
    """Bring MODEL to a size, for the program that runs it, and write it to OUT; all else is decided by the model.

    For example 'niwaki compress MODEL OUT --size 0.4'. An interrupted run resumes when the command is repeated.

    Options:
        size: What the weights may take in files: a share of what they take now, such as 0.4, or 80MB. Never exceeded.
        parameters: For transformers: how many of the parameters stay, such as 0.75 or 110M.
        runtime: What runs the result: niwaki (packed), llama.cpp (GGUF) or transformers (a smaller dense model).
            [default: niwaki, or transformers with --parameters]
        max_time: Heal for so long, such as 30m. [default: no healing]
        plan: Only say what would be done, and what else there is.
    """
    asked: dict[str, Any] = {"parameters": parameters, "runtime": runtime, "max_time": max_time}
    if plan:
        from niwaki.compression import plan_compression

        out.print(str(plan_compression(model, size, **asked)), markup=False, highlight=False, soft_wrap=True)
        return
    with work.begun(f"compressing {model}", output) as common:
        from niwaki.compression import compress as run

        run(model, output, size, **asked, **common)
