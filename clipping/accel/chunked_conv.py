"""A convolution on a CPU that computes its input's gradient in pieces of the batch.

oneDNN copies its operands into a layout of its own: while an input's gradient is computed, it takes twice its size, or
three times with a stride. In pieces of a few samples it takes little more than its size. This is about as fast, and
takes half the time where a copy would be 32 MiB or more, which the C library requests from the kernel each time, page
by page. Each piece copies the weight, too: a weight that is large beside the images leaves one piece.

Only the tape's own backward pass, which requests no gradient of a parameter, uses pieces. Any other one is autograd's
own, and can be differentiated again.
"""

from __future__ import annotations

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
"""Bytes of the input or of the output that a piece may have."""
LEAST = 4
"""Pieces that are worth it: the result of all and a copy of each of two take no more than two whole ones."""
MOST = 8
"""Pieces, unless they would be larger than `LARGEST`: to begin an operation takes time as well."""
LARGEST = 16 * 2**20
"""Bytes of the input or of the output that a piece may have where a batch is large."""
WEIGHTS = 0.25
"""Of the bytes of input and output, what copies of the weight may have; with more, pieces take a sixth more time."""


class Share:
    """What the gradient of a use tells the node that comes next: that only the input's gradient is wanted of it."""

    def __init__(self) -> None:
        self.input_only = False


class Pieces(torch.autograd.Function):
    """convNd of an input that requires a gradient."""

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
    """Number of pieces of the batch in which to form an input's gradient; 1 if none are worth it.

    Args:
        x, weight, y: shapes of input, weight and output.
        size: bytes of an entry.
    """
    images = size * math.prod(x), size * math.prod(y)
    count = min(max(min(max(images) // PIECE, MOST), max(images) // LARGEST), x[0] // 2)
    copies = count * size * math.prod(weight)
    return count if count >= LEAST and copies <= WEIGHTS * sum(images) else 1


def applies(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> bool:
    """Whether a convolution of x is one to take apart: large, dense, on a CPU, and nobody transforms it.

    Args:
        x: [B, C, *size].
        weight: [p, C / groups, *kernel].
        stride, padding, dilation: one number a spatial dimension.
        groups: of channels.
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
    with torch.no_grad(), without_autocast(g.device):
        wanted = [True, False, False]
        result = torch.empty_like(x)

        def form(samples: slice) -> tuple[()]:
            into, *operands = (whole[samples] for whole in (result, g, x))
            into.copy_(torch.ops.aten.convolution_backward.default(*operands, weight, None, *geometry, wanted)[0])
            return ()

        each(form, in_parts(len(x), count))
        return result
