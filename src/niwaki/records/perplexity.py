"""Perplexities, and differences of two."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from niwaki.records.data import Amount, Finite, Fraction, Name, Positive
from niwaki.records.wording import counted

if TYPE_CHECKING:
    from torch import Tensor


#: Of which a bound on a mean is computed at least: the spread of fewer says next to nothing.
FEWEST_WINDOWS = 4
#: Perplexities stay below e^700, which is a little more.
_CUT = 1e304
#: The coefficients of the expansion of Student's quantiles in powers of 1 / n, for powers of the normal quantile z:
#: Abramowitz and Stegun 26.7.5.
_EXPANSION = (
    (4, {3: 1, 1: 1}),
    (96, {5: 5, 3: 16, 1: 3}),
    (384, {7: 3, 5: 19, 3: 17, 1: -15}),
    (92160, {9: 79, 7: 776, 5: 1482, 3: -1920, 1: -945}),
)


class Difference(NamedTuple):
    """The difference of two models' mean losses on the same windows, in nats a token.

    If the two have different tokens for the same text, the difference is in bits a byte, as ``unit`` says.

    The standard error is that of the windows' own differences ("paired"). It is much smaller than that of either loss,
    because what makes a window hard for one model makes it hard for the other. None if the windows' losses were not
    kept. ``windows`` is how many it comes from.
    """

    nats: float
    standard_error: float | None
    unit: str = "nats a token"
    windows: int = 0

    @property
    def most(self) -> float:
        """The upper end of the 95 % interval, by Student's t distribution; infinite for fewer than 4 windows."""
        if self.standard_error is None or self.windows < FEWEST_WINDOWS:
            return math.inf
        return self.nats + _quantile(self.windows - 1) * self.standard_error

    @property
    def clear(self) -> bool:
        """Whether the difference is more than two standard errors from 0; without an error, whether it is not 0."""
        return abs(self.nats) > 2 * (self.standard_error or 0.0)

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ±{self.standard_error:.4f}"
        return f"{self.nats:.4f}{error}"

    @property
    def words(self) -> str:
        """The difference in words, such as ``"0.1156 ±0.0062 nats a token"``."""
        return f"{self} {self.unit}"


