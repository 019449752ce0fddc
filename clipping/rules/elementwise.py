"""Addition and multiplication of an activation and a tensor D made of parameters, with broadcasting; concatenation.

y = x + D: the gradient of D is g, summed over the dimensions that D was broadcast along, but for the samples.
y = x · D: the same of g · x. Rows of the output are samples; a D with a row for each of them meets each in its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.interface import norm_dtype
from clipping.rules.base import Refused, Rule, part


class Broadcast(Rule):
    """D in an elementwise operation.

    Args:
        parameter: D, broadcast to the output's shape [n, ...].
        output: the operation's output.
        factor: what g is multiplied by (for a product, the other factor); None is 1.
        dim, start: where in the output D stands if it was concatenated along `dim` and not broadcast.
    """

    def __init__(
        self, parameter: Tensor, output: Tensor, factor: Tensor | float | None = None, dim: int = 0, start: int = 0
    ) -> None:
        super().__init__(parameter)
        self.factor, self.dim, self.start = factor, dim, start
        self.aligned = parameter.dim() == output.dim() and parameter.shape[0] == output.shape[0]

    @property
    def is_sum(self) -> bool:
        """y = x + D, and nothing else."""
        return self.factor is None and self.dim == 0

    def row(self, tensor: Tensor) -> Broadcast:
        """The same rule for the tensor whose copies D's rows are."""
        self.parameter, self.aligned = tensor, False
        return self

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        g = part(g, samples)
        if self.dim:
            g = g.narrow(self.dim, self.start, self.parameter.shape[self.dim])
        if isinstance(self.factor, Tensor):
            # a factor without the samples' dimension broadcasts as it is
            per_sample = self.factor.dim() == g.dim() and self.factor.shape[0] > 1
            g = g * (part(self.factor, samples) if per_sample else self.factor)
        elif self.factor is not None:
            g = g * self.factor
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


class Copies(Rule):
    """D copied for each row of the output, which is those copies: the gradient is g itself."""

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        return part(g, samples)


def add(input: Any, other: Any, *, alpha: float = 1) -> tuple[Tensor, list[Rule]]:
    """torch.add and the rules of whichever operand is made of parameters."""
    output = torch.add(input, other, alpha=alpha)
    rules: list[Rule] = [Broadcast(input, output)] if isinstance(input, Tensor) else []
    if isinstance(other, Tensor):
        rules.append(Broadcast(other, output, None if alpha == 1 else alpha))
    return output, rules


def sub(input: Any, other: Any, *, alpha: float = 1) -> tuple[Tensor, list[Rule]]:
    """torch.sub."""
    return add(input, other, alpha=-alpha)


def add_(input: Tensor, other: Any, *, alpha: float = 1) -> tuple[Tensor, list[Rule]]:
    """Tensor.add_, x += D."""
    input.add_(other, alpha=alpha)
    return input, [Broadcast(other, input, None if alpha == 1 else alpha)]


def mul(input: Any, other: Any) -> tuple[Tensor, list[Rule]]:
    """torch.mul."""
    output = torch.mul(input, other)
    return output, [
        Broadcast(mine, output, theirs.detach() if isinstance(theirs, Tensor) else theirs)
        for mine, theirs in ((input, other), (other, input))
        if isinstance(mine, Tensor)
    ]


def cat(tensors: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, list[Rule]]:
    """torch.cat along any dimension but the samples': each piece gets its own segment of g."""
    output = torch.cat(tuple(tensors), dim)
    dim = dim % output.dim()
    if dim == 0:
        raise Refused("concatenates parameters to the batch along its first dimension", "use microbatch")
    rules: list[Rule] = []
    start = 0
    for tensor in tensors:
        rules.append(Broadcast(tensor, output, dim=dim, start=start))
        start += tensor.shape[dim]
    return output, rules
