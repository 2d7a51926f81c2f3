"""What can be seen to be wrong with an option before torch is imported, which takes seconds."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from niwaki.choices import MASK_NAMES, SOLVER_NAMES, WEIGHT_NAMES
from niwaki.effort import NO_EFFORT, make_effort
from niwaki.named import find, parse_name
from niwaki.quantities import (
    check_sparsity,
    fraction,
    parse_bits,
    parse_number,
    parse_parameters,
    parse_share,
    parse_size,
    parse_time,
)

_SOLVERS = dict.fromkeys((*MASK_NAMES, *SOLVER_NAMES, *WEIGHT_NAMES))


def _effort(text: str) -> None:
    if text != NO_EFFORT:  # which some commands know
        make_effort(text)


def _solver(text: str) -> None:
    for each in text.split("+"):
        find("solver", parse_name(each)[0], _SOLVERS)


def _size(text: str) -> None:
    if (share := fraction(text)) is None or not share.is_finite():
        parse_size(text)


def _sparsity(text: str) -> None:
    if (share := fraction(text)) is not None:  # lists and patterns are for others
        check_sparsity(float(share))


#: By the name of an option that takes text.
_CHECKS: Mapping[str, Callable[[str], Any]] = {
    "sparsity": _sparsity,
    "solver": _solver,
    "effort": _effort,
    "grid": parse_bits,
    "quantize": parse_bits,
    "embeddings": parse_bits,
    "parameters": parse_parameters,
    "size": _size,
    "max_time": parse_time,
    "tokens": parse_number,
    "batch": parse_number,
    **{name: partial(parse_share, name) for name in ("neurons", "heads", "experts", "expert_neurons", "own_text")},
}


def check(given: Mapping[str, Any]) -> None:
    """UsageError where one of the options that were ``given``, by name, is not valid."""
    for name, value in given.items():
        if name in _CHECKS and isinstance(value, str):
            _CHECKS[name](value)
