"""Squared per-sample norms on CPUs by kernels in C, which store no Gram matrix of the batch.

    gram_norm_and_reach   Σ_{t,s} (a_t · a_s)(g_t · g_s) = ‖gᵀa‖²        multiplications n T² (d + p) / 2
    pixel_norms           the same of a convolution, from its pixels      multiplications n (N² C + T² p) / 2
    patch_reach           Σ_t ‖a_t‖ ‖g_t‖ of a convolution's patches      reads pixels' norms for each kernel offset

torch's matrix libraries are built for large matrices; the Gram matrices of one sample are small and symmetric. Here a
tile of inner products stays in registers for all features, only a triangle is computed, and entries of the two Gram
matrices are multiplied at once. The sources need no other library and no torch headers; threads are torch's own, by
`torch_parallel_for`.

**Compiling** happens once on a machine, by $CC or cc (`clipping.native.library`). Without a writable folder, or a
compiler that has `__builtin_shufflevector` (GCC 12 or later), `supported` returns False, and the formulas of
`clipping.rules` are the exact fallback.

**Exactness.** Inner products have the dtype of the tensors, at least float32; rows of tiles are summed in float64. The
same tensors give the same bits for any number of threads.

Functions take:
    a: [n, T, d], of any strides.
    g: [n, T, p], of any strides.
    lost: factors of the rows' norms, from `clipping.numerics.rounding_bounds.of_lost`.
"""

import ctypes
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from clipping.core.dtypes import norm_dtype
from clipping.native import library
from clipping.numerics.traced_operations import operation

REALS = {torch.float32: "float", torch.float64: "double"}
"""dtype -> C type."""
PART = 512
"""Positions of a sample that a thread takes at a time."""

Phase = tuple[Tensor, Sequence[tuple[int, ...]]]
"""An image x [n, C, *size], and the offsets (rows, columns) of the pixels that a position reads."""


