"""What was dropped from a model, as dataclasses and as JSON; imports no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DroppedRecord:
    """Heads or neurons of one block.

    Attributes:
        block: Its number in the dense model, from 0.
        kind: "heads" or "neurons".
        name: The matrix that they go into, by its path in the block.
        unit: What went as one: "neuron", "head" or "group of 4 heads".
        units: How many there were.
        dropped: The numbers of those that went.
        error: Squared output error of the matrix relative to its squared output, on the calibration text, after the
            other weights were fitted.
        scores: For heads, that error (with the ridge) of each unit if it alone had gone.
        damping: The ridge that was used, relative to the unit diagonal of the Gram matrix.
        tokens: Tokens in the Gram matrix.
        seconds: That it took.
    """

    block: int
    kind: str
    name: str
    unit: str
    units: int
    dropped: list[int]
    error: float
    scores: list[float]
    damping: float
    tokens: int
    seconds: float


@dataclass
class ShrinkRecord:
    """All that was dropped from a model: ``niwaki.json``.

    Attributes:
        command: The command line, or "" where it was called from Python.
        versions: Of niwaki, Python and the libraries that matter.
        model: Where the dense model came from.
        blocks: How many blocks were to go.
        neurons: Which fraction of the neurons of each block.
        heads: Likewise of attention heads.
        calibration: Source, samples, sequence length, order, seed and SHA-256 of the tokens.
        device: Where blocks ran and weights were fitted.
        dtype: What blocks ran in.
        influence: Of each block of the dense model, if some were to go: 1 - the mean cosine of its input and output.
        kept: Numbers of the blocks that stayed.
        dropped: One entry for heads and one for neurons of each of them, in the order of computation.
        parameters: Numbers in all tensors of the files, "before" and "after".
        perplexity: "before" and "after", where measured.
        seconds: By stage, and in total.
        peak_memory: Bytes: the greatest resident size of the process; on a GPU also that of its allocator.
        notes: What a careful reader should know.
    """

    command: str
    model: str
    blocks: int
    neurons: float
    heads: float
    calibration: dict[str, Any]
    device: str
    dtype: str
    versions: dict[str, str] = field(default_factory=dict)
    influence: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    dropped: list[DroppedRecord] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    perplexity: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, str]:
        """In words what went, by what it is, such as "blocks" or "heads"."""
        found = {}
        gone = [index for index in range(len(self.influence)) if index not in self.kept]
        if gone:
            found["blocks"] = f"{', '.join(map(str, gone))} of {len(self.influence)}, counted from 0"
        for kind in dict.fromkeys(item.kind for item in self.dropped):
            item = next(item for item in self.dropped if item.kind == kind)
            unit = "" if item.unit == kind.removesuffix("s") else f", each a {item.unit}"
            found[kind] = f"{len(item.dropped)} of {item.units} in each block{unit}"
        return found

    def to_json(self) -> str:
        """JSON text, indented."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ShrinkRecord:
        """The inverse of :meth:`to_json`."""
        values = json.loads(text)
        dropped = [DroppedRecord(**item) for item in values.pop("dropped")]
        return cls(**values, dropped=dropped)
