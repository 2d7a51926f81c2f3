"""Solvers on matrices of all kinds: in any memory layout, hard ones, and ones that are no problem at all."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niwaki.errors import NiwakiError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured, make_pattern
from niwaki.layer.problem import Gram, LayerProblem, Solution
from niwaki.layer.solvers import SOLVERS, MaskThenUpdate, Solver

_SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 24, 32)
#: Values of parameters that every solver has to cope with.
_PARAMETERS: dict[str, tuple[Any, ...]] = {"schedule": ("constant", "cubic", "printed"), "method": ("adam", "sgd")}
_PARAMETERS |= {"iterations": (1, 2, 3, 30), "sparsification_steps": (1, 2, 3), "finish": (0, 1, 5), "cycles": (1, 5)}
_PARAMETERS |= {"sweeps": (1, 2, 5, 13), "parts": (1, 2, 3, 100), "block_size": (1, 3, 8, 128)}
_PARAMETERS |= {"rho": (1e-6, 0.01, 1.0, 1e6), "damping": (0.0, 1e-9, 0.01, 1.0, 1e6), "memory": (1e-9, 1.0, 1e300)}
_PARAMETERS |= {"penalty_start": (1e-4, 0.3), "penalty_end": (0.3, 1.0, 100.0), "softness": (0.0, 0.4, 1.0)}
_PARAMETERS |= {"relaxation": (0.1, 1.0, 1.9), "learning_rate": (1e-6, 0.1, 1.0), "momentum": (0.0, 0.9)}
_PARAMETERS |= {"threshold": (0.0, 0.1), "power": (0.0, 0.5, 3.0)}


def prepare(place: Path) -> None:
    signal.signal(signal.SIGALRM, _ends)
    torch.set_num_threads(1)


def _ends(*_: object) -> None:
    raise AssertionError("it does not end")


def case(chance: random.Random, place: Path) -> str:
    try:
        return _case(chance)
    finally:
        signal.alarm(0)  # other kinds go on in this process


def _case(chance: random.Random) -> str:
    dtype = chance.choice((torch.float32, torch.float64))
    rows, columns = chance.choice(_SIZES), chance.choice(_SIZES)
    W, X, hard = _weights(chance, rows, columns), _inputs(chance, columns), chance.random() < 0.4
    if hard:
        W, X = W * 10.0 ** chance.randint(-30, 30), X * 10.0 ** chance.randint(-30, 30)
    W, H = W.to(dtype), (X.T @ X / len(X)).to(dtype)
    wrong = chance.random() < 0.3
    if wrong:
        W, H = _spoiled(chance, W, H)
    pattern, fits = _pattern(chance, rows, columns)
    solver = _solver(chance)
    given = [_presented(chance, each) for each in (W, H)]
    before = [_bytes(each) for each in given]
    signal.alarm(60)  # for what does not end
    try:
        made = LayerProblem(given[0], Gram(given[1], chance.random() < 0.5))
        assert not wrong, "a problem that is none was accepted"
        solution = solver(made, pattern, (lambda *_: None) if chance.random() < 0.3 else None)
    except NiwakiError as error:
        said = str(error)
        one_line = "\n" not in said and len(said) < 600
        easy = fits and not (wrong or hard) and isinstance(pattern, float | PerRow | Unstructured)
        refuses = {"GiB", "infinite weights", "they are 0 without", "heavily damped"}
        outcome = f"{'no problem' if wrong else 'hard' if hard else 'refused'}: {type(error).__name__}"
        solution = None
    assert [_bytes(each) for each in given] == before, "the arguments were changed"
    if solution is None:
        assert one_line, said
        assert not easy or any(each in said for each in refuses), f"{solver} refused {pattern}: {said}"
        return outcome
    _check(W, H, make_pattern(pattern, solver.default_pattern), solver, solution)
    signal.alarm(60)
    again = solver(LayerProblem(W, H), pattern)
    assert torch.equal(again.W, solution.W), "layout or sharing matters"
    assert torch.equal(again.mask, solution.mask)
    return "hard and solved" if hard else "solved"


def _weights(chance: random.Random, rows: int, columns: int) -> Tensor:
    W = torch.from_numpy(np.random.default_rng(chance.getrandbits(32)).standard_normal((rows, columns)))
    match chance.randrange(8):
        case 0:
            W[chance.randrange(rows)] = 0.0
        case 1:
            W[:, chance.randrange(columns)] *= 1e6
        case 2:
            W = W.sign()
        case 3:
            W *= -0.0
        case 4:
            W -= W.mean(dim=1, keepdim=True)
    return W


def _inputs(chance: random.Random, columns: int) -> Tensor:
    """(tokens, in) float64."""
    draw = np.random.default_rng(chance.getrandbits(32)).standard_normal
    X = torch.from_numpy(draw((chance.choice((1, 2, columns, 8 * columns)), columns)))
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        j, k = chance.randrange(columns), chance.randrange(columns)
        match chance.randrange(6):
            case 0:
                X[:, j] = 0.0
            case 1:
                X[:, j] = 1.0
            case 2:
                X[:, j] = X[:, k]
            case 3:
                X[:, j] = -1000 * X[:, k]
            case 4:
                X *= 10.0 ** torch.from_numpy(draw(columns))
            case 5:
                X += 30.0
    return X


def _spoiled(chance: random.Random, W: Tensor, H: Tensor) -> tuple[Any, Any]:
    """What is no problem in exactly one way."""
    W, H, size = W.clone(), H.clone(), len(H)
    i, j = chance.randrange(size), chance.randrange(size)
    scale = 1 + float(H.diagonal().max())
    match chance.randrange(12):
        case 0:
            W[0, 0] = chance.choice((float("nan"), float("inf"), float("-inf")))
        case 1:
            H[i, j] = chance.choice((float("nan"), float("inf"), float("-inf")))
        case 2 if i != j:
            H[i, j] += 0.1 * scale
        case 3:
            H[i, i] = -scale
        case 4 if i != j:
            H[i, j] = H[j, i] = 2 * scale
        case 5 if size > 2:  # what no entry shows: 1 on the diagonal, -0.9 elsewhere
            H = torch.full_like(H, -0.9) * scale
            H.diagonal().fill_(scale)
        case 6:
            H = torch.cat([H, H])
        case 7:
            W = W[:, :0]
        case 8:
            W = W[0]
        case 9:
            H = H.half()
        case 10:
            return W.tolist(), H
        case _:
            H = H.to(torch.float32 if H.dtype == torch.float64 else torch.float64)
    return W, H


def _solver(chance: random.Random) -> Solver:
    def one() -> Solver:
        # Not of two factors, whose masks are no masks of a matrix: tests/layer/test_double_sparse.py.
        usual = chance.choice([solver for name, solver in SOLVERS.items() if name != "double-sparse"])
        names = [name for name in vars(usual) if chance.random() < 0.4]
        try:
            return type(usual)(**{**vars(usual), **{name: chance.choice(_PARAMETERS[name]) for name in names}})
        except NiwakiError:
            return usual

    solver = one()
    while chance.random() < 0.2:
        solver = MaskThenUpdate(solver, one())
    return solver


def _pattern(chance: random.Random, rows: int, columns: int) -> tuple[Any, bool]:
    """A pattern as a caller may give it, and whether it fits the matrix."""
    sparsity = chance.choice((0.0, 0.1, 0.5, 0.6, 0.9, 0.999, chance.random()))
    m = chance.choice((1, 2, 3, 4, 8))
    nm = NM(chance.randint(1, m), m)
    values = torch.from_numpy(np.random.default_rng(chance.getrandbits(32)).random((rows, columns))) < sparsity
    fixed = Fixed(values.T.contiguous().T)
    always = (sparsity, str(sparsity), Unstructured(sparsity), PerRow(sparsity), Fixed(values), fixed)
    patterns: list[tuple[Any, bool]] = [*((each, True) for each in always)]
    patterns += [(each, columns % m == 0) for each in (nm, str(nm))]
    return chance.choice(patterns)


def _presented(chance: random.Random, values: Any) -> Any:
    """The same values in other memory, or with gradients."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        return values
    match chance.randrange(7):
        case 0:
            values = values.mT.contiguous().mT if values.ndim == 2 else values
        case 1:
            wide = torch.full((*values.shape[:-1], 3 * values.shape[-1]), 7.0, dtype=values.dtype)
            wide[..., 1::3] = values
            values = wide[..., 1::3]
        case 2:
            values = torch.nn.Parameter(values.clone())
        case 3:
            values = values.clone().requires_grad_() * 1
        case 4:
            values = torch.cat([values, values])[: len(values)]
    return values


