"""What steps are foreseen to cost a model, in nats a token, before any of them is taken."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import raw_bytes
from niwaki.errors import CalibrationError, CheckpointError, UnsupportedModelError, UsageError
from niwaki.files import cached_directory, digest
from niwaki.layer.grid import AnyGrid, parse_grid, scale_dtype
from niwaki.layer.linalg import has_tf32, products
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.rounding import onto_grid, to_nearest, unsolved
from niwaki.models.hidden_states import HiddenStates, MemoryBudget, pieces
from niwaki.models.outside import embedding_keys, head_gram
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute, Measurement
from niwaki.pruning.mixed_bits import (
    CLOSE,
    BitCosts,
    Found,
    Look,
    Looked,
    Place,
    choose_bits,
    cost_of_bits,
    examined,
    foreseen,
    remembered_costs,
    together,
)
from niwaki.pruning.plan import Curve
from niwaki.pruning.request import rounds_to_nearest
from niwaki.records.progress import SOON, Progress
from niwaki.records.record import Record, versions
from niwaki.records.wording import estimated
from niwaki.runs import duration
from niwaki.runs.card import digests_of_texts
from niwaki.runs.stage import current_session
from niwaki.shrinking.tokens import ModelTokens, Size
from niwaki.shrinking.units import neurons_of
from niwaki.texts.counting import count_tokens
from niwaki.texts.own import with_answers
from niwaki.texts.same_text import same_text
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

# What fewer tokens are foreseen to cost a model, by how often a text has those that would go.

#: Shares of the tokens that could stay, and multiples that their numbers are.
_STAY, _MULTIPLE = (0.75, 0.625, 0.5, 0.375, 0.25), 64
FEWEST = _STAY[-1]
#: On about how many tokens of the text a model with the fewest of them is run.
_RUN = 2048
#: What a removed word costs, and at least: on SmolLM2 5 to 8 nats on text of four kinds. It counts as so many words of
#: the text. With fewer tokens to choose from all others cost a little less, which alone is no reason to remove any.
_USUAL, _LEAST, _COUNTS_AS = 6.0, 3.0, 8


@dataclass(frozen=True)
class TokenCosts:
    """What fewer tokens are foreseen to cost, in nats for each token that a text has now.

    Attributes:
        rows: How many tokens there are.
        weights: How many weights go with each.
        sizes: Numbers of tokens that could stay, in descending order, each with what that costs on text like the one
            that they are chosen by, and on text of other kinds.
        unused: How many of them the tokenizer does not have.
        unknown: Why nothing is known of them, with no ``sizes``; "" where it is, or where that was not looked at.
    """

    rows: int = 0
    weights: int = 0
    sizes: tuple[tuple[int, float, float], ...] = ()
    unused: int = 0
    unknown: str = ""

    @property
    def most(self) -> int:
        """The most that can stay where some are removed."""
        return self.rows - self.unused - 1

    def of(self, tokens: int) -> tuple[float, float] | None:
        """The two costs of any number of tokens; None for fewer than are known."""
        for (more, *first), (fewer, *second) in pairwise([(self.rows - self.unused, 0.0, 0.0), *self.sizes]):
            if fewer <= tokens <= more:
                part = (more - tokens) / (more - fewer)
                own, other = (one + part * (two - one) for one, two in zip(first, second, strict=True))
                return own, other
        return None

    def removed(self, tokens: int) -> int:
        """How many weights go where so many tokens stay."""
        return (self.rows - tokens) * self.weights


class LookingAtTokens:
    """Counts which tokens of a text would go, and runs the model without them on a little of it.

    What is left of a removed word are the pieces that it was merged from. The first costs about what the word did, and
    those after it some nats each, because the model has never seen the two beside each other. How many nats that are
    is measured where the most tokens are gone; how many words, on windows that the tokens are not chosen by. For text
    of other kinds the tokenizer's own ranks say how common a token is, by Zipf's law.
    """

    def __init__(self, model: StreamedModel, tokens: ModelTokens, held: Windows, shares: Tensor) -> None:
        self._model, self._tokens = model, tokens
        ranks = tokens.file.shares()
        #: For each number of tokens that could stay what is gone: of the windows, and of other text.
        self._gone: dict[int, tuple[float, float]] = {}
        for share in _STAY:
            size = int(share * tokens.rows) // _MULTIPLE * _MULTIPLE
            try:
                new = tokens.choose(shares, Size(size))
            except UsageError:  # fewer than have to stay, or as many as the tokenizer has
                continue
            kept = torch.tensor([number for number in new if number < tokens.rows])
            own = 1 - float(torch.isin(held.tokens, kept).double().mean())
            self._gone[size] = own, sum(value for number, value in ranks.items() if number not in new)
            self._kept, self._new = kept, new
        self._removed, self._lost = 0, 0.0
        if self._gone:
            run = held.of(torch.arange(max(1, min(len(held.tokens), _RUN // held.tokens.shape[1]))))
            bos = None if run.bos is None else self._new[run.bos]
            #: Some windows, and the same text with the fewest tokens.
            self._pair = same_text(run, model.tokenizer, tokens.tokenizer(self._new), bos, model.positions)

    @classmethod
    def of(
        cls, model: StreamedModel, calibration: Calibration, windows: Windows, look: Look = CLOSE
    ) -> LookingAtTokens:
        """Raises what says why not, where tokens of the model cannot be removed, or the text is too short for it."""
        texts = len(calibration.texts)  # whose windows take turns
        if not (half := len(windows.tokens) // 2):
            raise CalibrationError("the text has one window")
        count = max(1, min(half, look.tokens // windows.tokens.shape[1]) // texts)
        turns = torch.linspace(0, max(0, len(windows.tokens) // texts - 1), count).long()
        held = windows.of((turns.unsqueeze(1) * texts + torch.arange(texts)).flatten()[:half])
        model.check_head()
        tokens, counts = ModelTokens(model), count_tokens(model, calibration, held.tokens)
        if (rest := counts.tokens - held.tokens.numel()) < (needed := tokens.rows // 2):
            measured = f"{held.tokens.numel():,} that they are measured on"
            raise CalibrationError(
                f"choosing them takes {needed:,} tokens of text beside {measured}, and there are {rest:,}"
            )
        looking = cls(model, tokens, held, counts.shares)
        if not looking._gone:
            raise UnsupportedModelError("hardly any token can be removed")
        return looking

    def changed(self, budget: MemoryBudget) -> list[HiddenStates]:
        """The first block's inputs for some windows, and for the same text with the fewest tokens."""
        before, after = self._pair
        # As numbers of the whole model, whose embeddings and head have these rows too.
        old = torch.tensor([*self._new])[after.tokens]
        return [self._model.embed(tokens, budget=budget) for tokens in (before.tokens, old)]

    def see(self, before: HiddenStates, after: HiddenStates) -> None:
        """Measures both after the last block."""
        measured = [
            self._model.measured(states, windows, only=kept)
            for states, windows, kept in zip((before, after), self._pair, (None, self._kept), strict=True)
        ]
        first, second = (each.nats * each.tokens for each in measured)
        self._lost = second - first
        tokens, spans = self._pair[0].tokens, self._pair[0].spans
        assert spans is not None
        predicted = (place := torch.arange(tokens.shape[1])) >= spans[:, :1]
        self._removed = int((predicted & (place < spans[:, 1:]) & ~torch.isin(tokens, self._kept)).sum())

    def found(self) -> TokenCosts:
        """What fewer tokens cost, by what was counted and measured."""
        each = max(_LEAST, (self._lost + _USUAL * _COUNTS_AS) / (self._removed + _COUNTS_AS))
        sizes = tuple((size, own * each, max(own, other) * each) for size, (own, other) in self._gone.items())
        return TokenCosts(self._tokens.rows, self._tokens.weights, sizes, self._tokens.unused)


