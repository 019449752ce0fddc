"""Tensors made of parameters alone: views, slices, casts, concatenations, whole reparametrisations.

Let D = f(θ) be such a tensor, the same for every sample. The per-sample gradient of θ is J_fᵀ applied to the per-sample
gradient of D, whatever f is: one batched vector-Jacobian product through the graph that autograd recorded from θ to D.
Where f only rearranges entries (a view, a transpose), it preserves norms, and D's norm is θ's. Where it only copies
entries (a table read at fixed indices, a concatenation), J_fᵀ adds up those of D that are copies of one entry of θ: f
applied to the numbers of θ's entries says which, and no graph is gone through.

A tensor that is changed in place is another D from then on. What was read of it before goes back by the place in the
graph that it had then.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipping.core.dtypes import norm_dtype
from clipping.provenance.broadcast_once import done_once

TRANSPOSITIONS = {
    torch.Tensor.permute,
    torch.permute,
    torch.Tensor.transpose,
    torch.transpose,
    torch.Tensor.t,
    torch.t,
    torch.Tensor.T.__get__,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    torch.Tensor.movedim,
    torch.movedim,
    torch.Tensor.swapaxes,
    torch.Tensor.unsqueeze,
    torch.unsqueeze,
}
"""Operations that put each dimension where their arguments say, and change nothing else."""

REARRANGEMENTS = TRANSPOSITIONS | {
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.reshape,
    torch.Tensor.squeeze,
    torch.squeeze,
    torch.Tensor.flatten,
    torch.flatten,
    torch.Tensor.unflatten,
    torch.Tensor.contiguous,
    torch.Tensor.clone,
    torch.clone,
}
"""Operations on one tensor under which the norm of its gradient is the norm of the result's."""

READS = {torch.Tensor.__getitem__, torch.Tensor.index_select, torch.index_select}
"""Operations on one tensor whose other operands are indices."""

COPIES = (
    REARRANGEMENTS
    | READS
    | {
        torch.Tensor.narrow,
        torch.narrow,
        torch.Tensor.select,
        torch.select,
        torch.Tensor.expand,
        torch.Tensor.repeat,
        torch.cat,
        torch.concat,
        torch.stack,
    }
)
"""Operations each entry of whose result is an entry of an operand, whatever that is."""

PIECES = {
    torch.Tensor.__getitem__,
    torch.Tensor.select,
    torch.Tensor.narrow,
    torch.Tensor.unbind,
    torch.unbind,
    torch.Tensor.chunk,
    torch.chunk,
    torch.Tensor.split,
    torch.split,
}
"""Operations whose results may be parts of an operand."""

EXPANSIONS = {torch.Tensor.expand, torch.Tensor.broadcast_to, torch.broadcast_to, torch.Tensor.repeat}
"""Operations whose rows along a new or singleton first dimension are copies of one another."""

KEEPS: set[Any] = {torch.Tensor.clone, torch.clone, torch.Tensor.contiguous}
"""Operations whose rows are those of what they are given."""


CONSTANTS = {
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    torch.Tensor.new_tensor,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
}
"""Operations that read their operand's shape, type and device, but none of its values."""


def mark_data(x: Tensor, samples: Any = 0) -> Tensor:
    """Say that a tensor depends on the batch; the mark goes with it.

    Args:
        x: the tensor.
        samples: the dimension that holds them, or the `clipping.provenance.row_owners.Rows` that are theirs.
    """
    x._depends_on_data = samples  # type: ignore[attr-defined]
    return x


def samples_of(x: Tensor) -> Any:
    """Where an activation has its samples, as it was marked: by a dimension, the first one if nothing is known.

    Args:
        x: an activation.
    """
    return getattr(x, "_depends_on_data", 0)


def is_marked(x: Tensor) -> bool:
    """Known to depend on the batch.

    Args:
        x: any tensor.
    """
    return hasattr(x, "_depends_on_data")


def depends_on_data(x: Tensor) -> bool:
    """Marked, or differentiable, if it is not made of parameters alone.

    Args:
        x: any tensor.
    """
    return x.requires_grad or is_marked(x)


def forget_data(x: Tensor | None) -> None:
    """Take the mark off again.

    Args:
        x: any tensor, or None.
    """
    if x is not None and hasattr(x, "_depends_on_data"):
        del x._depends_on_data


