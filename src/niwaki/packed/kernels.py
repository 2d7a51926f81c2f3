"""Products with packed matrices: the native library's, or, where there is none, torch's."""

import ctypes
import functools
import importlib.machinery
import importlib.util
import math
import os
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import linear

from niwaki.errors import UsageError, shown
from niwaki.packed.matrix import (
    DTYPES,
    PackedMatrix,
    all_numbers,
    groups_fit,
    in_bytes,
    in_rows,
    possible_bits,
    size_of_whole,
    stride,
)

#: Weights that are unpacked at a time where products cannot read a matrix as it is: a tile stays in the cache.
TILE = 1 << 20

#: The most vectors for which matrices are read as they are: in general; and without a mask, where the processor has
#: units for bfloat16, which torch uses.
FEW, MANY = 32, 128

#: As the native library numbers them; uint8 are numbers of 4 bits.
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.int8: 3, torch.uint8: 4}
#: The same of whole numbers without a mask, by their bits.
_WHOLE = {2: 7, 3: 8, 4: 4, 5: 5, 6: 6, 8: 3}


class NativeMatrix(ctypes.Structure):
    """A packed matrix as the native library has it."""

    _fields_ = [  # as ctypes wants it
        ("dtype", ctypes.c_int),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("in_strips", ctypes.c_int64),
    ]


class Path(IntEnum):
    """Which instructions the native library uses."""

    PORTABLE = 0
    AVX2 = 1
    AVX2_VNNI = 2
    AVX512BW = 3
    AVX512 = 4
    AVX512_BF16 = 5