#: Goes up when anything else is foreseen of the same model: what earlier ones kept is not read then.
_VERSION = 12
#: On about how many tokens predictions are compared.
_COMPARED = 512
#: Logarithms of both, probabilities, differences, and their products, which are in memory at once.
_COPIES = 5
#: How many rows of the head are rounded: on 512 tokens of three models they have 97 to 99.8 % of all probability.
_LIKELY = 16384
#: On about how many the model runs with rounded embeddings, at least one window.
_CHANGED = 512
#: Shares of the neurons of which the cost is measured.
_NEURONS = (0.05, 0.1, 0.2, 0.35, 0.5)
#: What removing neurons costs in a run, as a multiple of a power of the sum of what each block does: of two models, a
#: tenth and a quarter of the parameters, within a quarter.
_OF_NEURONS, _POWER = 1.1, 0.72
#: Rows of the head that stand for all.
_ROWS = 256


@dataclass(frozen=True)
class Foresight:
    """What bits, fewer neurons and fewer tokens are foreseen to cost, in nats a token.

    To second order independent errors add up: each step has its own cost, and a list of steps the sum of theirs. Large
    errors of matrices cost more than that.

    Attributes:
        tokens: What fewer tokens cost.
        bits: For each matrix what rounding it to so many bits costs, or for the first of those that have the same bits
            what all of them do; empty where that was not looked at.
        ends: By grid what rounding the embeddings and the head costs.
        neurons: For shares of the neurons, in ascending order, what it costs to remove these from each block; empty for
            models that have none of a known kind, and where that was not looked at.
    """

    tokens: TokenCosts
    bits: list[tuple[Place, BitCosts]] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)
    neurons: tuple[tuple[float, float], ...] = ()

    def of_matrices(self, average: float) -> float:
        """What matrices of so many bits in the mean cost, each of as many as suit it."""
        bits = dict(self.bits)
        return together(foreseen(bits, choose_bits(bits, average)))

    def of_neurons(self, share: float) -> float | None:
        """What it costs to remove that share of each block's neurons; None where it is not known, or beyond what is."""
        if not self.neurons or share > self.neurons[-1][0]:
            return None
        curve = Curve(1, ((0.0, 0.0), *self.neurons))
        return float(_OF_NEURONS * curve.at(share) ** _POWER)


