"""How many tokens a second packed models write on this machine, before they are made.

That does not depend on the values of the weights. So the smallest and the largest form are made by rounding to the
nearest, which takes seconds, and timed, as is the dense model. Between them the time for a token grows nearly in a
straight line with bytes (benchmarks/results/compress_speed.json).
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from niwaki.checkpoints.reading import Checkpoint
from niwaki.compression.part import PartOf
from niwaki.compression.ways import Parts, Way, Ways
from niwaki.errors import NiwakiError, first_line
from niwaki.evaluation.bench import measured
from niwaki.exports.export import Pack
from niwaki.files import free_space
from niwaki.layer.grid import Grid
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Prune, Quantize
from niwaki.recipes import run
from niwaki.records.speed import Speed
from niwaki.records.wording import size as in_bytes

#: Tokens of the prompt, tokens that are written after it, and how often.
_TOKENS = 16, 24, 3
#: Of free memory and space on disk, what may be used.
_SHARE = 0.8


@dataclass(frozen=True)
class Throughput:
    """Tokens a second of one sequence on this machine, measured; those of packed models by their bytes.

    Attributes:
        dense: Tokens a second of the model as it is, in transformers.
        smallest: Bytes of the smallest packed form, and its tokens a second.
        largest: The same of the largest.
    """

    dense: float
    smallest: tuple[int, float]
    largest: tuple[int, float]

    def of(self, way: Way) -> float | None:
        """What is foreseen of a way; None of one with zeros, whose products take longer for a byte."""
        return None if any(isinstance(stage, Prune) for stage in way.stages) else self.at(way.size)

    def at(self, size: int) -> float:
        """What is foreseen of packed models of that size in bytes."""
        (low, fast), (high, slow) = self.smallest, self.largest
        part = min(1.0, max(0.0, (size - low) / max(1, high - low)))
        return 1 / (part / slow + (1 - part) / fast)


def throughput(checkpoint: Checkpoint, compute: Compute, part: PartOf) -> Throughput | str:
    """What is measured of a model, or why nothing is: no room for it, or a model that cannot be timed.

    ``compute`` says where it runs. Memory is needed for the whole dense model, and space for temporary files for the
    largest packed one.
    """
    model = StreamedModel(checkpoint, "cpu")
    ways = Ways(Parts.of(model, "niwaki"), "niwaki", ())
    if not model.has_head:
        return "the model writes no text"
    before, free = checkpoint.size, psutil.virtual_memory().available
    if before > _SHARE * free:
        return f"{in_bytes(before)} of weights do not fit in the {in_bytes(free)} of memory that are free"
    scratch = Path(tempfile.gettempdir())
    if 2 * ways.largest.size > _SHARE * (room := free_space(scratch)):  # with its parts while it is written
        return f"{scratch} has {in_bytes(room)} free, and a packed form of {in_bytes(ways.largest.size)} is made there"
    where = Compute(compute.device)
    found = []
    try:
        part.status("timing the dense model")
        dense = measured(checkpoint.path, *_TOKENS, where)
        for bits, ends in ((ways.grid.choices[0], ways.ends_bits[-1]), (8, 8)):
            part.status(f"timing {bits} bits")
            found.append(_of_packed(checkpoint, ways.grid.group, bits, ends, where))
    except (NiwakiError, RuntimeError) as error:  # the latter where a GPU's memory is full
        return first_line(error)
    smallest, largest = ((speed.disk, speed.tokens_per_second) for speed in found)
    return Throughput(dense.tokens_per_second, smallest, largest)


def _of_packed(checkpoint: Checkpoint, group: int | None, bits: int, ends: int, compute: Compute) -> Speed:
    """The speed of a packed form that is rounded to the nearest."""
    stages = (
        Quantize(Grid(bits, group), effort="none"),
        QuantizeEmbeddings(Grid(ends, group), effort="none"),
        Pack(),
    )
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        out = Path(scratch) / "out"
        run(checkpoint.path, out, stages, measurement=None, compute=compute)
        return measured(out, *_TOKENS, compute)