@dataclass(eq=False)
class Source:
    """A tensor that depends on parameters alone.

    Attributes:
        tensor: the parameter itself, or what became of it; held, so that its identity stays its own.
        parameters: the trainable parameters that it is made of, by name.
        rearranged: its entries are those of one parameter, or of a part that nothing else reads, each exactly once.
        row: the source whose copies its rows are, if it or what it is made of was expanded along the first dimension.
        lookup: (ids, table, padding_idx) if its rows were read from an embedding at ids that do not depend on data.
        copied: (operation, args, kwargs, its operands that are sources) if it did no more than copy their entries.
        version: of the tensor as it was made.
        node, output_nr: its place in the graph then; None for a parameter.
        part: (start, stop) of the entries of one parameter that it has, rearranged, if these are consecutive.
    """

    tensor: Tensor
    parameters: dict[str, Tensor]
    rearranged: bool
    row: Source | None = None
    lookup: tuple[Tensor, Source, int | None] | None = None
    copied: tuple[Any, Any, Any, list[Source]] | None = None
    version: int = 0
    node: Any = None
    output_nr: int = 0
    part: tuple[int, int] | None = None

    @property
    def is_parameter(self) -> bool:
        """Whether the tensor is a parameter itself, and not made of any."""
        return self.node is None

    def pull_back_one(self, gradient: Tensor) -> dict[str, Tensor]:
        """A gradient [*shape of tensor] to those of each parameter, [*shape of parameter].

        Args:
            gradient: of the tensor.
        """
        if self.is_parameter:
            (name,) = self.parameters
            shape = self.tensor.shape
            return {name: gradient if gradient.shape == shape else gradient.reshape(shape)}
        return {name: found[0] for name, found in self.pull_back(gradient[None]).items()}

    def add_to(self, grads: dict[str, Tensor], gradient: Tensor) -> None:
        """Add to those of each parameter what a gradient [*shape of tensor] is to them.

        Args:
            grads: parameter name -> gradient, which is changed in place or replaced.
            gradient: of the tensor.
        """
        if self.part is None or not self.tensor.is_contiguous() or not self.tensor._is_view():
            for name, found in self.pull_back_one(gradient).items():
                grads[name] = found + grads[name] if name in grads else found
            return
        ((name, p),) = self.parameters.items()
        if name not in grads:
            grads[name] = torch.zeros_like(p, dtype=gradient.dtype, memory_format=torch.contiguous_format)
        start, stop = self.part
        grads[name].view(-1)[start:stop] += gradient.reshape(-1)

    def pull_back(self, gradients: Tensor) -> dict[str, Tensor]:
        """Per-sample gradients [b, *shape of tensor] to those of each parameter, [b, *shape of parameter].

        Args:
            gradients: of the tensor, one a sample.
        """
        if self.is_parameter:
            return {name: gradients.reshape(-1, *p.shape) for name, p in self.parameters.items()}
        gradients = gradients.reshape(-1, *self.tensor.shape)
        several = gradients.shape[0] != 1
        if several and not self.rearranged:
            sizes = [p.numel() for p in self.parameters.values()]
            *starts, end = accumulate(sizes, initial=0)
            identities = map(id, self.parameters.values())
            numbers = self._numbers(dict(zip(identities, starts, strict=True)), end)
            if numbers is not None:
                rows = gradients.reshape(len(gradients), -1).to(norm_dtype(gradients.dtype))
                total = rows.new_zeros(len(rows), end + 1).index_add_(1, numbers.flatten(), rows)
                parts = zip(self.parameters.items(), total[:, :-1].split(sizes, 1), strict=True)
                return {name: part.reshape(len(part), *p.shape) for (name, p), part in parts}
        gradients = gradients.to(self.tensor.dtype)
        if several:
            try:
                found = self._pulled_back(gradients, batched=True)
                return {name: g for name, g in zip(self.parameters, found, strict=True) if g is not None}
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # an operation that vmap does not know, on sparse tensors say
                pass
        each = [self._pulled_back(g) for g in gradients]  # a batch of one need not go through vmap
        pairs = zip(self.parameters, zip(*each, strict=True), strict=True)
        return {name: torch.stack(found) for name, found in pairs if found[0] is not None}

    def _pulled_back(self, gradients: Tensor, batched: bool = False) -> tuple[Tensor, ...]:
        changed = self.tensor._version != self.version
        return torch.autograd.grad(
            GradientEdge(self.node, self.output_nr) if changed else self.tensor,
            list(self.parameters.values()),
            gradients,
            retain_graph=True,
            is_grads_batched=batched,
            allow_unused=True,
        )

    def _numbers(self, starts: dict[int, int], constant: int) -> Tensor | None:
        """Of which entry of the parameters each entry of the tensor is a copy; None if they were not only copied.

        Args:
            starts: identity of a parameter -> the number of its first entry.
            constant: the number of what is no entry of theirs.
        """
        if self.is_parameter:
            start, size = starts[id(self.tensor)], self.tensor.numel()
            return torch.arange(start, start + size, device=self.tensor.device).view(self.tensor.shape)
        if self.copied is None or self.tensor._version != self.version:  # changed in place since
            return None
        func, args, kwargs, origins = self.copied
        known = {id(origin.tensor): origin._numbers(starts, constant) for origin in origins}
        if any(numbers is None for numbers in known.values()):
            return None

        def numbered(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) in known:
                    return known[id(value)]
                return value if func in READS else torch.full_like(value, constant, dtype=torch.long)
            return type(value)(map(numbered, value)) if type(value) in (tuple, list) else value

        return func(*numbered(args), **{key: numbered(value) for key, value in kwargs.items()})


