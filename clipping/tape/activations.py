"""Tensors made of parameters as activations: a copy for each row of the batch, whose own gradient is per sample.

What is done to an activation needs no rule, and what changes it in place does not come between: its gradient is asked
for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Gradient, Spec
from clipping.rules.elementwise import Broadcast, Copies

COPIES = 16
"""Of a vector that are joined at once: each costs Python's time."""

Note = Callable[[Source, Gradient, Spec, Tensor], None]
"""(what was copied, its gradient, output, the copies): the tape takes note of a use."""


class Activations:
    """Makes activations of sources.

    Args:
        sources: by the identity of their tensors; the tape's own.
        note: called for each activation.
        place: called with what has a row for each row of the batch; gives it back, and notes whose these are.
    """

    def __init__(self, sources: dict[int, Source], note: Note, place: Callable[[Tensor], Tensor]) -> None:
        self._sources, self._note, self._place = sources, note, place

    def source(self, x: Any) -> Source | None:
        """What a tensor is that is made of parameters alone; None for all else.

        Args:
            x: any object.
        """
        return self._sources.get(id(x))

    def let_go(self, x: Tensor) -> None:
        """It depends on data from now on; what it was made of is still read.

        Args:
            x: the tensor of a source.
        """
        source = self._sources.pop(id(x))
        self._sources[id(source)] = source

    def each(self, tensor: Tensor, rows: int) -> Tensor:
        """[rows · n]: a tensor of n entries, made of parameters, with a copy for each row of the batch.

        Args:
            tensor: of the parameters, n entries.
            rows: of the batch.
        """
        copies = _Repeated.apply(tensor, rows)
        source = self._sources.get(id(tensor))
        if source is not None:
            spec = Spec(torch.Size((rows, *tensor.shape)), copies.dtype)
            self._note(source, (tensor, Copies), spec, copies)
        return copies

    def copies(self, source: Source, rows: int) -> Tensor:
        """[rows, *shape of the source]: a copy for each row of the batch.

        Args:
            source: made of parameters.
            rows: of the batch.
        """
        return self._place(self.each(source.tensor, rows).view(rows, *source.tensor.shape))

    def own(self, source: Source) -> Tensor:
        """The tensor of a source that has a row for each row of the batch: itself, as an activation.

        Args:
            source: made of parameters, [rows, ...].
        """
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
    """[rows · n] of a tensor of n entries; its gradient is one sum over the rows, not one addition for each."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: int) -> Tensor:
        ctx.rows, ctx.shape = rows, tensor.shape
        copies = tensor.reshape(-1)
        if not copies.is_cpu:
            return copies.repeat(rows)  # one launch
        parts: list[Tensor] = []
        while rows >= COPIES:  # in less time than by `repeat`, or `expand` and `reshape`
            rows, rest = divmod(rows, COPIES)
            parts = [copies] * rest + parts
            copies = torch.cat([copies] * COPIES)
        return torch.cat([copies] * rows + parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].view(ctx.rows, -1).sum(0).view(ctx.shape), None
