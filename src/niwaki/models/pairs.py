"""Pairs of a source, which an encoder reads, and a target, which a decoder writes: each pair as one row of tokens.

A row is the source, :data:`NOTHING`, the target, which begins with the token that the model's targets begin with, and
:data:`NOTHING` up to the end. So pairs of any lengths are windows as those of running text are. Of a source that is
a file of sound or an image the row has its number among :data:`SOURCES`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from niwaki.errors import UsageError

#: What stands between a source and its target, and after the target.
NOTHING = -1


class Sources:
    """All files that pairs of this process have as their sources, by number; each is read when it is asked for."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._readers: list[Callable[[], Mapping[str, Tensor]]] = []

    def number(self, name: str, read: Callable[[], Mapping[str, Tensor]]) -> int:
        """The number of the file called ``name``, of which a model receives what ``read`` gives."""
        if name not in self._names:
            self._names[name] = len(self._readers)
            self._readers.append(read)
        return self._names[name]

    def __getitem__(self, number: int) -> Mapping[str, Tensor]:
        if not 0 <= number < len(self._readers):
            raise UsageError(f"{number} is not the number of a source; there are {len(self._readers)}")
        with torch.autocast("cpu", enabled=False):  # as within a step of training
            return self._readers[number]()


SOURCES = Sources()


def rows_of(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """(pairs, length) int64: the row of each (source, target), of which the target begins with its first token."""
    rows = [torch.tensor([*source, NOTHING, *target], dtype=torch.int64) for source, target in pairs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=NOTHING)


def padded(rows: Tensor, length: int) -> Tensor:
    """``rows`` that are at least so long."""
    return torch.nn.functional.pad(rows, (0, max(0, length - rows.shape[1])), value=NOTHING)


def parted(row: Tensor) -> tuple[Tensor, Tensor]:
    """(source, target) of a row (length,); UsageError where it has none of one, or a target of one token."""
    (breaks,) = (row == NOTHING).nonzero(as_tuple=True)
    start, end = [*breaks[:2].tolist(), len(row), len(row)][:2]
    source, target = row[:start], row[start + 1 : end]
    if not len(source) or len(target) < 2 or bool((row[end:] != NOTHING).any()):
        raise UsageError(
            "tokens for an encoder with a decoder are pairs, each a source and a target of two tokens or more; see "
            "docs/encoder-decoders.md"
        )
    return source, target


def predicting(rows: Tensor) -> Tensor:
    """(rows, length) bool: the tokens of targets after which another one comes, whose predictions count."""
    is_break = rows == NOTHING
    in_target = (is_break.cumsum(1) == 1) & ~is_break
    return in_target & torch.nn.functional.pad(~is_break[:, 1:], (0, 1), value=False)


def count_tokens(rows: Tensor) -> int:
    """How many tokens there are in ``rows`` of pairs, or of text."""
    return int((rows != NOTHING).sum())
