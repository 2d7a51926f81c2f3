"""Products of one vector with a packed matrix, by AVX2 and by each kind of AVX-512 that this machine has.

    python benchmarks/paths.py --record benchmarks/results/paths.json
    python benchmarks/paths.py --sizes 4096x4096 --dtypes int8 --threads 1

The paths take turns on the same matrices, which are more than caches hold, and the least time of each counts: on a
machine that others use too it is what scatters least. Whole numbers have a scale for each 64. The vector is bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from functools import partial
from pathlib import Path

import common  # first: it sets what OpenMP reads when torch is loaded
import torch

from niwaki.packed import kernels
from niwaki.packed.load import in_large_pages
from niwaki.packed.matrix import PackedMatrix, pack

SIZES = ["11008x4096", "4096x11008", "1536x576", "576x576"]
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {"int8": 8, "int4": 4}
#: Bytes of the matrices of a size, were they dense bfloat16: several times what caches hold.
WORKING_SET = 1 << 29
GROUP = 64
#: For others processors with VBMI2 have no kernels of their own.
WITH_VBMI2 = ("bfloat16", "int4")


def paths_of(name: str, best: kernels.Path) -> list[kernels.Path]:
    """Those up to ``best`` whose kernels for a dtype differ, from AVX2 on."""
    last = best if name in WITH_VBMI2 else min(best, kernels.Path.AVX512BW)
    return [path for path in kernels.Path if kernels.Path.AVX2 <= path <= last]


def matrix(rows: int, columns: int, name: str, sparsity: float) -> PackedMatrix:
    """A random one."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(rows, columns, generator=generator) >= sparsity
    if name in FLOATS:
        return pack(torch.randn(rows, columns, generator=generator).where(kept, 0).to(FLOATS[name]))
    bits = BITS[name]
    sizes = torch.randint(1, 1 << (bits - 1), (rows, columns), generator=generator)
    signs = 1 - 2 * torch.randint(2, (rows, columns), generator=generator)
    codes = (sizes * signs * kept).to(torch.int8)
    scales = (torch.rand(rows, columns // GROUP, generator=generator) + 0.5).bfloat16().float()
    W = (codes.float().unflatten(1, (-1, GROUP)) * scales.unsqueeze(2)).flatten(1).bfloat16()
    return pack(W, codes, scales, bits)


def least_seconds(matrices: list[PackedMatrix], paths: list[kernels.Path], seconds: float) -> dict[kernels.Path, float]:
    """Of one product by each path, in rounds that take about so many seconds together."""
    x = torch.randn(1, matrices[0].columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    best = dict.fromkeys(paths, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for path, W in itertools.product(paths, matrices):
            best[path] = min(best[path], common.seconds(partial(kernels.multiply, W, x, path)))
    return best


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--dtypes", nargs="*", default=[*FLOATS, *BITS], choices=[*FLOATS, *BITS])
    parser.add_argument("--sparsities", nargs="*", type=float, default=[0.5, 0.7])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    best, results = kernels.best_path(), []
    if best is None or best < kernels.Path.AVX512BW:
        sys.exit(f"paths.py needs AVX-512 and the native library, and here products are {kernels.describe()}")
    for size, name, sparsity in itertools.product(arguments.sizes, arguments.dtypes, arguments.sparsities):
        rows, columns = map(int, size.split("x"))
        packed = matrix(rows, columns, name, sparsity)
        count = max(2, WORKING_SET // (2 * rows * columns))
        matrices = [in_large_pages(copy.deepcopy(packed)) for _ in range(count)]
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            found = least_seconds(matrices, paths_of(name, best), arguments.seconds)
            case = {"size": size, "dtype": name, "sparsity": sparsity, "threads": threads}
            results += [{**case, "path": path.name, "seconds": seconds} for path, seconds in found.items()]
            shown = (
                f"{path.name} {1e3 * seconds:.3f} ms ({found[kernels.Path.AVX2] / seconds:.2f})"
                for path, seconds in found.items()
            )
            print(f"{size}, {name}, {sparsity:g}, {threads} threads: {', '.join(shown)}", flush=True)
    common.save(arguments.record, kernels=kernels.describe(), results=results)


if __name__ == "__main__":
    main()