class PartOf(Progress):
    """Tells ``outer`` in a line with a ``name`` what a part of it does, such as one trial of several."""

    def __init__(self, outer: Progress, name: str) -> None:
        self._outer, self._name, self._stage = outer, name, name
        #: How many blocks the part goes through, as far as that is known.
        self.blocks = 0
        self._about = ""

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        self._outer.status(f"{self._stage}{self._about}: {what}", done, count)

    def note(self, text: str) -> None:
        self._outer.note(text)

    def estimate(self, seconds: float) -> None:
        if seconds >= SOON:
            self._about = f" (about {estimated(seconds)})"
            self._outer.status(f"{self._stage}{self._about}")

    def turn(self, number: int, count: int, stage: str) -> None:
        self._stage = f"{self._name}, {stage}"
        self._outer.status(f"{self._stage}{self._about}")

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        self.blocks = blocks

    def stage(self, block: int, name: str, steps: int) -> None:
        self._outer.status(f"{self._stage}{self._about}: {name}", block, self.blocks)

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        self._outer.stopped(done, blocks, ", ".join(filter(None, (self._name, where))))


@torch.no_grad()
def foresee(
    checkpoint: Checkpoint,
    grid: AnyGrid | None,
    ends: Sequence[str],
    calibration: Calibration,
    compute: Compute,
    progress: Progress,
    look: Look = CLOSE,
) -> Foresight:
    """Looks at the model in two and a half passes forward and one backward over a little of the calibration text.

    Bits are the :meth:`.Grid.choices` of ``grid``, and the ``ends`` grids of embeddings and head. Squared errors of the
    outputs of matrices count by how sensitive the loss is to each of them (:func:`.sensitivities`): those of numbers of
    the grid (:func:`.costs_of_bits`), or without a ``grid`` of the neurons that add least to the outputs. What rounding
    embeddings and head costs is measured: the divergence of predictions. So is what a removed token costs
    (:class:`.LookingAtTokens`). ``look`` says how closely the model is looked at.
    What is found is kept on disk block by block, so that a call that was stopped goes on, and one that is repeated does
    not look again. Memory: one block, or the head.

    Raises:
        UnsupportedModelError: the model has no head, or embeddings that are no matrices.
        NiwakiError: see :mod:`niwaki.errors`; as of stages that calibrate on this text.
    """
    world, part = current_session().world, PartOf(progress, "looking at what each step would cost")
    with contextlib.closing(MemoryBudget(compute.budget)) as budget:
        model = StreamedModel(checkpoint, compute.device, compute.dtype, budget)
        part.blocks = len(model.blocks)
        text = with_answers(model, calibration, compute.budget, world, part)
        texts = Texts.read(model, text, Measurement(samples=0))
        for note in texts.notes:
            part.note(note)
        windows, tokens = texts.windows, texts.windows.tokens
        own, tf32 = world.share(tokens), compute.tf32 if has_tf32(model.device) else "never"
        examine: Callable[[Looked], Any] = partial(cost_of_bits, grid) if grid else _Neurons(model).cost
        place = _place_of(model, grid, ends, tokens, tf32, calibration, look) if world.first else None
        kind: Any = list[tuple[Place, BitCosts]] if grid else list[tuple[Place, tuple[float, ...]]]
        kept = Found(place, kind, world)
        found: Foresight | None = kept.read("costs", Foresight)
        if found is None:
            at_end = _Ends(model, ends)
            if world.first:
                at_end.add_tokens(text, windows, look)
            operations = duration.looking(model, min(look.tokens, tokens.numel()))
            part.estimate(operations / (world.size * duration.products_per_second(model.device)))
            with products(tf32=False):
                costs = examined(model, own, tf32, world, part, examine, at_end, look, kept)
            of_ends, of_tokens = world.received((at_end.ends, at_end.of_tokens()))
            if grid:
                found = Foresight(of_tokens, [*costs.items()], of_ends)
            else:
                removed = [nats for nats in costs.values() if nats]
                shares = zip(_NEURONS, *removed, strict=True) if removed else ()
                found = Foresight(of_tokens, neurons=tuple((share, math.fsum(nats)) for share, *nats in shares))
            kept.keep("costs", found, whole=True)
        if grid:
            remembered_costs(model, grid, own, tf32, lambda: dict(found.bits))
    return found


