"""Ways to a size: which stages bring a model there, for the program that runs it, how large it is then, at what loss.

Of all ways to a size the one is taken that is foreseen to lose least (:mod:`niwaki.compression.foresight`). For
niwaki's own format these are matrices of 2 to 8 bits, with embeddings and head of 8 to 4; for llama.cpp matrices in its
types, and embeddings and head too; for vLLM matrices of 2 to 8 bits. transformers runs smaller dense models alone. For
all of them a model can have fewer tokens too.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from niwaki.checkpoints.tensors import DTYPES
from niwaki.choices import Runtime
from niwaki.compression.foresight import FEWEST, Foresight, TokenCosts
from niwaki.effort import DEFAULT_EFFORT
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.exports.export import Export, Pack
from niwaki.exports.gguf_file import Gguf
from niwaki.layer.block_types import BlockGrid
from niwaki.layer.grid import AnyGrid, Grid
from niwaki.models.outside import embedding_keys
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Quantize
from niwaki.records.progress import Progress
from niwaki.records.wording import size as in_bytes
from niwaki.runs.stage import Stage
from niwaki.shrinking.configuration import Tensors, numbers
from niwaki.shrinking.search import Combinations
from niwaki.shrinking.shrink import Shrink
from niwaki.shrinking.tokens import PRIOR
from niwaki.shrinking.units import mlps
from niwaki.shrinking.vocabulary import ShrinkVocabulary

#: Weights that share a scale.
_GROUPS = {"niwaki": 64, "llama.cpp": 32, "vllm": 64}
#: Bits that embeddings and head can have, the most first; for llama.cpp those of types.
_ENDS = {"niwaki": (8, 6, 5, 4), "llama.cpp": (8.5, 6.5625, 6.0, 5.5, 4.5, 3.4375)}
#: Where these stay as they are stored.
_AS_STORED = "as stored"
#: The most that a matrix has for llama.cpp.
_MOST_BITS = 8.5
#: What a foreseen size may be too small by, relative; and what headers of files have beside names, in all and for each
#: tensor: a matrix is at most three of them, its numbers, scales and mask.
_MARGIN, _HEADER, _ENTRY, _TENSORS = 0.002, 4096, 100, 3
#: How much smaller each way of a ladder is than the one before, and what stays of the parameters at the end of one.
_STEP, _LAST_LEFT = 0.04, 0.4
#: What the numbers of tokens of smaller dense models are multiples of.
_TOKENS = 64
#: The effort of matrices that are trained, once they are rounded, from which loss on, and what that leaves of it.
_TRAINING, _WORTH, _LEFT = f"{DEFAULT_EFFORT}:healing=1", 0.05, 0.87
#: How many times as much text of other kinds loses: on SmolLM2, fitted on books, 1.5 to 2.4 times.
_OTHERS = 2.0


@dataclass(frozen=True)
class Way:
    """One way to a size.

    Attributes:
        words: What is done.
        size: Bytes of the weights, as foreseen; they are no more.
        stages: What does it.
        nats: The loss that is foreseen on text like the calibration text, in nats a token; None where that is not
            known.
        elsewhere: What it is foreseen to lose besides on text of other kinds.
        tokens: How many tokens stay; None for all.
    """

    words: str
    size: int
    stages: tuple[Stage, ...]
    nats: float | None = None
    elsewhere: float = 0.0
    tokens: int | None = None

    @classmethod
    def fitted(cls, words: str, size: int, stages: tuple[Stage, ...], nats: float | None) -> "Way":
        """A way that rounds or removes, and loses more on text of other kinds than that which it is fitted to."""
        return cls(words, size, stages, nats, 0.0 if nats is None else (_OTHERS - 1) * nats)

    @property
    def loss(self) -> float:
        """The loss by which ways are compared: one of which nothing is known comes last.

        Other kinds of text count as much as they do where tokens are chosen.
        """
        return math.inf if self.nats is None else self.nats + PRIOR * self.elsewhere

    def with_tokens(self, tokens: int, costs: TokenCosts) -> "Way":
        """The same of a model that has so many tokens left before the first stage."""
        own, other = costs.of(tokens) or (math.inf, math.inf)
        return replace(
            self,
            words=", ".join(filter(None, (f"{tokens:,} of {costs.rows:,} tokens", self.words))),
            stages=(ShrinkVocabulary(tokens), *self.stages),
            nats=None if self.nats is None else self.nats + own,
            elsewhere=self.elsewhere + other - own,
            tokens=tokens,
        )


def _mixed(runtime: Runtime, group: int | None) -> AnyGrid:
    """The grid of matrices of as many bits as suit each."""
    return BlockGrid(_MOST_BITS, average=_MOST_BITS) if runtime == "llama.cpp" else Grid(8, group, 8.0)


@dataclass(frozen=True)
class Composition:
    """What a model is made of: numbers of weights, bytes of all else, and of headers.

    The tokenizer is in the same file for llama.cpp, and has no bytes elsewhere. ``group`` is how many weights share a
    scale (None for a row, in niwaki's format where rows are no multiples of its groups), and ``scale`` the bytes of
    scales for each weight; ``least`` are the fewest bits that matrices have in the mean, ``width`` is that of a row of
    the embeddings, and ``stored`` their bits as they are now.
    """

    matrices: int
    embeddings: int
    others: int
    headers: int
    tokenizer: int
    group: int | None
    scale: float
    least: float
    width: int
    stored: int

    @classmethod
    def of(cls, model: StreamedModel, runtime: Runtime) -> "Composition":
        """UnsupportedModelError where the program's formats cannot have the model."""
        if model.pairs is not None:
            raise UnsupportedModelError(
                f"{model.checkpoint.path} is an encoder with a decoder, which is only compressed for transformers"
            )
        matrices, checkpoint, entries = model.matrices(), model.checkpoint, model.checkpoint.entries
        keys = {*embedding_keys(model)}
        group: int | None = _GROUPS[runtime]
        widths = {matrix.shape[1]: matrix.key for matrix in matrices} | {entries[key].shape[1]: key for key in keys}
        if odd := [width for width in widths if group and width % group]:
            if runtime == "llama.cpp":
                raise UnsupportedModelError(
                    f"{widths[odd[0]]!r} of {checkpoint.path} has rows of {odd[0]}, which do not divide into groups of "
                    f"{group}, as {runtime} has them"
                )
            group = None
        of_blocks = {matrix.key for matrix in matrices}
        rest = entries.keys() - keys - of_blocks
        if runtime == "llama.cpp":
            tokenizer = Gguf(checkpoint, "Q8_0", {}, Progress()).tokenizer_size
            others, scale = 4 * numbers(checkpoint, rest), 2  # in float32 and in float16
        else:  # in the model's own dtypes
            tokenizer, others = 0, sum(entries[key].size for key in rest)
            scale = max(DTYPES[entries[key].dtype].itemsize for key in entries.keys() - rest)
        grid = _mixed(runtime, group)
        tensors = (len(key) + _ENTRY for key in [*entries, *(_TENSORS - 1) * [*keys, *of_blocks]])
        return cls(
            matrices=sum(matrix.size for matrix in matrices),
            embeddings=numbers(checkpoint, keys),
            others=others,
            headers=_HEADER + sum(tensors),
            tokenizer=tokenizer,
            group=group,
            scale=0.0 if runtime == "llama.cpp" else max(2, scale) / (group or min(widths)),
            least=sum(matrix.size * grid.choices(matrix.shape[1])[0] for matrix in matrices)
            / sum(matrix.size for matrix in matrices),
            width=entries[next(iter(keys))].shape[1] if keys else 0,
            stored=8 * max((DTYPES[entries[key].dtype].itemsize for key in keys), default=2),
        )


@dataclass(frozen=True, kw_only=True)
class Ways(ABC):
    """All ways for one program, with what is foreseen of the model if it was looked at; ``heal`` is done in each.

    ``effort`` is that of stages; None for the usual one of each.
    """

    heal: tuple[Stage, ...]
    effort: str | None = None
    foresight: Foresight | None = None

    @property
    def grid(self) -> AnyGrid | None:
        """The grid of mixed bits; None in dense models."""
        return None

    @property
    def ends(self) -> dict[str, float]:
        """The grids that embeddings and head can have, those of most bits first, with the bits of a weight."""
        return {}

    @property
    def rounded_ends(self) -> list[str]:
        """Those of them that are grids."""
        return [grid for grid in self.ends if grid != _AS_STORED]

    @property
    def costs(self) -> TokenCosts:
        """What fewer tokens cost, where that is known."""
        return self.foresight.tokens if self.foresight else TokenCosts()

    @property
    def _why(self) -> str:
        """What to say where a size cannot be reached, because there are no ways with fewer tokens."""
        return f", and fewer tokens were not considered: {self.costs.unknown}" if self.costs.unknown else ""

    @property
    def reach(self) -> tuple[Way, ...]:
        """The largest and the smallest way; none in dense models, which have as many parameters as one likes."""
        return ()

    @property
    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The stages of one of the ways, for checks before the model is looked at; none where only tokens can go."""

    @abstractmethod
    def check(self, limit: float) -> None:
        """UsageError where no way leads there; before there is foresight, whatever there is to see of the model."""

    @abstractmethod
    def to(self, limit: float) -> list[Way]:
        """The way there that is foreseen to lose least, and the best of other kinds, in ascending order of loss."""

    def beside(self, way: Way) -> list[Way]:
        """The best of other kinds that are no larger than a way of the ladder."""
        return []

    @abstractmethod
    def ladder(self) -> list[Way]:
        """Ways in descending order of size."""


def _in_order(own: Iterable[Way], fewer_tokens: Iterable[Way]) -> list[Way]:
    """The ``own`` ways and the best of the others, in ascending order of the foreseen loss."""
    by_loss = attrgetter("loss")
    return sorted([*own, *sorted(fewer_tokens, key=by_loss)[:1]], key=by_loss)


@dataclass(frozen=True, kw_only=True)
class DenseWays(Ways):
    """Ways for transformers: dense models with fewer parameters than the ``count`` that takes ``before`` bytes now.

    Where all tokens stay, ``least`` parameters are left or more. A limit is a number of parameters, or a share below 1.
    """

    count: int
    before: int
    of_neurons: int
    of_tokens: int
    least: int

    @classmethod
    def of(cls, model: StreamedModel, heal: tuple[Stage, ...], effort: str | None = None) -> "DenseWays":
        checkpoint = model.checkpoint
        least = count = numbers(checkpoint, checkpoint.entries)
        with contextlib.suppress(UnsupportedModelError):
            least = Combinations.all_of(model, Tensors.of(model))[0].least
        neurons = (mlp for i in range(len(model.blocks)) for mlp in mlps(model.matrices(i)))
        return cls(
            heal=heal,
            effort=effort,
            count=count,
            before=sum(entry.size for entry in checkpoint.entries.values()),
            of_neurons=sum(matrix.size for down, ups in neurons for matrix in (down, *ups)),
            of_tokens=numbers(checkpoint, embedding_keys(model)),
            least=least,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Shrink(parameters=self.least), *self.heal) if self.least < self.count else ()

    def check(self, limit: float) -> None:
        left, costs = self._left(limit), self.costs
        of_tokens = costs.removed(costs.sizes[-1][0]) if costs.sizes else 0
        least = self.least - (of_tokens if self.foresight else int((1 - FEWEST) * self.of_tokens))
        if left < least:
            raise UsageError(
                f"{left:,.0f} of {self.count:,} parameters cannot be reached by removing parts: at least {least:,} are "
                f"left{self._why}; give {math.ceil(100 * least / self.count) / 100:g} or more, or take a smaller model"
            )

    def to(self, limit: float) -> list[Way]:
        self.check(limit)
        left = self._left(limit)
        words = f"{limit:g} of the" if limit < 1 else f"{limit:,.0f} of {self.count:,}"
        own = [self._removing(f"{words} parameters", limit, self.count, left)] if left >= self.least else []
        return _in_order(own, self._with_fewer_tokens(left))

    def _left(self, limit: float) -> float:
        return limit * self.count if limit < 1 else limit

    def ladder(self) -> list[Way]:
        found = []
        for step in range(1, int((1 - _LAST_LEFT) / _STEP) + 1):
            with contextlib.suppress(UsageError):
                found.append(self.to(round(1 - _STEP * step, 2))[0])
        return found or self.to(round(1 - _STEP, 2))[:1]  # which says what cannot be reached

    def _removing(self, words: str, parameters: float, there: float, left: float) -> Way:
        """Removes blocks, heads and neurons of a model that has so many parameters there."""
        nats = None
        if self.foresight and self.of_neurons:
            nats = self.foresight.of_neurons((there - left) / self.of_neurons)
        return Way.fitted(
            words, self._bytes(left), (Shrink(parameters=parameters, effort=self.effort), *self.heal), nats
        )

    def _with_fewer_tokens(self, left: float) -> Iterator[Way]:
        if not (costs := self.costs).sizes:
            return
        enough = min(costs.most, costs.rows - math.ceil((self.count - left) / costs.weights))
        if costs.of(alone := enough // _TOKENS * _TOKENS):
            size = self._bytes(self.count - costs.removed(alone))
            yield Way("", size, self.heal, 0.0).with_tokens(alone, costs)
        for tokens, *_ in costs.sizes:
            if tokens > enough and left >= self.least - costs.removed(tokens):
                there = self.count - costs.removed(tokens)
                words = f"{left / there:.2g} of the parameters that this leaves"
                yield self._removing(words, int(left), there, left).with_tokens(tokens, costs)

    def _bytes(self, left: float) -> int:
        return int(self.before * left / self.count)


@dataclass(frozen=True, kw_only=True)
class PackedWays(Ways):
    """Ways for "niwaki", "llama.cpp" and "vllm": fewer bits. A limit is a number of bytes.

    Healing comes before embeddings and head are put on their grid. Without foresight there are the largest and the
    smallest way alone.
    """

    parts: Composition
    runtime: Runtime
    #: Whether what matrices lose is trained back, where it is worth the time.
    trains: bool = True
    #: How many tokens it has left, where some are removed first.
    tokens: int | None = None

    @cached_property
    def grid(self) -> AnyGrid:
        return _mixed(self.runtime, self.parts.group)

    @cached_property
    def ends(self) -> dict[str, float]:
        if self.runtime == "vllm":  # whose embeddings on a grid cannot be the head too
            return {_AS_STORED: self.parts.stored - 8 * self.parts.scale}
        if self.runtime == "niwaki":
            return {str(Grid(int(bits), self.parts.group)): bits for bits in _ENDS["niwaki"]}
        found = self.grid.choices(self.parts.width)
        return {
            BlockGrid(bits).type_of(self.parts.width).name.lower(): bits
            for bits in _ENDS[self.runtime]
            if bits in found
        }

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.smallest.stages

    @cached_property
    def largest(self) -> Way:
        """The most bits for everything."""
        return self._bits(self._most, next(iter(self.ends)))

    @cached_property
    def smallest(self) -> Way:
        """The fewest bits, with the tokens there are."""
        return self._bits(math.ceil(100 * self.parts.least) / 100, [*self.ends][-1])

    @property
    def _most(self) -> float:
        return _MOST_BITS if self.runtime == "llama.cpp" else 8.0

    @property
    def reach(self) -> tuple[Way, ...]:
        return self.largest, self.smallest

    def beside(self, way: Way) -> list[Way]:
        return self.to(way.size)[1:]

    def ladder(self) -> list[Way]:
        found, least = [self.largest], min(each.smallest.size for each in (self, *self._with_fewer_tokens()))
        while (asked := int(found[-1].size * (1 - _STEP))) >= least:
            found.append(self.to(asked)[0])
        return found

    def check(self, limit: float) -> None:
        ends, tokenizer = (int(FEWEST * count) for count in (self.parts.embeddings, self.parts.tokenizer))
        fewest = replace(self.parts, embeddings=ends, tokenizer=tokenizer)
        others = [*self._with_fewer_tokens()] if self.foresight else [replace(self, parts=fewest)]
        if limit < (least := self.smallest).size and all(limit < each.smallest.size for each in others):
            fewer = f" ({in_bytes(min(each.smallest.size for each in others))} with fewer tokens)" if others else ""
            raise UsageError(
                f"{in_bytes(limit)} cannot be reached for {self.runtime}: {least.words} have {in_bytes(least.size)}"
                f"{self._why}; give at least that{fewer}, or take a smaller model"
            )

    def to(self, limit: float) -> list[Way]:
        self.check(limit)
        if limit >= self.largest.size:
            return [self.largest]
        fewer = [*self._with_fewer_tokens()]
        found = _in_order(self._to(int(limit)), (way for each in fewer for way in each._to(int(limit))))
        # None where there are fewer than a hundredth of a bit more than the least: bits are tried in hundredths.
        return found or [min((each.smallest for each in (self, *fewer)), key=attrgetter("size"))]

    def _to(self, limit: int) -> Iterator[Way]:
        """The ways with these tokens: one for each number of bits of embeddings and head."""
        for ends in self.ends:
            low, high = self._bytes(0, ends), self._bytes(8, ends)
            bits = min(self._most, math.floor(100 * (8 * (limit - low) / (high - low))) / 100)  # the most that fit
            if bits >= self.parts.least and (way := self._bits(bits, ends)).size <= limit:
                yield way

    def _with_fewer_tokens(self) -> Iterator["PackedWays"]:
        """The ways of the same model with fewer tokens."""
        if self.tokens is None:
            costs = self.costs
            for tokens, *_ in costs.sizes:
                embeddings = self.parts.embeddings - costs.removed(tokens)
                tokenizer = int(self.parts.tokenizer * tokens / costs.rows)  # of shorter tokens, the more common ones
                parts = replace(self.parts, embeddings=embeddings, tokenizer=tokenizer)
                yield replace(self, parts=parts, tokens=tokens)

    def _bytes(self, bits: float, ends: str) -> int:
        parts = self.parts
        weights = parts.matrices * (bits / 8 + parts.scale) + parts.embeddings * (self.ends[ends] / 8 + parts.scale)
        return int((weights + parts.others + parts.tokenizer) * (1 + _MARGIN)) + parts.headers

    def _bits(self, bits: float, ends: str) -> Way:
        """Rounds matrices to so many bits, one number for all of them where it can be, and embeddings and head."""
        if self.runtime == "llama.cpp":
            text = "q8_0" if bits == _MOST_BITS else f"q{bits:.2f}"
            words, last = f"{bits:g} bits a weight, embeddings and head in {ends}", Export("gguf")
        else:
            text = f"int{bits:g}" if bits in (4, 8) else f"int{bits:.2f}"
            words, last = f"{bits:g} bits a weight, embeddings and head of {self.ends[ends]:g}", Pack()
            if self.runtime == "vllm":
                words, last = f"{bits:g} bits a weight, embeddings and head {ends}", Export("compressed-tensors")
            if self.parts.group:
                text += f":{self.parts.group}"
            else:
                words += ", one scale for each row"
        lost = self.foresight.of_matrices(bits) if self.foresight else 0.0
        trains = self.trains and lost >= _WORTH
        on_grid = () if ends == _AS_STORED else (QuantizeEmbeddings(ends),)
        # 8 bits are rounded to the nearest, which takes less time than any other effort.
        effort = None if bits == self._most else _TRAINING if trains else self.effort
        stages = (Quantize(text, effort=effort), *self.heal, *on_grid, last)
        nats = (_LEFT if trains else 1.0) * lost + self.foresight.ends.get(ends, 0.0) if self.foresight else None
        way = Way.fitted(words, self._bytes(bits, ends), stages, nats)
        return way if self.tokens is None else way.with_tokens(self.tokens, self.costs)
