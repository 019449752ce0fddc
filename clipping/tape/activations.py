"""Turn tensors made of parameters into activations: one copy for each row, whose gradient is per sample.

Operations on an activation need no rule. The backward pass requests the activation's own gradient, so later changes in
place do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Gradient, Spec
from clipping.rules.elementwise import Broadcast, Copies

Note = Callable[[Source, Gradient, Spec, Tensor], None]
"""(source, its gradient, output, copies): records a use on the tape."""


class Activations:
    """Makes activations from sources.

    Args:
        sources: id of a tensor -> its source, as the tape keeps them.
        note: called for each activation.
        place: called with a tensor of one row for each row of the batch; marks its rows and returns it.
    """

    def __init__(self, sources: dict[int, Source], note: Note, place: Callable[[Tensor], Tensor]) -> None:
        self._sources, self._note, self._place = sources, note, place

    def source(self, x: Any) -> Source | None:
        """Return the source of a tensor made of parameters alone, else None."""
        return self._sources.get(id(x))

    def each(self, tensor: Tensor, rows: int) -> Tensor:
        """Copy a tensor of n entries, made of parameters, for each row of the batch: [rows · n]."""
        copies = _Repeated.apply(tensor, rows)
        source = self._sources.get(id(tensor))
        if source is not None:
            spec = Spec(torch.Size((rows, *tensor.shape)), copies.dtype)
            self._note(source, (tensor, Copies), spec, copies)
        return copies

    def copies(self, source: Source, rows: int) -> Tensor:
        """Copy a source for each row of the batch: [rows, *shape of the source]."""
        return self._place(self.each(source.tensor, rows).view(rows, *source.tensor.shape))

    def own(self, source: Source) -> Tensor:
        """Return the tensor of a source that already has one row for each row of the batch, as an activation."""
        shape = source.tensor.shape
        if source.row is not None:
            row = source.row.tensor
            inner = row.shape[1:] if row.dim() == len(shape) else row.shape
            copies = self.each(row, shape[0])
            return self._place(copies.view(shape[0], *[1] * (len(shape) - 1 - len(inner)), *inner).expand(shape))
        copies = _Repeated.apply(source.tensor, 1)
        self._note(source, (source.tensor, Broadcast, shape), Spec(shape, copies.dtype), copies)
        return self._place(copies.view(shape))


class _Repeated(torch.autograd.Function):
    """Repeats a tensor of n entries to [rows · n]; its gradient is one sum over the rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: int) -> Tensor:
        ctx.rows, ctx.shape = rows, tensor.shape
        return tensor.reshape(-1).repeat(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].view(ctx.rows, -1).sum(0).view(ctx.shape), None