def _place_of(
    model: StreamedModel,
    grid: AnyGrid | None,
    ends: Sequence[str],
    tokens: Tensor,
    tf32: str,
    calibration: Calibration,
    look: Look,
) -> Path | None:
    """The directory for what is foreseen, so that a command that is repeated does not look again; None for nowhere."""
    # Which tokens stay depends on the whole of the texts, and on the tokenizer.
    text = hashlib.sha256(raw_bytes(tokens)).hexdigest(), tuple(tokens.shape), digests_of_texts(calibration)
    how = str(model.dtype), model.device.type, tf32, torch.get_num_threads(), versions()
    of_grid = grid and grid.family
    with contextlib.suppress(OSError, ValueError):
        names = {file.name: digest(file) for file in sorted(model.checkpoint.path.glob("*.json"))}
        asked = _VERSION, model.checkpoint.fingerprint(), names, text, of_grid, tuple(ends), how, astuple(look)
        return cached_directory("foresight", asked)
    return None


class _Neurons:
    """What fewer neurons cost, in models that have some of a known kind."""

    def __init__(self, model: StreamedModel) -> None:
        self._into = frozenset[Place]()
        with contextlib.suppress(UnsupportedModelError):
            self._into = frozenset(matrix.place for matrix in neurons_of(model).matrices)

    def cost(self, looked: Looked) -> tuple[float, ...]:
        """What removing each share of ``_NEURONS`` costs, where neurons go into the matrix."""
        if looked.matrix.place not in self._into:
            return ()
        W, cost = looked.rows()
        order = (W.square().sum(dim=0) * looked.gram.norm.square()).argsort()
        removed = (order[: round(share * len(order))] for share in _NEURONS)
        return tuple(cost(W.index_fill(1, columns, 0.0)) for columns in removed)


