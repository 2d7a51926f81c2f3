"""Whole experts of a mixture: which to remove from each block, and how the others take over."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.errors import UsageError
from niwaki.layer.unit_removal import fit_sum
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.mixture import DOWN, Mixture, Routed, Router, find_experts
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import choice
from niwaki.records.progress import Progress
from niwaki.shrinking.units import Removal, UnitParameter, accepted, refused

#: Names of the number of experts in configurations, and in modules.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Names of the number of groups that routers choose from first.
_GROUPS = ("n_group", "num_expert_group")
#: Names of the number of experts for each token.
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")


@dataclass(frozen=True)
class ExpertRemoval(Removal):
    """The removal of whole experts, as many of each group that the router chooses from."""

    paths: list[str | None]  # of the experts in each block; None where there are none
    groups: int


@dataclass(frozen=True)
class FittedExperts:
    """The experts of a block after some have gone."""

    weights: list[tuple[Matrix, Tensor]]  # the last matrix of each expert that stays, as the checkpoint would have it
    error: float  # squared, of their outputs' sum, relative to that of all experts
    tokens: int  # the fewest that one of them has had
    stats: dict[str, float | int | str]


def _find_mixtures(model: StreamedModel) -> tuple[list[str | None], int, list[Matrix]]:
    """(The path of the experts in each block, None where there are none; their number; their last matrices).

    UsageError where ``model`` has no experts, UnsupportedModelError where they are unknown.
    """
    paths = [find_experts(block) for block in model.blocks]
    mixed = dict.fromkeys(matrix.block for matrix in model.matrices() if matrix.expert is not None)
    if not mixed:
        raise UsageError("there are no experts to remove, because the model has no experts; give neurons or heads")
    if unknown := [index for index in mixed if paths[index] is None]:
        raise refused(model, "experts", f"experts of block {unknown[0]} run in a way that niwaki does not follow")
    counts = {len(model.blocks[index].get_submodule(str(paths[index])).get_parameter(DOWN)) for index in mixed}
    if len(counts) != 1:
        raise refused(model, "experts", f"blocks differ: they have {', '.join(map(str, sorted(counts)))} experts")
    down = [matrix for matrix in model.matrices() if matrix.parameter == f"{paths[matrix.block]}.{DOWN}"]
    if {matrix.block for matrix in down} != set(mixed):
        raise refused(model, "experts", "the last matrices of experts are not known")
    return paths, counts.pop(), down


def expert_removal(model: StreamedModel, fraction: float) -> ExpertRemoval:
    """Removes ``fraction`` of the experts of each block that has some.

    Raises UsageError where there are none or this number cannot be removed, UnsupportedModelError where blocks differ.
    """
    (paths, experts, down), config = _find_mixtures(model), model.config
    if "." not in str(next(filter(None, paths))):
        raise refused(model, "experts", "their router runs outside of a module that has both")
    names = [name for name in COUNTS if getattr(config, name, None) == experts]
    if not names:
        raise refused(model, "experts", f"its configuration has no entry for their number, {experts}")
    groups = next((value for name in _GROUPS if (value := getattr(config, name, None))), 1)
    searched = getattr(config, "topk_group", None) or 1  # groups that a token's experts are of
    chosen = next((value for name in _CHOSEN if (value := getattr(config, name, None))), 1)
    chosen = max(chosen) if isinstance(chosen, list | tuple) else chosen  # of each block
    count = round(fraction * experts)
    allowed = []
    for n in range(groups, experts, groups):
        left = (experts - n) // groups  # of each group, which is judged by its best two
        enough = left * searched >= chosen and (left > 1 or groups == 1)
        if enough and accepted(config, dict.fromkeys(names, experts - n)):
            allowed.append(n)
    if count not in allowed:
        of = f" in {groups} groups" if groups > 1 else ""
        possible = f"{allowed[0]} to {allowed[-1]}" if allowed else "none"
        steps = f", in steps of {groups}" if groups > 1 and allowed else ""
        raise UsageError(
            f"experts {fraction:g} of {experts}{of}, {chosen} for each token, would be {count}; its routing allows "
            f"{possible}{steps}"
        )
    blocks = zip(model.blocks, paths, strict=True)
    parameters = [_parameters(block, path, experts) if path else [] for block, path in blocks]
    return ExpertRemoval(
        "experts", experts, parameters, down, count, dict.fromkeys(names, experts - count), paths, groups
    )


def _parameters(block: nn.Module, path: str, experts: int) -> list[UnitParameter]:
    """All parameters and buffers of a block with an entry for each expert: the experts' own and the router's."""
    parent = path.rpartition(".")[0]
    parameters = []
    for name, value in block.state_dict().items():
        own, beside = name.startswith(f"{path}."), name.startswith(f"{parent}." if parent else "")
        chooses = beside and (choice(name) == "router" or name.endswith("expert_bias"))
        if experts in (value.shape[:1] if own else value.shape[:2] if chooses else ()):
            parameters.append(UnitParameter(name, list(value.shape).index(experts), 1))
    return parameters


@dataclass(frozen=True)
class ChosenExperts:
    """The choice of the experts of a block that stay, and what all of them have seen."""

    mask: Tensor  # (experts,) bool, of those that stay
    arguments: list[tuple[Any, ...]]  # of the module that has the experts and their router, for each batch
    routed: Routed


def choose_experts(
    block: DecoderBlock, removal: ExpertRemoval, states: HiddenStates, progress: Progress
) -> ChosenExperts:
    """Chooses the experts of ``block`` that stay; ``states`` stay as they are.

    Those go that have the lowest score of REAP, the mean over their tokens of gate times norm of output.

    Reference: REAP, arXiv 2510.13999, eq. 9, which is also used group by group where a router has groups.
    """
    mixture = Mixture(block, str(removal.paths[block.index]))
    arguments, routed = mixture.observe(states, progress.step)
    kept = highest(scores(mixture, routed, removal.units), removal.units - removal.count, removal.groups)
    mask = torch.zeros(removal.units, dtype=torch.bool).index_fill_(0, torch.tensor(kept), True)
    return ChosenExperts(mask, arguments, routed)


def fit_experts(block: DecoderBlock, path: str, chosen: ChosenExperts) -> FittedExperts:
    """Fits the last matrices of the ``chosen`` experts, at ``path`` of ``block``, to the outputs of all.

    The router chooses among them, with the weights that it has; see :func:`niwaki.layer.unit_removal.fit_sum`. REAP has
    no such fit.
    """
    experts, gates = Router(block.module, path).route(chosen.arguments)
    mixture, routed = Mixture(block, path), Routed(chosen.routed.X, experts, gates, chosen.routed.Y)
    down, parameter = mixture.down, mixture.experts.get_parameter(DOWN)
    residual = routed.Y.to(torch.float32, copy=True)
    power = max(float(residual.square().sum(dtype=torch.float64)), 1e-30)
    counts = []
    for expert in range(len(down)):
        rows, gates = routed.to(expert)
        counts.append(len(rows))
        if len(rows):
            residual[rows] -= gates * mixture.answer(expert, routed.X[rows])[1]

    def inputs(expert: int) -> tuple[Tensor, Tensor]:
        rows, X = routed.to(expert)
        if len(rows):
            X = X * mixture.answer(expert, routed.X[rows])[0]
        return rows, X

    fit = fit_sum(lambda expert: down[expert].within(parameter).float(), inputs, len(down), residual)
    weights = []
    for expert in range(len(down)):
        matrix = down[expert]
        weights.append((matrix, block.stored(matrix, fit.W.pop(0))))  # or all would be there twice
        block.put(*weights[-1])
    stats: dict[str, float | int | str] = {"error_before_fit": fit.before / power, "sweeps": fit.sweeps}
    return FittedExperts(weights, fit.after / power, min(counts), stats)


def scores(mixture: Mixture, routed: Routed, experts: int) -> list[float]:
    """REAP's score of each expert; 0 of one without tokens."""
    values = [0.0] * experts
    for expert in range(experts):
        rows, gates = routed.to(expert)
        if len(rows):
            _, outputs = mixture.answer(expert, routed.X[rows])
            values[expert] = float((gates[:, 0] * outputs.norm(dim=1)).mean(dtype=torch.float64))
    return values


def highest(scores: list[float], count: int, groups: int) -> list[int]:
    """The ``count`` experts with the highest scores, as many of each group, in ascending order."""
    size = len(scores) // groups
    kept = []
    for start in range(0, len(scores), size):
        order = sorted(range(start, start + size), key=lambda expert: -scores[expert])
        kept += order[: count // groups]
    return sorted(kept)
