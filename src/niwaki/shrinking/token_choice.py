"""Which tokens stay: those that are common, in the text that was counted and in the text the tokenizer is from."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import UsageError
from niwaki.quantities import parse_vocabulary
from niwaki.shrinking.tokenizer_file import TokenizerFile

#: How much of a token's score is how common it was in the tokenizer's own text, and not in what was counted. On SmolLM2
#: with books counted: docs/results-quality.md.
PRIOR = 0.3
#: Sizes that are not asked for as such are multiples of it.
_MULTIPLE = 64


@dataclass(frozen=True)
class Size:
    """How many tokens stay: a ``number``, all but a ``share``, or so much of what the counted text uses (``used``)."""

    number: int | None = None
    share: float | None = None
    used: float | None = None

    @classmethod
    def of(cls, given: float | str) -> "Size":
        """24576, "24576", 0.5, "50 %", "used" or "used:0.9995"; UsageError for all else."""
        return cls(*parse_vocabulary(given))


def score(file: TokenizerFile, counts: Tensor) -> Tensor:
    """(tokens,) float64 what each token is worth: its share of ``counts`` and of the tokenizer's own text."""
    prior = torch.zeros(len(counts), dtype=torch.float64)
    for number, value in file.shares().items():
        if number < len(prior):
            prior[number] = value
    return (1 - PRIOR) * counts.double() / counts.sum() + PRIOR * prior


def choose(file: TokenizerFile, counts: Tensor, size: Size, always: Collection[int]) -> list[int]:
    """The numbers of the tokens that stay, in order: those of ``always``, and the best by :func:`score`, closed.

    ``counts`` (tokens,) are the shares of the counted text, of all numbers that the model has. UsageError where the
    ``size`` is less than what has to stay, or all there is.
    """
    values = score(file, counts).tolist()
    known = (number for number in file.tokens.values() if number < len(values))  # by the model too
    order = sorted(known, key=lambda number: (-values[number], number))
    kept = set[int]()
    for number in sorted({*file.always, *always}):
        kept |= {*file.needs(number)}
    least, whole = len(kept), len({*order, *kept})
    if size.used is not None:
        kept |= _of_text(file, counts, size.used)
        wanted = _rounded(len(kept), whole)
    else:
        wanted = size.number or _rounded(round((1 - (size.share or 0)) * whole), whole)
    if wanted < least:
        raise UsageError(
            f"a vocabulary of {wanted:,} is less than the {least:,} tokens that have to stay: bytes, special tokens "
            "and what these need; give more"
        )
    if wanted >= whole:
        raise UsageError(f"a vocabulary of {wanted:,} tokens would remove none of the {whole:,} that the tokenizer has")
    return sorted(_filled(file, kept, order, wanted))


def _rounded(count: int, whole: int) -> int:
    """The next multiple of 64, but no more than there are."""
    return min(whole, -(-count // _MULTIPLE) * _MULTIPLE)


def _of_text(file: TokenizerFile, counts: Tensor, share: float) -> set[int]:
    """The most common tokens that make up this ``share`` of the text, with what they need."""
    kept, values, had = set[int](), counts.double(), 0.0
    for number in torch.argsort(values, descending=True, stable=True).tolist():
        if not values[number] or had >= share * float(values.sum()):
            break
        had += float(values[number])
        kept |= {*file.needs(number)}
    return kept


def _filled(file: TokenizerFile, kept: set[int], order: list[int], size: int) -> set[int]:
    """``kept`` with the first tokens of ``order`` that fit into the ``size``, each with what it needs."""
    while len(kept) < size:
        later = list[int]()  # too many for now: some of what they need may come first
        for number in order:
            if number in kept:
                continue
            missing = {*file.needs(number)} - kept
            if len(kept) + len(missing) <= size:
                kept |= missing
            else:
                later.append(number)
            if len(kept) == size:
                break
        order = later
    return kept


def renumbered(kept: Collection[int]) -> Mapping[int, int]:
    """By the old number of each token that stays its new one: the same order without gaps."""
    return {number: new for new, number in enumerate(sorted(kept))}
