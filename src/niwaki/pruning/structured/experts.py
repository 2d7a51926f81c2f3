"""Whole experts of a mixture: which to remove from each block, and how the others take over."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from niwaki.errors import UsageError
from niwaki.layer.expert_fit import fit_sum
from niwaki.models.block import DecoderBlock
from niwaki.models.families import choice
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.mixture import DOWN, Mixture, Routed, Router, find_experts
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.structured.units import Removal, UnitParameter, accepted, refused
from niwaki.records.progress import Progress

#: Names of the number of experts in configurations, and in modules.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Names of the number of groups that routers choose from first.
_GROUPS = ("n_group", "num_expert_group")


@dataclass(frozen=True)
class ExpertRemoval(Removal):
    """Experts: the least useful of each group that the router chooses from."""

    groups: int
    paths: list[str | None]  # of the experts in each block; None where there are none
    matrices: list[Matrix]  # whose outputs are the experts' own


@dataclass(frozen=True)
class FittedExperts:
    """The experts of a block that stay."""

    mask: Tensor  # (experts,) bool, of those that stay
    weights: list[tuple[Matrix, Tensor]]  # the last matrix of each that stays, as the checkpoint would have it
    error: float  # squared, of their outputs' sum, relative to that of all experts
    tokens: int  # the fewest that one of them has had
    stats: dict[str, float | int | str]


def expert_removal(model: StreamedModel, fraction: float) -> ExpertRemoval:
    """Removes ``fraction`` of the experts of each block that has some.

    Raises UsageError where this number cannot be removed, UnsupportedModelError where there are none, or blocks differ.
    """
    paths = [find_experts(block) for block in model.blocks]
    mixed = [matrix.block for matrix in model.matrices() if matrix.expert is not None]
    if not mixed:
        raise refused(model, "experts", "it has none")
    for index in mixed:
        if paths[index] is None:
            raise refused(model, "experts", f"those of block {index} run in a way that niwaki does not follow")
    counts = {len(model.blocks[index].get_submodule(str(paths[index])).get_parameter(DOWN)) for index in mixed}
    if len(counts) != 1:
        raise refused(model, "experts", f"blocks differ: there are {', '.join(map(str, sorted(counts)))}")
    (experts,) = counts
    names = [name for name in COUNTS if getattr(model.config, name, None) == experts]
    if not names:
        raise refused(model, "experts", f"its configuration has no entry for their number, {experts}")
    groups = next((value for name in _GROUPS if (value := getattr(model.config, name, None))), 1)
    chosen = getattr(model.config, "num_experts_per_tok", None) or getattr(model.config, "moe_k", None) or 1
    searched = getattr(model.config, "topk_group", None) or 1  # groups that a token's experts are of
    count = round(fraction * experts)
    allowed = []
    for n in range(groups, experts, groups):
        left = (experts - n) // groups  # of each group, which is judged by its best two
        enough = left * searched >= chosen and (left > 1 or groups == 1)
        if enough and accepted(model.config, dict.fromkeys(names, experts - n)):
            allowed.append(n)
    if count not in allowed:
        of = f" in {groups} groups" if groups > 1 else ""
        possible = ", ".join(f"{n / experts:.4g}" for n in allowed) or "none"
        raise UsageError(
            f"experts {fraction:g} of {experts}{of}, {chosen} for each token, would be {count}; its routing allows "
            f"{possible}"
        )
    parameters = [
        _parameters(block, path, experts) if path else [] for block, path in zip(model.blocks, paths, strict=True)
    ]
    down = [matrix for matrix in model.matrices() if matrix.parameter == f"{paths[matrix.block]}.{DOWN}"]
    if {matrix.block for matrix in down} != set(mixed):
        raise refused(model, "experts", "their last matrices are not known")
    config = dict.fromkeys(names, experts - count)
    return ExpertRemoval("experts", experts, count, config, parameters, groups, paths, down)


def _parameters(block: nn.Module, path: str, experts: int) -> list[UnitParameter]:
    """All parameters and buffers of a block with an entry for each expert: the experts' own and the router's."""
    beside = f"{path.rpartition('.')[0]}."
    return [
        UnitParameter(name, 0, 1)
        for name, value in block.state_dict().items()
        if value.ndim
        and len(value) == experts
        and (name.startswith(f"{path}.") or (name.startswith(beside) and choice(name) == "router"))
    ]


def fit_experts(
    block: DecoderBlock, removal: ExpertRemoval, smaller: nn.Module, states: HiddenStates, progress: Progress
) -> FittedExperts:
    """Chooses the experts of ``block`` that stay, and fits the last matrices of these to the outputs of all.

    Those go that have the lowest score of REAP, the mean over their tokens of gate times norm of output. The router
    then chooses among the others, with the weights it has, and their last matrices are fitted together, see
    :func:`niwaki.layer.expert_fit.fit_sum`. ``smaller`` is the block with fewer experts, whose router gets its weights
    here. ``states`` stay as they are.

    Reference: REAP, arXiv 2510.13999, eq. 9, for the score, which it also uses group by group where a router has
    groups; the fit is our own.
    """
    path = str(removal.paths[block.index])
    mixture = Mixture(block, path)
    batches: list[Routed] = []
    for hidden in states.hidden:
        batches.append(mixture.observe(hidden, states))
        progress.step()
    score = scores(mixture, batches, removal.units)
    kept = highest(score, removal.units - removal.count, removal.groups)
    mask = torch.zeros(removal.units, dtype=torch.bool).index_fill_(0, torch.tensor(kept), True)
    values = block.module.state_dict()
    choosing = [each for each in removal.parameters[block.index] if not each.name.startswith(path)]
    weights = {each.name: each.without(values[each.name], mask) for each in choosing}
    smaller.load_state_dict(weights, strict=False, assign=True)
    with torch.no_grad():
        routed = [Router(smaller, path).route(batch) for batch in batches]
    return _fitted(mixture, kept, mask, routed)


def scores(mixture: Mixture, batches: list[Routed], experts: int) -> list[float]:
    """REAP's score of each expert; 0 of one without tokens."""
    values = []
    for expert in range(experts):
        total, tokens = 0.0, 0
        for batch in batches:
            rows, gates = batch.to(expert)
            if len(rows):
                _, outputs = mixture.answer(expert, batch.X[rows])
                total += float((gates[:, 0] * outputs.norm(dim=1)).sum(dtype=torch.float64))
                tokens += len(rows)
        values.append(total / max(1, tokens))
    return values