def supported(*tensors: Tensor) -> bool:
    """True if there is a library and the tensors are floating-point, on a CPU, and not wrapped by torch.func."""
    for x in tensors:
        if type(x) not in (Tensor, Parameter, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        if x.device.type != "cpu" or not x.dtype.is_floating_point or _library(norm_dtype(x.dtype)) is None:
            return False
    return True


@operation
def gram_norm_and_reach(a: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """Σ_{t,s} (a_t · a_s)(g_t · g_s) of each sample, and the reach from the diagonals of the Gram matrices: [n, 3].

    float32 or wider. Rounding may make the square of a vanishing gradient slightly negative.
    """
    parts = max(1, -(-a.shape[1] // PART))
    found = a.new_empty(len(a), parts, 3, dtype=norm_dtype(g.dtype))
    a, g = (
        x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous() for x in (a.to(found.dtype), g.to(found.dtype))
    )
    if not len(a) or not a.shape[1]:
        found.zero_()
    elif not isinstance(found, FakeTensor):
        sizes = _numbers([g.shape[1], a.shape[2], *a.stride()[:2], g.shape[2], *g.stride()[:2], parts])
        _loaded(g.dtype).gram_norm(
            _torch().torch_parallel_for, a.data_ptr(), g.data_ptr(), sizes, len(g), *lost, found.data_ptr()
        )
    return found.sum(1) if parts > 1 else found[:, 0]


@operation
def pixel_norms(images: Sequence[Phase], g: Tensor, lost: tuple[float, float]) -> Tensor:
    """‖∂/∂W‖² and `patch_reach` of each sample, for a convolution of one group in one or two dimensions.

    Nothing is unfolded. The reach comes from the diagonals of the Gram matrices.

    Args:
        images: phases of the input (`clipping.rules.pixel_gram`); one if the stride is 1.
        g: [n, p, *output size].

    Returns:
        [n, 3], float32 or wider: squared norms as in `gram_norm_and_reach`, and the two columns of the reach.
    """
    dtype = norm_dtype(g.dtype)
    found = g.new_empty(len(g), 3, dtype=dtype)
    images = [(x.to(dtype), offsets) for x, offsets in images if x.numel() and offsets]
    if not images or not g.numel():
        return found.zero_()
    g, offsets = g.to(dtype), [_offsets(tuple(each)) for _, each in images]
    sources = zip(images, offsets, strict=True)
    phases = [n for (x, _), each in sources for n in (*_source(x), len(each) // 2, ctypes.addressof(each))]
    given = _numbers(phases), len(images), _numbers(_source(g))
    kernels, count = _loaded(dtype), len(g)
    scratch = g.new_zeros(min(torch.get_num_threads(), count) * kernels.pixel_scratch(*given))
    if not isinstance(g, FakeTensor):
        starts = _torch().torch_parallel_for, _torch().torch_get_thread_idx
        kernels.pixel_norms(*given, *starts, count, scratch.data_ptr(), *lost, found.data_ptr())
    return found


@operation
def patch_reach(
    pixels: Tensor, norms: Tensor, geometry: Sequence[Sequence[int]], width: int, lost: tuple[float, float]
) -> Tensor:
    """Σ_t ‖a_t‖ ‖g_t‖ and Σ_t (‖a_t‖ · lost[0] + ‖g_t‖ · lost[1]) of patches in one or two dimensions, [n, 2].

    Args:
        pixels: [n, *size], norms of the input's pixels, float32 or float64.
        norms: [n, T], norms of the output gradient's positions, of the same dtype.
        geometry: kernel, stride, padding and dilation, one number a spatial dimension.
        width: size of the output's last dimension.
    """
    pixels, norms, found = pixels.contiguous(), norms.contiguous(), norms.new_empty(len(norms), 2)
    if found.numel() and not isinstance(found, FakeTensor):
        flat = () if pixels.dim() == 3 else (1,)
        two = [n for each, one in zip(geometry, (1, 1, 0, 1), strict=True) for n in (*(one for _ in flat), *each)]
        size = [*flat, *pixels.shape[1:], norms.shape[1] // max(1, width), width]
        _loaded(norms.dtype).patch_reaches(
            _torch().torch_parallel_for, pixels.data_ptr(), norms.data_ptr(), _numbers([*size, *two]), len(norms),
            *lost, found.data_ptr(),
        )  # fmt: skip
    return found


def scratch_bytes(pixels: int, positions: int, features: int, samples: int, dtype: torch.dtype) -> int:
    """Approximate bytes that `pixel_norms` allocates.

    Args:
        pixels: number of pixels of an image.
        positions: number of positions of the output.
        features: the larger of the channels of a pixel and of an output position.
        samples: B.
        dtype: of the images.
    """
    larger = max(pixels, positions)
    return min(torch.get_num_threads(), samples) * (pixels + features) * larger * norm_dtype(dtype).itemsize


def _source(x: Tensor) -> Sequence[int]:
    """The numbers of a two-dimensional `source` in `pixels.c`, from [n, C, *size]."""
    x = x if x.dim() == 4 else x.unsqueeze(2)
    return (0 if isinstance(x, FakeTensor) else x.data_ptr(), *x.shape[1:], *x.stride())


def _numbers(given: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(given))(*given)


@functools.cache
def _offsets(pairs: tuple[tuple[int, ...], ...]) -> ctypes.Array[ctypes.c_int64]:
    return _numbers([offset for pair in pairs for offset in pair])


def _loaded(dtype: torch.dtype) -> ctypes.CDLL:
    kernels = _library(dtype)
    if kernels is None:
        raise RuntimeError("expected a library: ask `supported` first, and use the formulas of clipping.rules")
    return kernels


@functools.cache
def _torch() -> ctypes.CDLL:
    """torch's CPU library, for the two functions that start threads and return a thread's index."""
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(next(folder.glob("libtorch_cpu.*"))))


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for float32 or float64, compiled if necessary; None if they cannot be."""
    try:
        kernels = library.load(REALS[dtype]).kernels
        _torch().torch_parallel_for, _torch().torch_get_thread_idx
    except (library.NoLibrary, OSError, AttributeError, StopIteration) as missing:
        if not getattr(missing, "expected", False):
            warnings.warn(f"no kernels in C, torch's own operations remain: {missing}", stacklevel=2)
        return None
    number: Any = ctypes.c_int64
    address: Any = ctypes.c_void_p
    real: Any = ctypes.c_double
    reach = [*[address] * 4, number, real, real, address]
    arguments = {
        "gram_norm": reach,
        "pixel_norms": [address, number, *[address] * 3, number, address, real, real, address],
        "patch_reaches": reach,
    }
    for name, types in arguments.items():
        kernel = getattr(kernels, name)
        kernel.argtypes, kernel.restype = types, None
    kernels.pixel_scratch.argtypes, kernels.pixel_scratch.restype = [address, number, address], number
    return kernels
