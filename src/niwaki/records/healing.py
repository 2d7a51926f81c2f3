"""How the weights of a pruned model were trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from niwaki.errors import UsageError
from niwaki.records.data import Amount, Count, Finite, Fraction, Name, Positive, Seconds

#: Points of a training: more are too many to show.
LARGEST_CURVE = 10_000


@dataclass(frozen=True)
class HealingPoint:
    """A point of a training: its state after this many ``tokens``, ``steps`` and ``seconds``.

    Attributes:
        error: Mean KL divergence of the pruned model from the dense one on held-out text, in nats a token, for weights
            as the files have them. For models without a head, the squared distance of states, relative to their
            squares.
        loss: The same on the text trained on since the last point; None if there is none, as at the first point, and if
            blocks are trained, each towards its own. In old records the first point has a copy of the error.
    """

    tokens: Count
    steps: Count
    seconds: Seconds
    error: Amount
    loss: Finite | None

    @property
    def trained_on(self) -> float | None:
        """``loss``, except that it is None at a point before any step, where old records have a number."""
        return self.loss if self.steps else None


@dataclass
class HealingRecord:
    """How a pruned model's weights were trained, see :mod:`niwaki.healing.heal`.

    Attributes:
        teacher: The dense model, as it was given.
        method: What was trained: "full", "lora", "norms", or "blocks" one after the other.
        tokens: Largest number of tokens to train on.
        limit: Time limit in seconds; None for no limit.
        rate: Learning rate, relative to the root mean square of each parameter's weights.
        batch: Tokens per step.
        held: Number of held-out tokens.
        own_text: Fraction of the training text that the dense model was to generate.
        of_states: Whether states were trained towards those of the dense model, which has no head, instead of
            predictions.
        halved: How often the rate was halved because outputs were not finite.
        points: The points, from the pruned model as it was given to the end.
        best: Number of the point with the lowest error, whose weights are the result.
    """

    teacher: Name
    method: Name
    tokens: Positive
    limit: Seconds | None
    rate: Amount
    batch: Positive
    held: Positive
    own_text: Fraction = 0.0
    halved: Count = 0
    of_states: bool = False
    points: list[HealingPoint] = field(default_factory=list)
    best: Count = 0

    def __post_init__(self) -> None:
        if self.points and self.best >= len(self.points):
            raise UsageError(f"the best of {len(self.points)} points cannot be number {self.best}")
        if len(self.points) > LARGEST_CURVE:
            raise UsageError(f"a training has {len(self.points):,} points, too many to show")

    @property
    def by_block(self) -> bool:
        """Whether blocks were trained one after the other, so that points have no loss."""
        return self.method == "blocks"

    def __str__(self) -> str:
        if not self.points:
            return f"0 tokens towards {self.teacher}"
        first, best, last = self.points[0], self.points[self.best], self.points[-1]
        after = "" if best == last else f" after {best.tokens:,}"
        what, unit = ("distance of states", "of their squares") if self.of_states else ("KL", "nats a token")
        return (
            f"{last.tokens:,} tokens towards {self.teacher}; {what} from it on {self.held:,} held-out tokens "
            f"{first.error:.4g} to {best.error:.4g} {unit}{after}"
        )
