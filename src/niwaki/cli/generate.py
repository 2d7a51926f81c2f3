"""``niwaki generate``."""

import io
import sys
from typing import Annotated

from niwaki.cli.common import in_session, writing
from niwaki.cli.options import Model, options
from niwaki.cli.screen import Screen
from niwaki.options import Compute
from niwaki.records.wording import printable


@options(without=("tf32", "max_memory"))
def generate(
    model: Model,
    prompt: Annotated[str, "PROMPT"],
    tokens: Annotated[int, "N"] = 100,
    temperature: Annotated[float, "NUMBER"] = 0.0,
    seed: Annotated[int, "N"] = 0,
    raw: bool = False,
    compute: Compute = Compute(),
) -> None:
    """Write what MODEL, dense or packed, answers to PROMPT, or how it continues it if it has no chat template.

    Options:
        prompt: A message to the model, or a text to continue; if it is too long for the context, its end.
        tokens: Write at most N tokens.
        temperature: 0: the most likely token each time; 1: sampled by the model's probabilities.
        seed: The random seed for sampling.
        raw: Continue PROMPT as it stands, also with a model that has a chat template.
    """
    with Screen(f"loading {model}") as screen, in_session():
        from niwaki.evaluation.generate import write

        def say(text: str) -> None:
            screen.stop_spinner()
            screen.said()
            with writing(sys.stdout):
                sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks
        write(model, prompt, tokens, temperature, seed, raw, compute, say=say, echo=True)
        say("\n")
