"""What was removed from a model as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from niwaki.errors import UsageError
from niwaki.records.data import Count, Finite, Fraction, Positive


@dataclass(frozen=True)
class StructureRecord:
    """What structured pruning removed, see :mod:`niwaki.shrinking.shrink`.

    Attributes:
        parameters: Number of parameters in all tensors of the files, "before" and "after".
        removed: Fraction of the blocks' parameters that was removed.
        influence: If blocks were removed, for each block: how much the model without it alone loses, in nats a token,
            see :func:`niwaki.shrinking.depth.costs_of_runs`.
        blocks: Numbers of the blocks that were removed; all numbers here and below count from 0.
        heads: For each remaining block, the heads that were removed; for heads that share keys and values, the groups.
        neurons: For each remaining block, the neurons that were removed.
        experts: For each remaining block that has experts, those that were removed.
        vocabulary: Number of tokens of the model, "before" and "after"; empty if none were removed.
        combinations: If only a size was requested, what each combination of that size would cost, in nats a token, see
            :func:`niwaki.shrinking.combinations.costs_of_combinations`.
    """

    parameters: dict[str, Positive]
    removed: Fraction
    influence: list[Finite] = field(default_factory=list)
    blocks: list[Count] = field(default_factory=list)
    heads: list[list[Count]] = field(default_factory=list)
    neurons: list[list[Count]] = field(default_factory=list)
    experts: list[list[Count]] = field(default_factory=list)
    vocabulary: dict[str, Positive] = field(default_factory=dict)
    combinations: dict[str, Finite] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parameters.keys() >= {"before", "after"}:
            raise UsageError(f"parameters are those before and after; got {self.parameters}")

    def after(self, earlier: StructureRecord) -> StructureRecord:
        """What this stage and the ``earlier`` one, which removed tokens, removed together."""
        parameters = {**self.parameters, "before": earlier.parameters["before"]}
        return replace(self, parameters=parameters, vocabulary=earlier.vocabulary)

    @property
    def share(self) -> str:
        """The fraction of all parameters that was removed, such as "25.7 %"."""
        return f"{100 * (1 - self.parameters['after'] / self.parameters['before']):.1f} %"

    def __str__(self) -> str:
        numbers = "{after:,} of {before:,}".format(**self.parameters)
        words = "{after:,} of {before:,} tokens, ".format(**self.vocabulary) if self.vocabulary else ""
        return f"{words}{numbers} ({self.share} fewer, of those in blocks {100 * self.removed:.1f} %)"
