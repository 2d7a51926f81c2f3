"""How far smaller models, repaired where blocks are gone, are from the dense one: side by side, in one pass over it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from niwaki.errors import NumericalError, named
from niwaki.layer.linalg import is_finite
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.unit_removal import Ridge, removals_of_units
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import Products
from niwaki.models.hidden_states import Handed, HiddenStates, MemoryBudget, SpillList, pieces
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.shrinking.units import ColumnUnits, mlps

# What removed blocks did, put back as far as it goes: into the last matrix of the block before them.

#: The ridge of the regression, relative to the mean square of each input.
DAMPING = 0.1
#: How much the outputs of a block may differ from what they would be if its last matrix were added to them.
_TOLERANCE = 0.1


@torch.no_grad()
def last_matrix(block: DecoderBlock, states: HiddenStates) -> Matrix | None:
    """The matrix whose products are added to the outputs of ``block`` as they are; None where there is no such matrix.

    There is none where a norm follows it (Gemma 2, BERT), or where experts take its place. It is tried, with twice the
    matrix, on the first batch of ``states``, the inputs of the block.
    """
    found = mlps(block.matrices)
    if len(found) != 1 or states.leading:
        return None
    matrix, _ = found[0]
    before = run_with_inputs(block, matrix, states, 0)
    if before is None:
        return None
    outputs, inputs = before
    weight = matrix.within(block.module.get_parameter(matrix.parameter))
    own = weight.clone()
    weight.mul_(2)
    twice = block.forward(states.hidden[0], states, 0).float()
    weight.copy_(own)
    added = (inputs @ own.float().T).view(outputs.shape)
    is_added = (twice - outputs - added).norm() <= _TOLERANCE * added.norm()
    return matrix if is_added else None


def run_with_inputs(
    block: DecoderBlock, matrix: Matrix, states: HiddenStates, i: int, handed: Handed | None = None
) -> tuple[Tensor, Tensor] | None:
    """(outputs (samples, length, width), inputs of ``matrix`` (tokens, in)), float32, for batch ``i`` of ``states``.

    None where ``matrix`` has not one input for each token. What the block hands on is added to ``handed``, as in
    :meth:`.DecoderBlock.forward`.
    """
    seen: list[Tensor] = []
    parameters = dict(block.module.named_parameters())
    with torch.no_grad(), Products([matrix], parameters, lambda _, __, X, ___: seen.append(X.flatten(0, -2))):
        outputs = block.forward(states.hidden[i], states, i, handed=handed).float()
    tokens = outputs.shape[:-1].numel()
    if outputs.ndim != 3 or len(seen) != 1 or len(seen[0]) != tokens:
        return None
    return outputs, seen[0].float()


def advance_with_inputs(block: DecoderBlock, matrix: Matrix, states: HiddenStates, budget: MemoryBudget) -> SpillList:
    """Runs ``block``, whose last matrix is ``matrix``; the inputs of that, as in :func:`run_with_inputs`, by batch."""
    seen = SpillList(budget)
    for i in range(len(states.hidden)):
        handed = states.arguments.handed(block.index, i)
        found = run_with_inputs(block, matrix, states, i, handed)
        assert found  # as in last_matrix
        states.hidden[i] = found[0].to(states.hidden[i].dtype)
        states.arguments.hand_on(block.index, i, handed)
        seen.append(found[1])
    return seen


def add_inputs(H: Tensor, inputs: Tensor, outputs: Tensor) -> None:
    """Adds u u^T / |y|^2 to H (in, in), for tokens with ``inputs`` u (tokens, in) of a matrix.

    Their block's ``outputs`` y are (samples, length, width). So tokens with large states count for as much as others:
    what norms do behind blocks depends on directions, and a few tokens have states a thousand times as long as all
    others.
    """
    H.addmm_((inputs * _weights(outputs)).T, inputs)


def add_residuals(C: Tensor, inputs: Tensor, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Adds r u^T / |y|^2 to C (width, in), see :func:`add_inputs`, where r is what ``outputs`` lack to be ``wanted``.

    Returns r and r / |y|^2 (tokens, width).
    """
    residuals = (wanted.float() - outputs.float()).flatten(0, -2)
    weighted = residuals * _weights(outputs)
    C.addmm_(weighted.T, inputs)
    return residuals, weighted


