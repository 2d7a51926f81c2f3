"""What a teacher says in its own tokens, as predictions in those of a student that has fewer of them.

Where tokens were removed from a vocabulary, one of the teacher's is several pieces for the student. After the last
piece of a token the student's next token is the first piece of the teacher's next one, so each piece gets the
probabilities of all tokens that begin with it. Within a token, the teacher's prediction of that token tells what
follows the pieces that are there: the next pieces of all tokens that begin with these, by their probabilities. What
kept the pieces together as another token would have come before that, which is in other places of the text.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

#: What a row of the teacher's embeddings becomes that no text has: any token will do.
_NO_TEXT = (0,)
#: The least logarithm of a probability: of what cannot come next.
_LEAST = -100.0


class Translated(NamedTuple):
    """Windows of a text for both models, each (windows, length) int64.

    Attributes:
        tokens: What the student reads.
        at: By its tokens, which token of the teacher's window predicts what comes next.
        beginnings: Likewise, what it is to begin with: a number of :class:`Translation`, 0 where it may be anything.
    """

    tokens: Tensor
    at: Tensor
    beginnings: Tensor


class Translation:
    """From the tokens of a ``teacher`` to those of a ``student``, all of which the teacher has too.

    ``sizes`` are the numbers of tokens that the two models have.
    """

    def __init__(
        self, teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, sizes: tuple[int, int]
    ) -> None:
        self._size = sizes[1]
        whole, split = dict[int, int](), dict[int, tuple[int, ...]]()
        known, model = student.get_vocab(), student.backend_tokenizer.model
        for text, number in sorted(teacher.get_vocab().items(), key=itemgetter(1)):  # it comes in any order
            if number >= sizes[0]:
                continue
            if (same := known.get(text)) is not None:
                whole[number] = same
            elif pieces := tuple(piece.id for piece in model.tokenize(text)):
                split[number] = pieces
        #: By the teacher's token, what it is for the student.
        self._pieces = {number: (piece,) for number, piece in whole.items()} | split
        self._whole = torch.tensor([[*whole.keys()], [*whole.values()]])
        self._split = torch.tensor([[*split.keys()], [pieces[0] for pieces in split.values()]])
        #: By the pieces that a token begins with, the teacher's tokens that do, and the student's that come next.
        follow = defaultdict[tuple[int, ...], list[tuple[int, int]]](list)
        for number, pieces in split.items():
            for there in range(1, len(pieces)):
                follow[pieces[:there]].append((number, pieces[there]))
        self._number = {beginning: i for i, beginning in enumerate(follow, 1)}
        self._follow = [torch.tensor(pairs).T for pairs in follow.values()]

    def same(self, number: int) -> int | None:
        """What a token of the teacher is for the student, if it has it."""
        pieces = self._pieces.get(number, ())
        return pieces[0] if len(pieces) == 1 else None

    def windows(self, tokens: Tensor) -> Translated:
        """The text of the teacher's windows ``tokens`` (windows, length), up to as many of the student's tokens.

        Of the first token only its last piece is there, as nothing predicts the others.
        """
        rows = [self._window(window) for window in tokens.tolist()]
        return Translated(*(torch.tensor([row[part] for row in rows]) for part in range(3)))

    def _window(self, window: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        made, at, beginnings = list[int](), list[int](), list[int]()
        for place, number in enumerate(window):
            pieces = self._pieces.get(number, _NO_TEXT)
            first = len(pieces) - 1 if place == 0 else 0
            made += pieces[first:]
            at += [place - 1] * (len(pieces) - first - 1) + [place]
            beginnings += [self._number[pieces[:there]] for there in range(first + 1, len(pieces))] + [0]
            if len(made) >= len(window):
                break
        length = len(window)
        return made[:length], at[:length], beginnings[:length]

    @torch.no_grad()
    def predictions(self, logits: Tensor, beginnings: Tensor) -> Tensor:
        """(rows, student's tokens) float32 logarithms of probabilities, of the teacher's ``logits`` (rows, tokens).

        ``beginnings`` (rows,) are those of :class:`Translated`. Cost: a few passes over the logits.
        """
        log_p = logits.float().log_softmax(1)
        p = log_p.exp()
        (own, new), (split, first) = self._whole.to(p.device), self._split.to(p.device)
        made = torch.zeros(len(p), self._size, device=p.device)
        made[:, new] = p[:, own]
        made.scatter_add_(1, first.expand(len(p), -1), p[:, split])
        made /= made.sum(1, keepdim=True)
        for row in beginnings.nonzero().flatten().tolist():
            numbers, after = self._follow[int(beginnings[row]) - 1].to(p.device)
            made[row] = torch.zeros_like(made[row]).index_add_(0, after, log_p[row, numbers].softmax(0))
        return made.log_().clamp_(min=_LEAST)
