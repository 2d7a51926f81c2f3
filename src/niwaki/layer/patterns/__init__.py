"""Which weights may be non-zero.

A pattern is a value with one main operation: ``pattern.mask(scores)``, the best weights that it allows. For scores
``|w|`` that is the Euclidean projection of ``w`` onto the matrices of the pattern::

    argmin_Z  |Z - W|^2   subject to   the support of Z being allowed   =   W * pattern.mask(|W|)

Counts are exact, ties are broken by position, and True means that a weight is kept.
"""

from niwaki.layer.patterns._base import Pattern
from niwaki.layer.patterns.among import Among
from niwaki.layer.patterns.factors import TwoFactors
from niwaki.layer.patterns.fixed import Fixed
from niwaki.layer.patterns.n_of_m import NM
from niwaki.layer.patterns.parsing import make_pattern, parse_pattern
from niwaki.layer.patterns.unstructured import PerRow, Unstructured

__all__ = [
    "NM", "Among", "Fixed", "Pattern", "PerRow", "TwoFactors", "Unstructured", "make_pattern", "parse_pattern",
]  # fmt: skip
