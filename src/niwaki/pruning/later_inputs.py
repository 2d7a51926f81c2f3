"""The inputs of matrices that several blocks share, in all of these but the first, where each of them is pruned."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from niwaki.choices import TF32
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import InputGram
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.texts.conversations import Samples


@dataclass
class LaterInputs:
    """The Gram matrices of inputs in later blocks, summed over these: one for all matrices that have the same."""

    _grams: dict[tuple[str, int | None], InputGram] = field(default_factory=dict)  # by what a matrix is in the files

    def add(self, matrices: Sequence[Matrix], gram: InputGram) -> None:
        """Adds the inputs that ``matrices`` have in one block."""
        before = self._grams.get(matrices[0].entry)
        total = gram if before is None else _sum(before, gram)
        self._grams |= dict.fromkeys([matrix.entry for matrix in matrices], total)

    def joined(self, block: DecoderBlock, grams: list[InputGram]) -> list[InputGram]:
        """``grams`` of the inputs in ``block`` with those in later blocks, which are freed, where there are any."""
        entries = {matrix.name: matrix.entry for matrix in block.matrices}
        joined: list[InputGram] = []
        for gram in grams:
            names: dict[InputGram | None, list[str]] = {}
            for name in gram.names:
                names.setdefault(self._grams.pop(entries[name], None), []).append(name)
            for later, chosen in names.items():
                here = replace(gram, names=chosen)
                joined.append(here if later is None else _sum(here, later))
        return joined


def later_inputs(model: StreamedModel, samples: Samples, tf32: TF32, world: World, progress: Progress) -> LaterInputs:
    """Those of ``samples``, this process's share, in the dense model; over all processes."""
    later = LaterInputs()
    last = max((max(matrix.blocks, default=-1) for matrix in model.matrices()), default=-1)
    if last < 0:
        return later
    with model.budget.lent() as budget:
        states = model.embed(samples, budget=budget)
        for block in model.stream():
            progress.stage(block.index, "sharing", len(states.hidden))
            if block.shared:
                matrices = {matrix.name: matrix for matrix in block.shared}
                for gram in block.input_grams(states, world=world, tf32=tf32, matrices=block.shared):
                    later.add([matrices[name] for name in gram.names], gram)
            if block.index == last:
                break
            block.advance(states, progress.step)
    return later


def _sum(gram: InputGram, other: InputGram) -> InputGram:
    """The Gram matrix of the tokens of both, for the matrices of ``gram``."""
    here, there = (each.tokens + each.borrowed for each in (gram, other))
    share = there / max(1, here + there)
    return InputGram(
        gram.names,
        gram.H.lerp(other.H, share),
        gram.mean.lerp(other.mean, share),
        gram.tokens + other.tokens,
        gram.borrowed + other.borrowed,
    )
