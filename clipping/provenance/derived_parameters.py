"""Sources: tensors made of parameters alone, and the pullback of their gradients to the parameters.

Let D = f(θ) be such a tensor (a view, a slice, a cast, a concatenation, a reparametrisation), the same for every
sample. The per-sample gradient of θ is J_fᵀ ∂ℓ_i/∂D: one batched vector-Jacobian product through the graph
from θ to D. If f only rearranges entries (a view, a transpose), both gradients have the same norm. If f only copies
entries (a table read at fixed indices, a concatenation), J_fᵀ sums the gradients of the copies of each entry of θ.
Applying f to the indices of θ's entries shows which are copies, without the graph.

A tensor changed in place is another D from then on. Earlier reads are pulled back from its previous place in the graph.

*Broadcast*: an attention's position score is the same for every sample, and a model may expand it to the batch before
use (ConViT). Each of the B rows is then the same function f of the parameters, and the gradient of sample i is J_fᵀ
applied to row i's gradient, for one row (`done_once`). The graph of all B rows gives the same result at B times the
cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.nn import Parameter

from clipping.core.autograd import nodes
from clipping.core.dtypes import norm_dtype


def methods(*names: str) -> set[Any]:
    """Return the operations of these names, both torch functions and methods."""
    found = {getattr(where, name, None) for where in (torch, torch.Tensor) for name in names}
    return found - {None}


TRANSPOSITIONS = methods("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "unsqueeze")
TRANSPOSITIONS |= {torch.Tensor.T.__get__, torch.Tensor.mT.__get__}  # type: ignore[attr-defined]
TRANSPOSITIONS |= {torch.ops.aten.numpy_T, torch.ops.aten.mT}  # as TorchDynamo writes these
"""Operations that only permute or insert dimensions, as their arguments say."""
REARRANGEMENTS = methods("view", "reshape", "squeeze", "flatten", "unflatten", "contiguous", "clone") | TRANSPOSITIONS
"""Operations on one tensor that preserve the norm of its gradient."""
READS = {torch.Tensor.__getitem__, *methods("index_select", "narrow", "select")}
"""Operations on one tensor whose other operands are indices."""
COPIES = methods("expand", "repeat", "cat", "concat", "stack") | REARRANGEMENTS | READS
"""Operations that copy each entry of the result from an entry of an operand."""
PIECES = {torch.Tensor.__getitem__, *methods("select", "narrow", "unbind", "chunk", "split")}
"""Operations whose results may be parts of an operand."""
EXPANSIONS = methods("expand", "broadcast_to", "repeat")
"""Operations that copy rows along a new or singleton first dimension."""
KEEPS = methods("clone", "contiguous")
"""Operations that keep the rows of their operand."""
CONSTANTS = methods("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
CONSTANTS |= methods("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
"""Operations that read an operand's shape, dtype and device, but not its values."""


def mark_data(x: Tensor, samples: Any = 0) -> Tensor:
    """Mark a tensor as dependent on the batch.

    Args:
        samples: the dimension of the samples, or the `clipping.provenance.row_owners.Rows` of its rows.
    """
    x._depends_on_data = samples  # type: ignore[attr-defined]
    return x


def samples_of(x: Tensor) -> Any:
    """Return the mark of an activation: the dimension or rows of its samples; the first dimension without a mark."""
    return getattr(x, "_depends_on_data", 0)


def is_marked(x: Tensor) -> bool:
    """True if the tensor is marked as dependent on the batch."""
    return hasattr(x, "_depends_on_data")


def mark_constant(x: Tensor) -> None:
    """Mark a tensor that requires a gradient as made of parameters that are not the model's own."""
    x._is_constant = True  # type: ignore[attr-defined]


def depends_on_data(x: Tensor) -> bool:
    """True if the tensor is marked, or requires a gradient and is not made of constants alone.

    Call it only for tensors not made of parameters alone. A parameter without a mark is a constant, such as
    `nn.Parameter(frozen.T)`; another leaf may be the batch, as `Variable(x, requires_grad=True)` has no mark.
    """
    return (x.requires_grad and type(x) is not Parameter and not hasattr(x, "_is_constant")) or is_marked(x)


