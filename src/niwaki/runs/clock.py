"""The time that each stage of a run takes."""

import time
from collections import defaultdict


class Clock:
    """A stopwatch for ``Record.seconds``: each lap counts as time of a stage."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now

    def add(self, seconds: dict[str, float]) -> None:
        """Counts the time of an earlier run, or of earlier stages, also."""
        for stage, value in seconds.items():
            if stage == "total":
                continue
            self.seconds[stage] += value
            self._began -= value

    def total(self) -> float:
        return time.perf_counter() - self._began
