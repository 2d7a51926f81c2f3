"""How far a training has come, of the tokens or of the time that it may take."""

import math
import time
from dataclasses import dataclass, field

from niwaki.records.healing import HealingPoint

#: The share of a training in which the learning rate rises.
_WARMUP = 0.1


@dataclass
class Schedule:
    """The learning rate rises for a short time and falls to 0 by the end: of ``tokens``, or earlier of ``seconds``."""

    tokens: int
    seconds: float  # infinite for no limit
    steps: int = 0  # so far
    trained: int = 0  # tokens so far
    at_the_end: float = 0.0  # seconds that are to be left for what is not a step
    _began: float = field(default_factory=time.monotonic)

    @property
    def is_limited(self) -> bool:
        """Whether time may end the training."""
        return not math.isinf(self.seconds)

    def resume(self, point: HealingPoint) -> None:
        """The training goes on at ``point``."""
        self.steps, self.trained = point.steps, point.tokens
        self._began -= point.seconds

    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    def share(self, tokens: int, seconds: float) -> float:
        """How much of what the training may take these are, up to 1."""
        left_for_steps = max(1.0, self.seconds - self.at_the_end)
        return min(1.0, max(tokens / self.tokens, seconds / left_for_steps))

    def now(self) -> float:
        """The share of the training that is behind."""
        return self.share(self.trained, self.spent())

    def rate(self, share: float) -> float:
        """The learning rate at this ``share`` of the training, relative to the highest."""
        return min(1.0, (share + 1e-3) / _WARMUP) * (1 - share)
