"""Nodes that the tape puts into the graph: to have something to differentiate by, and a gradient for each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COPIES = 16
"""Of a vector that are joined at once: each costs Python's time."""


class Anchored(torch.autograd.Function):
    """Identity on its first argument, in place, so that it costs nothing; the zero scalar's gradient is none at all."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class AnchoredCopy(torch.autograd.Function):
    """The same with a copy of its first argument."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Repeated(torch.autograd.Function):
    """[rows · n] of a tensor of n entries; its gradient is one sum over the rows, not one addition for each."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: int) -> Tensor:
        ctx.rows, ctx.shape = rows, tensor.shape
        copies = tensor.reshape(-1)
        parts: list[Tensor] = []
        while rows >= COPIES:  # in less time than by `repeat`, or `expand` and `reshape`
            rows, rest = divmod(rows, COPIES)
            parts = [copies] * rest + parts
            copies = torch.cat([copies] * COPIES)
        return torch.cat([copies] * rows + parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].view(ctx.rows, -1).sum(0).view(ctx.shape), None