def summed(shape: tuple[int, int], add: Callable[..., object], world: World, *values: SpillList) -> Tensor:
    """What ``add``, :func:`add_inputs` or :func:`add_residuals`, sums over all batches of ``values`` and processes."""
    total = torch.zeros(shape, device=values[0][0].device)
    for batch in zip(*values, strict=True):
        add(total, *batch)
    world.sum([total])
    check(total)
    return total


def check(*moments: Tensor) -> None:
    """Raises NumericalError where sums over tokens are NaN or infinite."""
    if not all(map(is_finite, moments)):
        raise NumericalError("hidden states are NaN or infinite on the calibration text; try dtype float32")


def _weights(outputs: Tensor) -> Tensor:
    """(tokens, 1): the inverse squared lengths of ``outputs`` (samples, length, width)."""
    squares = outputs.float().flatten(0, -2).square().sum(1, keepdim=True)
    return 1 / squares.clamp_(min=torch.finfo(torch.float32).tiny)


def bridge(
    block: DecoderBlock,
    matrix: Matrix,
    states: HiddenStates,
    wanted: SpillList,
    world: World,
    done: Callable[[], None] = lambda: None,
) -> tuple[Tensor, float, float, int]:
    """Changes ``matrix``, the last one of ``block``, so that the block's outputs come near to ``wanted``.

    ``states`` are the inputs of the block, ``wanted`` the dense model's states behind the blocks that are gone, in the
    same batches. Columns of zeros stay zero. The new weights are W + D with

        minimize  sum_t |r_t - D u_t|^2 / |y_t|^2 + ridge,

    where u are the inputs of the matrix, y the block's outputs and r what they lack: ReplaceMe (Shopkhoev et al. 2025,
    arXiv 2505.02819) with all inputs of the matrix instead of its outputs, which fits better
    (docs/results-quality.md), and with tokens that count alike.

    Returns:
        What was put into ``block``, in the layout of the checkpoint; the squared errors before and after, relative to
        the outputs, as means over tokens; the number of tokens.
    """
    W = matrix.within(block.module.get_parameter(matrix.parameter)).detach().float()
    H, C = W.new_zeros(W.shape[1], W.shape[1]), torch.zeros_like(W)
    tokens, before = 0, 0.0
    for i in range(len(states.hidden)):
        found = run_with_inputs(block, matrix, states, i)
        assert found  # as in last_matrix
        outputs, inputs = found
        add_inputs(H, inputs, outputs)
        residuals, weighted = add_residuals(C, inputs, outputs, wanted[i])
        before += float((residuals * weighted).sum(dtype=torch.float64))
        tokens += len(inputs)
        done()
    tokens, before = (sum(each) for each in zip(*world.collected((tokens, before)), strict=True))
    world.sum([H, C])
    check(H, C)
    zero = ~(W != 0).any(dim=0)
    H[zero], H[:, zero], C[:, zero] = 0.0, 0.0, 0.0
    D = Ridge(H, DAMPING).change(C)
    gain = 2 * float((D * C).sum(dtype=torch.float64)) - float(((D @ H) * D).sum())
    stored = world.send(block.stored(matrix, W + D), 0)
    block.put(matrix, stored)
    return stored, before / tokens, max(before - gain, 0.0) / tokens, tokens


#: Predictions of one in so many tokens are compared: neighbours are alike, and the head takes as long as many blocks.
EVERY = 4
#: Logits, probabilities and their differences, which are in memory at once.
_COPIES = 4


@dataclass
class _Repair:
    """The dense model behind a block after which others are gone, for the repair of its last matrix."""

    matrix: Matrix
    inputs: SpillList
    outputs: SpillList  # of the block
    #: Of its inputs, which all repairs with the matrix share; where it loses columns, its weights (out, in) and H.
    ridge: Ridge | tuple[Tensor, Tensor]


@dataclass
class _Gap:
    """Blocks that are gone, behind which the dense model has not come yet."""

    start: int  # the block before them
    inputs: SpillList  # of its last matrix
    change: Tensor | None  # (out, in) float32, what the removal of units did to that


