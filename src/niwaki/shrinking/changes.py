"""What shrinking does to a block, kept until the smaller model is whole."""

from dataclasses import dataclass, field

from torch import Tensor

from niwaki.runs.kept import Kept


@dataclass
class Changes(Kept):
    """Which units of a block stay, and the weights of matrices with all of their units."""

    kept: dict[str, Tensor] = field(default_factory=dict)  # by kind: (units,) bool
    weights: dict[str, Tensor] = field(default_factory=dict)  # by the name of a matrix, as the checkpoint has it
    moved: dict[str, Tensor] = field(default_factory=dict)  # likewise, of the smaller block that experts moved to
