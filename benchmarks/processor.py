"""Products on a CPU: with packed matrices against dense ones, by each kind of AVX, and of float32 matrices.

    python benchmarks/processor.py decode --record benchmarks/results/decode.json
    python benchmarks/processor.py decode --threads 1 --sizes 4096x4096
    python benchmarks/processor.py decode --threads 2 --batches 1 --bits 16,8,4 --sparsities 0,0.3,0.5,0.7   # on a grid
    python benchmarks/processor.py paths --record benchmarks/results/paths.json
    python benchmarks/processor.py whole --record benchmarks/results/whole.json
    python benchmarks/processor.py prompts
    python benchmarks/processor.py products

Matrices are several, more than caches hold, and used in turn, as a model does.
"""

import contextlib
import copy
import ctypes
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import Call, Cell, Record, Rounds, Sizes, Sparsities, Threads, fractions, integers, names
from torch import Tensor
from torch.nn.functional import linear
from typer import Option

from niwaki.layer.linalg import onednn_is_faster, products as chosen_products
from niwaki.packed import kernels
from niwaki.packed.load import in_large_pages
from niwaki.packed.matrix import PackedMatrix, pack

#: Bytes of dense matrices in bfloat16, all together: several times what caches hold.
WORKING_SET = 1 << 29
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {"int8": 8, "int4": 4}
ALL_DTYPES = ",".join([*FLOATS, *BITS])
#: Columns to a scale of whole numbers.
GROUP = 64
#: For other dtypes processors with VBMI2 have no kernels of their own.
WITH_VBMI2 = ("bfloat16", "int4")
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


