"""How far a pruned model's predictions are from those of the dense model, by a few numbers for each token.

The head is not pruned. With its matrix W, the dense model's distribution p of the next token and the pruned model's
state h after the last norm,

    KL(p | softmax(W h)) = s - <h, c> + log sum exp(W h),    c = W^T p,    s = sum_v p_v log p_v.

So c, as long as a state, and the number s are all that is needed of the dense model: no logits of it are kept, and none
are computed again. Where a tanh caps the logits that does not hold, and what is kept is the likeliest words' p, and a
sample of all others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from niwaki.errors import UnsupportedModelError
from niwaki.models.streamed import StreamedModel

#: Squares of a state that count for 1 at least: it may be 0.
_SMALLEST = 1e-30
#: Logits at a time. With a quarter of them, products of 151,936 words have 27 rows and take 1.6 times as long.
LOGITS = 1 << 24
#: By how much logits may differ from what is made of the head's products, relative to the largest of them.
_CLOSE = 1e-3
#: Where logits are capped, the likeliest words, of which p is kept.
_LIKELIEST = 100
#: How many words are drawn of the others: these nearly never have 1 % of p together, but nearly all of it where the cap
#: is low.
_DRAWN = 100


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

    @property
    def kept(self) -> Mapping[str, tuple[type[np.generic], tuple[int, ...]]]:
        """What :meth:`targets` gives for each token, by name: dtype and shape in which it is kept."""
        return {"c": (np.float16, (self.weight.shape[1],)), "s": (np.float32, ())}

    @property
    def width(self) -> int:
        """How many numbers a state has."""
        return self.weight.shape[1]

    @property
    def answers(self) -> int:
        """How many numbers the dense model says of a token."""
        return len(self.weight)

    @torch.no_grad()
    def targets(self, logits: Tensor) -> tuple[Tensor, ...]:
        """C (tokens, width) and s (tokens,), float32, for the dense model's ``logits`` (tokens, vocabulary)."""
        log_p = logits.float().log_softmax(1)
        p = log_p.exp()
        s = (p * log_p).sum(1)
        if self.bias is not None:
            s -= (p @ self.bias.float()) * self.scale
        return self._mean_row(p), s

    @torch.no_grad()
    def divergence(self, states: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """(KL (tokens,) in nats, its gradient with respect to ``states`` (tokens, width)), float32.

        ``kept`` is what :meth:`targets` gave for these tokens. Cost: two products with W; never more than a few
        thousand rows' logits are in memory.
        """
        losses = torch.empty(len(states), device=states.device)
        gradient = torch.empty(states.shape, device=states.device)
        for rows in self._pieces(len(states)):
            losses[rows], gradient[rows] = self._divergence(states[rows], *(each[rows] for each in kept))
        return losses, gradient

    def _divergence(self, h: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        c, s = kept
        z = self._products(h)
        log_sum = z.logsumexp(1)
        losses = s - (h.float() * c).sum(1) + log_sum
        return losses, self._mean_row(z.sub_(log_sum.unsqueeze(1)).exp_()).sub_(c)

    def _products(self, h: Tensor) -> Tensor:
        """(tokens, vocabulary), float32."""
        return nn.functional.linear(h.to(self.weight.dtype), self.weight, self.bias).float().mul_(self.scale)

    def _mean_row(self, p: Tensor) -> Tensor:
        """(tokens, width): the mean of the rows of W by the probabilities ``p``, times the scale."""
        return (p.to(self.weight.dtype) @ self.weight).float().mul_(self.scale)

    def _pieces(self, tokens: int) -> Iterator[slice]:
        size = max(1, LOGITS // len(self.weight))
        return (slice(start, start + size) for start in range(0, tokens, size))


@dataclass(frozen=True)
class CappedHead(Head):
    """A head whose products z become the logits ``cap tanh(z / cap)``, as in Gemma 2.

    KL, the mean of log p - log q over words drawn by p, is computed as that over the likeliest words, each with its p,
    and words drawn of all others, which share the rest of p alike. Its mean and that of its gradient over the draws are
    those of all words. It is 0, but for rounding, where q is p.
    """

    cap: float

    @property
    def kept(self) -> Mapping[str, tuple[type[np.generic], tuple[int, ...]]]:
        count = min(_LIKELIEST, len(self.weight)) + _DRAWN
        return {"words": (np.int32, (count,)), "p": (np.float32, (count,)), "s": (np.float32, ())}

    @torch.no_grad()
    def targets(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Words (tokens, count), with what they have of p, and the mean of log p over these, float32."""
        log_p = logits.float().log_softmax(1)
        p = log_p.exp()
        likeliest, words = p.topk(min(_LIKELIEST, p.shape[1]))
        others = p.scatter(1, words, 0.0).double().cumsum(1)
        rest = others[:, -1:]
        # Systematic: as far apart as they can be in the order of the vocabulary, from a random place on. Drawn alike
        # for all pieces, so that what is asked again is answered in the same way.
        offsets = torch.rand(len(p), 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(p.device)
        places = (torch.arange(_DRAWN, device=p.device) + offsets) / _DRAWN * rest
        drawn = torch.searchsorted(others, places, right=True).clamp_(max=p.shape[1] - 1)
        words = torch.cat([words, drawn], 1)
        p = torch.cat([likeliest, (rest / _DRAWN).float().expand(-1, _DRAWN)], 1)
        return words, p, torch.where(p > 0, p * log_p.gather(1, words), 0.0).sum(1)

    def _divergence(self, h: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        words, p, s = kept
        capped = self._products(h).div_(self.cap).tanh_()
        log_q, words = (self.cap * capped).log_softmax(1), words.long()
        losses = s - (p * log_q.gather(1, words)).sum(1)
        gradient = log_q.exp_().mul_(p.sum(1, keepdim=True)).scatter_add_(1, words, -p)  # with respect to the logits
        return losses, self._mean_row(gradient.mul_(1 - capped.square_()))


@dataclass(frozen=True)
class States:
    """What stands for a head where a model has none: its states themselves are to be as the dense model's.

    The distance of a token's state q from the dense model's h is |q - h|^2 / |h|^2. Vectors of sentences are made of
    these states.
    """

    width: int

    def of(self, model: PreTrainedModel, dtype: torch.dtype) -> "States":
        """The same for every model, as :meth:`Logits.of` is the head of one."""
        return self

    @property
    def kept(self) -> Mapping[str, tuple[type[np.generic], tuple[int, ...]]]:
        """The same as :attr:`Head.kept`, of states."""
        return {"h": (np.float16, (self.width,))}

    @property
    def answers(self) -> int:
        """The same as :attr:`Head.answers`, of states."""
        return self.width

    def targets(self, states: Tensor) -> tuple[Tensor, ...]:
        """The dense model's ``states`` (tokens, width)."""
        return (states.float(),)

    def divergence(self, states: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """(Distances (tokens,), their gradient with respect to ``states`` (tokens, width)), float32."""
        (h,) = kept
        squares = h.square().sum(1, keepdim=True).clamp_(min=_SMALLEST)
        gradient = (states.float() - h).div_(squares)
        return (gradient.square() * squares).sum(1), gradient.mul_(2)


class Logits(NamedTuple):
    """What becomes of a head's products: they are multiplied by ``scale``, and where there is a ``cap``, capped."""

    scale: float
    cap: float | None = None

    def of(self, model: PreTrainedModel, dtype: torch.dtype, copy: bool = False) -> Head:
        """The head of ``model``, in ``dtype``; a ``copy`` of it where its weights will not stay."""
        output = model.get_output_embeddings()
        bias, weight = getattr(output, "bias", None), output.weight.detach().to(dtype, copy=copy)
        return self.head(weight, None if bias is None else bias.detach().to(dtype, copy=copy))

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """The head with these parameters."""
        return Head(weight, bias, self.scale) if self.cap is None else CappedHead(weight, bias, self.scale, self.cap)


@torch.no_grad()
def find_logits(model: StreamedModel) -> Logits | States:
    """How the model makes logits of the products of its head with states after the last norm, if it has a head.

    UnsupportedModelError where they are neither multiples of these nor capped by a tanh.
    """
    if not model.has_head:
        return States(model.config.hidden_size)
    seen: list[Tensor] = []
    output = model.model.get_output_embeddings()
    decoder = model.decoder if model.pairs is None else model.pairs.decoder

    def keep(_module: nn.Module, _inputs: Any, made: Any) -> None:
        # Not what the head receives: some models scale states first (T5, MiniCPM), or transform them (BERT).
        seen.append(output(made.last_hidden_state))

    hook = decoder.register_forward_hook(keep)
    shape = (1, 4, *model.interface.streams, model.config.hidden_size)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    try:
        with model.head(torch.float32) as head:
            logits = head(states.to(model.device), torch.zeros(1, 4, dtype=torch.int64)).double()
    finally:
        hook.remove()
    product = seen[-1].double() if seen else torch.zeros_like(logits)
    caps = (value for name, value in vars(model.config).items() if "cap" in name and isinstance(value, int | float))
    for cap in (None, *caps):
        before = logits if cap is None else (logits / cap).clamp(-1, 1).atanh() * cap
        scale = float((product * before).sum() / product.square().sum().clamp(min=1e-300))
        made = scale * product if cap is None else cap * (scale * product / cap).tanh()
        if float((logits - made).abs().max()) <= _CLOSE * float(logits.abs().max()):
            return Logits(scale, cap)
    raise UnsupportedModelError(
        f"{model.checkpoint.path}: logits are neither products of the head nor such products capped by a tanh; models "
        "like this one cannot be healed"
    )
