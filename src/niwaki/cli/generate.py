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
    """Generate text with MODEL, dense or packed. It answers PROMPT, or continues it if it has no chat template.

    Example: niwaki generate MODEL "What is a bonsai?"

    Options:
        prompt: The prompt; if it exceeds the context, its beginning is cut off.
        tokens: Generate at most N tokens.
        temperature: 0 always takes the most likely token, 1 samples from the model's probabilities.
        seed: Random seed for sampling.
        raw: Continue PROMPT as it stands, without the chat template.
    """
    with Screen(f"loading {model}", stopped="stopped") as screen, in_session():
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
