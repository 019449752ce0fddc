"""Rules for rows out of the samples' order: routed to experts, of one sample in a loop, or of jagged sequences.

A weight's rows are gathered for each sample and padded with zeros, which do not change any product. Norms and gradients
are then those of ordinary layers with as many positions. The clipped sum needs no order: each row is scaled by its
sample's factor. For any other rule, the gradients of rows are added up by sample.

Functions take:
    rows: n rows in one dimension, with their owners.
"""

from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import wide_dtype
from clipping.core.microbatching import blocks, power_of_two
from clipping.numerics import kernels
from clipping.numerics.rounding_bounds import Reach
from clipping.numerics.traced_operations import is_traced
from clipping.provenance.row_owners import Rows, of_rows, taken
from clipping.rules.base import Regrouped, Rule, Spec, Work
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.grouped import GroupedWeight
from clipping.rules.linear import LinearWeight


def gathered(rule: Rule, rows: Rows) -> Rule:
    """Return the rule for rows with the given owners, from the rule for as many samples as rows."""
    if not len(rows.owners):
        return AddedUp(rule, rows)
    if isinstance(rule, GroupedWeight):
        return rule.of_rows(rows)
    if type(rule) is LinearWeight:
        return GatheredLinear(rule, rows)
    return GatheredEmbedding(rule, rows) if type(rule) is EmbeddingWeight else AddedUp(rule, rows)


class _OfRows(Rule):
    """A rule whose output has a row for each of `order`, from a rule of as many samples as rows."""

    order: Rows
    rule: Rule

    def samples(self, g: Tensor | Spec) -> int:
        return self.order.batch_size

    def output_rows(self, count: int) -> int:
        return len(self.order.owners)

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        if not len(self.order.owners):
            return torch.zeros_like(self.parameter, dtype=wide_dtype(g.dtype))
        return self.rule.weighted(g, of_rows(factors, self.order.owners))


class AddedUp(_OfRows, Regrouped):
    """Any rule, with the gradients of rows added up by sample; there may be no row (an expert that received no token).

    Args:
        rule: a rule of as many samples as rows.
    """

    def __init__(self, rule: Rule, rows: Rows) -> None:
        super().__init__(rule, 1)
        self.order = rows

    def work(self, g: Tensor | Spec, way: str) -> Work:
        share = max(1, -(-len(self.order.owners) // self.order.batch_size))
        return Work(*(share * number for number in self.rule.work(g, way)))

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        owners = self.order.owners
        mine = (owners >= samples.start) & (owners < samples.stop)
        everything = samples.start == 0 and samples.stop >= self.order.batch_size
        total = None
        for each in blocks(len(owners), int(self.rule.work(g, way).workspace), self.workspace(g)):
            if not len(owners) or (not everything and not is_traced() and not bool(mine[each].any())):
                continue
            found = self.rule.instantiate(g, each, way).reshape(-1, *self.parameter.shape)
            found = found * mine[each].view(-1, *[1] * (found.dim() - 1)) if not everything else found
            if total is None:
                total = found.new_zeros(samples.stop - samples.start + 1, *found.shape[1:])
            at = torch.where(mine[each], owners[each] - samples.start, samples.stop - samples.start)
            total.index_add_(0, at, found)
        if total is None:
            return g.new_zeros(samples.stop - samples.start, *self.parameter.shape)
        return total[:-1]

    def reach(self, g: Tensor) -> Reach | None:
        owners, batch_size = self.order.owners, self.order.batch_size
        at = torch.where(owners >= 0, owners, batch_size)
        found = self.rule.reach(g) if len(owners) else None
        return found and Reach(*(each.new_zeros(batch_size + 1).index_add_(0, at, each)[:-1] for each in found))


class _Gathered(_OfRows):
    """A rule by positions, with the rows of each sample side by side as its positions."""

    rule: Any

    def __init__(self, rule: Rule, rows: Rows) -> None:
        vars(self).update(vars(rule))
        self.rule, self.order = rule, rows
        positions = max(1, rule.positions) * rows.padded.shape[1]
        self.positions = power_of_two(positions)  # the same in most steps, as plans depend on it
        self.ways = (*type(rule).ways, *kernels.ways.of(self))

    def by_position(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """`by_position` of the rule, with the rows gathered by sample."""
        x, g = type(self.rule).by_position(self, g, slice(0, len(g)))
        index = self.order.padded[samples]
        return taken(x, index).flatten(1, 2), taken(g, index, filled=True).flatten(1, 2)


class GatheredLinear(_Gathered, LinearWeight):
    """A linear layer's weight."""


class GatheredEmbedding(_Gathered, EmbeddingWeight):
    """An embedding."""