class _Ends:
    """Looks at embeddings, head and tokens."""

    def __init__(self, model: StreamedModel, ends: Sequence[str]) -> None:
        self._model = model
        self._keys = embedding_keys(model)
        self._stored = model.checkpoint.dtype(self._keys[-1])
        #: By the grid of the embeddings and the head.
        self.ends = dict.fromkeys(ends, 0.0)
        self._tokens: LookingAtTokens | None = None
        self._unknown = ""

    def add_tokens(self, calibration: Calibration, windows: Windows, look: Look) -> None:
        """Looks at what fewer tokens cost too, where that is possible."""
        try:
            self._tokens = LookingAtTokens.of(self._model, calibration, windows, look)
        except (UnsupportedModelError, CheckpointError, CalibrationError) as error:
            self._unknown = str(error)

    def of_tokens(self) -> TokenCosts:
        """What fewer tokens are foreseen to cost."""
        return self._tokens.found() if self._tokens else TokenCosts(unknown=self._unknown)

    def changed(self, tokens: Tensor, budget: MemoryBudget) -> list[HiddenStates]:
        """The first block's inputs with embeddings of each number of bits, and those of fewer tokens."""
        tokens = tokens[: max(1, _CHANGED // tokens.shape[1])]
        found, embeddings = [], self._model.model.get_input_embeddings()
        for grid in self.ends:
            # What it gives are rows of the table, each of which has scales of its own.
            hook = embeddings.register_forward_hook(lambda _, __, rows, grid=grid: self._rounded(rows, grid))
            try:
                found.append(self._model.embed(tokens, budget=budget))
            finally:
                hook.remove()
        return found + (self._tokens.changed(budget) if self._tokens else [])

    def see(self, halves: list[HiddenStates], changed: list[HiddenStates]) -> None:
        """What rounding embeddings and head costs, by the divergence of predictions for some tokens.

        It is measured for numbers that are rounded to the nearest, in the head and before the first block, and each of
        the two counts as much as what is fitted leaves of its squared errors.
        """
        if self._tokens:
            self._tokens.see(*changed[len(self.ends) :])
        if not self.ends:
            return
        # (tokens, width) of the head, which is the table of embeddings where these are tied.
        weight = self._model.checkpoint.read(self._keys[-1]).to(self._model.device)
        tokens = changed[0].tokens[0]
        dense, *inputs = (
            self._some(hidden)
            for hidden in [halves[-1].hidden[0][: len(tokens)], *(each.hidden[0] for each in changed[: len(self.ends)])]
        )
        expected = self._predictions(dense, tokens)
        likely = expected.softmax(-1).sum((0, 1)).topk(min(_LIKELY, expected.shape[-1])).indices
        grams = [head_gram(self._model, each) for each in (halves[0], halves[-1])]
        for grid, x in zip(self.ends, inputs, strict=True):
            of_head, before = self._left(weight, grid, *grams)
            self.ends[grid] += of_head * self._divergence(expected, self._predictions(dense, tokens, (grid, likely)))
            self.ends[grid] += before * self._divergence(expected, self._predictions(x, tokens))

    def _some(self, x: Tensor) -> Tensor:
        """(count, 1, width) some of the hidden states (samples, length, width), each a text: positions may be few."""
        return x.flatten(0, 1)[:: math.ceil(x.shape[0] * x.shape[1] / _COMPARED)].unsqueeze(1)

    def _predictions(self, x: Tensor, tokens: Tensor, on: tuple[str, Tensor] | None = None) -> Tensor:
        """(count, 1, tokens) logits, by hidden states (count, 1, width), of the head; with some rows ``on`` a grid.

        Errors count as much as their words are probable, so that the likeliest rows stand for all of them.
        """
        head = self._model.model.get_output_embeddings()

        def rounded(grid: str, likely: Tensor, module: nn.Linear, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
            rows = module.weight[likely]
            return logits.index_add_(-1, likely, inputs[0] @ (self._rounded(rows, grid) - rows).T)

        hooked = head.register_forward_hook(partial(rounded, *on)) if on else contextlib.nullcontext()
        with hooked, self._model.head(torch.float32) as predict:
            return predict(x, tokens.flatten()[: len(x)].unsqueeze(1))

    def _left(self, weight: Tensor, name: str, first: Gram, other: Gram) -> tuple[float, float]:
        """What fitting some rows of the head to its inputs leaves of squared errors: of its outputs, and of the rows.

        The latter are those of embeddings, where they are tied. What is fitted to the first half counts on the other.
        """
        if rounds_to_nearest(grid := parse_grid(name), None):
            return 1.0, 1.0
        W = weight[:: math.ceil(len(weight) / _ROWS)].float()
        problem, counted = LayerProblem(W, first), LayerProblem(W, other)
        fitted = onto_grid(problem, unsolved(problem), grid, scale_dtype(self._stored))[0].W
        nearest = self._rounded(W, name)
        tied = len(self._keys) == 1
        errors = float((nearest - W).square().sum())
        before = float((fitted - W).square().sum()) / errors if tied and errors else 1.0
        lost = counted.loss(nearest)
        return counted.loss(fitted) / lost if lost else 1.0, before

    def _rounded(self, rows: Tensor, name: str) -> Tensor:
        nearest, _ = to_nearest(rows.flatten(0, -2).float(), parse_grid(name), scale_dtype(self._stored))
        return nearest.to(rows.dtype).view_as(rows)

    def _divergence(self, expected: Tensor, found: Tensor) -> float:
        """The mean divergence of predictions from the expected ones, both logits (count, 1, tokens), in nats."""
        each = []
        for some in pieces(self._model.tokens_at_a_time(_COPIES), expected, found):
            p, q = (logits.log_softmax(-1) for logits in some)
            each.append((p.exp() * (p - q)).sum(-1))
        return float(torch.cat(each).mean())
