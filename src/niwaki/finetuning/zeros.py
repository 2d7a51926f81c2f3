"""Zeros that stay zeros while a pruned model is trained by any program that uses optimizers of torch."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from niwaki.checkpoints.tensors import read_header, read_json, read_tensor
from niwaki.choices import TWO_FACTORS
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError, shown
from niwaki.files import replace_file
from niwaki.finetuning.adapters import is_pruned, mask_lora
from niwaki.finetuning.grids import KeptGrid, grid_in, plain_name, told_of, values_of
from niwaki.packed.kernels import mask_

#: The weights of models; those of adapters, which have no zeros of the model, are called otherwise.
_WEIGHTS, _ADAPTERS = "model*.safetensors", "adapter_model*"
#: By bytes of a number, integers as wide.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: What keeps the zeros of each model, for as long as that lives.
_ALIVE = weakref.WeakKeyDictionary[nn.Module, "KeptZeros"]()


class KeptZeros:
    """Keeps the zeros of a model while it is trained; made by :func:`keep_zeros`, which says how.

    Attributes:
        zeros: Number of zeros in all matrices whose zeros are kept.
        sparsity: The same as a fraction of the weights of these matrices.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"keep_zeros takes a model in memory, any module of torch; got {shown(model)}")
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise UnsupportedModelError(
                "FSDP 1 puts several matrices into one parameter, whose zeros cannot be kept; use FSDP 2 (fully_shard)"
            )
        # PEFT keeps those that it trains a copy of.
        named = ((name, value) for name, value in model.named_parameters() if ".original_module." not in name)
        counted = {name: (value, _zeros(value)) for name, value in named if value.ndim > 1}
        found = {name: (value, zeros) for name, (value, zeros) in counted.items() if is_pruned(zeros, value.numel())}
        if not found:
            why = (
                "its weights are products of two sparse factors, which only niwaki heal trains"
                if str(told_of(model).get("pattern")).startswith(TWO_FACTORS)
                else "was it pruned, and loaded from the pruned directory?"
            )
            raise UsageError(f"the model has no zeros to keep, as no matrix has 0.1 % of them; {why}")
        self._grid = KeptGrid(model) if grid_in(model) else None
        self._model = weakref.ref(model)
        #: By name in the model.
        self._kept = {name: _Mask(value, _packed(_local(value) != 0), zeros) for name, (value, zeros) in found.items()}
        self._by_number = {id(kept.parameter): kept for kept in self._kept.values()}
        self.zeros = sum(kept.zeros for kept in self._kept.values())
        self.sparsity = self.zeros / sum(kept.parameter.numel() for kept in self._kept.values())
        self._unmask = mask_lora(model, {*found})
        self._handles = [
            *(self._watch_gradient(kept.parameter) for kept in self._kept.values()),
            register_optimizer_step_pre_hook(_weakly(self, KeptZeros.before_step)),
            register_optimizer_step_post_hook(_weakly(self, KeptZeros.after_step)),
        ]
        _ALIVE[model] = self

    def check(self) -> None:
        """Checks that all zeros of the model are still zero.

        Raises:
            OutputError: some are not; the message names the matrices that lost most.
        """
        lost = {}
        for name, kept in self._kept.items():
            if gone := _all(int((_local(kept.parameter)[~kept.mask()] != 0).sum()), kept.parameter):
                lost[name] = gone
        if lost:
            worst = sorted(lost, key=lost.__getitem__, reverse=True)[:3]
            raise OutputError(
                f"{sum(lost.values()):,} of {self.zeros:,} zeros of the model are nonzero now, most of them in "
                f"{', '.join(worst)}; was it trained by something that is not a torch optimizer?"
            )

    def check_saved(self, directory: str | Path) -> None:
        """Checks that a model saved in ``directory``, as by ``save_pretrained``, has all of the zeros.

        If weights are on a grid, their scales are added to the directory. If it has only an adapter, nothing is
        checked.

        Raises:
            OutputError: zeros are missing; ``pruning_config`` has been removed from config.json, as it would no longer
                be true.
            CheckpointError: there are no weights.
        """
        if not isinstance(directory, str | Path):
            raise UsageError(f"check_saved takes a directory; got {shown(directory)}")
        directory = Path(directory)
        files = sorted(directory.glob(_WEIGHTS))
        if not files:
            if any(directory.glob(_ADAPTERS)):
                return
            raise CheckpointError(f"{directory} has no {_WEIGHTS}; give a directory that save_pretrained has written")
        found = {key: count for file in files for key, count in _zeros_of(file).items()}
        expected = {plain_name(name): kept.zeros for name, kept in self._kept.items()}
        lost = sum(max(0, count - found[name]) for name, count in expected.items() if name in found)
        # Files may have some of them under other names, or in one tensor.
        others = sum(found.values()) - sum(found.get(name, 0) for name in expected)
        lost += max(0, sum(count for name, count in expected.items() if name not in found) - others)
        if not lost:
            if self._grid:
                self._grid.complete(directory)
            return
        path = directory / "config.json"
        config = read_json(path)
        if config.pop("pruning_config", None) is not None:
            replace_file(path, json.dumps(config, indent=2) + "\n")
        raise OutputError(
            f"{directory} has lost {lost:,} of {self.zeros:,} zeros, so its config.json says no longer that it is "
            "pruned; was it trained by something that is not a torch optimizer, or merged with adapters otherwise than "
            "by niwaki.merge_lora?"
        )

    def remove(self) -> None:
        """Stops keeping zeros: from now on training may fill them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unmask()

    def __enter__(self) -> KeptZeros:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _watch_gradient(self, parameter: nn.Parameter) -> RemovableHandle:
        """Has the gradient masked as soon as it is there, also that of a parameter that is only trained later."""
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._mask_gradient)
        parameter.requires_grad_(is_trained)
        return handle

    @torch.no_grad()
    def _mask_gradient(self, parameter: Tensor) -> None:
        """Masks a gradient, so that its norm, and what optimizers remember, are of weights that are trained."""
        kept = self._by_number.get(id(parameter))
        if kept and parameter.grad is not None:
            kept.mask_(parameter.grad)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Called before each step of any optimizer: restores the unrounded weights, if they are on a grid."""
        if self._grid:
            self._grid.before_step(optimizer)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Called after each step of any optimizer: sets the zeros to 0 again, as some optimizers change them."""
        self._check_parameters(optimizer)
        for parameter in values_of(optimizer):
            if kept := self._by_number.get(id(parameter)):
                kept.mask_(parameter)
        if self._grid:
            self._grid.after_step(optimizer)

    def _check_parameters(self, optimizer: Optimizer) -> None:
        """UsageError where ``optimizer`` trains the model, and that has others than when they were to be kept."""
        if (model := self._model()) is None:
            return
        there = {id(value): name for name, value in model.named_parameters()}
        if not any(id(value) in there for value in values_of(optimizer)):
            return
        now = {name: there.get(id(kept.parameter)) for name, kept in self._kept.items()}
        if any(at is None or (".base_layer." in at and ".base_layer." not in name) for name, at in now.items()):
            raise UsageError(
                "the model has other parameters than when its zeros were to be kept; call keep_zeros after what "
                "changes them, such as fully_shard and get_peft_model"
            )


def keep_zeros(model: nn.Module) -> KeptZeros:
    """Keeps the zeros of ``model`` zero while any optimizer of torch trains it: use it to fine-tune a pruned model.

    Call it once, when the model is in the form in which it is trained (after ``fully_shard`` or DDP), and train as
    usual. It works with gradient accumulation, autocast, ``torch.compile``, DDP and FSDP 2, and takes one bit for each
    weight, or with a grid 4 bytes more.

    The zeros of every matrix are kept (experts too) of which at least 0.1 % but not all weights are zero. Vectors, and
    adapters that begin with zeros, are trained as a whole. Gradients are masked as soon as they are accumulated, so
    clipping by their norm and the optimizer's state see only trained weights; weights are masked after each step.
    PEFT's LoRA is computed only where weights are nonzero, so :func:`niwaki.merge_lora` loses nothing. Weights that
    niwaki has put on a grid stay on it: the model computes with the rounded weights, while steps change the unrounded
    ones.

    Args:
        model: Any module, by niwaki or not, with or without adapters of PEFT.

    Returns:
        An object that keeps the zeros for as long as the model lives, or until :meth:`~KeptZeros.remove`; it can be
        used as a context manager. Its :meth:`~KeptZeros.check` says whether all zeros are still there.

    Raises:
        UsageError: no matrix has zeros; later, from an optimizer's step: the model's parameters were replaced.
        UnsupportedModelError: the model uses FSDP 1, or its weights are on a grid and split over processes.
        CheckpointError: the weights are on a grid whose scales cannot be found.
    """
    return KeptZeros(model)


@dataclass
class _Mask:
    """A parameter, and which of its weights (of those in this process) are no zeros, in bits."""

    parameter: nn.Parameter
    bits: Tensor
    zeros: int

    def mask(self) -> Tensor:
        """Where it is no zero, in its shape."""
        local = _local(self.parameter)
        return self._unpacked(local, torch.bool)

    def mask_(self, values: Tensor) -> None:
        """Makes 0 what of ``values``, the parameter or its gradient, is at one of the zeros, also NaN there."""
        local = _local(values)
        self.bits = self.bits.to(local.device)  # the model may have been moved
        if mask_(local, self.bits):
            return
        integers = _INTEGERS[local.itemsize]
        local.view(integers).bitwise_and_(self._unpacked(local, integers))

    def _unpacked(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        self.bits = self.bits.to(like.device)  # the model may have been moved
        return _table(dtype, like.device).index_select(0, self.bits.int()).flatten()[: like.numel()].view(like.shape)


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256, 8): what each byte is as eight values of ``dtype``, all bits set or none, True or False."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return bits.bool() if dtype == torch.bool else -bits.to(dtype)


def _packed(mask: Tensor) -> Tensor:
    """Eight of ``mask`` in a byte, the first in its lowest bit."""
    flat = nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (flat * powers).sum(1, dtype=torch.uint8)


def _local(value: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _all(count: int, value: Tensor) -> int:
    """``count`` of all processes that have a part of ``value``."""
    if not isinstance(value, DTensor):
        return count
    total = torch.tensor(count, device=value.to_local().device)
    for mesh_dim, placement in enumerate(value.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(total, group=value.device_mesh.get_group(mesh_dim))
    return int(total)


def _zeros(value: Tensor) -> int:
    """How many there are in all of ``value``, in all processes."""
    local = _local(value)
    return _all(local.numel() - int(local.count_nonzero()), value)


def _zeros_of(file: Path) -> dict[str, int]:
    """How many zeros each matrix of a safetensors file has."""
    matrices = ((key, entry) for key, entry in read_header(file).items() if len(entry.shape) > 1)
    return {key: _zeros(read_tensor(file, key, entry)) for key, entry in matrices}


def _weakly(zeros: KeptZeros, do: Callable[[KeptZeros, Optimizer], None]) -> Callable[..., None]:
    """A hook for all optimizers that does not keep the model in memory."""
    reference = weakref.ref(zeros)

    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if (alive := reference()) is not None:
            do(alive, optimizer)

    return hook
