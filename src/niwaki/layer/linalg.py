"""Linear algebra on Gram matrices; nothing here knows of pruning."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from niwaki.choices import TF32
from niwaki.errors import NumericalError

# How products of float32 matrices are computed: in TF32 on a GPU, by oneDNN on AMD's processors.

_ONEDNN = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
#: Of processors, for products of bfloat16 matrices: the names that torch has for them.
_UNITS = ("amx_bf16", "avx512_bf16")
#: Sizes of the products that show whether oneDNN rounds factors.
_SIZES = (16, 100, 512)


def has_tf32(device: torch.device) -> bool:
    """Whether ``device`` has it: NVIDIA GPUs from Ampere on, and some of AMD's."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_tf32_supported()


def gram_in_tf32(tf32: TF32, dtype: torch.dtype) -> bool:
    """Whether to use it for the Gram matrix of activations of ``dtype``.

    A bfloat16 or float16 number is a TF32 number too: no factor changes, and sums are in float32.
    """
    return tf32 == "always" or (tf32 == "auto" and dtype in (torch.bfloat16, torch.float16))


@contextlib.contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Within it products of float32 matrices on GPUs use TF32, or do not, and those on processors the faster library.

    The settings are torch's own, for all threads. Its older one (``allow_tf32``) cannot be read within: torch refuses
    where the two differ.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(_precision(torch.backends.cuda.matmul, "tf32" if tf32 else "ieee"))
        if onednn_is_faster():
            held.enter_context(_precision(_ONEDNN, "bf16"))
        yield


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which torch asks otherwise, and as exactly.

    MKL uses half of what AMD's processors with AVX-512 can do. torch leaves products to oneDNN where it is allowed to
    round factors to bfloat16. oneDNN makes use of that on processors with units for bfloat16 matrices (AMX) only;
    products with an identity matrix, which change nothing unless factors are rounded, show that it does not here.
    """
    if not (torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD"):
        return False
    generator = torch.Generator().manual_seed(0)
    with _precision(_ONEDNN, "bf16"):
        factors = [torch.rand(size, size, generator=generator) for size in _SIZES]
        return all(torch.equal(factor @ torch.eye(len(factor)), factor) for factor in factors)


def has_bfloat16_units() -> bool:
    """Whether the processor has any of ``_UNITS``, which is not known before torch 2.13."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(unit) for unit in _UNITS)


def _vendor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "vendor_id":
                return value.strip()
    return ""


@contextlib.contextmanager
def _precision(backend: object, value: str) -> Iterator[None]:
    before = backend.fp32_precision  # type: ignore[attr-defined]
    backend.fp32_precision = value  # type: ignore[attr-defined]
    try:
        yield
    finally:
        backend.fp32_precision = before  # type: ignore[attr-defined]


#: Rows and columns that are factorized at once; of larger matrices the parts, which leaves nearly all to products.
_PART = 192
#: Up to here LAPACK is the faster one everywhere.
_SMALL = 1024
#: Rows that are worked on at a time, to save memory: enough for the full rate of products.
STRIP = 1024
#: How many weights are looked at together, which a processor's cache is to hold.
AT_ONCE = 1 << 18
#: The ridge of the least squares for scales, relative to the squared output of each.
_SCALE_RIDGE = 1e-3
#: Of sums above this no term that matters is below what float32 can hold.
_SMALLEST = 1e-30
_TINY = torch.finfo(torch.float32).tiny
#: The error where not even a large damping helps.
NOT_DEFINITE = (
    "a Gram matrix is not positive definite even when heavily damped; "
    "look for NaN, infinite or huge activations in the calibration data"
)


def damped_cholesky(copy: Callable[[], Tensor], damping: float) -> tuple[Tensor, float]:
    """(L, damping that was used): the lower Cholesky factor of H + damping I.

    The damping is greater than asked for (at least 0) if H + damping I was not positive definite in floating point.
    ``copy`` returns H, (n, n), symmetric, positive semidefinite up to rounding: a new tensor each time, whose memory
    the factor takes. NumericalError if H is not finite, or not even n times its mean diagonal makes it definite.
    """
    # LAPACK's layout, so that nothing is copied: the transpose of a symmetric matrix is itself.
    L = copy().mT
    mean, info = L.diagonal().mean().item(), torch.empty((), dtype=torch.int32, device=L.device)
    # Rounding errors of a Gram matrix are about n eps times its diagonal: a start below that is lost.
    step = max(damping, mean * torch.finfo(L.dtype).eps * L.shape[0])
    while True:
        L.diagonal().add_(damping)
        if L.device.type == "cpu" and len(L) > _SMALL and onednn_is_faster():
            done = _cholesky(L)
            L.mT.triu_()  # in the order of memory
        else:
            torch.linalg.cholesky_ex(L, out=(L, info))
            done = not info.item()
        if done:
            return L, damping
        if not (step > 0 and damping <= mean * L.shape[0] < math.inf):
            raise NumericalError(NOT_DEFINITE)
        damping = step = step * 10
        del L
        L = copy().mT


