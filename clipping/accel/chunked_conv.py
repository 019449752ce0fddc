"""A convolution on a CPU that computes its input's gradient in pieces of the batch.

oneDNN copies its operands into its own layout: computing an input's gradient takes twice the gradient's memory, or
three times with a stride. In pieces of a few samples it takes little more than once. This is about as fast, and faster
for copies of 32 MiB or more, which the C library requests from the operating system each time, page by page. Each piece
also copies the weight, so a weight that is large compared with the images is not worth splitting.

Only the tape's own backward pass uses pieces; it requests no gradient of a parameter. In any other backward pass
autograd's own operation runs, which can be differentiated again.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import without_autocast
from clipping.core.microbatching import each, in_parts

PIECE = 2 * 2**20
"""Target bytes of a piece's input or output, whichever is larger."""
LEAST = 4
"""Fewest pieces: the whole result and one piece's copies of two operands then take at most two whole results."""
MOST = 8
"""Most pieces, unless they would exceed `LARGEST`: starting an operation takes time."""
LARGEST = 16 * 2**20
"""Most bytes of a piece's input or output in a large batch."""
WEIGHTS = 0.25
"""Most bytes of the weight's copies as a share of input and output; above it, pieces take a sixth more time."""


class Share:
    """Tells the convolution's node that only the input's gradient is needed (`input_only`)."""

    def __init__(self) -> None:
        self.input_only = False


class Pieces(torch.autograd.Function):
    """conv1d, conv2d or conv3d of an input that requires a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        share: Share,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> Tensor:
        function = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
        output = function(x, weight, bias, stride, padding, dilation, groups)
        ctx.save_for_backward(x, weight)
        ctx.share, ctx.has_bias = share, bias is not None
        ctx.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        ctx.count = pieces(x.shape, weight.shape, output.shape, x.itemsize)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,) = grads
        x, weight = ctx.saved_tensors
        if ctx.share.input_only:
            ctx.share.input_only = False
            return None, _in_pieces(g, x, weight, ctx.geometry, ctx.count), *[None] * 6
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[2], ctx.has_bias and ctx.needs_input_grad[3]]
        biases = [weight.shape[0]] if ctx.has_bias else None
        found = torch.ops.aten.convolution_backward.default(g, x, weight, biases, *ctx.geometry, wanted)
        return None, *found, *[None] * 4


def pieces(x: Sequence[int], weight: Sequence[int], y: Sequence[int], size: int) -> int:
    """Number of pieces in which to compute an input's gradient; 1 if splitting does not pay.

    Args:
        x, weight, y: shapes of input, weight and output.
        size: bytes of an entry.
    """
    images = size * math.prod(x), size * math.prod(y)
    count = min(max(min(max(images) // PIECE, MOST), max(images) // LARGEST), x[0] // 2)
    copies = count * size * math.prod(weight)
    return count if count >= LEAST and copies <= WEIGHTS * sum(images) else 1


def applies(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> bool:
    """True if a convolution of x runs in pieces: large, contiguous, on a CPU, without autocast or torch.func.

    Args:
        x: [B, C, *size].
        weight: [p, C / groups, *kernel].
        stride, padding, dilation: one number a spatial dimension.
        groups: as in torch.nn.Conv2d.
    """
    if not x.is_cpu or not x.requires_grad or x.dim() != weight.dim():
        return False
    return (
        _is_large(x.shape, weight.shape, tuple(stride), tuple(padding), tuple(dilation), x.itemsize)
        and x.is_contiguous()
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


@functools.lru_cache(4096)
def _is_large(
    x: torch.Size,
    weight: torch.Size,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    itemsize: int,
) -> bool:
    sides = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]
    return pieces(x, weight, [x[0], weight[0], *size], itemsize) > 1


def _in_pieces(g: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Any], count: int) -> Tensor:
    with torch.no_grad(), without_autocast():
        wanted = [True, False, False]
        result = torch.empty_like(x)

        def form(samples: slice) -> tuple[()]:
            into, *operands = (whole[samples] for whole in (result, g, x))
            into.copy_(torch.ops.aten.convolution_backward.default(*operands, weight, None, *geometry, wanted)[0])
            return ()

        each(form, in_parts(len(x), count))
        return result
