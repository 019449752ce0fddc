"""A convolution whose input's gradient is formed in pieces of the batch, on a CPU.

There the library copies whatever it multiplies into a layout of its own (`numerics.convolution_memory`): an input's
gradient takes twice its size while it is formed, three times with a stride, in the backward pass at the worst moment.
In pieces of a few samples it takes little more than itself. It is about as fast, and takes half the time where a copy
would be 32 MiB or more, which the C library takes from the kernel anew each time, page by page. Each piece copies the
weight, too: where that is large beside the images, as in a ResNet's last layers, all are one piece.

Only in the tape's own backward pass, which wants no gradient of a parameter: any other one is autograd's own, on
tensors, so that it can be differentiated once more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.accel.gradient_accumulation import Meeting
from clipping.core.dtypes import without_autocast
from clipping.core.microbatching import each, in_parts
from clipping.numerics.convolution_memory import Convolution

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
    """convNd of an input that requires a gradient; `meeting` of its node is where that meets another one, or None."""

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
        ctx.share, ctx.has_bias, ctx.meeting = share, bias is not None, None
        ctx.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        ctx.sizes = Convolution(x.shape, weight.shape, output.shape, stride, groups, x.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,) = grads
        x, weight = ctx.saved_tensors
        if ctx.share.input_only:
            ctx.share.input_only = False
            return None, _met(ctx.meeting, g, x, weight, ctx.geometry, pieces(ctx.sizes)), *[None] * 6
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[2], ctx.has_bias and ctx.needs_input_grad[3]]
        biases = [weight.shape[0]] if ctx.has_bias else None
        found = torch.ops.aten.convolution_backward.default(g, x, weight, biases, *ctx.geometry, wanted)
        return None, *found, *[None] * 4


def sizes_of(node: Any) -> Convolution | None:
    """The shapes and options of a node's convolution; None of a node of another kind.

    Args:
        node: of the graph.
    """
    return node.sizes if isinstance(node, Pieces._backward_cls) else None  # type: ignore[attr-defined]


def pieces(sizes: Convolution) -> int:
    """In how many pieces of the batch an input's gradient is formed; 1 if none are worth it.

    Args:
        sizes: shapes and options of the convolution.
    """
    images = [each.results(True, False) for each in (sizes, sizes._replace(x=sizes.y))]
    count = min(max(min(max(images) // PIECE, MOST), max(images) // LARGEST), sizes.x[0] // 2)
    copies = count * sizes.results(False, True)
    return count if count >= LEAST and copies <= WEIGHTS * sum(images) else 1


def in_pieces(sizes: Convolution) -> int:
    """Bytes at once of the input's gradient, itself among them.

    Args:
        sizes: shapes and options of the convolution.
    """
    count = pieces(sizes)
    if count == 1:
        return sizes.input_gradient()
    rows = -(-sizes.x[0] // count)
    part = sizes._replace(x=[rows, *sizes.x[1:]], y=[rows, *sizes.y[1:]])
    return sizes.results(True, False) + part.input_gradient()


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
    geometry = tuple(stride), tuple(padding), tuple(dilation), groups
    return (
        _is_large(x.shape, weight.shape, *geometry, x.dtype)
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
    groups: int,
    dtype: torch.dtype,
) -> bool:
    sides = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]
    return pieces(Convolution(x, weight, [x[0], weight[0], *size], stride, groups, dtype)) > 1


def _met(
    meeting: Meeting | None, g: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Any], count: int
) -> Tensor | None:
    """The input's gradient; None if it was added to the one that waited."""
    if meeting:
        total = meeting.take(x)
        found = _in_pieces(g, x, weight, geometry, count, total)
        return found if total is None else None
    found = _in_pieces(g, x, weight, geometry, count)
    if meeting is not None:
        meeting.leave(found)
    return found


def _in_pieces(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Any], count: int, add_to: Tensor | None = None
) -> Tensor:
    with torch.no_grad(), without_autocast(g.device):
        wanted = [True, False, False]
        result = torch.empty_like(x) if add_to is None else add_to
        put = Tensor.copy_ if add_to is None else Tensor.add_

        def form(samples: slice) -> tuple[()]:
            into, *operands = (whole[samples] for whole in (result, g, x))
            put(into, torch.ops.aten.convolution_backward.default(*operands, weight, None, *geometry, wanted)[0])
            return ()

        each(form, in_parts(len(x), count))
        return result
