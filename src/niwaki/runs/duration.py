"""About how long a run takes, before it begins: what is computed, at the speed of this machine's products.

How much longer each part takes than its products was measured on SmolLM2-135M and on blocks of LLaMA-2-7B
(docs/results-speed.md). Other models and machines may take half or twice that.
"""

import time

import torch

from niwaki.effort import Effort
from niwaki.layer.linalg import products
from niwaki.models.streamed import StreamedModel
from niwaki.texts.texts import Texts

#: Of a forward pass of a block and of solvers: with matrices of this width they take twice as long as their products
#: alone, and with wider ones less in proportion, because all else grows with the width and products with its square.
_PASS, _SOLVING = 280, 900
#: How many forward passes as long as one of training, with an optimizer, and of writing text, a token at a time.
_TRAINING, _WRITING = 2.0, 6.0
#: What rounding a weight to the nearest number of a grid takes, with the choice of its scale.
_NEAREST = 3e4
#: What a backward pass takes, in forward passes.
_BACKWARD = 2
#: How many times as long as its passes looking takes, which rounds some rows of each matrix to numbers of many grids.
_LOOKING = 2.0
#: The size of matrices whose product is timed, and how often.
_SIZE, _TIMES = 1024, 3


def products_per_second(device: torch.device) -> float:
    """The floating-point operations a second of products of float32 matrices on ``device``, from a few of them."""
    A = torch.ones(_SIZE, _SIZE, device=device)
    fastest = float("inf")
    with products(tf32=False):
        for _ in range(_TIMES):
            began = time.perf_counter()
            float((A @ A)[0, 0])  # which waits for a GPU
            fastest = min(fastest, time.perf_counter() - began)
    return 2.0 * _SIZE**3 / fastest


def passes(model: StreamedModel, tokens: float, *, count: float = 1.0, head: bool = False) -> float:
    """Operations that take as long as ``count`` forward passes of all blocks on ``tokens``, and of the ``head``."""
    weights = sum(value.numel() for block in model.blocks for value in block.parameters())
    outputs = getattr(model.config, "vocab_size", 0) * _width(model) if head else 0
    return 2.0 * tokens * count * (_overhead(model, _PASS) * weights + outputs)


def _overhead(model: StreamedModel, width: int) -> float:
    """How many times as long as its products something takes that has one more of them at this ``width``."""
    return 1 + width / _width(model)


def _width(model: StreamedModel) -> int:
    """The width of hidden states, by the matrices, as configurations have many names for it."""
    return max(min(matrix.shape) for matrix in model.matrices())


def measuring(model: StreamedModel, texts: Texts, before: bool) -> float:
    """Operations of measuring perplexity, of the model ``before`` too."""
    tokens = sum(windows.tokens.numel() for windows in texts.heldout.values())
    return passes(model, tokens, count=2 if before else 1, head=True)


def nearest(rows: int, columns: int) -> float:
    """Operations of rounding a matrix to the nearest numbers of a grid."""
    return _NEAREST * rows * columns


def pruning(model: StreamedModel, effort: Effort, tokens: float, solving: float) -> float:
    """Operations of pruning that calibrates on ``tokens``, whose solvers need ``solving`` operations themselves."""
    own = effort.synthetic * tokens
    fitted = effort.fit.epochs * (tokens + own)
    return (
        passes(model, own, count=_WRITING, head=True)
        + passes(model, tokens + own, count=2)  # inputs are gathered, and outputs passed on
        + (tokens + own) * sum(matrix.shape[1] ** 2 for matrix in model.matrices())
        + _overhead(model, _SOLVING) * solving
        + (passes(model, effort.plan.pilot * tokens, count=2 + _BACKWARD) if effort.plan.is_needed else 0)
        + passes(model, min(fitted, tokens + own))  # the dense model's outputs
        + training(model, fitted)
    )


def looking(model: StreamedModel, tokens: float) -> float:
    """Operations of finding out on ``tokens`` what bits, zeros and fewer neurons would cost in each matrix."""
    return _LOOKING * passes(model, tokens, count=2.5 + (1 + _BACKWARD) / 2, head=True)


def training(model: StreamedModel, tokens: float, *, head: bool = False) -> float:
    """Operations of training on ``tokens``."""
    return passes(model, tokens, count=_TRAINING * (1 + _BACKWARD), head=head)