def inverse_of_damped(copy: Callable[[], Tensor], damping: float) -> tuple[Tensor, float]:
    """((H + damping I)^-1, damping that was used), by Cholesky; see :func:`damped_cholesky`."""
    L, used = damped_cholesky(copy, damping)
    return torch.cholesky_inverse(L, out=L), used


def eigenvectors(copy: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """(n,) the eigenvalues of H, without what rounding takes below 0, and (n, n) its eigenvectors as columns.

    ``copy`` returns H; NumericalError if they cannot be found.
    """
    try:
        values, vectors = torch.linalg.eigh(copy())
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise NumericalError(NOT_DEFINITE) from error
    return values.clamp_(min=0), vectors


def inverse_diagonal(copy: Callable[[], Tensor], damping: float) -> tuple[Tensor, float]:
    """((n,) the diagonal of (H + damping I)^-1, damping that was used); see :func:`damped_cholesky`."""
    L, used = damped_cholesky(copy, damping)
    with products(tf32=False):
        _invert(L)
    return L.square_().sum(dim=0), used


def resolvent(copy: Callable[[], Tensor], rho: float, damping: float = 0.0) -> tuple[Tensor, float]:
    """(rho (H + (damping + rho) I)^-1, damping that was used), by Cholesky; see :func:`damped_cholesky`."""
    inverse, used = inverse_of_damped(copy, damping + rho)
    return inverse.mul_(rho), used - rho


def inverse_upper_cholesky(H: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper triangular U with U^T U = (H + damping I)^-1, and the damping that was used.

    With J the reversal of the order, J (H + damping I) J = L L^T gives U = J L^-1 J: one factorization and one
    triangular inverse, instead of two factorizations and an inverse, each of which loses digits.
    """
    L, used = damped_cholesky(lambda: H.flip(0, 1), damping)
    with products(tf32=False):  # cuBLAS solves with the setting for products
        _invert(L)
    return L.flip(0, 1), used


def _cholesky(A: Tensor) -> bool:
    """Replaces the lower triangle of A by its Cholesky factor; False if A is not positive definite.

    For processors where LAPACK has half the rate of products.
    """
    if len(A) <= _PART:
        L, info = torch.linalg.cholesky_ex(A)
        A.copy_(L)
        return not info.item()
    half = _half(len(A))
    above, below, beside = A[:half, :half], A[half:, half:], A[half:, :half]
    if not _cholesky(above):
        return False
    with products(tf32=False):
        _divide(beside, above)
        for start in range(0, len(below), STRIP // 2):  # the lower triangle is enough
            columns = slice(start, start + STRIP // 2)
            below[start:, columns].addmm_(beside[start:], beside[columns].mT, alpha=-1)
    return _cholesky(below)


def _divide(X: Tensor, L: Tensor) -> None:
    """Replaces X by X L^-T, for a lower triangular L; what L has above the diagonal is not read."""
    if len(L) <= _PART:
        X.copy_(torch.linalg.solve_triangular(L.mT, X, upper=True, left=False))
        return
    half = _half(len(L))
    left, right = X[:, :half], X[:, half:]
    _divide(left, L[:half, :half])
    right.addmm_(left, L[half:, :half].mT, alpha=-1)
    _divide(right, L[half:, half:])


def _invert(L: Tensor) -> None:
    """Replaces a lower triangular L by its inverse, with 2/3 n^3 operations; solving for each column takes n^3."""
    if len(L) <= _PART:
        unit = torch.eye(len(L), dtype=L.dtype, device=L.device)
        L.copy_(torch.linalg.solve_triangular(L, unit, upper=False))
        return
    half = _half(len(L))
    above, below, beside = L[:half, :half], L[half:, half:], L[half:, :half]
    _invert(above)
    _invert(below)
    torch.mm((below @ beside).neg_(), above, out=beside)


def _half(n: int) -> int:
    return math.ceil(n / 2 / 64) * 64


def masked_conjugate_gradients(
    H: Tensor, target: Tensor, start: Tensor, mask: Tensor, steps: int
) -> tuple[Tensor, float]:
    """Conjugate gradients on min_Z tr((Z - target) H (Z - target)^T) over Z with support in ``mask``.

    H is (in, in), positive definite, of unit diagonal, which needs no preconditioner; all others are (out, in), and
    ``start`` is zero off the mask. Each row has its own step lengths and stops when it has converged. Cost: one
    (out, in) x (in, in) product a step.

    Z is never worse than ``start`` in any row, up to rounding. The residual is the norm of the gradient on the mask
    relative to that at the start (0 if that is 0), by the recurrence: near rounding errors the true one is greater.
    """
    solved = start.clone()
    before = after = 0.0
    for Z, goal, allowed in zip(solved.split(STRIP), target.split(STRIP), mask.split(STRIP), strict=True):
        R = ((goal - Z) @ H).mul_(allowed)
        P = R.clone()
        rr = R.square().sum(dim=1, keepdim=True)
        before += float(rr.sum(dtype=torch.float64))
        # Below this the residual is rounding noise, and steps along it are noise too.
        floor = rr * torch.finfo(H.dtype).eps ** 2
        for _ in range(steps):
            HP = (P @ H).mul_(allowed)
            curvature = (P * HP).sum(dim=1, keepdim=True)
            alpha = torch.where((curvature > 0) & (rr > floor), rr / curvature, 0.0)
            Z.addcmul_(P, alpha)
            R.addcmul_(HP, alpha, value=-1)
            rr_next = R.square().sum(dim=1, keepdim=True)
            beta = torch.where(rr > floor, rr_next / rr, 0.0)
            P.mul_(beta).add_(R)
            rr = rr_next
        after += float(rr.sum(dtype=torch.float64))
    return solved, math.sqrt(after / before) if before > 0 else 0.0


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], residual: Tensor, start: Tensor, steps: int, dim: int | None = None
) -> Tensor:
    """``start``, which leaves this ``residual``, after steps of conjugate gradients; changes the residual.

    Where ``dim`` is given, what lies along it is a problem of its own.
    """

    def inner(X: Tensor, Y: Tensor) -> Tensor:
        return (X * Y).sum() if dim is None else (X * Y).sum(dim, keepdim=True)

    solved, D, rr = start.clone(), residual.clone(), inner(residual, residual)
    for step in range(steps):
        AD = apply(D)
        curvature = inner(D, AD)
        length = torch.where(curvature > 0, rr / curvature, 0.0)
        solved.addcmul_(D, length)
        if step + 1 < steps:
            residual.addcmul_(AD, length, value=-1)
            before, rr = rr, inner(residual, residual)
            D.mul_(torch.where(before > 0, rr / before, 0.0)).add_(residual)
    return solved


def with_unit_diagonal(M: Tensor) -> tuple[Tensor, Tensor]:
    """(M with 1 on its diagonal, or 0 where it has 0; the roots of that, with 1 for 0)."""
    diagonal = M.diagonal().clamp(min=0)
    units = torch.where(diagonal > _TINY, diagonal, 1.0).sqrt_()
    return M.div_(units).div_(units.unsqueeze(1)), units


def scale_systems(W: Tensor, codes: Tensor, H: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """A (rows, n, n) and b (rows, n): (w - q s) H (w - q s)^T of each row is s A s^T - 2 b s^T and a constant.

    q are the ``codes`` (rows, in), and s the scales of each ``group`` of them.
    """
    n = codes.shape[1] // group
    A, b = W.new_empty(len(codes), n, n), ((W @ H) * codes).unflatten(1, (n, group)).sum(dim=2)
    for i in range(n):  # A is symmetric
        start, stop = i * group, (i + 1) * group
        outputs = (codes[:, start:stop] @ H[start:stop, start:]).mul_(codes[:, start:])
        A[:, i, i:] = A[:, i:, i] = outputs.unflatten(1, (n - i, group)).sum(dim=2)
    return A, b


def fitted_scales(A: Tensor, b: Tensor, old: Tensor) -> Tensor:
    """(rows, n): for each row the x with the least x A x^T - 2 b x^T, with a ridge towards the ``old`` one.

    A (rows, n, n) and b (rows, n) are changed. An old number stays where it has no effect, or the new one another sign.
    """
    diagonal = A.diagonal(dim1=1, dim2=2)
    seen = diagonal > 0
    ridge = diagonal * _SCALE_RIDGE
    b.addcmul_(ridge, old)
    diagonal.add_(ridge).masked_fill_(~seen, 1.0)
    with products(tf32=False):
        fitted, _ = torch.linalg.solve_ex(A, b)
    return torch.where(seen & (fitted.sign() == old.sign()) & fitted.isfinite(), fitted, old)


def quadratic_form(A: Tensor, H: Tensor, B: Tensor | None = None) -> float:
    """tr(D H D^T), 0 or more, with D = A - B, or A alone; for A and B (rows, n) and H (n, n)."""
    if B is not None and torch.equal(A, B):  # which is common, where weights are only rounded, and no product shows
        return 0.0
    value = _quadratic_form(A, H, B)
    if not _SMALLEST < value < math.inf and A.dtype == torch.float32:
        value = _quadratic_form(A.double(), H.double(), None if B is None else B.double())
    return max(value, 0.0)  # which rounding may take it below


def _quadratic_form(A: Tensor, H: Tensor, B: Tensor | None) -> float:
    strips: Iterable[Tensor] = A.split(STRIP)
    if B is not None:
        strips = (rows - others for rows, others in zip(A.split(STRIP), B.split(STRIP), strict=True))
    return math.fsum(float((D @ H).mul_(D).sum(dtype=torch.float64)) for D in strips)


def is_finite(A: Tensor) -> bool:
    """Whether all of A is finite. A sum that is finite has no other terms, and takes a fortieth of a look at each."""
    for rows in A.split(STRIP) if A.ndim > 1 else (A,):
        wide = rows if rows.dtype.itemsize >= 4 else rows.float()
        if not wide.sum().isfinite() and not torch.isfinite(wide).all():  # finite terms may have an infinite sum
            return False
    return True
