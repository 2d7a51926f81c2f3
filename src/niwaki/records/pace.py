"""How far a run is and how much time is left, from what it tells its progress; imports no torch."""

import time

from niwaki.records.wording import duration, estimated

#: Parts that are not of a block: a walk over all before or after that which prunes, or something else for all.
PLANNING = ("sensitivity", "allocation", "sharing", "synthesis", "influence", "perplexity", "rounding")
#: What those of them are called whose steps are all that they have to do, and not those of a block.
_OF_ALL = {"sensitivity": "planning", "synthesis": "planning", "perplexity": "measuring", "rounding": "rounding"}


class Pace:
    """How far a run is, and the time left, by how long the parts of the last block took.

    Before the first block is done the time left comes from the estimate for all of the run.
    """

    def __init__(self) -> None:
        self.blocks = self.block = 0
        self.is_planning = False
        self._shares = [0.3, 0.5, 0.2]  # of each part in the time of a block, as in the one before
        self._spent: list[float] = []  # by the parts of this block so far
        self._began = self._part_began = time.monotonic()
        self._part, self._steps, self._done = "", 1, 0
        self._at: tuple[str, float, str] | None = None  # where healing is
        self._end = 0.0  # when all should be done, while nothing better is known

    def estimate(self, seconds: float) -> None:
        """All that comes takes about this long."""
        self._end = time.monotonic() + seconds

    def begin(self, blocks: int) -> None:
        """So many blocks are to come."""
        self.blocks, self._began = blocks, time.monotonic()

    def is_next(self, block: int, part: str) -> bool:
        """Whether ``part`` is of another block than the one before, or of another walk."""
        return block != self.block or self.is_planning != (part in PLANNING)

    def stage(self, block: int, part: str, steps: int) -> None:
        """A ``part`` of a block begins, in ``steps`` steps."""
        planning = part in PLANNING
        if self.is_planning and not planning:
            self._began = time.monotonic()  # the time so far says nothing of what comes
        self.is_planning = planning
        self.block, self._part, self._steps, self._done = block, part, steps, 0
        self._part_began, self._at = time.monotonic(), None

    def step(self) -> None:
        """A step of the part is done."""
        self._done += 1

    def healing(self, share: float, seconds: float) -> None:
        """``share`` of a training is done after ``seconds``."""
        left = f"{duration(seconds * (1 - share) / share)} left" if share else ""
        self._at = "healing", share, left

    def end_part(self) -> None:
        """The part that has begun, if one has, is done."""
        if self._part:
            self._spent.append(time.monotonic() - self._part_began)
        self._part = ""

    def end_block(self, is_like_others: bool) -> float:
        """The seconds of the block so far; the next one takes as long if this one ``is_like_others``."""
        spent, self._spent = self._spent, []
        total = sum(spent)
        if is_like_others and total > 0:
            self._shares = [seconds / total for seconds in spent]
        return total

    def where(self) -> tuple[str, float, str]:
        """What is at work, the fraction of it that is done, and the time left in words, or ""."""
        if self._at:
            return self._at
        part = min(1.0, self._done / max(1, self._steps))
        rest = self._end - time.monotonic()
        left = f"about {estimated(rest)} left" if rest > 0 else ""
        if self.is_planning:
            what = _OF_ALL.get(self._part, "")
            if not left and part and what not in ("", "planning"):
                left = f"{duration((time.monotonic() - self._part_began) * (1 - part) / part)} left"
            return what or "planning", part if what else (self.block + part) / max(1, self.blocks), left
        done = sum(self._shares[: len(self._spent)]) + sum(self._shares[len(self._spent) :][:1]) * part
        fraction = (self.block + done) / max(1, self.blocks)
        if self.block > 0:
            left = f"{duration((time.monotonic() - self._began) * (1 - fraction) / fraction)} left"
        return f"block {self.block + 1}/{self.blocks}", fraction, left
