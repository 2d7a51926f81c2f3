"""Patterns from text."""

from collections.abc import Callable
from numbers import Real

from niwaki.choices import TWO_FACTORS
from niwaki.errors import PatternError, shown
from niwaki.layer.grid import parse_grid
from niwaki.layer.patterns._base import Pattern
from niwaki.layer.patterns.factors import TwoFactors
from niwaki.layer.patterns.n_of_m import NM
from niwaki.layer.patterns.unstructured import PerRow, Unstructured
from niwaki.quantities import fraction, read_pattern

#: By what :func:`~niwaki.quantities.read_pattern` calls each.
_KINDS: dict[str, Callable[..., Pattern]] = {
    "": NM,
    "unstructured": Unstructured,
    "per-row": PerRow,
    TWO_FACTORS: lambda share, grid: TwoFactors(share, parse_grid(grid) if grid else None),
}


def make_pattern(given: float | str | Pattern, usual: Callable[[float], Pattern]) -> Pattern:
    """The pattern that ``given`` says; for a fraction of zeros (:func:`fraction`) the one that ``usual`` makes.

    PatternError if it is neither, or its numbers are out of range.
    """
    if isinstance(given, Pattern):
        return given
    if isinstance(given, bool) or not isinstance(given, str | Real):
        raise PatternError(f"a pattern is a fraction of zeros, text or a Pattern; got {shown(given)}")
    share = fraction(given)
    return parse_pattern(str(given)) if share is None else usual(float(share))


def parse_pattern(text: str) -> Pattern:
    """A pattern from its ``str``, such as ``"2:4"`` or ``"unstructured:0.6"``; PatternError if not valid."""
    kind, *numbers = read_pattern(text)
    return _KINDS[kind](*numbers)
