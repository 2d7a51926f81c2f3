"""Adapters of PEFT on a pruned model: trained where its weights are not zero, and merged there."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from niwaki.errors import UnsupportedModelError, UsageError, shown
from niwaki.finetuning.grids import grid_in

if TYPE_CHECKING:
    from peft import PeftModel

#: Ways to begin LoRA that change the weights themselves, and fill zeros before there is any training.
_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")


@torch.no_grad()
def merge_lora(model: "PeftModel") -> nn.Module:
    """Merges the LoRA adapters of a pruned model into its weights without filling the zeros.

    Use it after training LoRA on a pruned model, in place of PEFT's ``merge_and_unload``. If :func:`niwaki.keep_zeros`
    was called before training, the result is exactly the model that was trained. If not, what the adapters added to
    zeros is lost and the model is worse; a warning says so. In that case, rather merge with PEFT and restore the zeros
    with ``niwaki prune MERGED OUT --mask-from PRUNED --solver exact``, which compensates for them.

    Args:
        model: A model of PEFT with active adapters that can be merged and have not been merged yet. Its weights are
            changed.

    Returns:
        The pruned model itself, without the adapters' layers.

    Raises:
        UsageError: there is no adapter, or it was merged already, which has filled the zeros.
        UnsupportedModelError: PEFT is not installed; weights are packed, as with bitsandbytes; or the adapters changed
            the weights when they were initialized (PiSSA, OLoRA).
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"merge_lora takes a model of PEFT; got {shown(model)}")
    if find_spec("peft") is None:
        raise UnsupportedModelError("adapters are PEFT's; pip install peft")
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    from niwaki.finetuning.masked_lora import MaskedLinear

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
    if not layers:
        raise UsageError("the model has no adapter to merge; give what peft.get_peft_model returned")
    _check_beginning(model)
    for name, layer in layers.items():
        _check(name, layer)
    lost = False
    for layer in layers.values():
        weight: Tensor = layer.get_base_layer().weight  # type: ignore[assignment]
        zeros = weight == 0
        layer.merge(safe_merge=True)
        lost |= not isinstance(layer, MaskedLinear) and bool(weight[zeros].any())
        weight.masked_fill_(zeros, 0)
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                for (_, old), new in zip(module.original_module.named_parameters(), copy.parameters(), strict=True):
                    if old.ndim > 1:
                        new.masked_fill_(old == 0, 0)
    merged: nn.Module = model.unload()
    if lost:
        warnings.warn(
            "the adapters were trained without keep_zeros, and what they made of zeros is lost; see niwaki.merge_lora",
            stacklevel=3,
        )
    if grid := grid_in(merged):
        config: Any = merged.config
        told = config.pruning_config
        config.pruning_config = {name: value for name, value in told.items() if name != "quantization"}
        warnings.warn(f"the weights are not on the grid {grid} any more; niwaki quantize puts them there", stacklevel=3)
    return merged


def mask_lora(model: nn.Module, names: set[str]) -> Callable[[], None]:
    """From now on LoRA changes no zero of the parameters ``names`` of ``model``; the result ends that.

    It takes longer than PEFT's two thin products: the gradient needs a product of the size of the matrix.
    UnsupportedModelError for kinds of LoRA that compute otherwise, such as DoRA.
    """
    masked = list[Any]()
    if find_spec("peft") is not None:
        from peft.tuners.lora.layer import Linear
        from peft.tuners.tuners_utils import BaseTunerLayer

        from niwaki.finetuning.masked_lora import MaskedLinear

        _check_beginning(model)
        for name, layer in model.named_modules():
            if not isinstance(layer, BaseTunerLayer) or f"{name}.base_layer.weight" not in names:
                continue
            kind: Any = type(layer)
            if kind not in (Linear, MaskedLinear) or layer.lora_variant or type(layer.base_layer) is not nn.Linear:  # type: ignore[attr-defined]
                raise UnsupportedModelError(
                    f"the adapter of {name} is not a plain LoRA of a linear layer, and would change zeros; train it "
                    "without keep_zeros, merge it with PEFT, and restore the zeros with niwaki prune --mask-from"
                )
            _check(name, layer)
            masked.append(layer)
        for layer in masked:
            layer.__class__ = MaskedLinear

    def unmask() -> None:
        for layer in masked:
            layer.__class__ = Linear

    return unmask


def _check_beginning(model: nn.Module) -> None:
    """UnsupportedModelError where an adapter has begun by changing weights."""
    configs: Any = getattr(model, "peft_config", {})
    for config in configs.values():
        how = str(getattr(config, "init_lora_weights", ""))
        if how.startswith(_CHANGING):
            raise UnsupportedModelError(
                f"LoRA that begins as {how} changes the weights of the model, and fills zeros; leave init_lora_weights "
                "as it is"
            )


def _check(name: str, layer: Any) -> None:
    """Raises where the adapter of a layer cannot be merged into its zeros."""
    if layer.merged:
        raise UsageError(f"the adapter of {name} was merged already, which fills zeros; load the pruned model again")
    if not layer.get_base_layer().weight.is_floating_point():
        raise UnsupportedModelError(
            f"the weights of {name} are packed numbers, so no adapter can be merged; load the model unquantized"
        )
