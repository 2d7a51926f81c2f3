"""How near the sentence vectors or scores of a smaller model are to those of the dense one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from niwaki.records.data import Amount, Fraction, Name, Positive
from niwaki.records.wording import counted

Cosine = Annotated[float, msgspec.Meta(ge=-1.01, le=1.01)]


@dataclass(frozen=True)
class Similarity:
    """How close the sentence vectors of a model are to those of the dense one, for the same sentences.

    It replaces the perplexity for models that make vectors of texts and predict no words.

    Attributes:
        cosine: Mean cosine of the two vectors of a sentence: 1 if nothing has changed.
        standard_error: Standard error of that mean.
        lowest: The lowest cosine of all sentences.
        rank_correlation: Spearman's correlation of the similarities of pairs of sentences: whether a search finds the
            same results in the same order.
        sentences: Number of sentences.
        pairs: Number of pairs of sentences.
        pooling: How a sentence's vector is made from those of its tokens: "mean", "cls" (the first), "lasttoken" or
            "max".
        text: Where the sentences come from.
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


@dataclass(frozen=True)
class Agreement:
    """How close the scores of a classifier or reranker are to those of the dense one, for the same texts.

    It replaces the perplexity for models that give scores to texts, or to each of their tokens.

    Attributes:
        agreement: Share of texts, or of tokens, to which both give the same label; None where there is one score only.
        standard_error: Standard error of that share; None likewise.
        rank_correlation: Spearman's correlation of the scores, the mean over the labels: whether a reranker gives the
            same order.
        labels: Number of scores that a text or token has.
        sentences: Number of texts.
        scored: Number of texts or tokens that have scores.
        in_pairs: Whether each text is two sentences, as a reranker reads them.
        text: Where the texts come from.
    """

    agreement: Fraction | None
    standard_error: Amount | None
    rank_correlation: Cosine
    labels: Positive
    sentences: Positive
    scored: Positive
    in_pairs: bool
    text: Name

    def __str__(self) -> str:
        same = ""
        if self.agreement is not None:
            error = 100 * (self.standard_error or 0)
            same = f"same label as the dense model's for {100 * self.agreement:.1f} ±{error:.1f} %; "
        what = counted(self.sentences, "pair" if self.in_pairs else "sentence")
        tokens = f", {counted(self.scored, 'token')}" if self.scored > self.sentences else ""
        return f"{same}rank correlation of scores {self.rank_correlation:.4f} ({what}{tokens}, {self.text})"
