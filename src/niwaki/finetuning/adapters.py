"""Adapters of PEFT on a pruned model: trained where its weights are not zero, and merged there."""

import warnings
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from niwaki.errors import OutputError, UnsupportedModelError, UsageError, shown
from niwaki.finetuning.grids import grid_in, plain_name

if TYPE_CHECKING:
    from peft import PeftModel

#: Ways to begin LoRA that change the weights themselves, and fill zeros before there is any training.
_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
#: Matrices with a smaller share of zeros were not pruned: rounding makes some.
_LEAST = 1e-3
#: By the dtype of weights, how far outputs may be from those before merging, relative to their norm.
_FAR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def is_pruned(zeros: int, weights: int) -> bool:
    """Whether a matrix of so many ``weights`` with so many ``zeros`` was pruned: those are what is to stay zero."""
    return _LEAST <= zeros / max(1, weights) < 1


@torch.no_grad()
def merge_lora(model: "PeftModel") -> nn.Module:
    """Merges the LoRA adapters of a pruned model into its weights without filling the zeros.

    Use it after training LoRA on a pruned model, in place of PEFT's ``merge_and_unload``. If :func:`niwaki.keep_zeros`
    was called before training, the result is exactly the model that was trained, which is checked on a few tokens. If
    not, what the adapters added to zeros is lost and the model is worse; a warning says so. In that case, rather merge
    with PEFT and restore the zeros with ``niwaki prune MERGED OUT --mask-from PRUNED --solver exact``, which
    compensates for them. Where ``modules_to_save`` has made the embeddings and the head of a model different, its
    configuration says so (``tie_word_embeddings``).

    Args:
        model: A model of PEFT with active adapters that can be merged and have not been merged yet. Its weights are
            changed.

    Returns:
        The pruned model itself, without the adapters' layers.

    Raises:
        UsageError: there is no adapter, or it was merged already, which has filled the zeros.
        UnsupportedModelError: PEFT is not installed; weights are packed, as with bitsandbytes; the adapters changed
            the weights when they were initialized (PiSSA, OLoRA); or the weights are those of other layers too, as tied
            embeddings and layers of ``layer_replication`` are.
        OutputError: the result does not compute what the trained model does.
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
    _check_shared(model, layers)
    trained, lost = _outputs(model), False
    for layer in layers.values():
        weight: Tensor = layer.get_base_layer().weight  # type: ignore[assignment]
        zeros = weight == 0
        layer.merge(safe_merge=True)
        if isinstance(layer, MaskedLinear) or is_pruned(int(zeros.sum()), zeros.numel()):
            lost |= not isinstance(layer, MaskedLinear) and bool(weight[zeros].any())
            weight.masked_fill_(zeros, 0)
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                for (_, old), new in zip(module.original_module.named_parameters(), copy.parameters(), strict=True):
                    zeros = old == 0
                    if old.ndim > 1 and is_pruned(int(zeros.sum()), old.numel()):
                        lost |= bool(new[zeros].any())
                        new.masked_fill_(zeros, 0)
    merged: nn.Module = model.unload()
    _tell_ties(merged)
    if trained is not None and not lost:
        _check_outputs(trained, merged)
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
        kept = {id(model.get_parameter(name)) for name in names}  # layers can share one, which has one of their names
        for name, layer in model.named_modules():
            if not isinstance(layer, BaseTunerLayer):
                continue
            if kept.isdisjoint(id(value) for value in layer.get_base_layer().parameters()):
                continue
            kind: Any = type(layer)
            is_plain = kind in (Linear, MaskedLinear) and type(layer.get_base_layer()) is nn.Linear
            if not is_plain or layer.lora_variant or any(layer.lora_bias.values()):  # type: ignore[attr-defined]
                raise UnsupportedModelError(
                    f"the adapter of {name} is not a plain LoRA (without lora_bias) of a linear layer, and would "
                    "change zeros; train it without keep_zeros, merge it with PEFT, and restore the zeros with niwaki "
                    "prune --mask-from"
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
    base = layer.get_base_layer()
    if not isinstance(getattr(base, "weight", None), Tensor):
        raise UnsupportedModelError(
            f"the adapter of {name} is of several parameters, and cannot be merged without filling zeros; merge it "
            "with PEFT, and restore the zeros with niwaki prune --mask-from"
        )
    if not base.weight.is_floating_point():
        raise UnsupportedModelError(
            f"the weights of {name} are packed numbers, so no adapter can be merged; load the model unquantized"
        )
    if any(getattr(layer, "lora_bias", {}).values()) and base.bias is None:
        raise UnsupportedModelError(
            f"the adapter of {name} has a bias (lora_bias), and the layer has none to add it to"
        )


def _check_shared(model: nn.Module, layers: dict[str, Any]) -> None:
    """UnsupportedModelError where merging the adapters of ``layers`` would change other layers too."""
    named = defaultdict[int, list[str]](list)
    for name, value in model.named_parameters(remove_duplicate=False):
        named[id(value)].append(plain_name(name))
    for layer in layers.values():
        if len(names := named[id(layer.get_base_layer().weight)]) > 1:
            raise UnsupportedModelError(
                f"{names[0]} and {names[1]} are one matrix, and an adapter of one of them cannot be merged without "
                "changing the other; keep the adapter, or train one of other layers"
            )


def _tell_ties(model: nn.Module) -> None:
    """Corrects the configuration of ``model`` where token embeddings and head are not one matrix any more."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    first, last = (getattr(end, "weight", None) for end in ends)
    config: Any = getattr(model, "config", None)
    if first is not None and last is not None and first is not last and config is not None:
        config.tie_word_embeddings = False


def _outputs(model: nn.Module) -> Tensor | None:
    """What a language model makes of a few tokens; None of one that takes more than tokens."""
    config: Any = getattr(model, "config", None)
    table = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
    if table is None or getattr(config, "is_encoder_decoder", True):
        return None
    tokens, is_training = torch.arange(16, device=table.device).mul_(37).remainder_(len(table))[None], model.training
    values: Tensor = model.eval()(input_ids=tokens, use_cache=False)[0]
    model.train(is_training)
    return values


def _check_outputs(trained: Tensor, merged: nn.Module) -> None:
    """OutputError where ``merged`` makes other values of the tokens than those that were ``trained``."""
    values, most = _outputs(merged), _FAR[next(merged.parameters()).dtype]
    assert values is not None
    far = float((values.double() - trained.double()).norm() / trained.double().norm().clamp(min=1e-30))
    if not far <= most:
        raise OutputError(
            f"the merged model is not the trained one: what it makes of a few tokens differs by {far:.2g} of its norm; "
            "load both again, and keep the adapter or merge it with PEFT"
        )
