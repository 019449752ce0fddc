"""Products of matrices, on a CPU by the library that takes less time there.

torch multiplies float32 matrices by MKL, which keeps its widest instructions for processors of its own maker: on others
it runs at half of what they can. oneDNN, by which torch convolves, does not; but it takes longer to begin, and
multiplies one pair of matrices at a time. So small products are MKL's everywhere, and from a size on that is measured
once, if there is one, they are oneDNN's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.core.dtypes import HALF, wide_dtype

SIDES = (384, 320, 256, 200, 160, 128)
"""Of the square matrices that both libraries are timed on."""
COUNT = 4
"""How many of them: as many as a small block of samples."""
FASTER = 0.8
"""Of the other's time, what oneDNN may take at the most."""
TURNS = 9
"""Of both libraries. Where MKL is at its best, one disturbed moment must not hand every product to the other."""


def products(x: Tensor, y: Tensor) -> Tensor:
    """x_i y_iᵀ for each i: [n, M, K] and [n, N, K] to [n, M, N]. Of any strides, but x is best contiguous.

    Of half precision in float32, with nothing rounded but the additions; of float32 never by TF32.

    Args:
        x: [n, M, K].
        y: [n, N, K], of the same dtype.
    """
    if x.dtype in HALF or y.dtype in HALF:
        if x.is_cuda and x.dtype == y.dtype:
            return torch.bmm(x, y.transpose(1, 2), out_dtype=torch.float32)
        x, y = x.float(), y.float()  # of two dtypes where a parameter is used under autocast and outside of it
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
    """xᵀ y: [K, M] and [K, N] to [M, N], or for each of many; one in float32, the other perhaps in half precision.

    On CUDA one of bfloat16 is multiplied by the two halves of the other's digits: so tensor cores do it, in float32.

    Args:
        x: [K, M], or [n, K, M].
        y: [K, N], or [n, K, N].
    """
    multiply: Any = torch.mm if x.dim() == 2 else torch.bmm
    if x.is_cuda and torch.bfloat16 in (x.dtype, y.dtype):
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
    """In bfloat16: itself, or what it is rounded to and what was cut off, 16 bits together."""
    if x.dtype == torch.bfloat16:
        return [x]
    upper = x.to(torch.bfloat16)
    return [upper, (x - upper).to(torch.bfloat16)]


@contextmanager
def full_precision(*, convolutions: bool = False) -> Iterator[None]:
    """Products of float32 on CUDA are not rounded to TF32 within it, whatever the caller allows.

    Args:
        convolutions: nor are convolutions.
    """
    switches: Any = torch.backends
    parts = [switches.cuda.matmul, *([switches.cudnn.conv] if convolutions else [])]
    before = [part.fp32_precision for part in parts]
    for part in parts:
        part.fp32_precision = "ieee"
    try:
        yield
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


def by_onednn(x: Tensor, multiplications: int) -> bool:
    """Whether oneDNN takes a product of x of so many. If both operands are strided, it copies the smaller one first.

    Args:
        x: the first operand.
        multiplications: that the product takes.
    """
    if not x.is_cpu or x.dtype != torch.float32 or isinstance(x, FakeTensor):
        return False
    return multiplications >= onednn_from(torch.get_num_threads())


def onednn_from(threads: int) -> float:
    """Multiplications from which on a product is faster by oneDNN with so many threads; infinite if it never is.

    Args:
        threads: of a CPU operation.
    """
    if threads not in _FROM:
        _FROM[threads] = _timed_from()
    return _FROM[threads]


def take_onednn_from(threads: int, multiplications: float) -> None:
    """Let this process multiply as another one did, which has timed it.

    Args:
        threads: of a CPU operation.
        multiplications: from which on oneDNN is faster; infinite for never.
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
    """The median of the one's time by the other's, run in turn, after a turn that does not count."""
    ratios = []
    for _ in range(1 + TURNS):
        start = time.perf_counter()
        run()
        between = time.perf_counter()
        other()
        ratios.append((between - start) / (time.perf_counter() - between))
    return statistics.median(ratios[1:])


def _onednn(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ, by the operation that a compiled model's linear layers call; perhaps a transposed view.

    It copies its first operand unless that is contiguous, so that may rather be y. Its second one must be dense: a
    part of a matrix would be multiplied by a reference implementation, a thousand times slower.
    """
    if not x.is_contiguous() and y.shape[0] * (x.shape[0] + x.shape[1]) < x.numel():
        return _onednn(y, x).t()
    if not (y.is_contiguous() or y.t().is_contiguous()):
        y = y.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(x, y, None, "none", [], "")
