"""A use: one operation on tensors made of parameters, as the forward pass notes it and as it is settled afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.provenance.derived_parameters import Source, mark_disjoint
from clipping.provenance.row_owners import Rows, taken
from clipping.rules.base import Gradient, Refused, Rule, Spec, made, title
from clipping.rules.elementwise import Broadcast
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.gathered import gathered


@dataclass(eq=False)
class Use:
    """One operation on sources.

    Attributes:
        operation: its name, or that of the function that it is a part of.
        rules: for each source the rule of its gradient.
        output: shape and dtype of its output, and so of g.
        node: the number of the node that gives its output, in the order in which the forward pass made them.
        first, last: the nodes that the operation made have the numbers from `first` up to `last`, which is not one.
        view: the number of the output's node where the output is a view of all that `node` gives; else that of `node`.
        rows: whose the rows of its output are; None if they are B·k, k consecutive ones to a sample.
        again: makes the rules once more, where what they are made of was let go of; see `clipping.tape.checkpointing`.
    """

    operation: str
    rules: list[tuple[Source, Rule]]
    output: Spec
    node: int = 0
    first: int = 0
    last: int = 0
    view: int = 0
    rows: Rows | None = None
    again: Callable[[], list[tuple[Source, Rule]]] | None = None

    def restored(self) -> list[tuple[Source, Rule]]:
        """Its rules, with what was let go of, in a backward pass."""
        if self.again is None:
            return self.rules
        found = self.again()
        for (_, rule), (_, planned) in zip(found, self.rules, strict=True):
            rule.route, rule.share, rule.chosen_for = planned.route, planned.share, planned.chosen_for
        return found

    @property
    def owners(self) -> Tensor | None:
        """The sample that each row of the output belongs to, [rows], -1 for none; None as for `rows`."""
        return None if self.rows is None else self.rows.owners

    def largest(self, g: Tensor, batch_size: int) -> Tensor:
        """The largest magnitude in the output's gradient g, of each sample, [B].

        Args:
            g: of the output, [B·k, ...].
            batch_size: B.
        """
        by_sample = g.reshape(batch_size, -1) if self.rows is None else taken(g, self.rows.padded, filled=True)
        return torch.linalg.vector_norm(by_sample.reshape(batch_size, -1), torch.inf, dim=1)


class Noted(NamedTuple):
    """A use as the forward pass leaves it: no rule is made yet.

    Attributes:
        operation: the function.
        output: shape and dtype of its output.
        node, at: of the graph, and which of its outputs this is.
        number: of the node, which may be gone when the forward pass has ended.
        view: as of the use.
        gradients: for each source what its rule is made of.
        made: `first` and `last` of the use.
        copies: the output, if its gradient is to be asked for itself.
        order: the rows of the output, if they are not in the samples' order.
        again: gives `gradients` anew, if those here are not whole.
    """

    operation: Any
    output: Spec
    node: Any
    at: int
    number: int
    view: int
    gradients: list[tuple[Source, Gradient]]
    made: tuple[int, int]
    copies: Tensor | None = None
    order: Rows | None = None
    again: Callable[[], list[tuple[Source, Gradient]]] | None = None

    def settled(self, batch_size: int) -> Use:
        """With its rules, per sample.

        Args:
            batch_size: B.

        Raises:
            Refused: rows that are not the batch's.
        """
        rules = self._rules(batch_size, self.gradients)
        use = Use(title(self.operation), rules, self.output, self.number, *self.made, self.view, self.order)
        if (again := self.again) is not None:
            use.again = lambda: self._rules(batch_size, again())
        return use

    def _rules(self, batch_size: int, gradients: list[tuple[Source, Gradient]]) -> list[tuple[Source, Rule]]:
        shape = self.output.shape
        rows = shape[0] if shape else 0
        if self.order is not None:
            if self.order.owners.shape != shape[:1]:
                reason = f"its output {list(shape)} does not have the {len(self.order.owners)} rows of its input"
                raise Refused(reason, "apply it to each row by itself, or use microbatch")
            return [(source, gathered(made(gradient), self.order)) for source, gradient in gradients]
        if rows == 0 or rows % batch_size:
            reason = f"its output {list(shape)} does not have the batch, {batch_size}, as first dimension"
            raise Refused(reason, "give it one row a sample (batch first), or use microbatch or vmap")
        fold = rows // batch_size
        rules = []
        for source, gradient in gradients:
            rule = made(gradient)
            if isinstance(rule, Broadcast):
                source, rule = _by_row(source, rule, self.output)
            rules.append((source, rule if fold == 1 else rule.regroup(fold)))
        return rules


def given(output: Tensor, first: int) -> Tensor:
    """What an operation made: its output, or what that is a view of, if it is all of it.

    A view that is changed in place gets another node, and what it is a view of goes through the same one as before.

    Args:
        output: of the operation.
        first: the number of the first node that it made.
    """
    base = output._base
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        return output
    same = base.is_contiguous() and output.is_contiguous() and base.grad_fn._sequence_nr() >= first
    return base if same else output


def _by_row(source: Source, rule: Broadcast, output: Spec) -> tuple[Source, Rule]:
    """A source that was made of rows, traced back to what they were made of.

    A row for each row of the output (an expanded token), or rows read from an embedding, for each sample or for all of
    them alike (positions).
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


def count_parts(uses: list[Use], counts: Counter[str]) -> None:
    """Uses of disjoint parts of a parameter (experts) are one use of it.

    Args:
        uses: of the forward pass.
        counts: parameter name -> how many uses it has; changed in place.
    """
    sources = [source for use in uses for source, _ in use.rules]
    for name in {name for source in sources if source.part is not None for name in source.parameters}:
        if counts[name] > 1 and mark_disjoint([source for source in sources if name in source.parameters]):
            counts[name] = 1
