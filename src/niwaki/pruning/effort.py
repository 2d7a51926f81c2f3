"""What is done to a block besides what the solver does to each of its matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from niwaki.errors import UsageError
from niwaki.options import choose, name_of, parameters
from niwaki.records.parameters import in_words

Allocation = Literal["uniform", "owl", "error", "loss"]
ALLOCATIONS: tuple[str, ...] = get_args(Allocation)


@dataclass(frozen=True)
class Effort:
    """How matrices and blocks are made to fit together. The default is the plain layer-wise method.

    Attributes:
        allocation: How zeros are shared out among matrices whose pattern leaves it open: the same sparsity for all
            ("uniform"), or by "loss", "error" or "owl", see :mod:`niwaki.pruning.plan`.
        per: Whether each "matrix" has a sparsity of its own then, or all of a "block" have the same ("owl" does).
        importance: How far squared errors of outputs count by how sensitive the model's loss is to them, when the
            weights of a matrix are chosen: its power, 0 for not at all, 1 in full. It makes a difference where rows
            compete with each other, as in unstructured patterns.
        pilot: The share of the calibration text that is looked at for these, at least one sample of each process.
        synthetic: Windows of text that the dense model writes itself, for each one of the calibration text, to which
            they are added, see :mod:`.own_text`. For that the whole model has to fit in memory; where it does
            not, there are none, and the record says so.
        groups: Whether inputs are computed anew after each group of matrices with the same inputs (q, k, v; o; gate,
            up; down; those of all experts together), so that each group is solved for what the pruned ones before it
            give.
        dense_targets: How far the targets go from the original weights' outputs on the pruned model's inputs (0) to
            the dense model's outputs (1), see :mod:`.dense_targets`. Experts keep to their original weights.
        ridge: Of the dense targets, relative to the unit diagonal of H.
        epochs: Passes over the calibration text in which the remaining weights of a block are fitted to the outputs
            of the dense block, see :mod:`niwaki.pruning.fit`; 0 for none, 0.5 for half of the text.
        rate: The learning rate there, relative to the root mean square of each matrix's weights.
        batch: Tokens in a step there, over all processes; each takes at least one sample.
        norms: Whether the block's parameters of one dimension are fitted there too: norms and biases.
        apart: Whether a block's attention and MLP are fitted apart there, each to the outputs of the dense one.

    Raises:
        UsageError: a value is out of its range.
    """

    allocation: Allocation = "uniform"
    per: Literal["matrix", "block"] = "matrix"
    importance: float = 0.0
    pilot: float = 0.0625
    synthetic: float = 0.0
    groups: bool = False
    dense_targets: float = 0.0
    ridge: float = 0.01
    epochs: float = 0.0
    rate: float = 0.02
    batch: int = 512
    norms: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        for name, accepted, range_ in (
            ("allocation", self.allocation in ALLOCATIONS, " or ".join(ALLOCATIONS)),
            ("per", self.per in ("matrix", "block"), "matrix or block"),
            ("importance", 0 <= self.importance <= 1, "from 0 to 1"),
            ("pilot", 0 < self.pilot <= 1, "above 0, to 1"),
            ("synthetic", 0 <= self.synthetic < math.inf, "0 or more"),
            ("dense_targets", 0 <= self.dense_targets <= 1, "from 0 to 1"),
            ("ridge", 0 < self.ridge < math.inf, "above 0"),
            ("epochs", 0 <= self.epochs < math.inf, "0 or more"),
            ("rate", 0 < self.rate < math.inf, "above 0"),
            ("batch", self.batch >= 1, "1 or more"),
        ):
            if not accepted:
                raise UsageError(f"{name} must be {range_}; got {getattr(self, name)!r}")

    @property
    def plans(self) -> bool:
        """Whether the dense model is looked at before."""
        return self.allocation != "uniform" or self.importance > 0 or self.synthetic > 0

    @property
    def dense(self) -> bool:
        """Whether the dense model's states are needed next to the pruned one's."""
        return self.dense_targets > 0 or self.epochs > 0

    @property
    def fits_norms(self) -> bool:
        """Whether parameters besides the pruned matrices are changed."""
        return self.norms and self.epochs > 0

    @property
    def fits_apart(self) -> bool:
        """Whether the outputs of the dense model's sub-blocks are needed."""
        return self.apart and self.epochs > 0


#: By name on the command line.
EFFORTS: dict[str, Effort] = {
    "fast": Effort(),
    "balanced": Effort(allocation="loss", importance=0.5, epochs=0.4),
    "best": Effort(allocation="loss", importance=0.5, synthetic=0.5, epochs=1),
}

DEFAULT_EFFORT = "balanced"
#: Methods as they were published.
PLAIN_EFFORT = "fast"


def usual_effort(*methods: object) -> str:
    """The effort where none is asked for: the plain one if any of ``methods`` is, and not None."""
    return DEFAULT_EFFORT if all(method is None for method in methods) else PLAIN_EFFORT


def make_effort(name: str) -> Effort:
    """The effort called ``name``, with parameters as in ``best:epochs=3:norms=true``.

    Raises:
        UnknownNameError: no such effort or parameter.
        UsageError: a value is not of the parameter's type, or out of its range, or a parameter has none.
    """
    return choose("effort", name, EFFORTS)


def describe(effort: Effort) -> dict[str, Any]:
    """The effort as data, for records: its "name", or that of the nearest in ``EFFORTS``, and all parameters."""
    return {"name": name_of(effort, EFFORTS), **parameters(effort)}


def described(effort: dict[str, Any]) -> str:
    """A record's effort in words: "balanced (allocation loss, epochs 0.4)", without what is as in the plain one."""
    plain = parameters(Effort())
    return in_words({key: value for key, value in effort.items() if key not in plain or value != plain[key]})
