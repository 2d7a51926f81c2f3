"""How the weights of a pruned model were trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from niwaki.errors import UsageError
from niwaki.records.data import Amount, Count, Finite, Fraction, Name, Positive, Seconds

#: Points of a training: more are too many to show.
LARGEST_CURVE = 10_000


@dataclass(frozen=True)
class HealingPoint:
    """A moment of a training: after so many ``tokens``, ``steps`` and ``seconds``.

    Attributes:
        error: The mean KL of the dense from the pruned model on what is held out, in nats a token; of weights as files
            have them. Where models have no head, the squared distance of states, relative to their squares.
        loss: The same on what was trained on since the last point; None where that is nothing, as at the first point,
            and where blocks are trained, each towards its own. Old records have a copy of the error at the first one.
    """

    tokens: Count
    steps: Count
    seconds: Seconds
    error: Amount
    loss: Finite | None

    @property
    def trained_on(self) -> float | None:
        """``loss``, but for what old records have at a point before any step."""
        return self.loss if self.steps else None


@dataclass
class HealingRecord:
    """A training of a pruned model's weights, see :mod:`niwaki.healing.heal`.

    Attributes:
        teacher: The dense model, as it was given.
        method: What was trained: "full", "lora", "norms", or one of the "blocks" after the other.
        tokens: How many were to be trained on, at most.
        limit: The seconds that it was given; None for no limit.
        rate: The learning rate, relative to the root mean square of each parameter's weights.
        batch: Tokens in a step.
        held: Tokens that were held out.
        own_text: The share of what was trained on that the dense model was to write itself.
        of_states: Whether states were trained towards those of the dense model, which has no head, and no predictions.
        halved: How often the rate was halved, after outputs that were not finite.
        points: From the pruned model as it came to the end.
        best: The number of the point with the lowest error, whose weights are the result.
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
        """Whether blocks were trained one after the other, and points have no loss."""
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
