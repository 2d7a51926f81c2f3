"""Ways to a size: which stages bring a model there, for the program that runs it, how large it is then, at what loss.

Of all ways to a size the one is taken that is foreseen to lose least (:mod:`niwaki.compression.foresight`). For
niwaki's own format these are matrices of 2 to 8 bits, with embeddings and head of 8 to 4, and zeros, with 4 or 8 bits
for the other weights. For llama.cpp they are 4 to 8 bits and fewer parameters. transformers runs smaller dense models
alone. For all of them a model can have fewer tokens too.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from niwaki.checkpoints.tensors import DTYPES
from niwaki.choices import Runtime
from niwaki.compression.foresight import FEWEST, Foresight, TokenCosts
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.exports.export import Export, Pack
from niwaki.exports.gguf_file import Gguf
from niwaki.layer.grid import Grid
from niwaki.models.outside import embedding_keys
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Prune, Quantize
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
_GROUPS = {"niwaki": 64, "llama.cpp": 32}
#: What a foreseen size may be too small by, relative; and what headers of files have beside names, in all and for each
#: tensor: a matrix is at most three of them, its numbers, scales and mask.
_MARGIN, _HEADER, _ENTRY, _TENSORS = 0.002, 4096, 100, 3
#: How much smaller each way of a ladder is than the one before, and what stays of the parameters at the end of one.
_STEP, _LAST_LEFT = 0.04, 0.4
#: What the numbers of tokens of smaller dense models are multiples of.
_TOKENS = 64
#: How many times as much text of other kinds loses: on SmolLM2, fitted on books, 1.5 to 2.4 times.
_OTHERS = 2.0
#: Of zeros and of the parameters that stay, the least and the most that are tried, in percent.
_ZEROS, _LEFT = range(5, 71), range(60, 100, 2)


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

    @property
    def loss(self) -> float:
        """By what ways are compared: one of which nothing is known comes last.

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


def _way(words: str, size: int, stages: tuple[Stage, ...], nats: float | None) -> Way:
    """One that rounds and removes, and loses more where it was not fitted."""
    return Way(words, size, stages, nats, 0.0 if nats is None else (_OTHERS - 1) * nats)


@dataclass(frozen=True)
class Parts:
    """What a model is made of: numbers of weights, of which some go with neurons, bytes of all else, and of headers.

    The tokenizer is in the same file for llama.cpp, and has no bytes elsewhere. ``least`` is the share of the
    parameters that has to stay where parts are removed, ``group`` how many weights share a scale (None for a row, in
    niwaki's format where rows are no multiples of its groups), and ``scale`` the bytes of scales for each weight.
    """

    matrices: int
    embeddings: int
    others: int
    of_neurons: int
    headers: int
    tokenizer: int = 0
    least: float = 0.0
    group: int | None = 64
    scale: float = 2 / 64

    @classmethod
    def of(cls, model: StreamedModel, runtime: Runtime) -> "Parts":
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
        embeddings = numbers(checkpoint, keys)
        of_blocks = {matrix.key for matrix in matrices}
        rest = entries.keys() - keys - of_blocks
        tokenizer, least = 0, 1.0
        if runtime == "llama.cpp":
            tokenizer = Gguf(checkpoint, "Q8_0", {}, Progress()).tokenizer_size
            least = fewest_parameters(model) / numbers(checkpoint, entries)
            others, scale = 4 * numbers(checkpoint, rest), 2  # in float32 and in float16
        else:  # in the model's own dtypes
            others = sum(entries[key].size for key in rest)
            scale = max(DTYPES[entries[key].dtype].itemsize for key in entries.keys() - rest)
        tensors = (len(key) + _ENTRY for key in [*entries, *(_TENSORS - 1) * [*keys, *of_blocks]])
        headers = _HEADER + sum(tensors)
        size = sum(matrix.size for matrix in matrices)
        of_neurons, per_weight = weights_of_neurons(model), max(2, scale) / (group or min(widths))
        return cls(size, embeddings, others, of_neurons, headers, tokenizer, least, group, per_weight)


def fewest_parameters(model: StreamedModel) -> int:
    """How many are left of a model where the most is removed that can be at once, with all tokens."""
    try:
        return Combinations.all_of(model, Tensors.of(model))[0].least
    except UnsupportedModelError:
        return numbers(model.checkpoint, model.checkpoint.entries)


