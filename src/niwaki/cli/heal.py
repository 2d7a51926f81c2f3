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
        method: What to train: auto, full, lora, norms or blocks. full: all weights; lora: low-rank products; norms:
            norms and biases; blocks: one block after the other, in the memory of one; auto: the first of full, lora and
            blocks that fits in memory.
        tokens: Tokens to train on, such as 500k or 2M.
        max_time: Time limit, such as 90m or 2h.
        own_text: Fraction of the training text that the dense model generates; 0 for none.

    More options:
        rate: Learning rate, relative to the size of the weights. [default: {healing_rate}, or {blocks_rate} for blocks]
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
    training: Training = Training(),
    work: Work = Work(),
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