#: In words, by :class:`Path`.
_NAMES = (
    "without vector instructions",
    "AVX2",
    "AVX2 with VNNI",
    "AVX-512 without VBMI2",
    "AVX-512",
    "AVX-512 with bfloat16",
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native library, or None where it was not built."""
    # The import system knows where the installation put it. It is not a module and works with any version of Python.
    try:
        spec = importlib.util.find_spec("niwaki._kernels")
        if spec is None or not isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            return None
        return open_library(str(spec.origin))
    except (OSError, AttributeError):
        return None


def loaded() -> ctypes.CDLL:
    """The native library; RuntimeError where it was not built."""
    if (native := library()) is None:
        raise RuntimeError("niwaki's native kernels are not built")
    return native


def open_library(path: str) -> ctypes.CDLL:
    """The native library in the file ``path``; OSError or AttributeError where it cannot be loaded, or is another."""
    native = ctypes.CDLL(path)
    pointer, size, int_ = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    native.niwaki_best_path.argtypes, native.niwaki_best_path.restype = [int_], int_
    native.niwaki_time_in_products.argtypes, native.niwaki_time_in_products.restype = [int_], size
    native.niwaki_multiply.argtypes = [int_, pointer, pointer, int_, int_, size, pointer, int_]
    native.niwaki_expand.argtypes = [int_, pointer, size, pointer, size, size, pointer, int_]
    native.niwaki_block_begin.argtypes = [pointer, pointer, pointer, pointer, size, pointer, pointer, pointer, int_]
    native.niwaki_block_end.argtypes = [pointer, pointer, pointer, pointer, pointer, int_]
    native.niwaki_tokens_begin.argtypes = [pointer, size, *native.niwaki_block_begin.argtypes[1:]]
    native.niwaki_tokens_end.argtypes = [pointer, size, pointer, pointer, pointer, int_]
    native.niwaki_blocks.argtypes = [pointer, size, pointer, pointer, pointer, size, pointer, pointer, int_]
    native.niwaki_dense.argtypes = [int_, pointer, size, size, pointer, pointer, int_]
    native.niwaki_mask.argtypes = [int_, pointer, int_, size, pointer, int_]
    of_blocks = ("block_begin", "block_end", "tokens_begin", "tokens_end", "blocks")
    for name in ("multiply", "expand", *of_blocks, "dense", "mask"):
        getattr(native, f"niwaki_{name}").restype = None
    return native


@functools.cache
def asked_path() -> Path:
    """The best one that the environment allows; UsageError where it names none."""
    paths = {path.name.lower(): path for path in Path}
    name = os.environ.get("NIWAKI_KERNELS", "")
    if name and name not in paths:
        raise UsageError(
            f"the environment variable NIWAKI_KERNELS is {shown(name)}, and not one of {', '.join(paths)}; unset it "
            "for the best that this machine has"
        )
    return paths[name] if name else max(Path)


@functools.cache
def asked_to_be_exact() -> bool:
    """Whether the environment wants no vectors rounded to whole numbers; UsageError where that is not clear."""
    value = os.environ.get("NIWAKI_EXACT", "")
    if value not in ("", "0", "1"):
        raise UsageError(f"the environment variable NIWAKI_EXACT is {shown(value)}, and not 0 or 1; unset it for 0")
    return value == "1"


def best_path() -> Path | None:
    """What the native library uses on this machine, see :func:`asked_path`; None without a library."""
    native, most = library(), asked_path()
    return None if native is None else Path(native.niwaki_best_path(most))


def paths() -> list[Path]:
    """All that this machine has the instructions for; none without a native library."""
    native = library()
    return [path for path in Path if native is not None and native.niwaki_best_path(path) == path]


def rounds(dtype: torch.dtype) -> bool:
    """Whether vectors of this dtype are rounded to whole numbers for products with matrices of these without a mask.

    With vector instructions that is faster. Who computes in float32 wants its digits.
    """
    return dtype != torch.float32 and (best_path() or Path.PORTABLE) >= Path.AVX2 and not asked_to_be_exact()


def reads_strips(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products with vectors of this dtype are fastest where rows without a mask are in strips."""
    path = best_path() or Path.PORTABLE
    return device.type == "cpu" and rounds(dtype) and (path >= Path.AVX512 or path == Path.AVX2_VNNI)


def most_vectors(W: PackedMatrix, dtype: torch.dtype) -> float:
    """Up to how many vectors of this dtype a product on the CPU is faster as :func:`multiply` than by tiles."""
    if W.mask is not None or not rounds(dtype):
        return FEW
    return MANY if best_path() == Path.AVX512_BF16 else math.inf


def describe() -> str:
    """Which kernels are used, in words."""
    if (path := best_path()) is not None:
        return f"native, {_NAMES[path]}" + (", exact" if asked_to_be_exact() else "")
    return (
        "pure torch, because the native kernels are not built: products with packed weights are slower than with "
        "dense ones; install a C++ compiler (Debian: apt install g++) and install niwaki again"
    )


def time_in_products(counts: bool) -> float:
    """Seconds that all threads together spent in native products with weights since this was called last.

    They are counted from a call with ``counts`` on; what was not counted took 0 seconds.
    """
    native = library()
    return native.niwaki_time_in_products(counts) / 1e9 if native else 0.0


def multiply(W: PackedMatrix, x: Tensor, path: Path | None = None, rounded: bool | None = None) -> Tensor:
    """(n, rows) float32: x W^T for x (n, columns) of any float dtype, added up in float32; all on the CPU.

    Reads W as it is, by the instructions of ``path``, if this machine has them, or the best ones. If W has no mask, x
    is ``rounded`` to whole numbers, 64 at a time, or not; see :func:`rounds`. RuntimeError where there is no native
    library, or a tensor has another device, dtype or shape.
    """
    native, matrix = loaded(), native_matrix(W)
    rows, columns = W.shape
    if x.device.type != "cpu" or not x.is_floating_point() or x.shape[1:] != (columns,):
        raise RuntimeError(
            f"a packed matrix with {columns} columns cannot be multiplied with {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    wide = x.detach().to(torch.float32).contiguous()
    if columns != 8 * stride(columns):
        wide = torch.nn.functional.pad(wide, (0, 8 * stride(columns) - columns))
    y = torch.empty(len(x), rows)
    rounded = rounds(x.dtype) if rounded is None else rounded
    vectors = (wide.data_ptr(), x.dtype == torch.bfloat16, rounded, len(x), y.data_ptr())
    path = (best_path() or Path.PORTABLE) if path is None else path
    native.niwaki_multiply(path, ctypes.byref(matrix), *vectors, torch.get_num_threads())
    return y


def expand(W: PackedMatrix, first: int = 0, last: int | None = None, path: Path | None = None) -> Tensor:
    """(last - first, columns): rows of W as they were, bit for bit, on its device; RuntimeError without such rows."""
    last = W.shape[0] if last is None else last
    if not 0 <= first <= last <= W.shape[0]:
        raise RuntimeError(f"a packed matrix with {W.shape[0]} rows has no rows {first} to {last}")
    return _expanded(W, slice(first, last), last - first, path)


def expand_rows(W: PackedMatrix, rows: Tensor) -> Tensor:
    """(n, columns): some ``rows`` (n,) int64 or int32 of W, which has no mask, as :func:`expand`.

    IndexError where there is no such row, RuntimeError where they have another dtype or device than W.
    """
    if rows.dtype not in (torch.int64, torch.int32) or rows.device != W.values.device:
        raise RuntimeError(f"{rows.dtype} on {rows.device} are no numbers of rows on {W.values.device}")
    first, last = (int(rows.min()), int(rows.max())) if rows.numel() else (0, 0)
    if first < 0 or last >= W.shape[0]:
        raise IndexError(f"a packed matrix with {W.shape[0]} rows has no rows {first} to {last}")
    return _expanded(W, rows.to(torch.int64).contiguous(), len(rows))


def _expanded(W: PackedMatrix, rows: slice | Tensor, count: int, path: Path | None = None) -> Tensor:
    native = library() if W.values.device.type == "cpu" else None
    if native is None:
        W = in_rows(W)
        raw = _unpacked(W, rows)
        if W.scales is not None:
            scales = W.scales[rows]
            raw = (raw.to(torch.float32).unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)).flatten(1)
    else:
        raw = torch.empty(count, W.columns, dtype=torch.float32 if W.scales is not None else W.values.dtype)
        path = (best_path() or Path.PORTABLE) if path is None else path
        which = (None, rows.start) if isinstance(rows, slice) else (rows.data_ptr(), 0)
        matrix = ctypes.byref(native_matrix(W))
        native.niwaki_expand(path, matrix, W.columns, *which, count, raw.data_ptr(), torch.get_num_threads())
    if W.scales is not None:
        raw.add_(0.0)  # which makes +0.0 of -0.0, as a scale below 0 makes of 0
    return raw.to(W.dtype)


def mask_(values: Tensor, bits: Tensor, path: Path | None = None) -> bool:
    """Makes 0 what of ``values`` has no bit set in ``bits`` (bytes,) uint8, the first in the lowest; also NaN there.

    Whether that was done: False, and nothing has changed, where there is no native library, or one of them is not on
    the CPU or not contiguous. RuntimeError where there are too few bits.
    """
    native = library()
    if native is None or not all(each.device.type == "cpu" and each.is_contiguous() for each in (values, bits)):
        return False
    if bits.dtype != torch.uint8 or 8 * bits.numel() < values.numel() or values.itemsize not in (1, 2, 4, 8):
        raise RuntimeError(f"{bits.numel()} bytes in {bits.dtype} are no mask of {values.numel()} {values.dtype}")
    path = (best_path() or Path.PORTABLE) if path is None else path
    threads = torch.get_num_threads()
    native.niwaki_mask(path, values.data_ptr(), values.itemsize, values.numel(), bits.data_ptr(), threads)
    return True


def native_matrix(W: PackedMatrix) -> NativeMatrix:
    """W, which has to stay; RuntimeError if it is not as :mod:`niwaki.packed.matrix` says, on the CPU."""
    # The library reads whatever lies where a pointer says.
    values = DTYPES if W.scales is None else (torch.int8, torch.uint8)
    dtypes = {"mask": (torch.uint8,), "values": values, "starts": (torch.int64,), "scales": (torch.float32,)}
    for name, tensor in W.components.items():
        if tensor.device.type != "cpu" or tensor.dtype not in dtypes[name] or not tensor.is_contiguous():
            raise RuntimeError(
                f"a packed matrix has its {name} in {tensor.dtype} on {tensor.device}; load the model again"
            )
    if (W.mask is None) != (W.starts is None) or not _fits(W):
        raise RuntimeError("the parts of a packed matrix do not fit each other; load the model again")
    mask, starts = (None if part is None else part.data_ptr() for part in (W.mask, W.starts))
    pointers = (mask, W.values.data_ptr(), starts)
    scales, groups = (None, 1) if W.scales is None else (W.scales.data_ptr(), W.scales.shape[1])
    dtype = _DTYPES[W.values.dtype] if W.mask is not None else _WHOLE[W.bits]
    return NativeMatrix(dtype, W.shape[0], stride(W.columns), *pointers, scales, groups, W.in_strips)


def _fits(W: PackedMatrix) -> bool:
    """Whether a matrix has the mask or, without one, the numbers and scales that its columns need."""
    if W.mask is not None:
        return W.mask.shape[1] == stride(W.columns)
    if W.scales is None or not groups_fit(W.columns, W.scales.shape[1]):
        return False
    return any(W.count == size_of_whole(*W.shape, bits) for bits in possible_bits(W))


def multiply_by_tiles(W: PackedMatrix, x: Tensor) -> Tensor:
    """(n, rows) in the dtype of x (n, columns): x W^T, with some rows of W unpacked at a time."""
    rows = max(1, TILE // max(1, W.columns))
    tiles = range(0, W.shape[0], rows)
    dtype = x.dtype
    if x.device.type == "cpu" and dtype == torch.bfloat16 and best_path() != Path.AVX512_BF16:
        x = x.to(torch.float32)  # products in bfloat16 take longer without instructions for them
    products = [linear(x, expand(W, at, min(at + rows, W.shape[0])).to(x.dtype)) for at in tiles]
    return torch.cat(products, dim=1).to(dtype)


def _unpacked(W: PackedMatrix, rows: slice | Tensor) -> Tensor:
    """Unpacks rows as the native library does, by operations that all devices have; without scales."""
    if W.mask is None:
        return all_numbers(W, rows)
    assert W.starts is not None
    assert isinstance(rows, slice)
    shifts = torch.arange(8, dtype=torch.uint8, device=W.mask.device)
    bits = (W.mask[rows].unsqueeze(2) >> shifts) & 1
    nonzero = bits.flatten(1)[:, : W.columns].bool()
    halves = W.values.dtype == torch.uint8
    first, last = rows.start, rows.stop
    values = in_bytes(W, first, last) if halves else W.values[int(W.starts[first]) : int(W.starts[last])]
    raw = torch.zeros(nonzero.shape, dtype=values.dtype, device=W.mask.device)
    raw[nonzero] = values
    return raw