def forget_data(x: Tensor | None) -> None:
    """Remove the mark."""
    if x is not None and hasattr(x, "_depends_on_data"):
        del x._depends_on_data


@dataclass(eq=False)
class Source:
    """A tensor that depends on parameters alone.

    Attributes:
        tensor: the parameter or the tensor made of parameters; the reference keeps its id unique.
        parameters: name -> trainable parameter that it is made of.
        rearranged: True if it holds each entry of one parameter, or of a part that nothing else reads, exactly once.
        row: the source that its rows are copies of, if it was expanded along the first dimension, or an operand was.
        lookup: (ids, table, padding_idx) if its rows were read from an embedding at ids independent of the data.
        copied: (operation, args, kwargs, source operands) if the operation only copied entries.
        version: version counter of the tensor when it was made.
        node, output_nr: its place in the graph at that time; None for a parameter.
        part: (start, stop) of its entries in one parameter, rearranged, if they are consecutive.
        alone: True if nothing else uses its parameters; known when the tape has exited.
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
    alone: bool = False

    @property
    def is_parameter(self) -> bool:
        """True if the tensor is a parameter."""
        return self.node is None

    def add_to(self, grads: dict[str, Tensor], gradient: Tensor) -> None:
        """Pull a gradient [*shape of tensor] back and add it to the gradient of each parameter.

        Args:
            grads: parameter name -> gradient; changed in place or replaced.
        """
        if self.node is None:
            (name,) = self.parameters
            gradient = gradient if gradient.shape == self.tensor.shape else gradient.reshape(self.tensor.shape)
            grads[name] = grads[name].add_(gradient) if name in grads else gradient
            return
        if self.part is None or not self.tensor.is_contiguous() or not self.tensor._is_view():
            for name, (found,) in self.pull_back(gradient[None]).items():
                grads[name] = found + grads[name] if name in grads else found
            return
        ((name, p),) = self.parameters.items()
        if name not in grads:
            grads[name] = torch.zeros_like(p, dtype=gradient.dtype, memory_format=torch.contiguous_format)
        start, stop = self.part
        grads[name].view(-1)[start:stop] += gradient.reshape(-1)

    def pull_back(self, gradients: Tensor) -> dict[str, Tensor]:
        """Pull per-sample gradients [b, *shape of tensor] back to each parameter, [b, *shape of parameter]."""
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
            except RuntimeError:  # vmap does not support an operation, for example on sparse tensors
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
        """Return the index of the parameter entry that each entry is a copy of; None if they are not only copied.

        Args:
            starts: id of a parameter -> the index of its first entry.
            constant: the index for entries of no parameter.
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
    """Return the source of a parameter."""
    return Source(parameter, {name: parameter}, rearranged=True, version=parameter._version)


def derive(func: Any, args: Any, kwargs: Any, output: Tensor, origins: list[Source]) -> Source:
    """Return the source that `func` made of `origins` (at least one) and no tensor that depends on data.

    Args:
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
    """Return the range of entries that a piece has of a contiguous parameter, or None if not consecutive."""
    p = whole.tensor
    if not (whole.is_parameter and piece._base is p and p.is_contiguous() and piece.is_contiguous()):
        return None
    start = int(piece.storage_offset() - p.storage_offset())
    return start, start + piece.numel()


def mark_disjoint(readings: list[Source]) -> bool:
    """True if all reads of a parameter are disjoint parts, so that each has its own norm. Marks them as rearranged.

    Args:
        readings: the sources of all uses of the parameter.
    """
    parts = sorted(source.part for source in readings if source.part is not None and len(source.parameters) == 1)
    if len(parts) < len(readings) or any(a[1] > b[0] for a, b in pairwise(parts)):
        return False
    for source in readings:
        source.rearranged = True
    return True


def _row(func: Any, first: Source, output: Tensor) -> Source | None:
    """Return the source that the rows of `output` are copies of, each broadcast to a row's shape."""
    if func in KEEPS:
        return first.row
    if func not in EXPANSIONS:
        return None
    shape, new = first.tensor.shape, output.dim() - first.tensor.dim()
    if not all(size in (1, wanted) for size, wanted in zip(shape, output.shape[new:], strict=True)):
        return None  # repeated rather than broadcast
    if new or shape[:1] == (1,):
        return first
    return first.row


