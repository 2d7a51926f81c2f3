"""The speed of this machine, measured once: each run begins with that, for as long as half of a tiny model's run."""

from __future__ import annotations

import torch

from niwaki.runs import duration, execute


def measure_once() -> None:
    """All runs of this process and of its forks estimate how long they take by the speed that is measured now."""
    speed = duration.products_per_second(torch.device("cpu"))
    vars(execute)["products_per_second"] = lambda device: speed