def _bytes(values: Any) -> bytes:
    if not isinstance(values, Tensor):
        return repr(values).encode()
    return torch.empty(0, dtype=torch.uint8).set_(values.untyped_storage()).numpy().tobytes()


def _check(W: Tensor, H: Tensor, pattern: Pattern, solver: Solver, solution: Solution) -> None:
    """That ``solution`` is one, by numpy and the definitions alone."""
    What, mask = solution.W.numpy(), solution.mask.numpy()
    assert What.shape == mask.shape == tuple(W.shape)
    assert solution.W.dtype == W.dtype
    assert mask.dtype == bool
    assert np.isfinite(What).all()
    assert (What[~mask] == 0).all(), "a weight off the mask"
    assert not np.signbit(What[What == 0]).any(), "-0.0"
    zeros = ~mask
    if isinstance(pattern, Fixed):
        assert (mask == pattern.values.numpy()).all()
    elif isinstance(pattern, NM):
        assert (zeros.reshape(-1, pattern.m).sum(axis=1) == pattern.m - pattern.n).all()
    else:
        assert zeros.sum() == round(pattern.sparsity * mask.size), f"{zeros.sum()} zeros for {pattern}"
    if type(solver).__name__ in ("Magnitude", "Wanda", "RIA"):
        assert (What[mask] == W.numpy()[mask]).all(), "a method for masks changed a weight"
    w, h = W.double().numpy(), H.double().numpy()
    d = w - What.astype(float)
    loss, power = (float(np.einsum("ij,jk,ik->", each, h, each)) for each in (d, w))
    rounding = 100 * (W.shape[1] + 10) * float(np.finfo(What.dtype).eps)
    slack = [rounding * float(np.einsum("ij,jk,ik->", *map(np.abs, (each, h, each)))) for each in (d, w)]
    assert solution.error >= 0
    if power > 10 * slack[1]:
        expected, tolerance = max(loss, 0.0) / power, (slack[0] + max(loss, 0.0) / power * slack[1]) / power
        assert abs(solution.error - expected) <= 2 * tolerance, f"error {solution.error}, by numpy {expected}"