def _row_made(func: Any, args: Any, kwargs: Any, output: Tensor, origins: list[Source]) -> Source | None:
    """Return the source that `func` makes of one row, if its operands' rows are copies of one another."""
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
    """Return the source of a tensor that was changed in place, from its graph.

    Args:
        tensor: differentiable.
        known: id of a tensor -> its source, parameters included.
        uses: graph nodes made by operations on data.

    Returns:
        None if the tensor also depends on data.
    """
    parameters: dict[str, Tensor] = {}
    for node in nodes([tensor.grad_fn]):
        if node in uses:
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            source = known.get(id(leaf))
            if source is None:
                return None
            parameters |= source.parameters
    if not parameters:
        return None
    return Source(tensor, parameters, False, version=tensor._version, node=tensor.grad_fn, output_nr=tensor.output_nr)


_NAMES = (
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "pow", "maximum", "minimum"),
    *("neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "abs", "sin", "cos", "tanh"),
    *("sigmoid", "relu", "erf", "clamp", "clip", "where", "lerp", "float", "double", "half", "bfloat16", "to"),
    *("matmul", "permute", "transpose", "swapaxes", "movedim", "unsqueeze", "softmax", "log_softmax"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__"),
    *("__pow__", "__rpow__", "__matmul__"),
)
ROWWISE = methods(*_NAMES) | {F.linear, F.layer_norm, F.rms_norm, torch.rms_norm, F.softmax, F.log_softmax}
ROWWISE |= {F.gelu, F.silu, F.softplus, F.relu, F.leaky_relu, F.elu}
"""Operations that treat each row independently, if their result for one row has the shape of an output row."""
ALONG = methods("softmax", "log_softmax") | {F.softmax, F.log_softmax}
"""Operations of `ROWWISE` whose second argument is a dimension; rowwise unless it is the dimension of the rows."""


def done_once(func: Any, args: Any, kwargs: Any, output: Tensor, rows: Mapping[int, Tensor]) -> Tensor | None:
    """Return `func` of one row, [1, ...], if the rows of its output [B, ...] are copies of it; else None.

    Args:
        rows: id of an operand made of parameters -> the row that its rows are copies of.
    """
    count = len(output) if output.dim() > 1 else 1
    in_place = any(output is x for x in (*args, *kwargs.values()))
    if count == 1 or func not in ROWWISE or in_place:
        return None
    if func in ALONG and _along(args, kwargs) % output.dim() == 0:
        return None
    found = False

    def one(x: Any) -> Any:
        nonlocal found
        if not isinstance(x, Tensor) or not x.dim() or len(x) != count:
            return x
        row = rows.get(id(x))
        if row is None and (x.requires_grad or x.stride(0)):
            return x
        found = True
        return x[:1] if row is None else row.expand(1, *x.shape[1:])

    replaced, named = [one(x) for x in args], {key: one(x) for key, x in kwargs.items()}
    if not found:
        return None
    made = None
    with suppress(RuntimeError, TypeError, IndexError), saved_as_they_are():
        made = func(*replaced, **named)
    return made if isinstance(made, Tensor) and made.shape == (1, *output.shape[1:]) else None


def _along(args: Any, kwargs: Any) -> int:
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else 0
    return dim if isinstance(dim, int) else 0


def saved_as_they_are() -> saved_tensors_hooks:
    """Context in which operations save tensors that no checkpoint counts, frees or recomputes."""
    return saved_tensors_hooks(torch.Tensor.detach, _same)


def _same(x: Tensor) -> Tensor:
    return x
