"""Neurons of experts: as many of each, because configurations have one number for all."""

from dataclasses import dataclass

import torch

from niwaki.errors import UsageError, named
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.unit_removal import remove_units
from niwaki.models.block import DecoderBlock
from niwaki.models.families import EXPERTS_INTERLEAVED
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.mixture import DOWN, Mixture
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.shrinking.experts import FittedExperts, MixtureRemoval, find_mixtures, fit_last
from niwaki.shrinking.units import UnitParameter, accepted, refused, rounded

_KIND = "expert neurons"
#: What modules of experts call the matrices that neurons come from, with their biases, by how many of them are in one.
_UP = {"gate_up_proj": 2, "gate_up_proj_bias": 2, "up_proj": 1, "up_proj_bias": 1}
#: Names of the number of neurons of an expert in configurations.
_WIDTHS = ("moe_intermediate_size", "intermediate_size")
#: Grouped products of experts, in torch and elsewhere, take rows of whole 16 bytes.
_MULTIPLE = 8


@dataclass(frozen=True)
class ExpertNeuronRemoval(MixtureRemoval):
    """Of neurons of all experts."""


def expert_neuron_removal(model: StreamedModel, fraction: float) -> ExpertNeuronRemoval:
    """Removes about ``fraction`` of the neurons of each expert: a multiple of 32 stays, see :func:`rounded`, or of 8.

    Raises UsageError where these are none or all, or there are no experts, UnsupportedModelError for unknown ones.
    """
    mixtures = find_mixtures(model, _KIND)
    widths = {matrix.shape[1] for matrix in mixtures.down}
    if len(widths) != 1 or any(matrix.flipped for matrix in mixtures.down):
        raise refused(model, _KIND, "experts of its blocks differ, or are stored in an unknown way")
    (width,) = widths
    name = next((name for name in _WIDTHS if getattr(model.config, name, None) == width), None)
    if name is None:
        raise refused(model, _KIND, f"its configuration has no entry for their number, {width}")
    count = rounded(width, fraction) or width - _MULTIPLE * round((1 - fraction) * width / _MULTIPLE)
    if not 0 < count < width or not accepted(model.config, {name: width - count}):
        raise UsageError(
            f"expert neurons {fraction:g} would leave {width - count} of {width}; a multiple of {_MULTIPLE} below "
            f"{width} has to stay"
        )
    parameters = [_parameters(model, index, path) if path else [] for index, path in enumerate(mixtures.paths)]
    return ExpertNeuronRemoval(_KIND, width, count, {name: width - count}, parameters, mixtures.down, mixtures.paths)


def _parameters(model: StreamedModel, index: int, path: str) -> list[UnitParameter]:
    is_interleaved = model.config.model_type in EXPERTS_INTERLEAVED
    transposed = {m.parameter: m.transposed for m in model.matrices(index) if m.expert is not None}
    parameters = [UnitParameter(f"{path}.{DOWN}", 1 if transposed[f"{path}.{DOWN}"] else 2, 1)]
    for name, value in model.blocks[index].get_submodule(path).named_parameters(recurse=False):
        if name in _UP:
            dimension = 1 if value.ndim == 2 or not transposed[f"{path}.{name}"] else 2
            size, times = (_UP[name], 1) if is_interleaved else (1, _UP[name])
            parameters.append(UnitParameter(f"{path}.{name}", dimension, size, times))
    return parameters


def fit_expert_neurons(
    block: DecoderBlock, removal: ExpertNeuronRemoval, states: HiddenStates, progress: Progress
) -> FittedExperts:
    """Chooses the neurons of each expert of ``block`` that stay, and fits the experts' last matrices.

    Of each expert those go that cost its outputs least, see :func:`niwaki.layer.unit_removal.remove_units`, of tokens
    weighted by their gates. Then what stays of all experts is fitted together, as in :func:`.experts.fit_experts`.
    ``states`` stay as they are.
    """
    mixture = Mixture(block, str(removal.paths[block.index]))
    _, routed = mixture.observe(states, progress.step)
    parameter = mixture.experts.get_parameter(DOWN)
    mask = torch.ones(len(mixture.down), removal.units, dtype=torch.bool)
    for expert in range(len(mixture.down)):
        matrix = mixture.down[expert]
        rows, gates = routed.to(expert)
        X = torch.zeros(1, removal.units, device=gates.device)
        if len(rows):
            X = gates * mixture.answer(expert, routed.X[rows])[0]
        with named(matrix.label):
            problem = LayerProblem(matrix.within(parameter).float(), Gram(X.T @ X / len(X), shared=False))
            solution = remove_units(problem, 1, removal.count)
        mask[expert] = solution.mask[0].cpu()
        block.put(matrix, block.stored(matrix, solution.W))
    return fit_last(mixture, mask, routed)
