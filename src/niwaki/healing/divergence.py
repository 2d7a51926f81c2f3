"""How far a model's predictions are from those of the dense model, with neither in memory."""

import math

import torch

from niwaki.errors import NumericalError
from niwaki.healing.objective import LOGITS
from niwaki.models.hidden_states import HiddenStates, pieces
from niwaki.models.streamed import StreamedModel


@torch.no_grad()
def divergence(dense: StreamedModel, model: StreamedModel, dense_states: HiddenStates, states: HiddenStates) -> float:
    """The mean KL divergence of the dense model's predictions from the other's, in nats a token.

    Both states are those of the same tokens, in the same batches, after the last block of each model. What is outside
    the blocks of both is in memory meanwhile. NumericalError where it is not finite.
    """
    total, count, rows = 0.0, 0, max(1, LOGITS // model.config.vocab_size)
    with dense.head() as dense_head, model.head() as head:
        for i, batch in enumerate(states.tokens):
            for p_hidden, q_hidden, tokens in pieces(rows, dense_states.hidden[i], states.hidden[i], batch):
                log_p = dense_head(p_hidden, tokens).float().log_softmax(-1)
                log_q = head(q_hidden, tokens).float().log_softmax(-1)
                total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
                count += tokens.numel()
    if not math.isfinite(total):
        raise NumericalError("the models' outputs are NaN or infinite on this text; try dtype float32")
    return max(0.0, total / count)
