"""Products of a few vectors with a packed matrix on a CPU, against dense ones.

    python benchmarks/decode.py --record benchmarks/results/decode.json
    python benchmarks/decode.py --threads 1 --sizes 4096x4096
    python benchmarks/decode.py --threads 2 --batches 1 --bits 16 8 4 --sparsities 0 0.3 0.5 0.7   # and on a grid

Each is called on several matrices in turn, more than caches hold, as a model does. Rounds of all of them alternate, and
medians count. Besides torch's dense products there is a plain dense kernel (dense.cpp, AVX2, one thread, one
vector; a C++ compiler has to be there), because torch's is not always near what the memory allows. The floor is
the bytes of a packed matrix over the rate at which torch sums numbers up.

Packed matrices are in large pages, as niwaki.load has them. THP_MEM_ALLOC_ENABLE=1 gives them to torch's tensors too.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from torch import Tensor
from torch.nn.functional import linear

from niwaki.packed import kernels
from niwaki.packed.load import in_large_pages
from niwaki.packed.matrix import PackedMatrix, pack

SIZES = ["11008x4096", "4096x11008"]
SPARSITIES = [0.5, 0.6, 0.7, 0.8, 0.9]
#: Bytes of dense matrices, all together: several times what caches hold.
WORKING_SET = 1 << 29


def plain_kernel() -> ctypes.CDLL | None:
    """``dense.cpp``, compiled; None without a compiler or AVX2."""
    compiler = shutil.which("c++")
    if compiler is None or (kernels.best_path() or 0) < kernels.Path.AVX2:
        return None
    library = Path(tempfile.mkdtemp()) / "dense.so"
    source = Path(__file__).with_name("dense.cpp")
    subprocess.run([compiler, "-std=c++17", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def plain(library: ctypes.CDLL, W: Tensor, x: Tensor) -> Tensor:
    """W x by the plain dense kernel."""
    mixed = x.view(-1, 8, 2).transpose(1, 2).contiguous()
    y = torch.empty(len(W))
    sizes = (ctypes.c_int64(size) for size in W.shape)
    library.dense(*sizes, *(ctypes.c_void_p(value.data_ptr()) for value in (W, mixed, y)))
    return y


def packed(W: Tensor, kept: Tensor, bits: int) -> PackedMatrix:
    """``W`` where it is ``kept``, as it is or, of fewer than 16 ``bits``, as whole numbers with a scale for 64."""
    if bits == 16:
        return in_large_pages(pack(W.where(kept, 0)))
    most = 2 ** (bits - 1) - 1
    codes = W.float().mul_(most / 3).round_().clamp_(-most, most)
    codes = codes.where(codes != 0, 1).where(kept, 0)
    scales = torch.ones(len(W), W.shape[1] // 64)
    return in_large_pages(pack(codes.bfloat16(), codes.to(torch.int8), scales, bits))


def measured(rounds: int, calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """Median seconds of each, per call; in each round every name has a turn with all of its calls."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, those in calls.items():
            began = time.perf_counter()
            for call in those:
                call()
            if number:
                seconds[name].append((time.perf_counter() - began) / len(those))
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--sparsities", nargs="*", type=float, default=SPARSITIES)
    parser.add_argument("--bits", nargs="*", type=int, default=[16], help="of values: 16, or whole numbers of 8 or 4")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    library, results = plain_kernel(), []
    for size in arguments.sizes:
        rows, columns = map(int, size.split("x"))
        count = max(2, WORKING_SET // (2 * rows * columns))
        generator = torch.Generator().manual_seed(0)
        dense = [torch.randn(rows, columns, generator=generator).bfloat16() for _ in range(count)]
        sparse: dict[str, list[PackedMatrix]] = {}
        for bits, sparsity in itertools.product(arguments.bits, arguments.sparsities):
            name = f"packed {sparsity:g}" + (f" int{bits}" if bits < 16 else "")
            chosen = (torch.rand(rows, columns, generator=generator) >= sparsity for _ in dense)
            sparse[name] = [packed(W, kept, bits) for W, kept in zip(dense, chosen, strict=True)]
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            numbers = torch.cat([W.view(torch.float32).flatten() for W in dense])
            rate = numbers.nbytes / measured(arguments.rounds, {"": [numbers.sum]})[""]
            del numbers
            for batch in arguments.batches:
                x = torch.randn(batch, columns, generator=generator)
                half = x.bfloat16()
                calls: dict[str, list[Callable[[], object]]] = {
                    "torch bfloat16": [partial(linear, half, W) for W in dense],
                    **{name: [partial(kernels.multiply, W, x) for W in those] for name, those in sparse.items()},
                }
                if library is not None and batch == threads == 1:
                    calls["plain dense"] = [partial(plain, library, W, x) for W in dense]
                found = measured(arguments.rounds, calls)
                print(f"{size}, {threads} threads, {batch} vectors; memory {rate / 1e9:.1f} GB/s")
                for name, seconds in found.items():
                    line = {
                        "size": size,
                        "threads": threads,
                        "batch": batch,
                        "name": name,
                        "seconds": seconds,
                        "torch_over_this": found["torch bfloat16"] / seconds,
                        "bytes": dense[0].nbytes,
                    }
                    if name in sparse:
                        line["bytes"] = sparse[name][0].nbytes
                    line["share_of_floor"] = line["bytes"] / rate / seconds
                    if "plain dense" in found:
                        line["plain_over_this"] = found["plain dense"] / seconds
                    results.append(line)
                    print(
                        f"  {name:15s} {seconds * 1e3:7.2f} ms  {line['torch_over_this']:5.2f} x torch"
                        f"  {line['share_of_floor']:5.2f} of the floor",
                        f" {line['plain_over_this']:5.2f} x plain" if "plain dense" in found else "",
                    )
    common.save(arguments.record, kernels=kernels.describe(), results=results)


if __name__ == "__main__":
    main()
