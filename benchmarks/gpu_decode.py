"""Products of a few vectors with pruned matrices on a GPU: dense, packed, and 2:4. Needs a GPU with CUDA.

    python benchmarks/gpu_decode.py --record gpu.json
    python benchmarks/gpu_decode.py --shapes 4096x4096 --sparsities 0.5 --batches 1 2 --dtype bfloat16

Times are medians between CUDA events around one product, with the second-level cache emptied before each; the filling
that empties it takes longer than launching the product, so that what Python needs is not in them. "dense" is F.linear.
GB/s counts the bytes that a product has to read and write once, and the share is that of the rate of copying a large
tensor, measured in the same run. 2:4 is a matrix of its own at 50 % zeros; torch pads few vectors to 8 for it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from torch import Tensor
from torch.nn.functional import linear

from niwaki.packed.matrix import pack


class Clock:
    """Times of single runs on the GPU, with nothing of what they read in its caches."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self._filler = torch.empty(max(4 * size, 1 << 29), dtype=torch.uint8, device="cuda")

    def seconds(self, run: Callable[[], Tensor]) -> float:
        """The median."""
        for _ in range(10):  # compiles, and lets the clock rate rise
            run()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeat)]
        for before, after in marks:
            self._filler.zero_()
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(float(before.elapsed_time(after)) for before, after in marks) / 1e3

    def bandwidth(self) -> float:
        """Bytes a second, read and written, of copying a large tensor."""
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))


def pruned(rows: int, columns: int, sparsity: float, dtype: torch.dtype) -> Tensor:
    """Random weights, each 0 with that probability; on the CPU."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(rows, columns, generator=generator)
    return W.masked_fill_(torch.rand(rows, columns, generator=generator) < sparsity, 0).to(dtype)


def two_four(W: Tensor) -> Tensor:
    """With the first and the last of every four."""
    kept: Tensor = W.unflatten(1, (-1, 4)) * torch.tensor([1, 0, 0, 1], device=W.device, dtype=W.dtype)
    return kept.flatten(1)


def kinds(
    rows: int, columns: int, sparsities: list[float], dtype: torch.dtype
) -> Iterator[tuple[str, float, int, Callable[[Tensor], Tensor], Tensor]]:
    """(name, sparsity, its bytes, product, the dense matrix) of each kind, one after the other."""
    from niwaki.packed.gpu import multiply

    W = pruned(rows, columns, 0, dtype).cuda()
    yield "dense", 0.0, W.nbytes, lambda x: linear(x, W), W
    for sparsity in sparsities:
        zeros = pruned(rows, columns, sparsity, dtype)
        packed = pack(zeros).to(torch.device("cuda", 0))
        yield "packed", sparsity, packed.nbytes, functools.partial(multiply, packed), zeros.cuda()
    fours = two_four(W)
    sparse = torch.sparse.to_sparse_semi_structured(fours)
    size = fours.nbytes // 2 + fours.numel() // 8 * 2  # half of the values, and 2 bits of place for each of these
    yield "2:4", 0.5, size, lambda x: linear(x, sparse), fours


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All times, printed as they come."""
    dtype = getattr(torch, arguments.dtype)
    clock = Clock(arguments.repeat)
    bandwidth = clock.bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, copies at {bandwidth / 1e9:,.0f} GB/s, {arguments.dtype}\n")
    print(f"{'':>14} {'zeros':>6} {'vectors':>8} {'us':>8} {'GB/s':>7} {'share':>6} {'dense/this':>11} {'error':>8}")
    results = []
    for shape in arguments.shapes:
        rows, columns = map(int, shape.split("x"))
        dense: dict[int, float] = {}
        print(f"{rows} x {columns}")
        for kind, sparsity, size, product, W in kinds(rows, columns, arguments.sparsities, dtype):
            for batch in arguments.batches:
                x = torch.randn(batch, columns, device="cuda").to(dtype)
                right = x.double() @ W.double().T
                error = float((product(x).double() - right).norm() / right.norm())
                took = clock.seconds(functools.partial(product, x))
                if kind == "dense":
                    dense[batch] = took
                rate = (size + x.nbytes + batch * rows * x.itemsize) / took
                print(
                    f"{kind:>14} {sparsity:6.0%} {batch:8} {1e6 * took:8.1f} {rate / 1e9:7.0f} "
                    f"{rate / bandwidth:6.0%} {dense[batch] / took:11.2f} {error:8.1e}",
                    flush=True,
                )
                results.append(
                    {
                        "shape": shape,
                        "kind": kind,
                        "sparsity": sparsity,
                        "batch": batch,
                        "seconds": took,
                        "bytes": size,
                        "bytes_per_second": rate,
                        "share": rate / bandwidth,
                        "dense_over_this": dense[batch] / took,
                        "error": error,
                    }
                )
    return {"gpu": name, "bandwidth": bandwidth, "dtype": arguments.dtype, "results": results}


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["4096x11008", "11008x4096", "8192x28672"])
    parser.add_argument("--sparsities", nargs="*", type=float, default=[0.5, 0.7, 0.8])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--repeat", type=int, default=101, help="runs of which the median is taken")
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_decode.py needs a GPU with CUDA, and torch finds none here")
    common.save(arguments.record, **measure(arguments))


if __name__ == "__main__":
    main()