def _count(rows: int, columns: int) -> int:
    """How many matrices are used in turn."""
    return max(2, WORKING_SET // (2 * rows * columns))


def decode(
    sizes: Sizes = "11008x4096,4096x11008",
    sparsities: Sparsities = "0.5,0.6,0.7,0.8,0.9",
    bits: Annotated[str, Option(help="Of values: 16, or whole numbers of 8 or 4.")] = "16",
    batches: Annotated[str, Option(help="Numbers of vectors.")] = "1,2,4",
    threads: Threads = "1,2",
    rounds: Rounds = 7,
    record: Record = None,
) -> None:
    """Products of a few vectors with a packed matrix, against dense ones; medians over rounds count.

    Besides torch's dense products there is a plain dense kernel (dense.cpp, AVX2, one thread, one vector; a C++
    compiler has to be there), because torch's is not always near what the memory allows. The floor is the bytes of a
    packed matrix over the rate at which torch sums numbers up. Packed matrices are in large pages, as niwaki.load has
    them. THP_MEM_ALLOC_ENABLE=1 gives them to torch's tensors too.
    """
    plain, results = _plain_kernel(), []
    for size in names(sizes):
        rows, columns = common.shape_of(size)
        generator = torch.Generator().manual_seed(0)
        dense = [torch.randn(rows, columns, generator=generator).bfloat16() for _ in range(_count(rows, columns))]
        sparse: dict[str, list[PackedMatrix]] = {}
        for width, sparsity in itertools.product(integers(bits), fractions(sparsities)):
            name = f"packed {sparsity:g}" + (f" int{width}" if width < 16 else "")
            kept = (torch.rand(rows, columns, generator=generator) >= sparsity for _ in dense)
            sparse[name] = [_packed(W, those, width) for W, those in zip(dense, kept, strict=True)]
        for number in integers(threads):
            torch.set_num_threads(number)
            rate = _memory_rate(dense, rounds)
            for batch in integers(batches):
                x = torch.randn(batch, columns, generator=generator)
                half = x.bfloat16()
                calls: dict[str, list[Call]] = {
                    "torch bfloat16": [partial(linear, half, W) for W in dense],
                    **{name: [partial(kernels.multiply, W, x) for W in those] for name, those in sparse.items()},
                }
                if plain is not None and batch == number == 1:
                    calls["plain dense"] = [partial(plain, W, x) for W in dense]
                print(f"{size}, {number} threads, {batch} vectors; memory {rate / 1e9:.1f} GB/s")
                moved = {name: sparse[name][0].nbytes if name in sparse else dense[0].nbytes for name in calls}
                case = {"size": size, "threads": number, "batch": batch}
                results += _lines(case, _medians(calls, rounds), moved, rate)
    common.save(record, kernels=kernels.describe(), results=results)


def prompts(
    sizes: Sizes = "576x576,192x576,192x576,576x576,1536x576,1536x576,576x1536",
    vectors: Annotated[str, Option(help="Numbers of them.")] = "16,64,256,1024",
    rounds: Rounds = 7,
    record: Record = None,
) -> None:
    """Products of many bfloat16 vectors with matrices of 4 bits without a mask, by panels and by tiles for torch.

    By default matrices are those of a block of SmolLM2-135M; times are of all of them once. NIWAKI_KERNELS chooses the
    instructions of both but torch's.
    """
    results = []
    matrices = [_random(*common.shape_of(size), "int4", 0.0) for size in names(sizes)]
    for count in integers(vectors):
        inputs = [torch.randn(count, W.columns).bfloat16() for W in matrices]
        pairs = list(zip(matrices, inputs, strict=True))
        calls: dict[str, list[Call]] = {
            "panels": [partial(kernels.multiply, W, x) for W, x in pairs],
            "tiles": [partial(kernels.multiply_by_tiles, W, x) for W, x in pairs],
        }
        found = {name: len(pairs) * took for name, took in _medians(calls, rounds).items()}
        results.append({"vectors": count, **found})
        print(f"{count:5d} vectors: " + ", ".join(f"{name} {1e3 * took:.2f} ms" for name, took in found.items()))
    common.save(record, kernels=kernels.describe(), results=results)


def _lines(case: Cell, found: dict[str, float], moved: dict[str, int], rate: float) -> list[Cell]:
    """What a record has of each product, which is also printed."""
    lines = []
    for name, took in found.items():
        line = {**case, "name": name, "seconds": took, "torch_over_this": found["torch bfloat16"] / took}
        line |= {"bytes": moved[name], "share_of_floor": moved[name] / rate / took}
        shown = f"  {name:15s} {took * 1e3:7.2f} ms  {line['torch_over_this']:5.2f} x torch"
        shown += f"  {line['share_of_floor']:5.2f} of the floor"
        if "plain dense" in found:
            line["plain_over_this"] = found["plain dense"] / took
            shown += f"  {line['plain_over_this']:5.2f} x plain"
        lines.append(line)
        print(shown)
    return lines


def _medians(calls: dict[str, list[Call]], rounds: int) -> dict[str, float]:
    return {name: statistics.median(those) for name, those in common.in_turns(calls, rounds).items()}


def _memory_rate(dense: list[Tensor], rounds: int) -> float:
    """Bytes a second of summing up."""
    numbers = torch.cat([W.view(torch.float32).flatten() for W in dense])
    return numbers.nbytes / _medians({"sum": [numbers.sum]}, rounds)["sum"]


def _plain_kernel() -> Callable[[Tensor, Tensor], Tensor] | None:
    """The product by ``dense.cpp``, which is compiled; None without a compiler or AVX2."""
    compiler = shutil.which("c++")
    if compiler is None or (kernels.best_path() or 0) < kernels.Path.AVX2:
        return None
    file = Path(tempfile.mkdtemp()) / "dense.so"
    source = Path(__file__).with_name("dense.cpp")
    subprocess.run([compiler, "-std=c++17", "-O3", "-shared", "-fPIC", "-o", file, source], check=True)
    library = ctypes.CDLL(str(file))

    def product(W: Tensor, x: Tensor) -> Tensor:
        mixed = x.view(-1, 8, 2).transpose(1, 2).contiguous()
        y = torch.empty(len(W))
        sizes = (ctypes.c_int64(size) for size in W.shape)
        library.dense(*sizes, *(ctypes.c_void_p(value.data_ptr()) for value in (W, mixed, y)))
        return y

    return product


def _packed(W: Tensor, kept: Tensor, bits: int) -> PackedMatrix:
    """``W`` where it is ``kept``, as it is or, of fewer than 16 ``bits``, as whole numbers with scales."""
    if bits == 16:
        return in_large_pages(pack(W.where(kept, 0)))
    most = 2 ** (bits - 1) - 1
    codes = W.float().mul_(most / 3).round_().clamp_(-most, most)
    codes = codes.where(codes != 0, 1).where(kept, 0)
    scales = torch.ones(len(W), W.shape[1] // GROUP)
    return in_large_pages(pack(codes.bfloat16(), codes.to(torch.int8), scales, bits))


def paths(
    sizes: Sizes = "11008x4096,4096x11008,1536x576,576x576",
    dtypes: Annotated[str, Option(help="Of values.")] = ALL_DTYPES,
    sparsities: Sparsities = "0.5,0.7",
    threads: Threads = "1,2",
    seconds: Annotated[float, Option(help="For each line.")] = 2.0,
    record: Record = None,
) -> None:
    """Products of one vector with a packed matrix, by AVX2 and by each kind of AVX-512 that this machine has.

    The paths take turns, and the least time of each counts: on a machine that others use too it is what scatters least.
    Whole numbers have a scale for each 64. The vector is bfloat16.
    """
    best, results = kernels.best_path(), []
    if best is None or best < kernels.Path.AVX512BW:
        sys.exit(f"paths needs AVX-512 and the native library, and here products are {kernels.describe()}")
    chosen = common.chosen(dtypes, [*FLOATS, *BITS])
    for size, name, sparsity in itertools.product(names(sizes), chosen, fractions(sparsities)):
        rows, columns = common.shape_of(size)
        matrix = _random(rows, columns, name, sparsity)
        matrices = [in_large_pages(copy.deepcopy(matrix)) for _ in range(_count(rows, columns))]
        for number in integers(threads):
            torch.set_num_threads(number)
            found = _least_seconds(matrices, _paths_of(name, best, matrix.mask is None), seconds)
            case = {"size": size, "dtype": name, "sparsity": sparsity, "threads": number}
            results += [{**case, "path": path, "seconds": took} for path, took in found.items()]
            shown = (f"{path} {1e3 * took:.3f} ms ({found['AVX2'] / took:.2f})" for path, took in found.items())
            print(f"{size}, {name}, {sparsity:g}, {number} threads: {', '.join(shown)}", flush=True)
    common.save(record, kernels=kernels.describe(), results=results)


def _paths_of(name: str, best: kernels.Path, whole: bool) -> list[kernels.Path]:
    """Those up to ``best`` whose kernels for a dtype differ, from AVX2 on."""
    last = best if name in WITH_VBMI2 or whole else min(best, kernels.Path.AVX512BW)
    return [path for path in kernels.paths() if kernels.Path.AVX2 <= path <= last]


def whole(
    sizes: Sizes = "11008x4096,1536x576",
    batches: Annotated[str, Option(help="Numbers of vectors.")] = "1,4",
    threads: Threads = "1,2",
    seconds: Annotated[float, Option(help="For each line.")] = 2.0,
    record: Record = None,
) -> None:
    """Products with matrices of whole numbers without zeros: with a mask, and with all numbers, exact and rounded.

    By each path that this machine has, in turns; the least time of each counts. The time of the mask divided by each is
    shown. The vectors are bfloat16, and there is a scale for each 64 numbers.
    """
    best, results = kernels.best_path(), []
    if best is None:
        sys.exit(f"whole needs the native library, and here products are {kernels.describe()}")
    for size, name in itertools.product(names(sizes), BITS):
        rows, columns = common.shape_of(size)
        forms = {
            form: [in_large_pages(copy.deepcopy(matrix)) for _ in range(_count(rows, columns) // 4)]
            for form, matrix in ((form, _random(rows, columns, name, 0.0, form)) for form in (False, True))
        }
        for number, batch, path in itertools.product(integers(threads), integers(batches), kernels.Path):
            if path > best:
                continue
            torch.set_num_threads(number)
            x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
            calls: dict[str, list[Call]] = {
                "mask": [partial(kernels.multiply, W, x, path) for W in forms[False]],
                "exact": [partial(kernels.multiply, W, x, path, rounded=False) for W in forms[True]],
                "rounded": [partial(kernels.multiply, W, x, path, rounded=True) for W in forms[True]],
            }
            found = _least(calls, seconds)
            case = {"size": size, "dtype": name, "threads": number, "batch": batch, "path": path.name}
            results += [{**case, "products": kind, "seconds": took} for kind, took in found.items()]
            shown = (f"{kind} {1e3 * took:.3f} ms ({found['mask'] / took:.2f})" for kind, took in found.items())
            print(f"{size}, {name}, {number} threads, {batch} vectors, {path.name}: {', '.join(shown)}", flush=True)
    common.save(record, kernels=kernels.describe(), results=results)


def _random(rows: int, columns: int, name: str, sparsity: float, whole: bool | None = None) -> PackedMatrix:
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
    return pack(W, codes, scales, bits, whole)


def _least_seconds(matrices: list[PackedMatrix], paths: list[kernels.Path], limit: float) -> dict[str, float]:
    """Of one product by each path, in rounds that take about so many seconds together."""
    x = torch.randn(1, matrices[0].columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    calls: dict[str, list[Call]] = {}
    for path in paths:
        calls[path.name] = [partial(kernels.multiply, W, x, path) for W in matrices]
    return _least(calls, limit)


def _least(calls: dict[str, list[Call]], limit: float) -> dict[str, float]:
    measured = common.turns(calls)
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        best = {name: min(best[name], *those) for name, those in next(measured).items()}
    return best


def products(rounds: Rounds = 10, record: Record = None) -> None:
    """Products of float32 matrices: by the library that torch chooses, and by the one that niwaki does.

    Each figure is the best of several rounds. Where niwaki chooses nothing else, both are the same.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for rows, inner, columns in SHAPES:
        x, w = (torch.randn(size, inner, generator=generator) for size in (rows, columns))
        pairs[f"{rows} x {inner} x {columns}"] = x, w.T
    for tokens, width in GRAMS:
        x = torch.randn(tokens, width, generator=generator)
        pairs[f"Gram, {tokens} x {width}"] = x.T, x
    cells = []
    for name, (a, b) in pairs.items():
        operations = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        best = [float("inf"), float("inf")]
        for _, ours in itertools.product(range(rounds), (0, 1)):
            with chosen_products(tf32=False) if ours else contextlib.nullcontext():
                best[ours] = min(best[ours], common.seconds(partial(torch.mm, a, b)))
        exact = a.double() @ b.double()
        with chosen_products(tf32=False):
            error = float((a @ b - exact).norm() / exact.norm())
        theirs, own = (operations / each / 1e9 for each in best)
        cells.append({"name": name, "torch": theirs, "niwaki": own, "error": error})
        print(f"{name:28} {theirs:6.0f} and {own:6.0f} GFLOP/s, error {error:.1e}", flush=True)
    print("oneDNN is used" if onednn_is_faster() else "what torch chooses is used")
    common.save(record, onednn=onednn_is_faster(), cells=cells)


if __name__ == "__main__":
    common.main(decode, paths, whole, prompts, products, about=__doc__)
