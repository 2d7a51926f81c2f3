"""What is done for the model as a whole, in addition to what the solver does to each matrix."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from niwaki.arguments import check_fields, checked_names
from niwaki.errors import UsageError
from niwaki.options import choose, name_of, parameters
from niwaki.records.wording import in_words

Allocation = Literal["uniform", "owl", "error", "loss"]


@checked_names
@dataclass(frozen=True)
class Effort:
    """How matrices and blocks are made to fit together. The default is the plain layer-wise method.

    Attributes:
        allocation: How zeros are distributed among matrices whose pattern leaves it open: the same sparsity for all
            ("uniform"), or by "loss", "error" or "owl", see :mod:`niwaki.pruning.plan`.
        per: Whether each "matrix" then has a sparsity of its own, or all of a "block" have the same ("owl" does that).
        importance: How much squared errors of outputs are weighted by the sensitivity of the model's loss to them when
            weights are chosen: a power, from 0 (not at all) to 1 (in full), for patterns in which rows compete.
        pilot: The share of the calibration text used for these two, at least one sample per process.
        synthetic: Windows of text that the dense model writes itself, per window of calibration text, to which they
            are added, see :mod:`niwaki.texts.synthesis`; none, with a note, where the whole model does not fit in half
            of the memory, or cannot write.
        dense_targets: How far targets go from the original weights' outputs on the pruned model's inputs (0) to the
            dense model's outputs (1), see :mod:`niwaki.layer.dense_targets`. Experts keep to their original weights.
        epochs: Passes over the calibration text in which the remaining weights of a block are fitted to the outputs
            of the dense block, see :mod:`niwaki.models.fit`; 0 for none, 0.5 for half of the text.
        rate: The learning rate of the fit, relative to the root mean square of each matrix's weights.
        batch: Tokens per step of the fit, over all processes; each takes at least one sample.
        healing: On how many tokens the result is then trained towards the dense model's predictions, for each token of
            the calibration text, see :func:`niwaki.heal`; 0 for none. None either, with a note, where the model cannot
            be healed as a whole.
        uniform_epochs: How many epochs there are at least, if any, where the pattern gives all matrices the same
            sparsity (n:m): no time is spent there on sharing zeros out.

    Raises:
        UsageError: a value is out of range.
    """

    allocation: Allocation = "uniform"
    per: Literal["matrix", "block"] = "matrix"
    importance: float = 0.0
    pilot: float = 0.0625
    synthetic: float = 0.0
    dense_targets: float = 0.0
    epochs: float = 0.0
    rate: float = 0.01
    batch: int = 512
    healing: float = 0.0
    uniform_epochs: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, accepted, range_ in (
            ("importance", 0 <= self.importance <= 1, "from 0 to 1"),
            ("pilot", 0 < self.pilot <= 1, "above 0, to 1"),
            ("synthetic", 0 <= self.synthetic < math.inf, "0 or more"),
            ("dense_targets", 0 <= self.dense_targets <= 1, "from 0 to 1"),
            ("epochs", 0 <= self.epochs < math.inf, "0 or more"),
            ("uniform_epochs", 0 <= self.uniform_epochs < math.inf, "0 or more"),
            ("rate", 0 < self.rate < math.inf, "above 0"),
            ("batch", self.batch >= 1, "1 or more"),
            ("healing", 0 <= self.healing < math.inf, "0 or more"),
        ):
            if not accepted:
                raise UsageError(f"{name} must be {range_}; got {getattr(self, name)!r}")

    @property
    def plans(self) -> bool:
        """Whether the dense model is examined before anything is pruned."""
        return self.allocation != "uniform" or self.importance > 0 or self.synthetic > 0

    def for_pattern(self, shares: bool) -> "Effort":
        """With the epochs that it has where a pattern ``shares`` zeros out among matrices, or where it cannot."""
        return self if shares or not self.epochs else replace(self, epochs=max(self.epochs, self.uniform_epochs))

    @property
    def dense(self) -> bool:
        """Whether the dense model's hidden states are needed next to the pruned model's."""
        return self.dense_targets > 0 or self.epochs > 0


#: By name on the command line.
EFFORTS: dict[str, Effort] = {
    "fast": Effort(),
    "balanced": Effort(allocation="loss", importance=0.5, synthetic=0.25, epochs=0.3, uniform_epochs=0.6),
    "best": Effort(allocation="loss", importance=0.5, synthetic=0.5, epochs=1, healing=1),
    "heal": Effort(allocation="loss", importance=0.5, synthetic=0.5, epochs=1, healing=3),
}

DEFAULT_EFFORT = "balanced"
#: Methods as they were published.
PLAIN_EFFORT = "fast"


def usual_effort(*methods: object) -> str:
    """The default effort: the plain one if any of ``methods`` is given, that is not None."""
    return DEFAULT_EFFORT if all(method is None for method in methods) else PLAIN_EFFORT


def make_effort(name: str) -> Effort:
    """The effort called ``name``, with parameters as in ``best:epochs=3``; raises UsageError where it is not valid."""
    return choose("effort", name, EFFORTS)


def describe(effort: Effort) -> dict[str, Any]:
    """The effort as data, for records: its "name", or that of the nearest in ``EFFORTS``, and all parameters."""
    return {"name": name_of(effort, EFFORTS), **parameters(effort)}


def described(effort: dict[str, Any]) -> str:
    """A record's effort in words: "balanced (allocation loss, epochs 0.3)", without what is as in the plain one."""
    plain = parameters(Effort())
    said = {key: value for key, value in effort.items() if key not in plain or value != plain[key]}
    said.pop("uniform_epochs", None)  # where it counts, it is among the epochs
    return in_words(said)
