"""Ways to a size: which stages bring a model there, for the program that runs it, and how large it is then.

What gains most in each program is known, and so is its order (docs/when-to-prune.md): whole numbers of 8 bits cost next
to nothing, and matrices get 4 of them where that costs the loss least. Below 4 bits each, llama.cpp gains by what is
removed, and niwaki's own format by zeros. transformers runs smaller dense models alone.
"""

import math
from dataclasses import dataclass

from niwaki.choices import Runtime
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.exports.export import Export, Pack
from niwaki.models.ends import embedding_keys
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Prune, Quantize
from niwaki.records.wording import size as in_bytes
from niwaki.runs.stage import Stage
from niwaki.shrinking.shrink import Shrink

#: Weights that share a scale, and bytes of a scale.
_GROUPS = {"niwaki": 64, "llama.cpp": 32}
_SCALE = 2
#: Headers of files, relative and in bytes: what a foreseen size may be too small by.
_HEADERS, _HEADER = 0.002, 1 << 16
#: What a bit of a weight of the embeddings and the head is worth beside one of a matrix: with 4 bits the former lose
#: 0.052 nats of SmolLM2 for 28 million weights, the latter 0.118 for 106 (docs/quantization.md).
_ENDS = 1.67
#: In percent, the fewest zeros that are smaller than 4 bits a weight, whose mask has a bit for each.
_LEAST_ZEROS = 26
#: How much smaller each way of a ladder is than the one before, and what stays of the parameters at the end of one.
_STEP, _LAST_LEFT = 0.04, 0.4
#: The most zeros, and what stays at least of the parameters: beyond it another, smaller model is better.
_MOST_ZEROS, _LEAST_LEFT = 70, 60


@dataclass(frozen=True)
class Way:
    """One way to a size: its ``stages``, in ``words``, and the ``size`` of its weights in bytes that is foreseen."""

    words: str
    size: int
    stages: tuple[Stage, ...]


def smaller(before: int, there: int, parameters: float, heal: tuple[Stage, ...]) -> Way:
    """A smaller dense model with that share, or number, of the parameters, of which ``there`` are in so many bytes."""
    is_share = parameters < 1
    words = f"{parameters:g} of the" if is_share else f"{parameters:,.0f} of {there:,}"
    part = parameters if is_share else min(1.0, parameters / there)
    return Way(f"{words} parameters", int(before * part), (Shrink(parameters=parameters), *heal))


def ladder_of_smaller(before: int, there: int, heal: tuple[Stage, ...]) -> list[Way]:
    """Smaller dense models in descending order of size."""
    steps = int((1 - _LAST_LEFT) / _STEP)
    return [smaller(before, there, round(1 - _STEP * step, 2), heal) for step in range(1, steps + 1)]


@dataclass(frozen=True)
class Parts:
    """What a model is made of: numbers of weights, and bytes of all else."""

    matrices: int
    embeddings: int
    others: int

    @classmethod
    def of(cls, model: StreamedModel, before: int, runtime: Runtime) -> "Parts":
        """UnsupportedModelError where the program's formats cannot have the model."""
        if model.pairs is not None:
            raise UnsupportedModelError(
                f"{model.checkpoint.path} is an encoder with a decoder, which is only compressed for transformers"
            )
        group, matrices = _GROUPS[runtime], model.matrices()
        if odd := [matrix for matrix in matrices if matrix.shape[1] % group]:
            raise UnsupportedModelError(
                f"{odd[0].key!r} of {model.checkpoint.path} has rows of {odd[0].shape[1]}, which do not divide into "
                f"groups of {group}, as {runtime} has them"
            )
        entries = model.checkpoint.entries
        keys = {*embedding_keys(model)}
        embeddings = sum(math.prod(entries[key].shape) for key in keys)
        of_blocks = {matrix.key for matrix in matrices}
        others = sum(entry.size for key, entry in entries.items() if key not in keys | of_blocks)
        if runtime == "llama.cpp":  # has them in float32, and the tokenizer in the same file
            tokenizer = model.checkpoint.path / "tokenizer.json"
            others = 2 * others + (int(1.25 * tokenizer.stat().st_size) if tokenizer.is_file() else 0)
        return cls(sum(matrix.size for matrix in matrices), embeddings, others)


