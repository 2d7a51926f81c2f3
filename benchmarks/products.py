"""Products of float32 matrices: by the library that torch chooses, and by the one that niwaki does.

    python benchmarks/products.py --record benchmarks/results/products.json

The two take turns; each figure is the best of several rounds. Where niwaki chooses nothing else, both are the same.
"""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from pathlib import Path

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from torch import Tensor

from niwaki.layer.products import onednn_is_faster, products

#: Rows, inner size and columns of what blocks of SmolLM2-135M and LLaMA-2-7B multiply.
SHAPES = (
    (48, 576, 1536),
    (512, 576, 576),
    (4096, 576, 1536),
    (4096, 1536, 576),
    (4096, 4096, 4096),
    (2048, 4096, 11008),
)
#: Of activations, for Gram matrices: tokens and width.
GRAMS = ((4096, 576), (4096, 1536), (4096, 4096))


def seconds(a: Tensor, b: Tensor, rounds: int) -> tuple[float, float]:
    """The best of torch's own choice and of niwaki's."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for turn in (0, 1):
            with products(tf32=False) if turn else contextlib.nullcontext():
                best[turn] = min(best[turn], common.seconds(partial(torch.mm, a, b)))
    return best[0], best[1]


def main() -> None:
    """Measures, prints a line for each shape and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    cells = []

    def measured(name: str, a: Tensor, b: Tensor) -> None:
        operations = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        rates = [operations / each / 1e9 for each in seconds(a, b, arguments.rounds)]
        exact = a.double() @ b.double()
        with products(tf32=False):
            error = float((a @ b - exact).norm() / exact.norm())
        cells.append({"name": name, "torch": rates[0], "niwaki": rates[1], "error": error})
        print(f"{name:28} {rates[0]:6.0f} and {rates[1]:6.0f} GFLOP/s, error {error:.1e}", flush=True)

    for rows, inner, columns in SHAPES:
        x, w = (torch.randn(size, inner, generator=generator) for size in (rows, columns))
        measured(f"{rows} x {inner} x {columns}", x, w.T)
    for tokens, width in GRAMS:
        x = torch.randn(tokens, width, generator=generator)
        measured(f"Gram, {tokens} x {width}", x.T, x)
    print("oneDNN is used" if onednn_is_faster() else "what torch chooses is used")
    common.save(arguments.record, onednn=onednn_is_faster(), cells=cells)


if __name__ == "__main__":
    main()