def parameter_source(name: str, parameter: Tensor) -> Source:
    """A parameter, as it is.

    Args:
        name: the parameter's name.
        parameter: the parameter.
    """
    return Source(parameter, {name: parameter}, rearranged=True, version=parameter._version)


def derive(func: Any, args: Any, kwargs: Any, output: Tensor, origins: list[Source]) -> Source:
    """The source that `func` made of `origins` (at least one) and of nothing that depends on data.

    Args:
        func, args, kwargs: the operation, and what it was called with.
        output: what it gave.
        origins: sources of its operands.
    """
    parameters = {name: p for origin in origins for name, p in origin.parameters.items()}
    first = origins[0]
    alone = len(origins) == 1 and output.numel() == first.tensor.numel() and output.dtype == first.tensor.dtype
    row = _row(func, first, output) or _row_made(func, args, kwargs, output, origins)
    copied = (func, args, kwargs, origins) if func in COPIES else None
    rearranged = alone and first.rearranged and func in REARRANGEMENTS
    part = first.part if alone and func in REARRANGEMENTS else _part(first, output) if func in PIECES else None
    version, node = output._version, output.grad_fn
    return Source(output, parameters, rearranged, row, None, copied, version, node, output.output_nr, part)


def _part(whole: Source, piece: Tensor) -> tuple[int, int] | None:
    """Which entries of a contiguous parameter a piece of it has, if they are consecutive."""
    p = whole.tensor
    if not (whole.is_parameter and piece._base is p and p.is_contiguous() and piece.is_contiguous()):
        return None
    start = int(piece.storage_offset() - p.storage_offset())
    return start, start + piece.numel()


def mark_disjoint(readings: list[Source]) -> bool:
    """Whether all that is read of a parameter are parts of it that do not overlap: then each has a norm of its own.

    Args:
        readings: the sources of all its uses.
    """
    parts = sorted(source.part for source in readings if source.part is not None and len(source.parameters) == 1)
    if len(parts) < len(readings) or any(a[1] > b[0] for a, b in pairwise(parts)):
        return False
    for source in readings:
        source.rearranged = True
    return True


def _row(func: Any, first: Source, output: Tensor) -> Source | None:
    """The source whose copies the rows of `output` are, each broadcast to a row's shape."""
    if func in KEEPS:
        return first.row
    if func not in EXPANSIONS:
        return None
    shape, new = first.tensor.shape, output.dim() - first.tensor.dim()
    if not all(size in (1, wanted) for size, wanted in zip(shape, output.shape[new:], strict=True)):
        return None  # repeated, and not broadcast
    if new or shape[0] == 1:
        return first
    return first.row


def _row_made(func: Any, args: Any, kwargs: Any, output: Tensor, origins: list[Source]) -> Source | None:
    """The source that `func` makes of one row, if its operands' rows are copies of one another."""
    rows = {id(origin.tensor): origin.row for origin in origins if origin.row is not None}
    made = done_once(func, args, kwargs, output, {key: row.tensor for key, row in rows.items()})
    if made is None:
        return None
    parameters = {name: p for origin in origins for name, p in origin.parameters.items()}
    moved = func in REARRANGEMENTS and all(
        row.rearranged and row.tensor.numel() == made.numel() for row in rows.values()
    )
    return Source(made, parameters, moved, version=made._version, node=made.grad_fn, output_nr=made.output_nr)


def remade(tensor: Tensor, known: dict[int, Source], uses: set[Any]) -> Source | None:
    """The source that a tensor is after it was changed in place, by the graph that leads to it.

    Args:
        tensor: differentiable.
        known: sources by the identity of their tensors, the parameters among them.
        uses: nodes of the graph that operations on data made.

    Returns:
        None if it holds data as well.
    """
    parameters: dict[str, Tensor] = {}
    stack, seen = [tensor.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            source = known.get(id(leaf))
            if source is None:
                return None
            parameters |= source.parameters
        stack.extend(child for child, _ in node.next_functions)
    if seen & uses or not parameters:
        return None
    return Source(tensor, parameters, False, version=tensor._version, node=tensor.grad_fn, output_nr=tensor.output_nr)
