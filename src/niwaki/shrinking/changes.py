"""What shrinking does to a block, kept until the smaller model is whole."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from niwaki.files import output_errors
from niwaki.runs.kept import load_tensors, save_tensors


@dataclass
class Changes:
    """Which units of a block stay, and the weights of matrices with all of their units."""

    kept: dict[str, Tensor] = field(default_factory=dict)  # by kind: (units,) or for each expert
    weights: dict[str, Tensor] = field(default_factory=dict)  # by the name of a matrix, as the checkpoint has it
    moved: dict[str, Tensor] = field(default_factory=dict)  # likewise, of the smaller block that experts moved to

    def save(self, path: Path) -> str:
        """Writes them, on disk at the return; the SHA-256 of the file."""
        tensors = {f"kept {name}": value for name, value in self.kept.items()}
        tensors |= {f"weight {name}": value for name, value in self.weights.items()}
        tensors |= {f"moved {name}": value for name, value in self.moved.items()}
        with output_errors(path.parent):
            path.parent.mkdir(exist_ok=True)
        return save_tensors(path, {name: value.cpu().contiguous() for name, value in tensors.items()})

    @classmethod
    def load(cls, path: Path, digest: str) -> "Changes | None":
        """The inverse of :meth:`save`; None where the file is not there or has another SHA-256."""
        if (kept := load_tensors(path, digest)) is None:
            return None
        changes = cls()
        parts = {"kept": changes.kept, "weight": changes.weights, "moved": changes.moved}
        for name, value in kept[0].items():
            what, _, own = name.partition(" ")
            parts[what][own] = value
        return changes
