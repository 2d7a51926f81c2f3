"""Patterns from text."""

import re
from collections.abc import Callable
from numbers import Real

from niwaki.choices import TWO_FACTORS
from niwaki.errors import PatternError, shown
from niwaki.layer.grid import parse_grid
from niwaki.layer.patterns._base import Pattern
from niwaki.layer.patterns.factors import TwoFactors
from niwaki.layer.patterns.n_of_m import NM, MixedNM, Quota
from niwaki.layer.patterns.unstructured import PerRow, Unstructured
from niwaki.quantities import fraction

#: By the word before a fraction of zeros.
_SHARED: dict[str, Callable[[float], Pattern]] = {
    "unstructured": Unstructured,
    "per-row": PerRow,
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
    """A pattern from its ``str``, such as ``"2:4"`` or ``"2:4+unstructured:0.6"``; PatternError if not valid."""
    within, plus, quota = text.strip().partition("+")
    kind, _, number = within.partition(":")
    try:
        if plus:
            nm, rest = parse_pattern(within), None if "+" in quota else parse_pattern(quota)
            if isinstance(nm, NM) and isinstance(rest, PerRow | Unstructured):
                return Quota(nm, rest)
        elif match := re.fullmatch(r"(mixed-|)(\d+):(\d+)", within):
            return (MixedNM if match[1] else NM)(int(match[2]), int(match[3]))
        elif kind == TWO_FACTORS:
            number, _, grid = number.partition(":")
            return TwoFactors(_share(number), parse_grid(grid) if grid else None)
        elif kind in _SHARED:
            return _SHARED[kind](_share(number))
    except ValueError as error:
        if isinstance(error, PatternError):
            raise
    raise PatternError(
        f"{shown(text)} is not a valid pattern; try 2:4, unstructured:0.6 or per-row:0.6, or mixed-2:4, "
        "2:4+per-row:0.6 or two-factors:0.5"
    )


def _share(text: str) -> float:
    """Of a pattern, as "0.6" or "60 %"; ValueError where it is no number."""
    share = fraction(text)
    if share is None:
        raise ValueError(text)
    return float(share)