@dataclass
class Variant:
    """A model without ``blocks``, and in the others without so many units of each kind."""

    blocks: Sequence[int]
    units: Mapping[str, int] = field(default_factory=dict)
    states: HiddenStates | None = None  # None as long as they are the dense model's
    gap: _Gap | None = None


@dataclass
class RemovalTrial:
    """Runs all ``ways`` on the tokens that are ``compared``, each block repaired or cut by what is ``fitted``.

    The block before a gap is repaired (see :func:`.bridge.bridge`) on the inputs that the dense model has. What blocks
    hand on that are gone stays the dense model's.
    """

    model: StreamedModel
    fitted: HiddenStates
    compared: HiddenStates
    ways: Sequence[Variant]
    world: World
    progress: Progress
    budget: MemoryBudget
    kinds: Sequence[ColumnUnits] = ()
    importance: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)

    def costs(self) -> list[float]:
        """What all ways cost, see :func:`divergences`."""
        repairs: dict[int, _Repair] = {}
        for block in self.model.stream():
            at = block.index
            for way in self.ways:
                if way.states is None and (way.units or at in way.blocks or at + 1 in way.blocks):
                    way.states = self.compared.branch(copied(self.compared, self.budget))
            present = [way for way in self.ways if way.states and at not in way.blocks]
            self.progress.stage(at, "influence", 2 + len(present))
            grams = self._grams(block)
            self.progress.step()
            repair = self._dense(block, any(at + 1 in way.blocks for way in present))
            if repair:
                repairs[at] = repair
            self.progress.step()
            self._cut(block, self.kinds, grams, present, repair)
            residuals: dict[int, Tensor] = {}
            for way in self.ways:
                if way.states and at in way.blocks:
                    way.states.arguments.adopt(self.compared.arguments, at)
                if way.gap and at > way.gap.start and at + 1 not in way.blocks:
                    self._repair(way, way.gap, repairs[way.gap.start], residuals)
                    way.gap = None
            waiting = {way.gap.start for way in self.ways if way.gap}
            repairs = {start: each for start, each in repairs.items() if start in waiting}
        return divergences(self.model, self.compared, [way.states or self.compared for way in self.ways], self.world)

    def _grams(self, block: DecoderBlock) -> dict[str, Gram]:
        """The Gram matrices of the dense model's inputs, by the name of each matrix that loses columns."""
        if not self.kinds:
            return {}
        matrices = [kind.matrices[block.index] for kind in self.kinds]
        found = block.input_grams(self.fitted, world=self.world, matrices=matrices)
        return {name: each.gram(shared=False) for each in found for name in each.names}

    def _cut(
        self,
        block: DecoderBlock,
        kinds: Sequence[ColumnUnits],
        grams: Mapping[str, Gram],
        ways: Sequence[Variant],
        repair: _Repair | None,
    ) -> None:
        """Runs ``block`` for ``ways``, each without its units of ``kinds``; one number of them after the other."""
        if not kinds:
            for way in ways:
                self._advance(block, way, repair)
                self.progress.step()
            return
        matrix, kind = kinds[0].matrices[block.index], kinds[0].kind
        numbers = sorted({way.units.get(kind, 0) for way in ways})
        W = block.weight(matrix)
        for number, weights in self._solved(kinds[0], matrix, W, grams[matrix.name], numbers):
            block.put(matrix, block.stored(matrix, weights))
            some = [way for way in ways if way.units.get(kind, 0) == number]
            self._cut(block, kinds[1:], grams, some, repair)

    def _solved(
        self, units: ColumnUnits, matrix: Matrix, W: Tensor, gram: Gram, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """``numbers`` in ascending order, with the weights (out, in) without so many of ``units``."""
        counts = [number for number in numbers if number]
        if counts != numbers:
            yield 0, W
        if counts:
            with named(matrix.label):
                rows = self.importance.get(matrix.place)
                removals = removals_of_units(LayerProblem(W, gram), units.size, counts, rows)
                for count, each in zip(counts, removals, strict=True):
                    yield count, each.W

    def _dense(self, block: DecoderBlock, is_before_gap: bool) -> _Repair | None:
        """Runs the dense ``block``; what a repair there needs, if others ``is_before_gap`` and it can be repaired."""
        matrix = last_matrix(block, self.compared) if is_before_gap else None
        block.advance(self.compared)
        if matrix is None:
            block.advance(self.fitted)
            return None
        inputs = advance_with_inputs(block, matrix, self.fitted, self.budget)
        H = summed((matrix.shape[1], matrix.shape[1]), add_inputs, self.world, inputs, self.fitted.hidden)
        ridge = (block.weight(matrix), H) if self.kinds else Ridge(H, DAMPING)
        return _Repair(matrix, inputs, copied(self.fitted, self.budget), ridge)

    def _advance(self, block: DecoderBlock, way: Variant, repair: _Repair | None) -> None:
        """Runs ``block``, without the units that go, and before a gap keeps what its repair needs."""
        assert way.states
        if not repair or block.index + 1 not in way.blocks:
            block.advance(way.states)
            return
        inputs, change = advance_with_inputs(block, repair.matrix, way.states, self.budget), None
        if isinstance(repair.ridge, tuple):
            own = repair.matrix.within(block.module.get_parameter(repair.matrix.parameter))
            change = own.float() - repair.ridge[0]
        way.gap = _Gap(block.index, inputs, change)

    def _repair(self, way: Variant, gap: _Gap, repair: _Repair, residuals: dict[int, Tensor]) -> None:
        """Adds to the outputs of the block before ``gap`` what its last matrix, repaired, would add."""
        assert way.states
        if gap.start not in residuals:
            inputs, outputs, shape = repair.inputs, repair.outputs, repair.matrix.shape
            residuals[gap.start] = summed(shape, add_residuals, self.world, inputs, outputs, self.fitted.hidden)
        C, ridge = residuals[gap.start], repair.ridge
        if isinstance(ridge, tuple):
            weights, H = ridge
            if gap.change is not None and gap.change.any():
                C = C - gap.change @ H  # what the units that go have left undone
                kept = (weights + gap.change != 0).any(dim=0)
                H, C = H * kept * kept.unsqueeze(1), C * kept
            ridge = Ridge(H, DAMPING)
        change = ridge.change(C)
        for i, batch in enumerate(gap.inputs):
            hidden = way.states.hidden[i]
            way.states.hidden[i] = (hidden.float() + (batch @ change.T).view(hidden.shape)).to(hidden.dtype)


def copied(states: HiddenStates, budget: MemoryBudget) -> SpillList:
    """The hidden states of each batch as they are now."""
    copy = SpillList(budget)
    for hidden in states.hidden:
        copy.append(hidden)
    return copy


def divergences(model: StreamedModel, dense: HiddenStates, others: Sequence[HiddenStates], world: World) -> list[float]:
    """How far the predictions from the last hidden states of each of ``others`` are from those of ``dense``.

    That is the KL divergence in nats a token, on every fourth token; of a model without a head the squared error of the
    states, relative to them. NumericalError where predictions are NaN or infinite.
    """
    sums, count = torch.zeros(len(others), dtype=torch.float64), 0.0
    if model.has_head:
        rows = model.tokens_at_a_time(_COPIES)
        with model.head() as head:
            for i, states in enumerate(dense.hidden):
                all_states = (each.hidden[i] for each in others)
                for hidden, tokens, *some in pieces(rows, states, dense.tokens[i], *all_states):
                    chosen = tokens[:, ::EVERY]
                    count += chosen.numel()
                    p = head(hidden[:, ::EVERY], chosen).float().log_softmax(-1)
                    for k, other in enumerate(some):
                        q = head(other[:, ::EVERY], chosen).float().log_softmax(-1)
                        sums[k] += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    else:
        for i, states in enumerate(dense.hidden):
            count += float(states.double().square().sum())
            for k, each in enumerate(others):
                sums[k] += float((each.hidden[i].double() - states.double()).square().sum())
    world.sum([sums])
    costs = (sums / sum(world.collected(count))).tolist()
    if not all(map(math.isfinite, costs)):
        raise NumericalError("predictions are NaN or infinite on the calibration text; try dtype float32")
    return [max(0.0, cost) for cost in costs]
