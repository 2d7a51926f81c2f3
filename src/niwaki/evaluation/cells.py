"""The cells of a comparison that are asked for: solvers at patterns, by their names."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from niwaki.effort import PLAIN_EFFORT, Effort, describe as describe_effort, make_effort
from niwaki.errors import UsageError
from niwaki.layer.patterns import Pattern, make_pattern, parse_pattern
from niwaki.layer.solvers import Solver, describe, make_solver
from niwaki.quantities import fraction
from niwaki.records.data import plain
from niwaki.records.record import Record
from niwaki.records.wording import in_words


@dataclass(frozen=True)
class AskedCell:
    """A cell that was asked for."""

    key: tuple[str, str]  # method and pattern, as in the table
    given: str | Solver
    solver: Solver
    effort: Effort
    pattern: Pattern

    @property
    def name(self) -> str:
        """That of its files."""
        name = "_".join(re.sub(r"[^\w.+=@-]+", "-", part).strip("-") for part in self.key)
        if len(name.encode()) < 150:
            return name
        return f"{name[:30]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"  # a file's name has 255 bytes

    @property
    def record(self) -> str:
        """The file of its record, in the directory of the comparison."""
        return f"records/{self.name}.json"

    def made(self, record: Record) -> bool:
        """Whether ``record`` is one of this cell, by what it says of the solver, the effort and the pattern."""
        asked = plain(describe(self.solver)), describe_effort(self.effort), str(self.pattern)
        return (record.solver, record.effort, record.pattern) == asked

    def __str__(self) -> str:
        return f"{in_words(describe(self.solver))}, {in_words(describe_effort(self.effort))}, {self.pattern}"


def asked_cells(
    solvers: Sequence[str | Solver], patterns: Sequence[str | float | Pattern], effort: str
) -> list[AskedCell]:
    """All cells, pattern by pattern; UsageError where names or patterns are not valid or solvers share a name."""
    cells: dict[tuple[str, str], AskedCell] = {}
    for column in patterns:
        for given in solvers:
            if isinstance(given, Solver):
                name, own, solver = type(given).__name__.lower(), "", given
            else:
                name, _, own = given.strip().partition("@")
                given, solver = name, make_solver(name)
            if name == "dense":
                raise UsageError("no solver can be called 'dense', as the model before it is; rename its class")
            used = own or effort
            key = (name if used == PLAIN_EFFORT else f"{name}@{used}", _column(column))
            cell = AskedCell(key, given, solver, make_effort(used), make_pattern(column, solver.default_pattern))
            if cells.setdefault(key, cell) != cell:
                raise UsageError(f"two solvers are called {key[0]!r}: {cells[key].solver} and {solver}")
    if not cells:
        raise UsageError("say which solvers and which patterns to compare, such as wanda and 0.5")
    return list(cells.values())


def _column(given: str | float | Pattern) -> str:
    """The name of a pattern's column, such as "60 %"."""
    if isinstance(given, Pattern):
        return str(given)
    share = fraction(given)
    return str(parse_pattern(str(given))) if share is None else f"{(100 * share).normalize():f} %"
