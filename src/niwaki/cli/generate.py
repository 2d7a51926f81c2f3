"""``niwaki generate``."""

import io
import sys
from typing import Annotated

from typer import Argument, Option

from niwaki.cli.common import in_session, writing
from niwaki.cli.options import Model, spread
from niwaki.cli.screen import Screen
from niwaki.options import Compute
from niwaki.records.wording import printable

TEMPERATURE = Option(
    metavar="NUMBER", help="0: the most likely token each time; 1: drawn by the model's probabilities."
)


@spread(without=("tf32", "memory"))
def generate(
    model: Model,
    prompt: Annotated[str, Argument(metavar="PROMPT", help="What the model continues. If it is too long, its end.")],
    tokens: Annotated[int, Option(metavar="N", help="Write at most N tokens.")] = 100,
    temperature: Annotated[float, TEMPERATURE] = 0.0,
    seed: Annotated[int, Option(metavar="N", help="For what is drawn.")] = 0,
    compute: Compute = Compute(),
) -> None:
    """Write what MODEL, dense or packed, continues PROMPT with."""
    with Screen(f"loading {model}") as screen, in_session():
        from niwaki.evaluation.generate import generate as run

        begin = iter([prompt])  # goes before the first piece: nothing is written where nothing is generated

        def say(text: str) -> None:
            screen.stop_spinner()
            screen.said()
            piece = next(begin, "") + text
            with writing(sys.stdout):
                sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks
        run(model, prompt, tokens=tokens, temperature=temperature, seed=seed, compute=compute, say=say)
        say("\n")
