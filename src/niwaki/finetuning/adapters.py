"""Adapters of PEFT on a pruned model: trained where its weights are not zero, and merged there."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.finetuning.grids import grid_in

if TYPE_CHECKING:
    from peft import PeftModel


@torch.no_grad()
def merge_lora(model: "PeftModel") -> nn.Module:
    """The model without its adapters, whose changes are in the weights that are not zero.

    For after training LoRA on a pruned model: what ``merge_and_unload`` of PEFT does, but zeros stay zeros. Where
    :func:`niwaki.keep_zeros` was called before training, that is exactly the model that was trained. Where it was not,
    what the adapters made of zeros is lost, and the model is worse: then merge with PEFT, and give the zeros back with
    ``niwaki prune MERGED OUT --mask-from PRUNED --solver exact``, which makes up for them.

    Args:
        model: Of PEFT, with active adapters that can be merged and are not yet. Its weights are changed.

    Returns:
        The pruned model itself, without the layers of the adapters.

    Raises:
        UsageError: There is no adapter, or it was merged already, which has filled the zeros.
        UnsupportedModelError: PEFT is not installed, or weights are packed, as with bitsandbytes.
    """
    if find_spec("peft") is None:
        raise UnsupportedModelError("adapters are PEFT's; pip install peft")
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
    if not layers:
        raise UsageError("the model has no adapter to merge; give what peft.get_peft_model returned")
    for name, layer in layers.items():
        _check(name, layer)
    for layer in layers.values():
        weight: Tensor = layer.get_base_layer().weight  # type: ignore[assignment]
        zeros = weight == 0
        layer.merge(safe_merge=True)
        weight.masked_fill_(zeros, 0)
    merged: nn.Module = model.unload()
    if grid := grid_in(merged):
        config: Any = merged.config
        told = config.pruning_config
        config.pruning_config = {name: value for name, value in told.items() if name != "quantization"}
        warnings.warn(f"the weights are not on the grid {grid} any more; niwaki quantize puts them there", stacklevel=2)
    return merged


def mask_lora(model: nn.Module, names: set[str]) -> Callable[[], None]:
    """From now on LoRA changes no zero of the parameters ``names`` of ``model``; the result ends that.

    Layers compute with W + (B A) * (W != 0), as one product, which takes longer than PEFT's two thin ones: its gradient
    needs a product of the size of W. UnsupportedModelError for kinds of LoRA that compute otherwise, such as DoRA.

    Source: Zimmer et al. 2023, arXiv:2312.15230 (MaskLoRA).
    """
    masked = list[Any]()
    if find_spec("peft") is not None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for name, layer in model.named_modules():
            if isinstance(layer, BaseTunerLayer) and f"{name}.base_layer.weight" in names:
                _mask(name, layer)
                masked.append(layer)

    def unmask() -> None:
        for layer in masked:
            layer.__dict__.pop("forward", None)

    return unmask


def _mask(name: str, layer: Any) -> None:
    from peft.tuners.lora.layer import Linear

    if type(layer) is not Linear or layer.lora_variant or type(layer.get_base_layer()) is not nn.Linear:
        raise UnsupportedModelError(
            f"the adapter of {name} is no plain LoRA of a linear layer, and would change zeros; train it without "
            "keep_zeros, merge it with PEFT, and give the zeros back with niwaki prune --mask-from"
        )
    _check(name, layer)
    usual = layer.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        adapters = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if args or kwargs or layer.disable_adapters or layer.merged or not adapters:
            return usual(x, *args, **kwargs)
        base: Any = layer.get_base_layer()
        kept, changed, result = base.weight != 0, base.weight, None
        for adapter in adapters:
            change = layer.get_delta_weight(adapter) * kept
            dropout = layer.lora_dropout[adapter]
            if layer.training and not isinstance(dropout, nn.Identity):
                own = nn.functional.linear(dropout(x.to(change.dtype)), change)
                result = own if result is None else result + own
            else:
                changed = changed + change.to(changed.dtype)
        made = nn.functional.linear(x, changed, base.bias)
        return made if result is None else made + result.to(made.dtype)

    layer.forward = forward  # type: ignore[method-assign]


def _check(name: str, layer: Any) -> None:
    """Raises where the adapter of a layer cannot be merged into its zeros."""
    if layer.merged:
        raise UsageError(f"the adapter of {name} was merged already, which fills zeros; load the pruned model again")
    if not layer.get_base_layer().weight.is_floating_point():
        raise UnsupportedModelError(
            f"the weights of {name} are packed numbers, into which no adapter can be merged; load the model unquantised"
        )
