"""What fewer tokens are foreseen to cost a model, by how often a text has those that would go."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from niwaki.errors import CalibrationError, CheckpointError, UnsupportedModelError, UsageError
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.spill import MemoryBudget
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration
from niwaki.pruning.mixed_bits import CLOSE, Look
from niwaki.shrinking.model_tokens import ModelTokens
from niwaki.shrinking.token_choice import Size
from niwaki.texts.counting import count_tokens
from niwaki.texts.same_text import same_text
from niwaki.windows import Windows

#: Shares of the tokens that could stay, and multiples that their numbers are.
_STAY, _MULTIPLE = (0.75, 0.625, 0.5, 0.375, 0.25), 64
FEWEST = _STAY[-1]
#: How many tokens of a text have to be counted for each that the model has.
_COUNTED = 4
#: On about how many tokens of the text a model with the fewest of them is run.
_RUN = 2048
#: What a removed word costs, and at least: on SmolLM2 5 to 8 nats on text of four kinds. It counts as so many words of
#: the text. With fewer tokens to choose from all others cost a little less, which alone is no reason to remove any.
_USUAL, _LEAST, _COUNTS_AS = 6.0, 3.0, 8


@dataclass(frozen=True)
class TokenCosts:
    """What fewer tokens are foreseen to cost, in nats for each token that a text has now.

    Attributes:
        rows: How many tokens there are.
        weights: How many weights go with each.
        sizes: Numbers of tokens that could stay, in descending order, each with what that costs on text like the one
            that they are chosen by, and on text of other kinds.
        unused: How many of them the tokenizer does not have.
    """

    rows: int
    weights: int
    sizes: tuple[tuple[int, float, float], ...]
    unused: int = 0

    @property
    def most(self) -> int:
        """The most that can stay where some are removed."""
        return self.rows - self.unused - 1

    def of(self, tokens: int) -> tuple[float, float] | None:
        """The two costs of any number of tokens; None for fewer than are known."""
        for (more, *first), (fewer, *second) in pairwise([(self.rows - self.unused, 0.0, 0.0), *self.sizes]):
            if fewer <= tokens <= more:
                part = (more - tokens) / (more - fewer)
                own, other = (one + part * (two - one) for one, two in zip(first, second, strict=True))
                return own, other
        return None

    def removed(self, tokens: int) -> int:
        """How many weights go where so many tokens stay."""
        return (self.rows - tokens) * self.weights


class LookingAtTokens:
    """Counts which tokens of a text would go, and runs the model without them on a little of it.

    What is left of a removed word are the pieces that it was merged from. The first costs about what the word did, and
    those after it some nats each, because the model has never seen the two beside each other. How many nats that are
    is measured where the most tokens are gone; how many words, on windows that the tokens are not chosen by. For text
    of other kinds the tokenizer's own ranks say how common a token is, by Zipf's law.
    """

    def __init__(self, model: StreamedModel, tokens: ModelTokens, held: Windows, shares: Tensor) -> None:
        self._model, self._tokens = model, tokens
        ranks = tokens.file.shares()
        #: For each number of tokens that could stay what is gone: of the windows, and of other text.
        self._gone: dict[int, tuple[float, float]] = {}
        for share in _STAY:
            size = int(share * tokens.rows) // _MULTIPLE * _MULTIPLE
            try:
                new = tokens.choose(shares, Size(size))
            except UsageError:  # fewer than have to stay, or as many as the tokenizer has
                continue
            kept = torch.tensor([number for number in new if number < tokens.rows])
            own = 1 - float(torch.isin(held.tokens, kept).double().mean())
            self._gone[size] = own, sum(value for number, value in ranks.items() if number not in new)
            self._kept, self._new = kept, new
        self._removed, self._lost = 0, 0.0
        if self._gone:
            run = held.of(torch.arange(max(1, min(len(held.tokens), _RUN // held.tokens.shape[1]))))
            bos = None if run.bos is None else self._new[run.bos]
            #: Some windows, and the same text with the fewest tokens.
            self._pair = same_text(run, model.tokenizer, tokens.tokenizer(self._new), bos, model.positions)

    @classmethod
    def of(
        cls, model: StreamedModel, calibration: Calibration, windows: Windows, look: Look = CLOSE
    ) -> LookingAtTokens | str:
        """Why not, where tokens of the model cannot be removed, or the text is too short to choose them by."""
        count = min(len(windows.tokens) // 2, max(1, look.tokens // windows.tokens.shape[1]))
        if not count:
            return "the text has one window"
        held = windows.of(torch.linspace(0, len(windows.tokens) - 1, count).long())
        try:
            model.check_head()
            tokens, counts = ModelTokens(model), count_tokens(model, calibration, held.tokens)
            if counts.tokens - held.tokens.numel() < (needed := _COUNTED * tokens.rows):
                return f"choosing them takes {needed:,} tokens of text, and there are {counts.tokens:,}"
            looking = cls(model, tokens, held, counts.shares)
        except (UnsupportedModelError, CheckpointError, CalibrationError) as error:
            return str(error)
        return looking if looking._gone else "hardly any token can be removed"

    def changed(self, budget: MemoryBudget) -> list[HiddenStates]:
        """The first block's inputs for some windows, and for the same text with the fewest tokens."""
        before, after = self._pair
        # As numbers of the whole model, whose embeddings and head have these rows too.
        old = torch.tensor([*self._new])[after.tokens]
        return [self._model.embed(tokens, budget=budget) for tokens in (before.tokens, old)]

    def see(self, before: HiddenStates, after: HiddenStates) -> None:
        """Receives them after the last block."""
        measured = [
            self._model.measured(states, windows, only=kept)
            for states, windows, kept in zip((before, after), self._pair, (None, self._kept), strict=True)
        ]
        first, second = (each.nats * each.tokens for each in measured)
        self._lost = second - first
        tokens, spans = self._pair[0].tokens, self._pair[0].spans
        assert spans is not None
        predicted = (place := torch.arange(tokens.shape[1])) >= spans[:, :1]
        self._removed = int((predicted & (place < spans[:, 1:]) & ~torch.isin(tokens, self._kept)).sum())

    def found(self) -> TokenCosts:
        """What was found out."""
        each = max(_LEAST, (self._lost + _USUAL * _COUNTS_AS) / (self._removed + _COUNTS_AS))
        sizes = tuple((size, own * each, max(own, other) * each) for size, (own, other) in self._gone.items())
        return TokenCosts(self._tokens.rows, self._tokens.weights, sizes, self._tokens.unused)
