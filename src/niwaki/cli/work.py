"""What the commands share that make a model of a model: prune, shrink, heal and run."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from niwaki.cli.common import in_session, written
from niwaki.cli.display import Display
from niwaki.options import Calibration, Compute, Measurement


@dataclass(frozen=True)
class Work:
    """Texts, where to compute, and how to begin: arguments that all functions of ``niwaki.recipes`` take."""

    calibration: Calibration = Calibration()
    measurement: Measurement = Measurement(samples=16)
    compute: Compute = Compute()
    restart: bool = False

    @contextlib.contextmanager
    def begun(self, what: str, output: str) -> Iterator[dict[str, Any]]:
        """These arguments and the progress on the screen, for ``what`` is done within, such as "pruning demo"."""
        with Display(what, output=output) as display:
            from niwaki.models.processes import world

            with world(self.compute.device) as (team, device), in_session(team):
                here = dataclasses.replace(self, compute=dataclasses.replace(self.compute, device=device))
                yield {**vars(here), "progress": display}
        if team.first:
            written(output)
