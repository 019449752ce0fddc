"""Matrix products; on a CPU, by the faster of MKL and oneDNN.

torch multiplies float32 matrices by MKL, which does not use the widest vector instructions on processors other than
Intel's. oneDNN, torch's library for convolutions, does; but it starts more slowly and multiplies one pair of matrices
at a time. So small products use MKL, and products above a size that is measured once, if there is one, use oneDNN.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.core.dtypes import HALF, wide_dtype

SIDES = (384, 320, 256, 200, 160, 128)
"""Sides of the square matrices to time both libraries on."""
COUNT = 4
"""Number of matrices, about a small block of samples."""
FASTER = 0.8
"""oneDNN is chosen if its time is at most this share of MKL's."""
TURNS = 9
"""Rounds of timing both libraries. One disturbed moment must not send every product to the slower one."""

ALIGNED, PADDED = 8, 16
"""Entries of a row: half precision loads fast if rows begin at multiples of 16 bytes (32 bytes for Triton)."""
OTHERS, PADS_FROM = 128, 2**30
"""Least rows of the other operand, and least multiplications, for padding to pay."""


def on_gpu(x: Tensor) -> bool:
    """True for a tensor on a CUDA device, or on "meta", which stands for CUDA when a step's operations are counted.

    Args:
        x: an operand.
    """
    return x.is_cuda or x.is_meta


def padding(shape: Sequence[int], dtype: torch.dtype, others: int) -> int:
    """Entries to add to each row of an operand so that a product on a GPU is fast; 0 if that does not pay.

    The choice depends on sizes only. A product of K·M·N multiplications is several times slower if its rows of M
    half-precision entries are not aligned (GPT-2's head: M = 50,257), and copying the operand moves 4·K·M bytes. So
    padding pays if N is large, and the product large enough to save more than a launch; an image model's head of ten
    classes is not.

    Args:
        shape, dtype: [*, M], of the operand.
        others: N.
    """
    unaligned = dtype in HALF and shape[-1] % ALIGNED
    pays = others >= OTHERS and math.prod(shape) * others >= PADS_FROM
    return -shape[-1] % PADDED if unaligned and pays else 0


def aligned(x: Tensor, others: int) -> Tensor:
    """x with `padding` zeros at the end of each row, or x itself if there are none.

    Args:
        x: [*, M].
        others: as for `padding`.
    """
    more = padding(x.shape, x.dtype, others)
    if not more:
        return x
    found = x.new_empty(*x.shape[:-1], x.shape[-1] + more)
    found[..., : x.shape[-1]] = x
    found[..., x.shape[-1] :] = 0
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
    if x.is_cuda and x.dtype == torch.float32:
        with full_precision():
            return torch.bmm(x, y.transpose(1, 2))
    if not by_onednn(x, x.shape[1] * y.shape[1] * x.shape[2]):
        return torch.bmm(x, y.transpose(1, 2))
    if x.shape[0] == 1:
        return _onednn(x[0], y[0]).contiguous()[None]
    found = x.new_empty(x.shape[0], x.shape[1], y.shape[1])
    for into, left, right in zip(found.unbind(), x.unbind(), y.unbind(), strict=True):
        into.copy_(_onednn(left, right))
    return found


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
    if x.dim() > 2 or not by_onednn(x, x.numel() * y.shape[1]):
        whole: Tensor = multiply(x.mT, y)
        return whole
    return _onednn(x.t(), y.t()).contiguous()


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
    before = [(part, part.fp32_precision) for part in parts]
    changed = [(part, precision) for part, precision in before if precision != "ieee"]
    for part, _ in changed:
        part.fp32_precision = "ieee"
    try:
        yield
    finally:
        for part, precision in changed:
            part.fp32_precision = precision


def by_onednn(x: Tensor, multiplications: int) -> bool:
    """True if oneDNN should compute a product of x. It copies the smaller operand if both are strided.

    Args:
        x: the first operand.
        multiplications: number of multiplications in the product.
    """
    if not x.is_cpu or x.dtype != torch.float32 or isinstance(x, FakeTensor):
        return False
    return multiplications >= onednn_from(torch.get_num_threads())


def onednn_from(threads: int) -> float:
    """Number of multiplications above which oneDNN is faster with this many threads; infinite if never.

    Args:
        threads: of a CPU operation.
    """
    if threads not in _FROM:
        _FROM[threads] = _timed_from()
    return _FROM[threads]


def take_onednn_from(threads: int, multiplications: float) -> None:
    """Adopt the threshold that another process has measured.

    Args:
        threads: of a CPU operation.
        multiplications: oneDNN is faster from here on; infinite for never.
    """
    _FROM[threads] = multiplications


_FROM: dict[int, float] = {}


def _timed_from() -> float:
    found = math.inf
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return found
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for side in SIDES:
            x = torch.rand(COUNT, side, side, dtype=torch.float32, device="cpu")
            if _ratio(lambda x=x: [_onednn(a, a.t()) for a in x], lambda x=x: torch.bmm(x, x)) > FASTER:  # type: ignore[misc]
                break
            found = side**3
    return found


def _ratio(run: Callable[[], object], other: Callable[[], object]) -> float:
    """Median ratio of the two functions' times, run in turn after one warm-up round."""
    ratios = []
    for _ in range(1 + TURNS):
        start = time.perf_counter()
        run()
        between = time.perf_counter()
        other()
        ratios.append((between - start) / (time.perf_counter() - between))
    return statistics.median(ratios[1:])


def _onednn(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ, by the operation of a compiled model's linear layers; the result may be a transposed view.

    It copies a non-contiguous first operand, so the smaller one goes first. The second operand must be dense, as a far
    slower reference implementation would otherwise run.
    """
    if not x.is_contiguous() and y.shape[0] * (x.shape[0] + x.shape[1]) < x.numel():
        return _onednn(y, x).t()
    if not (y.is_contiguous() or y.t().is_contiguous()):
        y = y.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(x, y, None, "none", [], "")
