"""Where two gradients of one tensor meet in a backward pass: the second is added to the first, in its memory.

autograd holds the first one meanwhile, and adds up what it is handed; handed nothing by the second node, it hands on
the first gradient, with what that node has added to it. So a sum of two takes the memory of one. As autograd does,
we add in place only if nobody else holds the gradient: a hook that keeps it, a norm that is still to read it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

Holders = tuple[int, int, int]


class Meeting:
    """Of two gradients of one tensor."""

    def __init__(self) -> None:
        self._waits: Tensor | None = None
        self._alone = _held_by_autograd_alone()

    def __bool__(self) -> bool:
        """Whether a gradient waits."""
        return self._waits is not None

    def leave(self, g: Tensor) -> None:
        """Let a gradient wait, which autograd is handed as well.

        Args:
            g: of the shape of the tensor.
        """
        self._waits = g

    def take(self, x: Tensor) -> Tensor | None:
        """The gradient that waits, which waits no more; None if it is not of x's form, or others hold it.

        Args:
            x: the tensor whose gradient it is.
        """
        g, self._waits = self._waits, None
        if g is None or not alike(g, x):
            return None
        ours = isinstance(g, FakeTensor) or _holders(g) == self._alone  # of a fake one nothing is computed
        return g if ours else None


def alike(g: Tensor, x: Tensor) -> bool:
    """Whether each entry of g has memory of its own, in the order of x.

    Args:
        g: a gradient.
        x: a tensor.
    """
    dense = g.is_contiguous() or (g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last))
    return dense and g.shape == x.shape and g.stride() == x.stride() and g.dtype == x.dtype


def _holders(g: Tensor) -> Holders:
    """How many names Python has for a tensor, how many hold the tensor, and how many its memory."""
    tensors: int = g._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(g), tensors, torch._C._storage_Use_Count(g.untyped_storage()._cdata)


class _Probe(torch.autograd.Function):
    """Identity. Of two of one tensor the second looks at the holders of the gradient that the first has left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, waits: list[Tensor], found: list[Holders]) -> Tensor:
        ctx.waits, ctx.found = waits, found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.waits:
            g = ctx.waits.pop()
            ctx.found.append(_holders(g))
            return None, None, None
        g = grads[0].clone()
        ctx.waits.append(g)
        return g, None, None


@functools.cache
def _held_by_autograd_alone() -> Holders:
    """Of a gradient that waits and nobody else has: versions of Python and torch count its holders otherwise.

    Not when this is imported: a process that has run a backward pass on a machine with a GPU can fork none that does.
    """
    waits, found = list[Tensor](), list[Holders]()
    with _disable_current_modes(), torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        (_Probe.apply(x, waits, found) + _Probe.apply(x, waits, found)).sum().backward()
    return found[0]
