"""Addition, multiplication and concatenation of an activation and a tensor D made of parameters, with broadcasting.

y = x + D: the gradient of D is g, summed over the dimensions that D was broadcast along, except the samples'.
y = x · D: the same with g · x. Output rows are samples; if D has as many rows, each row enters one output row.
A bias is such a sum, and the scale of a normalisation such a product (`clipping.rules.normalisation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import blocks, concatenated
from clipping.numerics.per_sample import part
from clipping.numerics.rounding_bounds import Reach, all_alike
from clipping.rules.base import Gradient, Refused, Rule


class Broadcast(Rule):
    """D in an elementwise operation.

    Args:
        parameter: D, broadcast to the output's shape.
        output: shape of the output, [n, ...].
        factor: multiplies g (for a product, the other factor); None is 1.
        dim, start: position of D in the output if it was concatenated along `dim` rather than broadcast.

    Attributes:
        after: number of the output's dimensions after D's last.

    Methods take:
        g, at: as `Rule.instantiate`: the output's gradient, and some samples.
    """

    after = 0

    def __init__(
        self,
        parameter: Tensor,
        output: torch.Size,
        factor: Tensor | float | None = None,
        dim: int = 0,
        start: int = 0,
    ) -> None:
        super().__init__(parameter)
        self.factor, self.dim, self.start = factor, dim, start
        self.length = parameter.shape[dim] if dim else 0
        self.aligned = parameter.dim() == len(output) and parameter.shape[0] == output[0]

    @property
    def is_sum(self) -> bool:
        """True for a plain sum y = x + D."""
        return self.factor is None and self.dim == 0

    def row(self, tensor: Tensor) -> Broadcast:
        """Change this rule to one for the tensor that D's rows are copies of, and return it.

        Args:
            tensor: one row of D, [1, ...] or [...].
        """
        self.parameter, self.aligned = tensor, False
        return self

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        if self.factor is None:  # no product to form in blocks
            return self._summed(g, samples)

        def summed(block: slice) -> Tensor:
            return self._summed(g, slice(samples.start + block.start, samples.start + block.stop))

        return concatenated(summed, blocks(samples.stop - samples.start, self._bytes(g), self.workspace(g)))

    def reach(self, g: Tensor) -> Reach:
        def of_block(samples: slice) -> Reach:
            return all_alike(self.sizes(g, samples), self.parameter.numel())

        return self._reach_of_rows(g, of_block, self._bytes(g))

    def terms(self, g: Tensor, at: slice) -> Tensor:
        """Return the terms to sum over the dimensions that D was broadcast along."""
        g = part(g, at)
        if self.dim:
            g = g.narrow(self.dim, self.start, self.length)
        if isinstance(self.factor, Tensor):
            # a factor without the samples' dimension broadcasts as it is
            per_sample = self.factor.dim() == g.dim() and self.factor.shape[0] > 1
            g = g * (part(self.factor, at) if per_sample else self.factor)
        elif self.factor is not None:
            g = g * self.factor
        return g

    def sizes(self, g: Tensor, at: slice) -> Tensor:
        """Return the terms up to their signs; for a term that is a difference, a larger magnitude."""
        return self.terms(g, at)

    def _summed(self, g: Tensor, at: slice) -> Tensor:
        g, shape = self.terms(g, at), self.parameter.shape
        lifted = (*(1,) * (g.dim() - len(shape) - self.after), *shape, *(1,) * self.after)
        over = [i for i, (mine, its) in enumerate(zip(lifted, g.shape, strict=True)) if i and mine == 1 and its > 1]
        if over:
            g = g.sum(over, dtype=norm_dtype(g.dtype))
        inner = shape[1:] if self.aligned else shape
        g = g if g.shape[1:] == inner else g.reshape(-1, *inner)
        if not self.aligned:
            return g
        placed = g.new_zeros(len(g), *shape)
        rows = torch.arange(len(g), device=g.device)
        placed[rows, rows + at.start] = g
        return placed

    def _bytes(self, g: Tensor) -> int:
        """Bytes of one sample's terms: g itself, or a product as large, in a wider dtype and with a copy."""
        each = g.element_size() if self.factor is None else 2 * norm_dtype(g.dtype).itemsize
        return math.prod(g.shape[1:]) * each


class Bias(Broadcast):
    """D [p] in an output [n, p, *size]."""

    def __init__(self, parameter: Tensor, output: torch.Size) -> None:
        super().__init__(parameter, output)
        self.after = len(output) - 2


class Copies(Rule):
    """D copied for each row of the batch; the output is these copies, and the gradient is g itself."""

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        return part(g, samples)


def add(input: Any, other: Any, *, alpha: float = 1) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.add and the gradients of whichever operand is made of parameters."""
    output = torch.add(input, other, alpha=alpha)
    factor = None if alpha == 1 else alpha
    return output, ((input, Broadcast, output.shape), (other, Broadcast, output.shape, factor))


def sub(input: Any, other: Any, *, alpha: float = 1) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.sub."""
    return add(input, other, alpha=-alpha)


def add_(input: Tensor, other: Any, *, alpha: float = 1) -> tuple[Tensor, Sequence[Gradient]]:
    """Tensor.add_, x += D."""
    input.add_(other, alpha=alpha)
    return input, ((other, Broadcast, input.shape, None if alpha == 1 else alpha),)


def mul(input: Any, other: Any) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.mul."""
    output = torch.mul(input, other)
    factors = [x.detach() if isinstance(x, Tensor) else x for x in (other, input)]
    return output, tuple(
        (mine, Broadcast, output.shape, factor) for mine, factor in zip((input, other), factors, strict=True)
    )


def cat(tensors: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.cat along any dimension but the samples': each piece gets its own segment of g."""
    output = torch.cat(tuple(tensors), dim)
    dim = dim % output.dim()
    if dim == 0:
        raise Refused("concatenates parameters to the batch along its first dimension", "use microbatch")
    starts = accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
    return output, [(x, Broadcast, output.shape, None, dim, start) for x, start in zip(tensors, starts, strict=False)]