@dataclass(frozen=True)
class Divergence:
    """How far the predictions of a model are from those of another on the same text, which it is to stand in for.

    That is KL(other | model) of the next token's distribution, for each token that is predicted: the nats that are lost
    by taking the model's probabilities where the other's are true. Unlike a difference of perplexities it is never
    below 0 and has no part that is due to the text alone, so that it tells models apart with less of it.

    Attributes:
        mean: Its mean, in nats a token.
        standard_error: Standard error of the mean, from the spread of the windows' own means; None if there is one.
        high: What 99 % of the tokens are below.
        largest: That of the token where the two are furthest apart.
        same_first: Share of tokens for which both have the same first choice.
        tokens: Number of predicted tokens.
    """

    mean: Amount
    standard_error: Amount | None
    high: Amount
    largest: Amount
    same_first: Fraction
    tokens: Positive

    @classmethod
    def of(cls, divergences: Tensor, same: Tensor, predicted: Tensor) -> Divergence:
        """Computes it from what each token has, (windows, tokens) all three: 1 or True of what is ``predicted``."""
        each = divergences.double().clamp_(min=0)  # rounding leaves less than 0 where the two are the same
        means = (each * predicted).sum(dim=1) / predicted.sum(dim=1)
        error = means.std().item() / math.sqrt(len(means)) if len(means) > 1 else None
        tokens = each[predicted.bool()].sort().values
        high, largest = tokens[math.ceil(0.99 * len(tokens)) - 1].item(), tokens[-1].item()
        first = (same * predicted).sum().item() / len(tokens)
        return cls(tokens.mean().item(), error, high, largest, first, len(tokens))

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ±{self.standard_error:.4f}"
        return (
            f"{self.mean:.4f}{error} nats a token (99 % of tokens below {self.high:.3g}, at most {self.largest:.3g}), "
            f"same first choice {100 * self.same_first:.1f} %"
        )


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on a text, the exponential of the mean cross-entropy, and how it was measured.

    In each of the non-overlapping ``windows`` of ``context`` tokens, the first token is given and the others are
    predicted, ``tokens`` in all; this is the protocol of the SparseGPT and Wanda papers (docs/reproduce.md).
    Perplexities with different contexts are not comparable.

    Attributes:
        value: The perplexity.
        standard_error: Standard error of ``value``, from the spread of the windows' mean losses: how much another text
            of this kind would differ. Two models on the same text can be compared more closely, see :meth:`above`. None
            if there is only one window.
        tokens: Number of predicted tokens.
        context: Tokens in a window.
        windows: Number of windows.
        text: Name of the text.
        origin: Where ``text`` comes from and how it became windows, in words; "" if not known.
        losses: Mean cross-entropy of each window, in nats; empty in records of earlier versions.
        counts: Number of predicted tokens in each window, if it is not ``context`` - 1: models with other vocabularies
            have different tokens for the same text, and their perplexities are not comparable.
        bytes: UTF-8 bytes of the predicted text in each window; empty if they were not counted.
        divergence: How far the predictions are from those of the dense model, or of another; None if not measured.
    """

    value: Annotated[float, msgspec.Meta(ge=0.5, le=1e305)]  # 1 or more, but for rounding
    standard_error: Annotated[float, msgspec.Meta(ge=0, le=1e305)] | None
    tokens: Positive
    context: Positive
    windows: Positive
    text: Name
    origin: str = ""
    losses: Annotated[tuple[Finite, ...], msgspec.Meta(max_length=1_000_000)] = ()
    counts: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=1_000_000)] = ()
    bytes: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=1_000_000)] = ()
    divergence: Divergence | None = None

    @classmethod
    def of(
        cls,
        losses: Tensor,
        text: str,
        origin: str = "",
        counts: tuple[int, ...] = (),
        bytes: tuple[int, ...] = (),  # noqa: A002 - it is the word for it
        divergence: Divergence | None = None,
    ) -> Perplexity:
        """Computes it from ``losses``, (windows, context - 1) cross-entropies in nats.

        If ``counts`` says how many tokens of each window are predicted, the losses of the others are 0.
        """
        tokens, exact = sum(counts) or losses.numel(), losses.double()
        if counts:
            means = exact.sum(dim=1) / exact.new_tensor(counts)
            mean = exact.sum().item() / tokens
        else:
            means = exact.mean(dim=1)
            mean = means.mean().item()
        value = math.exp(min(mean, 700.0))  # soon beyond it there is no float
        error = min(1e304, value * means.std().item() / math.sqrt(len(means))) if len(means) > 1 else None
        kept = tuple(round(mean, 7) for mean in means.tolist())
        context = losses.shape[1] + 1
        return cls(value, error, tokens, context, len(means), text, origin, kept, counts, bytes, divergence)

    @property
    def nats(self) -> float:
        """The mean cross-entropy per token, in nats."""
        return math.log(self.value)

    @property
    def bits(self) -> float | None:
        """Bits per byte of the text, which are comparable between all models; None if bytes were not counted."""
        return self.nats * self.tokens / math.log(2) / sum(self.bytes) if self.bytes else None

    def bits_of_windows(self) -> list[float]:
        """Bits per byte in each window; the losses and bytes of the windows must be known."""
        counts = self.counts or (self.context - 1,) * len(self.bytes)
        each = zip(self.losses, counts, self.bytes, strict=True)
        return [loss * count / math.log(2) / length for loss, count, length in each]

    def above(self, other: Perplexity, by_bytes: bool = False) -> Difference:
        """How much greater the mean loss per token is than that of ``other``, measured on the same text.

        If the two have different tokens for it, or if it is to be ``by_bytes``, the result is in bits a byte.
        """
        if (by_bytes or self.counts != other.counts) and self.bits is not None and other.bits is not None:
            pairs = zip(self.bits_of_windows(), other.bits_of_windows(), strict=True)
            bits = [mine - theirs for mine, theirs in pairs]
            error = statistics.stdev(bits) / math.sqrt(len(bits)) if len(bits) > 1 else None
            return Difference(self.bits - other.bits, error, "bits a byte", len(bits))
        nats = self.nats - other.nats
        if len(self.losses) != len(other.losses) or len(self.losses) < 2:
            return Difference(nats, None)
        differences = [mine - theirs for mine, theirs in zip(self.losses, other.losses, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return Difference(nats, error, windows=len(differences))

    def lost_from(self, before: Perplexity) -> Difference:
        """The difference of :meth:`above`, in nats a token of the model ``before`` even if this one has others."""
        found = self.above(before)
        if found.unit == Difference(0.0, None).unit:
            return found
        scale = math.log(2) * sum(before.bytes) / before.tokens
        error = found.standard_error and scale * found.standard_error
        return Difference(scale * found.nats, error, windows=found.windows)

    @property
    def protocol(self) -> str:
        """Everything that another program needs to repeat the measurement, in words."""
        if self.counts:
            return (
                f"{self.origin or self.text}; {self.tokens:,} predicted tokens in {self.windows:,} windows or pairs; "
                "exp of the mean loss"
            )
        return (
            f"{self.origin or self.text}; {counted(self.windows, 'non-overlapping window')} of {self.context:,} "
            f"tokens, the first token of each given and {self.context - 1:,} predicted; exp of the mean loss"
        )

    @property
    def figure(self) -> str:
        """The value and its error, as in ``"44.87 ± 1.20"``; without an error if there is none.

        A value that is too large for a float has none either.
        """
        if self.value >= _CUT:
            return f"over {_CUT:g}"
        digits, of_error = (".2f", ".2f") if self.value < 1e6 else (".3g", ".2g")
        return f"{self.value:{digits}}" + (
            "" if self.standard_error is None else f" ± {self.standard_error:{of_error}}"
        )

    @property
    def by_bytes(self) -> str:
        """Text to follow the perplexity, such as ``", 1.234 bits a byte"``; "" if bytes were not counted."""
        return "" if self.bits is None else f", {self.bits:.4f} bits a byte"

    def __str__(self) -> str:
        return f"{self.figure} ({self.tokens:,} tokens of {self.text}, context {self.context:,}){self.by_bytes}"


def _quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, within 0.2 % from 3 degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        sum(factor * z**power for power, factor in powers.items()) / (divisor * degrees**i)
        for i, (divisor, powers) in enumerate(_EXPANSION, 1)
    )
    return z + math.fsum(terms)


# How near the sentence vectors or scores of a smaller model are to those of the dense one.

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