def highest(scores: list[float], count: int, groups: int) -> list[int]:
    """The ``count`` experts with the highest scores, as many of each group, in ascending order."""
    size = len(scores) // groups
    kept = []
    for start in range(0, len(scores), size):
        order = sorted(range(start, start + size), key=lambda expert: -scores[expert])
        kept += order[: count // groups]
    return sorted(kept)


def _fitted(mixture: Mixture, kept: list[int], mask: Tensor, batches: list[Routed]) -> FittedExperts:
    block, parameter = mixture.block, mixture.experts.get_parameter(DOWN)
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + len(batch.X))
    residual = torch.cat([batch.Y.float() for batch in batches])
    power = float(residual.square().sum(dtype=torch.float64))
    counts = []
    for new, expert in enumerate(kept):
        tokens = 0
        for batch, start in zip(batches, starts, strict=False):
            rows, gates = batch.to(new)
            if len(rows):
                _, outputs = mixture.answer(expert, batch.X[rows])
                residual[start + rows] -= gates * outputs
            tokens += len(rows)
        counts.append(tokens)

    def inputs(new: int) -> tuple[Tensor, Tensor]:
        places, values = [], []
        for batch, start in zip(batches, starts, strict=False):
            rows, gates = batch.to(new)
            if len(rows):
                places.append(start + rows)
                values.append(gates * mixture.answer(kept[new], batch.X[rows])[0])
        return (torch.cat(places), torch.cat(values)) if places else (torch.empty(0, dtype=torch.int64), torch.empty(0))

    def old(new: int) -> Tensor:
        return mixture.down[kept[new]].within(parameter).float()

    fit = fit_sum(old, inputs, len(kept), residual)
    weights = []
    for expert, W in zip(kept, fit.W, strict=True):
        matrix = mixture.down[expert]
        weights.append((matrix, block.stored(matrix, W)))
        block.put(*weights[-1])
    power = max(power, 1e-30)
    stats: dict[str, float | int | str] = {"error_before_fit": fit.before / power, "sweeps": fit.sweeps}
    return FittedExperts(mask, weights, fit.after / power, min(counts), stats)