@dataclass(frozen=True)
class Ways:
    """Those for "niwaki" and "llama.cpp": whole numbers of fewer and fewer bits, and then zeros or a smaller model.

    ``heal`` is done in all of them before embeddings and head are put on their grid.
    """

    parts: Parts
    runtime: Runtime
    heal: tuple[Stage, ...]

    def ladder(self) -> list[Way]:
        """Ways in descending order of size, from 8 bits on."""
        found = [self._bits(8.0, 8)]
        least = self._beyond()[-1].size
        while (asked := int(found[-1].size * (1 - _STEP))) >= least:
            found.append(self.to(asked)[0])
        return found

    def to(self, asked: int) -> tuple[Way, tuple[Way, ...]]:
        """The way to a size, and others."""
        eight, four = self._bits(8.0, 8), self._bits(4.0, self._ends_bits[-1])
        beyond = self._beyond()
        least = beyond[-1]
        known = {way.size: way for way in (eight, four, least)}
        if asked < least.size:
            raise UsageError(
                f"{in_bytes(asked)} cannot be reached for {self.runtime}: {least.words} have {in_bytes(least.size)}; "
                f"give at least that, or take a smaller model"
            )
        if asked >= eight.size:
            way = eight
        elif asked >= four.size:
            way = self._mixed(asked)
        else:
            way = next(each for each in beyond if each.size <= asked)
        return way, tuple(each for _, each in sorted(known.items()) if each.words != way.words)

    @property
    def _ends_bits(self) -> tuple[int, ...]:
        """Bits that embeddings and head can have, the most first."""
        return (8, 6, 5, 4) if self.runtime == "niwaki" else (8,)

    def _mixed(self, asked: int) -> Way:
        """Of the ways in which matrices have 4 to 8 bits, the one that loses least by what a bit is worth in each."""
        averages = {ends: self._average(asked, ends) for ends in self._ends_bits}

        def loss(ends: int) -> float:
            return math.fsum([self.parts.matrices / 4 ** averages[ends], _ENDS * self.parts.embeddings / 4**ends])

        ends = min((ends for ends, average in averages.items() if average >= 4), key=loss)
        return self._bits(averages[ends], ends)

    def _bytes(self, bits: float, ends: int, matrices: float) -> int:
        scale = _SCALE / _GROUPS[self.runtime]
        whole = matrices * (bits / 8 + scale) + self.parts.embeddings * (ends / 8 + scale) + self.parts.others
        return int(whole * (1 + _HEADERS)) + _HEADER

    def _average(self, asked: int, ends: int) -> float:
        """The most bits a weight, in hundredths, with which the size is not exceeded."""
        low, high = self._bytes(4, ends, self.parts.matrices), self._bytes(8, ends, self.parts.matrices)
        return min(8.0, math.floor(100 * (4 + 4 * (asked - low) / (high - low))) / 100)

    def _bits(self, bits: float, ends: int) -> Way:
        group = _GROUPS[self.runtime]
        grid = f"int{bits:g}:{group}" if bits in (4, 8) else f"int{bits:.2f}:{group}"
        words = f"{bits:g} bits a weight, embeddings and head of {ends}"
        stages: tuple[Stage, ...] = (Quantize(grid), *self.heal, *self._ends(ends, bits == 8))
        return Way(words, self._bytes(bits, ends, self.parts.matrices), stages)

    def _ends(self, bits: int, eight: bool = False) -> tuple[Stage, ...]:
        """Embeddings and head, and the format, for matrices of ``eight`` bits or of fewer and mixed ones."""
        grid = f"int{bits}:{_GROUPS[self.runtime]}"
        file = Export("gguf-q8_0") if eight else Export("gguf-q4_0")
        return QuantizeEmbeddings(grid), Pack() if self.runtime == "niwaki" else file

    def _beyond(self) -> list[Way]:
        """The ways to sizes below 4 bits a weight, in descending order."""
        if self.runtime == "niwaki":
            return [self._zeros(percent / 100) for percent in range(_LEAST_ZEROS, _MOST_ZEROS + 1)]
        return [self._smaller(percent / 100) for percent in range(99, _LEAST_LEFT - 1, -1)]

    def _zeros(self, share: float) -> Way:
        bits = 1 + 4 * (1 - share)  # of a mask, and of what is not zero
        stages: tuple[Stage, ...] = (Prune(share, quantize="int4:64"), *self.heal, *self._ends(4))
        words = f"{100 * share:.3g} % zeros, 4 bits for each other weight, embeddings and head of 4"
        return Way(words, self._bytes(bits, 4, self.parts.matrices), stages)

    def _smaller(self, left: float) -> Way:
        parts = self.parts
        everything = parts.matrices + parts.embeddings
        matrices = parts.matrices - (1 - left) * everything
        stages: tuple[Stage, ...] = (Shrink(parameters=left), Quantize("int4:32"), *self.heal, *self._ends(8))
        return Way(f"{left:g} of the parameters, 4 bits for each", self._bytes(4, 8, matrices), stages)
