"""LoRA's linear layer, computed where the weights of a pruned model are not zero."""

from typing import Any

from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from niwaki.errors import UnsupportedModelError


class MaskedLinear(Linear):
    """W + (B A) * (W != 0), as one product: a layer of PEFT becomes one where its class is exchanged for this.

    Source: Zimmer et al. 2023, arXiv:2312.15230 (MaskLoRA).
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(.., out) of ``x`` (.., in)."""
        adapters = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        if kwargs.get("adapter_names"):
            raise UnsupportedModelError("while zeros are kept, all of a batch has the same adapters: no adapter_names")
        if args or kwargs or self.disable_adapters or self.merged or not adapters:
            return super().forward(x, *args, **kwargs)
        base: Any = self.get_base_layer()
        kept, changed, result = base.weight != 0, base.weight, None
        for adapter in adapters:
            change = self.get_delta_weight(adapter) * kept
            dropout = self.lora_dropout[adapter]
            if self.training and not isinstance(dropout, nn.Identity):
                own = nn.functional.linear(dropout(x.to(change.dtype)), change)
                result = own if result is None else result + own
            else:
                changed = changed + change.to(changed.dtype)
        made = nn.functional.linear(x, changed, base.bias)
        return made if result is None else made + result.to(made.dtype)
