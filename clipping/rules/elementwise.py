"""Addition, multiplication and concatenation of an activation and a tensor D made of parameters, with broadcasting.

y = x + D: the gradient of D is g, summed over the dimensions that D was broadcast along, except the samples'.
y = x · D: the same with g · x. Output rows are samples; each row of D, if it has as many, meets its own output row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import norm_dtype
from clipping.numerics.per_sample import part
from clipping.numerics.rounding_bounds import Reach, all_alike
from clipping.rules.base import Gradient, Refused, Rule


class Broadcast(Rule):
    """D in an elementwise operation.

    Args:
        parameter: D, broadcast to the output's shape.
        output: that shape, [n, ...].
        factor: multiplies g (for a product, the other factor); None is 1.
        dim, start: position of D in the output if it was concatenated along `dim` rather than broadcast.
    """

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

    def reach(self, g: Tensor) -> Reach:
        def of_block(samples: slice) -> Reach:
            return all_alike(self._terms(g, samples), self.parameter.numel())

        return self._reach_of_rows(g, of_block, math.prod(g.shape[1:]) * g.element_size())

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        g = self._terms(g, samples)
        shape = (1,) * (g.dim() - self.parameter.dim()) + self.parameter.shape
        over = [i for i, (mine, its) in enumerate(zip(shape, g.shape, strict=True)) if i and mine == 1 and its > 1]
        if over:
            g = g.sum(over, keepdim=True, dtype=norm_dtype(g.dtype))
        if not self.aligned:
            return g.reshape(-1, *self.parameter.shape)
        placed = g.new_zeros(g.shape[0], *self.parameter.shape)
        rows = torch.arange(g.shape[0], device=g.device)
        placed[rows, rows + samples.start] = g
        return placed

    def _terms(self, g: Tensor, samples: slice) -> Tensor:
        """Return the terms to sum over the dimensions that D was broadcast along."""
        g = part(g, samples)
        if self.dim:
            g = g.narrow(self.dim, self.start, self.length)
        if isinstance(self.factor, Tensor):
            # a factor without the samples' dimension broadcasts as it is
            per_sample = self.factor.dim() == g.dim() and self.factor.shape[0] > 1
            g = g * (part(self.factor, samples) if per_sample else self.factor)
        elif self.factor is not None:
            g = g * self.factor
        return g


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