def weights_of_neurons(model: StreamedModel) -> int:
    """How many weights go with the neurons of MLPs."""
    found = (mlp for i in range(len(model.blocks)) for mlp in mlps(model.matrices(i)))
    return sum(matrix.size for down, ups in found for matrix in (down, *ups))


@dataclass(frozen=True)
class _Foreseen:
    """With what is foreseen of the model, if it was looked at."""

    foresight: Foresight | None = field(default=None, kw_only=True)

    @property
    def costs(self) -> TokenCosts | None:
        """What fewer tokens cost, where that is known."""
        costs = self.foresight.tokens if self.foresight else None
        return None if isinstance(costs, str) else costs

    @property
    def all_tokens(self) -> str:
        """Why there are no ways with fewer tokens; "" where there are, or where that was not looked at."""
        return self.foresight.tokens if self.foresight and isinstance(self.foresight.tokens, str) else ""


@dataclass(frozen=True)
class SmallerWays(_Foreseen):
    """Those for transformers: dense models with fewer parameters than the ``count`` that takes ``before`` bytes now.

    At ``least`` so many are left where all tokens stay. ``heal`` is done at the end of each.
    """

    count: int
    before: int
    of_neurons: int
    of_tokens: int
    least: int
    heal: tuple[Stage, ...]

    @classmethod
    def of(cls, model: StreamedModel, heal: tuple[Stage, ...]) -> "SmallerWays":
        checkpoint, of_tokens = model.checkpoint, numbers(model.checkpoint, embedding_keys(model))
        count, before = numbers(checkpoint, checkpoint.entries), sum(each.size for each in checkpoint.entries.values())
        return cls(count, before, weights_of_neurons(model), of_tokens, fewest_parameters(model), heal)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those of one of the ways, for what can be checked before all are looked at; none where only tokens can go."""
        return (Shrink(parameters=self.least), *self.heal) if self.least < self.count else ()

    def check(self, parameters: float) -> None:
        """UsageError where no way leads to so few, whatever there is to see of the model."""
        self._check(self._left(parameters), self.least - int((1 - FEWEST) * self.of_tokens))

    def to(self, parameters: float) -> tuple[Way, list[Way]]:
        """The way to a share or a number of the parameters that is foreseen to lose least, and the other kinds."""
        left, costs = self._left(parameters), self.costs
        self._check(left, self.least - (costs.removed(costs.sizes[-1][0]) if costs and costs.sizes else 0))
        words = f"{parameters:g} of the" if parameters < 1 else f"{parameters:,.0f} of {self.count:,}"
        found = [self._removing(f"{words} parameters", parameters, self.count, left)] if left >= self.least else []
        fewer = min(self._with_fewer_tokens(left), key=lambda way: way.loss, default=None)
        first, *others = sorted(filter(None, (*found, fewer)), key=lambda way: way.loss)
        return first, others

    def _left(self, parameters: float) -> float:
        return parameters * self.count if parameters < 1 else parameters

    def _check(self, left: float, least: int) -> None:
        if left < least:
            why = f", and fewer tokens were not considered: {self.all_tokens}" if self.all_tokens else ""
            raise UsageError(
                f"{left:,.0f} of {self.count:,} parameters cannot be reached by removing parts: at least {least:,} are "
                f"left{why}; give {math.ceil(100 * least / self.count) / 100:g} or more, or take a smaller model"
            )

    def ladder(self) -> list[Way]:
        """Smaller models in descending order of size."""
        found = []
        for step in range(1, int((1 - _LAST_LEFT) / _STEP) + 1):
            with contextlib.suppress(UsageError):
                found.append(self.to(round(1 - _STEP * step, 2))[0])
        return found or [self.to(round(1 - _STEP, 2))[0]]  # which says what cannot be reached

    def _removing(self, words: str, parameters: float, there: float, left: float) -> Way:
        """Removes blocks, heads and neurons of a model that has so many parameters there."""
        sight, nats = self.foresight, None
        if sight and self.of_neurons:
            nats = sight.of_neurons((there - left) / self.of_neurons)
        return _way(words, self._bytes(left), (Shrink(parameters=parameters), *self.heal), nats)

    def _with_fewer_tokens(self, left: float) -> Iterator[Way]:
        if (costs := self.costs) is None:
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


@dataclass(frozen=True)
class Ways(_Foreseen):
    """Those for "niwaki" and "llama.cpp".

    ``heal`` is done in all of them before embeddings and head are put on their grid. Without ``foresight`` there are
    the largest and the smallest way alone.
    """

    parts: Parts
    runtime: Runtime
    heal: tuple[Stage, ...]
    #: How many tokens it has left, where some are removed first.
    tokens: int | None = None

    @property
    def grid(self) -> Grid:
        """The grid of mixed bits."""
        return Grid(8, self.parts.group, 8.0)

    @property
    def ends_bits(self) -> tuple[int, ...]:
        """Bits that embeddings and head can have, the most first."""
        return (8, 6, 5, 4) if self.runtime == "niwaki" else (8, 5, 4)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those of one of the ways, for what can be checked before all are looked at."""
        return self._bits(self.grid.choices[0], self.ends_bits[-1]).stages

    @cached_property
    def largest(self) -> Way:
        """8 bits for everything."""
        return self._bits(8.0, 8)

    @cached_property
    def smallest(self) -> Way:
        """The fewest bits, or the most that is removed, with the tokens there are."""
        if self.runtime == "niwaki":
            return self._bits(self.grid.choices[0], self.ends_bits[-1])
        fewest = self.ends_bits[-1]
        return self._smaller(self._lefts[0], 4.0, fewest) if self._lefts else self._bits(4.0, fewest)

    @cached_property
    def _lefts(self) -> list[float]:
        """Shares of the parameters that can stay, in ascending order: all that go are of matrices."""
        fewest = _LAST_LEFT * self.parts.matrices
        shares = (each / 100 for each in _LEFT)
        return [share for share in shares if share >= self.parts.least and self._matrices(share) >= fewest]

    def ladder(self) -> list[Way]:
        """Ways in descending order of size, from 8 bits to the smallest, with whatever tokens."""
        found, least = [self.largest], min(each.smallest.size for each in (self, *self._with_fewer_tokens()))
        while (asked := int(found[-1].size * (1 - _STEP))) >= least:
            found.append(self.to(asked)[0])
        return found

    def check(self, asked: float) -> None:
        """UsageError where the size cannot be reached; before there is foresight, not with fewer tokens either."""
        ends, tokenizer = (int(FEWEST * count) for count in (self.parts.embeddings, self.parts.tokenizer))
        fewest = replace(self.parts, embeddings=ends, tokenizer=tokenizer)
        others = self._with_fewer_tokens() if self.foresight else [replace(self, parts=fewest)]
        if asked < (least := self.smallest).size and all(asked < each.smallest.size for each in others):
            raise UsageError(
                f"{in_bytes(asked)} cannot be reached for {self.runtime}: {least.words} have {in_bytes(least.size)}; "
                f"give at least that, or take a smaller model"
            )

    def to(self, asked: float) -> tuple[Way, list[Way]]:
        """The way to a size that is foreseen to lose least, and the best of other kinds, in ascending order of loss."""
        self.check(asked)
        if asked >= self.largest.size:
            return self.largest, []
        best: dict[str, Way] = {}
        for kind, way in self._to(int(asked)):
            if way.size <= asked and (kind not in best or way.loss < best[kind].loss):
                best[kind] = way
        if not best:  # bits are tried in hundredths
            return min((each.smallest for each in (self, *self._with_fewer_tokens())), key=lambda way: way.size), []
        first, *others = sorted(best.values(), key=lambda way: way.loss)
        return first, others

    def _to(self, asked: int) -> Iterator[tuple[str, Way]]:
        """All ways to a size that are compared, each with its kind."""
        least = self.grid.choices[0]
        for ends in self.ends_bits:
            if (bits := self._average(asked, ends)) >= least:
                yield f"bits, embeddings of {ends}", self._bits(bits, ends)
            if self.runtime == "niwaki":
                for bits in (8, 4):
                    zeros = next((z / 100 for z in _ZEROS if self._zeros_size(z / 100, bits, ends) <= asked), None)
                    if zeros is not None:
                        yield f"zeros, {bits} bits", self._zeros(zeros, bits, ends)
            # In niwaki's format parts that go have lost more than bits wherever that was measured.
            for left in reversed(self._lefts) if self.runtime == "llama.cpp" else ():
                if (bits := self._average(asked, ends, left)) >= 4:
                    yield "parameters", self._smaller(left, bits, ends)
        for each in self._with_fewer_tokens():
            yield from (("fewer tokens", way) for _, way in each._to(asked))

    def _with_fewer_tokens(self) -> Iterator["Ways"]:
        """Those of the same model with fewer tokens."""
        if self.tokens is None and (costs := self.costs):
            for tokens, *_ in costs.sizes:
                embeddings = self.parts.embeddings - costs.removed(tokens)
                tokenizer = int(self.parts.tokenizer * tokens / costs.rows)  # of shorter tokens, the more common ones
                parts = replace(self.parts, embeddings=embeddings, tokenizer=tokenizer)
                yield replace(self, parts=parts, tokens=tokens)

    def _way(self, words: str, size: int, stages: tuple[Stage, ...], nats: float | None) -> Way:
        """A way of the model with all tokens or those that are left."""
        way = _way(words, size, stages, nats)
        return way.with_tokens(self.tokens, self.costs) if self.tokens is not None and self.costs else way

    def _bytes(self, bits: float, ends: int, matrices: float) -> int:
        parts = self.parts
        of_ends = parts.embeddings * (ends / 8 + parts.scale)
        whole = matrices * (bits / 8 + parts.scale) + of_ends + parts.others + parts.tokenizer
        return int(whole * (1 + _MARGIN)) + parts.headers

    def _average(self, asked: int, ends: int, left: float = 1.0) -> float:
        """The most bits a weight, in hundredths, with which the size is not exceeded; 8 at most, and maybe too few."""
        matrices = self._matrices(left)
        low, high = self._bytes(0, ends, matrices), self._bytes(8, ends, matrices)
        return min(8.0, math.floor(100 * (8 * (asked - low) / (high - low))) / 100)

    def _matrices(self, left: float) -> float:
        """How many weights matrices have where so much of the parameters is left."""
        return self.parts.matrices - (1 - left) * (self.parts.matrices + self.parts.embeddings)

    def _grid(self, bits: float) -> str:
        """The text of a grid of so many bits: of one number for all matrices where it can be."""
        text = f"{bits:g}" if bits in (4, 8) else f"{bits:.2f}"
        return f"int{text}" + ("" if self.parts.group is None else f":{self.parts.group}")

    @property
    def _per_row(self) -> str:
        """What to say where rows do not divide into groups."""
        return "" if self.parts.group else ", one scale for each row"

    def _bits(self, bits: float, ends: int) -> Way:
        words = f"{bits:g} bits a weight, embeddings and head of {ends}" + self._per_row
        stages: tuple[Stage, ...] = (Quantize(self._grid(bits)), *self.heal, *self._ends(ends, bits == 8))
        sight = self.foresight
        nats = None if sight is None else sight.of_matrices(bits) + sight.of_ends(ends)
        return self._way(words, self._bytes(bits, ends, self.parts.matrices), stages, nats)

    def _ends(self, bits: int, eight: bool = False) -> tuple[Stage, ...]:
        """Embeddings and head, and the format, for matrices of ``eight`` bits or of fewer and mixed ones."""
        grid = str(Grid(bits, self.parts.group))
        file = Export("gguf-q8_0") if eight else Export("gguf-q4_0")
        return QuantizeEmbeddings(grid), Pack() if self.runtime == "niwaki" else file

    def _zeros_size(self, share: float, bits: int, ends: int) -> int:
        return self._bytes(1 + bits * (1 - share), ends, self.parts.matrices)  # with the bits of a mask

    def _zeros(self, share: float, bits: int, ends: int) -> Way:
        grid = str(Grid(bits, self.parts.group))
        stages: tuple[Stage, ...] = (Prune(share, quantize=grid), *self.heal, *self._ends(ends))
        words = (
            f"{100 * share:.3g} % zeros, {bits} bits for each other weight, embeddings and head of {ends}"
            + self._per_row
        )
        nats = None
        if sight := self.foresight:
            nats = sight.of_matrices(bits, share) + sight.of_ends(ends)
        return self._way(words, self._zeros_size(share, bits, ends), stages, nats)

    def _smaller(self, left: float, bits: float, ends: int) -> Way:
        everything = self.parts.matrices + self.parts.embeddings
        stages: tuple[Stage, ...] = (Shrink(parameters=left), Quantize(self._grid(bits)), *self.heal)
        words = f"{left:g} of the parameters, {bits:g} bits for each, embeddings and head of {ends}"
        sight, removed = self.foresight, None
        if sight and self.parts.of_neurons:
            removed = sight.of_neurons((1 - left) * everything / self.parts.of_neurons)
        nats = None if sight is None or removed is None else removed + sight.of_matrices(bits) + sight.of_ends(ends)
        size = self._bytes(bits, ends, self._matrices(left))
        return self._way(words, size, (*stages, *self._ends(ends, bits == 8)), nats)
