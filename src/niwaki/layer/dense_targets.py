"""Targets from the dense model: what a matrix of the pruned model should do with its own inputs."""

import torch
from torch import Tensor

from niwaki.layer.linalg import inverse_of_damped
from niwaki.layer.problem import Gram


def dense_targets(W: Tensor, gram: Gram, cross: Tensor, share: float, ridge: float) -> Tensor:
    """(out, in): weights whose outputs on the pruned model's inputs come near those of the dense model.

    With X (tokens, in) the inputs in the dense model and Xp those in the pruned one,

        W* = argmin_V  |X W^T - Xp V^T|^2 / tokens + ridge |(V - W) D|^2
           = W + [(Xp^T Xp / tokens + ridge D^2)^-1 (Xp^T X - Xp^T Xp) W^T / tokens]^T

    where D holds the root mean squares of the inputs Xp, and the answer is (1 - share) W + share W*. Minimising
    |X W^T - Xp What^T|^2 is the layer problem with H = Xp^T Xp / tokens and W* (ridge 0) instead of W, up to a
    constant. An input that is always 0 keeps its weights.

    Cost: a factorisation, an inverse and a product of (in, in), once for all matrices that share ``gram``; a product of
    (out, in) with (in, in).

    Args:
        W: (out, in), the original weights, or some of their rows. Not changed.
        gram: H = Xp^T Xp / tokens, (in, in).
        cross: Xp^T X / tokens, (in, in).
        share: From 0, W itself, to 1.
        ridge: Relative to the unit diagonal of H, above 0: it keeps W where the inputs say little.
    """

    def correction() -> Tensor:
        scale = torch.where(gram.norm > 0, 1 / gram.norm, 0.0)
        inverse, _ = inverse_of_damped(gram.live, ridge)
        return (inverse @ ((cross - gram.H) * scale.unsqueeze(1))).mul_(scale.unsqueeze(1))

    return W + (W @ gram.derived(("dense targets", ridge), correction).T).mul_(share)
