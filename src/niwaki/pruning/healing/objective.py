"""How far a pruned model's predictions are from those of the dense model, by a few numbers for each token.

The head is not pruned. With its matrix W, the dense model's distribution p of the next token and the pruned model's
state h after the last norm,

    KL(p | softmax(W h)) = s - <h, c> + log sum exp(W h),    c = W^T p,    s = sum_v p_v log p_v.

So c, as long as a state, and the number s are all that is needed of the dense model: no logits of it are kept, and none
are computed again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from niwaki.errors import UnsupportedModelError
from niwaki.models.streamed import StreamedModel

#: Logits at a time: few enough to stay in a processor's cache, where they are read several times.
LOGITS = 1 << 22
#: By how much logits may differ from the head's products, relative to the largest of them.
_CLOSE = 1e-3


@dataclass(frozen=True)
class Head:
    """What makes logits of the states after the last norm: ``scale (h W^T + bias)``.

    Attributes:
        weight: (vocabulary, width), W.
        bias: (vocabulary,) or None.
        scale: 1 for most models.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float

    @torch.no_grad()
    def targets(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(c (tokens, width), s (tokens,)), float32, for the dense model's ``logits`` (tokens, vocabulary)."""
        log_p = logits.float().log_softmax(1)
        p = log_p.exp()
        s = (p * log_p).sum(1)
        if self.bias is not None:
            s -= (p @ self.bias.float()) * self.scale
        return self._mean_row(p), s

    @torch.no_grad()
    def divergence(self, states: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(KL (tokens,) in nats, its gradient with respect to ``states`` (tokens, width)), float32.

        Cost: two products with W; never more than a few thousand rows' logits are in memory.
        """
        losses = torch.empty(len(states), device=states.device)
        gradient = torch.empty(states.shape, device=states.device)
        for rows in self._pieces(len(states)):
            h = states[rows]
            z = nn.functional.linear(h.to(self.weight.dtype), self.weight, self.bias).float().mul_(self.scale)
            log_sum = z.logsumexp(1)
            losses[rows] = s[rows] - (h.float() * c[rows]).sum(1) + log_sum
            gradient[rows] = self._mean_row(z.sub_(log_sum.unsqueeze(1)).exp_()).sub_(c[rows])
        return losses, gradient

    def _mean_row(self, p: Tensor) -> Tensor:
        """(tokens, width): the mean of the rows of W by the probabilities ``p``, times the scale."""
        return (p.to(self.weight.dtype) @ self.weight).float().mul_(self.scale)

    def _pieces(self, tokens: int) -> Iterator[slice]:
        size = max(1, LOGITS // len(self.weight))
        return (slice(start, start + size) for start in range(0, tokens, size))


@torch.no_grad()
def head_scale(model: StreamedModel) -> float:
    """By what the head's products of states after the last norm are multiplied to become logits.

    UnsupportedModelError where logits are something else, as where a tanh caps them.
    """
    seen: list[Tensor] = []
    output = model.model.get_output_embeddings()
    hook = output.register_forward_hook(lambda _module, _inputs, product: seen.append(product))
    states = torch.randn(1, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    try:
        with model.head(torch.float32) as head:
            logits = head(states.to(model.device), torch.zeros(1, 4, dtype=torch.int64)).double()
    finally:
        hook.remove()
    product = seen[0].double() if seen else torch.zeros_like(logits)
    scale = float((product * logits).sum() / product.square().sum().clamp(min=1e-300))
    if float((logits - scale * product).abs().max()) > _CLOSE * float(logits.abs().max()):
        raise UnsupportedModelError(
            f"{model.checkpoint.path}: logits are not products of the head, as where they are capped; models like "
            "this one cannot be healed"
        )
    return scale
