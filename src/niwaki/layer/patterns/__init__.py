"""Which weights may be non-zero.

A pattern is a value with one main operation: ``pattern.mask(scores)``, the best weights that it allows. For scores
``|w|`` that is the Euclidean projection of ``w`` onto the matrices of the pattern::

    argmin_Z  |Z - W|^2   subject to   the support of Z being allowed   =   W * pattern.mask(|W|)

Counts are exact, ties are broken by position, and True means that a weight is kept.
"""

from collections.abc import Callable
from numbers import Real

from niwaki.choices import TWO_FACTORS
from niwaki.errors import PatternError, shown
from niwaki.layer.grid import Grid
from niwaki.layer.patterns._base import Pattern
from niwaki.layer.patterns.counted import NM, PerRow, Unstructured
from niwaki.layer.patterns.factors import TwoFactors
from niwaki.layer.patterns.given import Among, Fixed
from niwaki.quantities import fraction, parse_bits, read_pattern

__all__ = [
    "NM", "Among", "Fixed", "Pattern", "PerRow", "TwoFactors", "Unstructured", "make_pattern", "parse_pattern",
]  # fmt: skip

#: What makes a pattern of the numbers in its text, by what :func:`~niwaki.quantities.read_pattern` calls its kind.
_KINDS: dict[str, Callable[..., Pattern]] = {
    "": NM,
    "unstructured": Unstructured,
    "per-row": PerRow,
    TWO_FACTORS: lambda share, grid: TwoFactors(share, Grid(*parse_bits(grid)) if grid else None),
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
