"""Operations on a GPU whose node uses results of its rules.

The gradient g of a use's output arrives just before the operation's node runs. A rule may leave there what it computed
(`Share`):

    LayerNorm     the input's gradient, from the pass over x and g that sums the gradients of γ and β
    Linear        g with aligned rows, for its product with the weight (see `clipping.numerics.products.padding`)

As in `clipping.accel.chunked_conv`, this happens in the tape's own backward pass only. In any other one the node
computes all gradients by torch's operations, which can be differentiated again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.accel import chunked_conv, fused
from clipping.core.dtypes import HALF, is_autocast
from clipping.numerics.products import aligned, on_gpu, padded, padding

POSITIONS = 16
"""Fewest positions of a layer norm; of fewer, the sums of γ and β are as large as its input."""


class Share(chunked_conv.Share):
    """Passes results from a use's rules to its node.

    Methods take:
        g: the gradient of the use's output, the same tensor for rules and node.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def leave(self, g: Tensor, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep results for g until the node runs, and return them.

        Args:
            found: the results.
        """
        self._left = g, found
        return found

    def left(self, g: Tensor) -> tuple[Tensor, ...] | None:
        """Return the results for g, or None."""
        return self._left[1] if self._left is not None and self._left[0] is g else None

    def taken(self, g: Tensor) -> tuple[bool, tuple[Tensor, ...] | None]:
        """Return `input_only` and the results for g, for the node, and reset both."""
        found = self.input_only, self.left(g)
        self.input_only, self._left = False, None
        return found


class LayerNorm(torch.autograd.Function):
    """torch.native_layer_norm. Results of the rules are the gradient of x, and those of γ and β of each sample."""

    @staticmethod
    def forward(
        ctx: Any, share: Share, x: Tensor, shape: list[int], weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.share, ctx.shape = share, shape
        return output, mean, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        g = grads[0]
        if g is None:
            return (None,) * 6
        input_only, left = ctx.share.taken(g)
        x, weight, bias, mean, rstd = ctx.saved_tensors  # raises an error if a rule read an x that was changed in place
        if left is not None:
            return None, left[0], *[None] * 4
        _, of_x, _, *of_parameters, _ = ctx.needs_input_grad
        wanted = [of_x, *(each and not input_only for each in of_parameters)]
        layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
        found = layer_norm_backward(g, x, ctx.shape, mean, rstd, weight, bias, wanted)
        return None, found[0], None, *found[1:], None


def share_of_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Share | None:
    """Return a share for `LayerNorm`, or None if torch's own node is to run.

    Args:
        x, weight, bias: as of torch.nn.functional.layer_norm.
    """
    if weight is None or not (x.requires_grad and weight.requires_grad and torch.is_grad_enabled()):
        return None
    operands = [x, weight] if bias is None else [x, weight, bias]
    features = weight.numel()
    fits = 0 < features <= fused.FEATURES and x.numel() >= POSITIONS * features * max(1, len(x))
    one_dtype = len({each.dtype for each in operands}) == 1 and not (x.dtype in HALF and is_autocast(x.device))
    return Share() if fits and one_dtype and fused.runs(*operands) else None


class Linear(torch.autograd.Function):
    """torch.nn.functional.linear of operands of one dtype. The result of the weight's rule is g with aligned rows."""

    @staticmethod
    def forward(ctx: Any, share: Share, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.share = share
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (x, weight) = grads, ctx.saved_tensors
        input_only, left = ctx.share.taken(g)
        if input_only:
            (g,) = left or (aligned(g, x.shape[-1]),)
            return None, g @ padded(weight, g.shape[-1] - len(weight), 0), None, None
        rows, (_, _, of_weight, of_bias) = g.flatten(0, -2), ctx.needs_input_grad
        return None, g @ weight, rows.mT @ x.flatten(0, -2) if of_weight else None, rows.sum(0) if of_bias else None


def share_of_linear(x: Tensor, weight: Tensor) -> Share | None:
    """Return a share for `Linear`, or None if torch's own node is to run.

    Args:
        x, weight: as of torch.nn.functional.linear.
    """
    if not (x.requires_grad and torch.is_grad_enabled() and on_gpu(x)):
        return None
    return Share() if padding((*x.shape[:-1], len(weight)), x.dtype, x.shape[-1]) else None
