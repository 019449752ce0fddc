"""Uses: operations on tensors made of parameters, as recorded in the forward pass and as settled afterwards.

`Activations` turns tensors made of parameters into activations: one copy for each row, whose gradient is per sample.
Operations on an activation need no rule. The backward pass requests the gradient of the activation directly, so later
changes in place do not matter.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.provenance.derived_parameters import Source, mark_disjoint
from clipping.provenance.row_owners import Rows
from clipping.rules.base import Gradient, Refused, Route, Rule, Spec, made, title
from clipping.rules.elementwise import Broadcast, Copies
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.gathered import gathered

OfSources = list[tuple[Source, Gradient]]
"""Each source of an operation with the arguments of its rule."""


@dataclass(eq=False)
class Use:
    """One operation on sources. The forward pass records it; it is settled, with its rules, when the tape exits.

    Attributes:
        operation: the function; once settled, its name, or the name of the composite function that called it.
        output: shape and dtype of its output and of g.
        arrives: the node of its output, and the index among the node's outputs, until a hook is registered.
        node: number of that node, in the order in which the forward pass made nodes.
        view: number of the output's own node if the output is a view of everything that `node` returns; else as `node`.
        gradients: each source with the arguments of its rule, until it is settled.
        first, last: the operation's nodes have numbers from `first` to `last`, exclusive.
        copies: the output, if its gradient is requested directly, until a hook is registered.
        rows: owners of the output's rows; None for B·k rows, k consecutive rows a sample.
        again: returns complete `gradients` if the inputs of these were freed; see `clipping.tape.checkpointing`.
        rules: each source with the rule of its gradient.
        routes: of the norm by each rule, once planned.
        names: of the parameters that its sources are made of; kept when `rules` are freed.
    """

    operation: Any
    output: Spec
    arrives: tuple[Any, int]
    node: int
    view: int
    gradients: OfSources
    first: int
    last: int
    copies: Tensor | None = None
    rows: Rows | None = None
    again: Callable[[], OfSources] | None = None
    rules: list[tuple[Source, Rule]] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def settle(self, batch_size: int) -> None:
        """Make the per-sample rules.

        Raises:
            Refused: the output's rows are not the batch's.
        """
        self.rules = self._rules(batch_size, self.gradients)
        self.names = [name for source, _ in self.rules for name in source.parameters]
        self.operation, self.gradients = title(self.operation), []

    def restored(self, batch_size: int) -> list[tuple[Source, Rule]]:
        """Return its rules with freed inputs recovered, in a backward pass; `again` is not None."""
        assert self.again is not None
        found = self._rules(batch_size, self.again())
        for (source, rule), (marked, first) in zip(found, self.rules, strict=True):
            rule.share, source.alone, source.rearranged = first.share, marked.alone, marked.rearranged
        return found

    def largest(self, g: Tensor, batch_size: int) -> Tensor:
        """Return the largest magnitude of g for each sample, and last for rows without an owner: [B + 1]."""
        if self.rows is None:
            return F.pad(torch.linalg.vector_norm(g.reshape(batch_size, -1), torch.inf, dim=1), (0, 1))
        owners = self.rows.owners
        found = torch.linalg.vector_norm(g.reshape(len(owners), g.shape[1:].numel()), torch.inf, dim=1)
        at = torch.where(owners < 0, batch_size, owners)
        return found.new_zeros(batch_size + 1).scatter_reduce_(0, at, found, "amax")

    def _rules(self, batch_size: int, gradients: OfSources) -> list[tuple[Source, Rule]]:
        shape = self.output.shape
        count = shape[0] if shape else 0
        if self.rows is not None:
            if self.rows.owners.shape != shape[:1]:
                reason = f"its output {list(shape)} does not have the {len(self.rows.owners)} rows of its input"
                raise Refused(reason, "apply it to each row by itself, or use microbatch")
            return [(source, gathered(made(gradient), self.rows)) for source, gradient in gradients]
        if count == 0 or count % batch_size:
            reason = f"its output {list(shape)} does not have the batch, {batch_size}, as first dimension"
            raise Refused(reason, "give it one row a sample (batch first), or use microbatch or vmap")
        fold = count // batch_size
        rules = []
        for source, gradient in gradients:
            rule = made(gradient)
            if isinstance(rule, Broadcast):
                source, rule = _by_row(source, rule, self.output)
            rules.append((source, rule if fold == 1 else rule.regroup(fold)))
        return rules


def given(output: Tensor, first: int) -> Tensor:
    """Return an operation's output, or the base that the output is a view of, if it views all of it.

    A view changed in place gets another node, while its base passes through the same one as before.

    Args:
        first: number of the first node that it made.
    """
    base = output._base
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        return output
    same = base.is_contiguous() and output.is_contiguous() and base.grad_fn._sequence_nr() >= first
    return base if same else output


def _by_row(source: Source, rule: Broadcast, output: Spec) -> tuple[Source, Rule]:
    """Replace a source by the tensor that its rows are copies of, and the rule by that tensor's.

    This applies to a source with one row for each row of the output (an expanded token), and to rows read from an
    embedding at ids that are given for each sample, or once for all (positions).
    """
    shape = source.tensor.shape
    if rule.aligned and source.row is not None:
        return source.row, rule.row(source.row.tensor)
    if source.lookup is not None and rule.is_sum and shape.numel() and shape[-1] == output.shape[-1]:
        ids, table, padding_idx = source.lookup
        if shape == output.shape:
            return table, EmbeddingWeight(table.tensor, ids, padding_idx)
        if shape[1 - len(output.shape) :] == output.shape[1:] and shape.numel() == output.shape[1:].numel():
            ids = ids.reshape(1, *output.shape[1:-1]).expand(output.shape[:-1])
            return table, EmbeddingWeight(table.tensor, ids, padding_idx)
    return source, rule


def mark_alone(uses: list[Use], *, by_parts: bool) -> None:
    """Mark the sources of uses whose parameters nothing else uses.

    Args:
        by_parts: count uses of disjoint parts of a parameter (experts) as one use.
    """
    sources = [source for use in uses for source, _ in use.rules]
    counts = Counter(name for source in sources for name in source.parameters)
    for name in {name for source in sources if source.part is not None for name in source.parameters}:
        if by_parts and counts[name] > 1 and mark_disjoint([x for x in sources if name in x.parameters]):
            counts[name] = 1
    for source in sources:
        source.alone = all(counts[name] == 1 for name in source.parameters)


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
        return self._of_each(self._sources.get(id(tensor)), tensor, rows)

    def _of_each(self, source: Source | None, tensor: Tensor, rows: int) -> Tensor:
        copies = _Repeated.apply(tensor, rows)
        if source is not None:
            spec = Spec(torch.Size((rows, *tensor.shape)), copies.dtype)
            self._note(source, (tensor, Copies), spec, copies)
        return copies

    def copies(self, source: Source, rows: int) -> Tensor:
        """Copy a source for each row of the batch: [rows, *shape of the source]."""
        return self._place(self._of_each(source, source.tensor, rows).view(rows, *source.tensor.shape))

    def own(self, source: Source) -> Tensor:
        """Return the tensor of a source that already has one row for each row of the batch, as an activation."""
        shape = source.tensor.shape
        if source.row is not None:
            row = source.row.tensor
            inner = row.shape[1:] if row.dim() == len(shape) else row.shape
            copies = self._of_each(source.row, row, shape[0])  # the tape may not know a row that was made for this
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
