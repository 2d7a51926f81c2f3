"""``niwaki heal``."""

from dataclasses import dataclass
from typing import Annotated

from niwaki.choices import HealingMethod
from niwaki.cli.options import Output, options
from niwaki.cli.work import Work
from niwaki.options import HEALING_BATCH, HEALING_TOKENS, OWN_TEXT


@dataclass(frozen=True)
class Training:
    """How long and how to train: arguments of :func:`niwaki.heal`.

    Options:
        method: What is trained: all weights (full), products of low rank (lora), norms and biases (norms), or one block
            after the other, in the memory of one (blocks). auto is the first of full, lora and blocks that fits in
            memory.
        tokens: How many tokens to train on, such as 500k or 2M.
        max_time: A limit for all of it, such as 90m or 2h.
        rate: The learning rate, relative to the size of the weights. [default: {healing_rate}, or {blocks_rate} for
            blocks]
        batch: Tokens in a step, such as 512 or 1k.
        own_text: The share of what is trained on that the dense model writes itself; 0 for none.
    """

    method: HealingMethod = "auto"
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
    training: Training = Training(),
    work: Work = Work(),
) -> None:
    """Train what is left of PRUNED towards the dense model; all zeros stay. Write the result to OUT.

    Options:
        pruned: The pruned model: a directory or a hub id.
        teacher: The dense model that it was pruned from.
        calibration: What to train on. {text} May be given several times, for equal shares.
        length: Tokens in a window. [default: {healing_length}, or the model's positions if fewer]
        order: Which windows to train on: random ones from all of the text, or its first ones. [default: random, of data
            sets first]
    """
    with work.begun(f"healing {pruned}", output) as common:
        from niwaki.recipes import heal as run

        run(pruned, output, teacher, **vars(training), **common)
