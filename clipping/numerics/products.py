"""Matrix products that are never rounded beyond the bounds of `clipping.numerics.rounding_bounds`."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import HALF, wide_dtype
from clipping.numerics.traced_operations import operation

ALIGNED, PADDED = 8, 16
"""Entries of a row: half precision loads fast if rows begin at multiples of 16 bytes (32 bytes for Triton)."""
OTHERS, PADS_FROM = 128, 2**30
"""Least rows of the other operand, and least multiplications, for padding to pay."""


def on_gpu(x: Tensor) -> bool:
    """True for a tensor on a CUDA device, or on "meta", which stands for CUDA when a step's operations are counted."""
    return x.is_cuda or x.is_meta


def padding(shape: Sequence[int], dtype: torch.dtype, others: int) -> int:
    """Entries to add to each row of an operand so that a product on a GPU is fast; 0 if that does not pay.

    The choice depends on sizes only. A product of K·M·N multiplications is several times slower if its rows of M
    half-precision entries are not aligned (GPT-2's head: M = 50,257), and copying the operand moves 4·K·M bytes. So
    padding pays if N is large, and the product large enough to save more than a launch; an image model's head of ten
    classes is not.

    Args:
        others: N.
        shape, dtype: [*, M], of the operand.
    """
    unaligned = dtype in HALF and shape[-1] % ALIGNED
    pays = others >= OTHERS and math.prod(shape) * others >= PADS_FROM
    return -shape[-1] % PADDED if unaligned and pays else 0


def aligned(x: Tensor, others: int) -> Tensor:
    """x with `padding` zeros at the end of each row, or x itself if there are none.

    Args:
        others: as for `padding`.
        x: [*, M].
    """
    return padded(x, padding(x.shape, x.dtype, others))


def padded(x: Tensor, more: int, dim: int = -1) -> Tensor:
    """x with zeros at the end of a dimension, or x itself for none.

    Args:
        more: number of zeros.
        dim: the dimension.
    """
    if not more:
        return x
    shape, size = list(x.shape), x.shape[dim]
    shape[dim] += more
    found = x.new_empty(shape)
    found.narrow(dim, 0, size).copy_(x)
    found.narrow(dim, size, more).zero_()
    return found


def products(x: Tensor, y: Tensor) -> Tensor:
    """x_i y_iᵀ for each i: [n, M, N]. Any strides are allowed; a contiguous x is fastest.

    Half precision is multiplied exactly and accumulated in float32. float32 never uses TF32.

    Args:
        x: [n, M, K].
        y: [n, N, K], of the same dtype.
    """
    if x.dtype in HALF or y.dtype in HALF:
        if on_gpu(x) and x.dtype == y.dtype:
            return torch.bmm(x, y.transpose(1, 2), out_dtype=torch.float32)
        x, y = x.float(), y.float()  # the dtypes differ where a parameter is used both under autocast and outside of it
    return multiplied(x, y.transpose(1, 2))


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    """x y, or a batch of such products, [M, N] or [n, M, N], without TF32.

    Args:
        x: [M, K], or [n, M, K].
        y: [K, N], or [n, K, N], of the same dtype.
    """
    if x.is_cuda:
        return _without_tf32(x, y)
    return torch.mm(x, y) if x.dim() == 2 else torch.bmm(x, y)


@operation
def _without_tf32(x: Tensor, y: Tensor) -> Tensor:
    """A traced step keeps operations, but not a switch that was set around them: so this is one operation."""
    with full_precision():
        return torch.mm(x, y) if x.dim() == 2 else torch.bmm(x, y)


def product(x: Tensor, y: Tensor) -> Tensor:
    """xᵀ y, or a batch of such products: [M, N] or [n, M, N]. One operand is float32, the other may be half precision.

    With one bfloat16 operand on CUDA, the other is split into two bfloat16 halves, so that tensor cores can multiply.

    Args:
        x: [K, M], or [n, K, M].
        y: [K, N], or [n, K, N].
    """
    multiply: Any = torch.mm if x.dim() == 2 else torch.bmm
    if torch.bfloat16 in (x.dtype, y.dtype) and on_gpu(x):
        parts = [(each, other) for each in _halves(x) for other in _halves(y)]
        found = [multiply(each.mT, other, out_dtype=torch.float32) for each, other in parts]
        return found[0].add_(found[1]) if len(found) > 1 else found[0]
    if x.dtype in HALF or y.dtype in HALF:
        x, y = x.to(wide_dtype(x.dtype)), y.to(wide_dtype(y.dtype))
    whole: Tensor = multiply(x.mT, y)
    return whole


def _halves(x: Tensor) -> list[Tensor]:
    """Split x into bfloat16 parts: x itself, or its rounded value and the remainder, 16 bits together."""
    if x.dtype == torch.bfloat16:
        return [x]
    upper = x.to(torch.bfloat16)
    return [upper, (x - upper).to(torch.bfloat16)]


def full_precision(*, convolutions: bool = False) -> AbstractContextManager[None]:
    """Context in which float32 products on CUDA do not use TF32, even if the caller allows it.

    Args:
        convolutions: also for convolutions.
    """
    switches: Any = torch.backends
    return _unrounded(switches.cuda.matmul, *([switches.cudnn.conv] if convolutions else []))


def full_precision_on_cpu() -> AbstractContextManager[None]:
    """Context in which oneDNN does not round float32 operands to bfloat16, even if the caller allows it.

    Some CPUs do so after `torch.set_float32_matmul_precision("medium")`: by more than the bounds of
    `clipping.numerics.rounding_bounds`.
    """
    switches: Any = torch.backends
    return _unrounded(switches.mkldnn.matmul, switches.mkldnn.conv)


@contextmanager
def _unrounded(*parts: Any) -> Iterator[None]:
    changed = [(part, precision) for part in parts if (precision := part.fp32_precision) != "ieee"]
    for part, _ in changed:
        part.fp32_precision = "ieee"
    try:
        yield
    finally:
        for part, precision in changed:
            part.fp32_precision = precision
