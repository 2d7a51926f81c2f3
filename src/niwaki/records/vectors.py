"""How near the sentence vectors of a smaller model are to those of the dense one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from niwaki.records.data import Amount, Name, Positive
from niwaki.records.wording import counted

Cosine = Annotated[float, msgspec.Meta(ge=-1.01, le=1.01)]


@dataclass(frozen=True)
class Similarity:
    """Sentence vectors of a model beside those of the dense one, for the same sentences.

    It is for models that make vectors of texts and predict no words, which have no perplexity.

    Attributes:
        cosine: The mean cosine of the two vectors of a sentence: 1 where nothing has changed.
        standard_error: Of that mean.
        lowest: The lowest cosine of all sentences.
        rank_correlation: Spearman's, of the similarities of pairs of sentences: whether a search finds the same in the
            same order.
        sentences: How many there are.
        pairs: How many pairs of them.
        pooling: How a sentence's vector is made of those of its tokens: "mean", "cls" (the first), "lasttoken" or
            "max".
        text: Where the sentences are from.
    """

    cosine: Cosine
    standard_error: Amount
    lowest: Cosine
    rank_correlation: Cosine
    sentences: Positive
    pairs: Positive
    pooling: Name
    text: Name

    def __str__(self) -> str:
        ranks = f"; rank correlation of similarities {self.rank_correlation:.4f}" if self.sentences > 2 else ""
        return (
            f"cosine {self.cosine:.4f} ±{self.standard_error:.4f} to the dense model's, lowest {self.lowest:.3f}"
            f"{ranks} ({counted(self.sentences, 'sentence')}, {self.text})"
        )
