"""What products in TF32 or bfloat16 cost, as relative errors of solvers, measured without a GPU.

    python benchmarks/precision.py --record benchmarks/results/precision.json
    python benchmarks/precision.py --solvers alps,continuation:sweeps=40 --blocks 0,5 --means 10

Such products round their factors to 10 (TF32) or 7 bits (bfloat16) after the leading one and add in float32. Here
factors are rounded to the nearest, ties to even, before a product in float32, on two kinds of layers: those of a
model, and 256 x 256 synthetic ones whose inputs have a mean of so many standard deviations (--means), which makes
Gram matrices close to singular. Solutions are judged in float32 by the exact Gram matrix. Printed are geometric means
over matrices of their errors divided by those of the solutions in float32, and in brackets the worst matrix and the
error that the solver itself found, divided by the true one.

"sums cut off": tensor cores add a few products at a time, and round sums towards zero. Factors are bfloat16 numbers,
that is, neither TF32 nor bfloat16 rounds them; with them in float32 and the usual sums the result is compared.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import geometric_mean
from typing import Annotated, Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import Blocks, Cell, Layer, Layers, Length, Patterns, Record, Samples, Solvers, names
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typer import Option

from layer import PATTERNS, Synthetic
from niwaki.layer.solvers import make_solver

#: Bits after the leading one.
BITS = {"TF32": 10, "bfloat16": 7}
#: In one step of a tensor core so many products are added to a sum, at the least.
STEP = 4
_ATEN = torch.ops.aten
#: Where the first of the two factors is among the arguments, in or out of place.
_PRODUCTS = {
    **dict.fromkeys([_ATEN.mm, _ATEN.bmm], 0),
    **dict.fromkeys([_ATEN.addmm, _ATEN.addmm_, _ATEN.baddbmm, _ATEN.baddbmm_], 1),
}


def rounded(X: Tensor, bits: int) -> Tensor:
    """float32 ``X`` with at most ``bits`` bits after the leading one: the nearest such numbers, of two the even one."""
    dropped = 23 - bits
    pattern = X.contiguous().view(torch.int32)
    half = ((pattern >> dropped) & 1) + (1 << (dropped - 1)) - 1
    nearest = ((pattern + half) >> dropped << dropped).view(torch.float32)
    return torch.where(X.isfinite(), nearest, X)


def cut(X: Tensor) -> Tensor:
    """float64 ``X`` in float32, rounded towards zero."""
    Y = X.float()
    return torch.where(Y.abs() > X.abs(), Y.nextafter(torch.zeros_like(Y)), Y)


class Rounding(TorchDispatchMode):
    """Within it products of float32 matrices have factors of so many bits.

    Args:
        bits: How many, after the leading one.
        grams: Whether only products of a matrix with itself do.
        cut: Whether sums, then of Gram matrices only, are rounded towards zero after every ``STEP`` products.

    Attributes:
        count: Of products so far.
    """

    def __init__(self, bits: int, grams: bool = False, cut: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits = bits
        self._grams = grams or cut
        self._cut = cut
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at, kwargs = _PRODUCTS.get(func.overloadpacket), kwargs or {}
        if at is None or args[at].dtype != torch.float32:
            return func(*args, **kwargs)
        left, right = args[at : at + 2]
        if self._grams and left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
            return func(*args, **kwargs)
        self.count += 1
        left, right = rounded(left, self._bits), rounded(right, self._bits)
        if not self._cut:
            return func(*args[:at], left, right, *args[at + 2 :], **kwargs)
        left, right = left.double(), right.double()
        total = torch.zeros(left.shape[0], right.shape[1])
        for start in range(0, left.shape[1], STEP):
            some = slice(start, start + STEP)
            total = cut(total.double().addmm_(left[:, some], right[some]))
        return args[0].add_(total)


def with_mean(mean: float) -> Layer:
    """256 x 256, with four batches of 4,096 correlated inputs, each with a mean of so many standard deviations."""
    generator, size = torch.Generator().manual_seed(0), 256
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mixing *= torch.arange(1, size + 1).pow(-0.5)[:, None]
    mixing /= mixing.norm(dim=0)
    means = mean * torch.randn(size, generator=generator).sign()
    W, H = torch.randn(size, size, generator=generator), torch.zeros(size, size)
    for _ in range(4):
        X = torch.randn(4096, size, generator=generator, dtype=torch.float64) @ mixing
        X = (X + means).float()
        H.addmm_(X.T, X)
    return Layer(f"mean {mean:g}", W, H / (4 * 4096))


def same_bits(layers: Layers) -> int:
    """How many Gram matrices of a model that runs in bfloat16 were compared: TF32 changes no bit of them.

    Raises:
        SystemExit: it does.
    """
    few = replace(layers, samples=(8, 1))
    plain = {id(layer.H): layer.H for layer in few("bfloat16")}  # q, k and v have one
    with Rounding(BITS["TF32"], grams=True) as mode:
        other = {id(layer.H): layer.H for layer in few("bfloat16")}
    different = sum(not torch.equal(a, b) for a, b in zip(plain.values(), other.values(), strict=True))
    if different or mode.count == 0:
        raise SystemExit(f"TF32 changes {different} of {len(plain)} Gram matrices, after {mode.count} products")
    return len(plain)


def solve(
    solver: str, pattern: str, given: list[Layer], judges: list[Layer], bits: int | None
) -> list[tuple[float, float]]:
    """For each matrix the error by its judge, and the one that the solver found; products of so many bits."""
    found = []
    for layer, judge in zip(given, judges, strict=True):
        with Rounding(bits) if bits else contextlib.nullcontext():
            solution = make_solver(solver)(layer.problem(), PATTERNS[pattern])
        found.append((judge.problem().error(solution.W), solution.error))
    return found


def compare(where: str, make: Callable[[], list[Layer]], cases: list[tuple[str, str]]) -> Iterator[Cell]:
    """Entries of the record for the layers that ``make`` makes in whatever mode it is called."""

    def made(mode: Rounding) -> list[Layer]:
        with mode:
            return make()

    exact = make()
    half = made(Rounding(BITS["bfloat16"], grams=True))
    variants: list[tuple[str, str, list[Layer], list[Layer], int | None]] = [
        ("sums cut off", "", made(Rounding(BITS["bfloat16"], cut=True)), half, None)
    ]
    for factors, bits in BITS.items():
        grams = half if factors == "bfloat16" else made(Rounding(bits, grams=True))
        variants += [
            ("Gram matrices", factors, grams, exact, None),
            ("solver", factors, exact, exact, bits),
            ("all", factors, made(Rounding(bits)), exact, bits),
        ]
    for what, factors, given, judges, products in variants:
        for solver, pattern in cases:
            plain = solve(solver, pattern, judges, judges, None)
            coarse = solve(solver, pattern, given, judges, products)
            ratios = [error / best for (error, _), (best, _) in zip(coarse, plain, strict=True)]
            said = geometric_mean(own / error for error, own in coarse)
            entry = {"where": where, "what": what, "factors": factors, "solver": solver, "pattern": pattern}
            yield entry | {"relative_error": geometric_mean(ratios), "worst": max(ratios), "said": said}


def precision(
    solvers: Solvers = "admm-grad,sparsegpt,continuation",
    patterns: Patterns = "50 %,70 %,2:4",
    means: Annotated[str, Option(help="Of the inputs of synthetic layers.")] = "1,3,10,30",
    model: str = "demo",
    text: Annotated[str, Option(help="To calibrate on.")] = "demo",
    samples: Samples = 256,
    length: Length = 256,
    blocks: Blocks = "1,4",
    synthetic: Synthetic = "",
    record: Record = None,
) -> None:
    """What products in TF32 or bfloat16 cost, as relative errors of solvers, measured without a GPU."""
    chosen, sizes = common.integers(blocks), names(synthetic)
    layers = Layers(model, (text, "demo-held"), (samples, 1), length, chosen, sizes)  # the held-out text is not used
    cases = [(solver, pattern) for solver in names(solvers) for pattern in common.chosen(patterns, PATTERNS)]
    compared = 0 if sizes else same_bits(layers)
    print(f"{compared} Gram matrices of a model in bfloat16 are the same in TF32, to the bit")
    places: dict[str, Callable[[], list[Layer]]] = {"model": lambda: list(layers())}
    for mean in common.fractions(means):
        places[f"mean {mean:g}"] = partial(_only, mean)
    results = []
    for where, make in places.items():
        for entry in compare(where, make, cases):
            results.append(entry)
            *labels, error, worst, said = entry.values()
            print(*(f"{label:14s}" for label in labels), f"{error:.5f} ({worst:.4f}, {said:.4f})", flush=True)
    common.save(record, blocks=chosen, same_bits=compared, results=results)


def _only(mean: float) -> list[Layer]:
    return [with_mean(mean)]


if __name__ == "__main__":
    common.main(precision, about=__doc__)
