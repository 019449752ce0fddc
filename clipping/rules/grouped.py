"""Grouped matrix products: rows of a, sorted by expert, times the expert's matrix, W [E, d, p]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import Parts, power_of_two
from clipping.numerics.per_sample import gram_product
from clipping.numerics.products import product, products
from clipping.numerics.rounding_bounds import Reach, of_operands
from clipping.numerics.traced_operations import is_traced, operation
from clipping.provenance.row_owners import Rows, in_order, of_rows, padded, taken
from clipping.rules.base import DIRECT, Gradient, Gram, Refused, Rule, Spec


class _Gram(Gram["GroupedWeight"]):
    """Gram matrices of the rows of each sample and expert."""

    def norms(self, rule: GroupedWeight, g: Tensor, samples: slice) -> Parts:
        return (rule.run("squares", g, samples),)


class GroupedWeight(Rule):
    """∂/∂W_e of one sample is Σ_t a_tᵀ g_t over its rows t of expert e.

    A sample's squared norm is the sum over its experts. Rows of one sample and expert are gathered side by side.

    Args:
        weight: [E, d, p].
        a: [n, d], sorted by expert.
        ends: [E], end of each expert's rows; rows after the last belong to none.

    Methods take:
        g, samples: [n, p], gradient of the output; b samples.
        what: "gradients", "squares", "terms" or "total".
    """

    ways = (_Gram(), DIRECT)
    library = "cublas"

    def __init__(self, weight: Tensor, a: Tensor, ends: Tensor) -> None:
        experts, inputs, outputs = weight.shape
        super().__init__(weight, positions=1, inputs=inputs, outputs=outputs, groups=experts)
        self.a, self.ends = a, ends
        self.owners, self.count = torch.arange(len(a), device=a.device), len(a)

    def regroup(self, fold: int) -> Rule:
        return self.of_rows(Rows(in_order(len(self.a), len(self.a) // fold, self.a.device), len(self.a) // fold))

    def of_rows(self, rows: Rows) -> Rule:
        """Set the owners of the rows, and return this rule.

        Args:
            rows: the owners, [n].
        """
        self.owners, self.count = rows.owners, rows.batch_size
        rows_each = -(-len(self.a) // max(1, self.count * self.groups))
        self.positions = power_of_two(rows_each)
        return self

    def samples(self, g: Tensor | Spec) -> int:
        return self.count

    def output_rows(self, count: int) -> int:
        return len(self.a)

    @cached_property
    def _segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each pair of a sample and an expert with rows: the sample, the expert, and the padded row indices."""
        experts = torch.searchsorted(self.ends, torch.arange(len(self.a), device=self.a.device), right=True)
        keys = torch.where((experts < self.groups) & (self.owners >= 0), self.owners * self.groups + experts, -1)
        there, segment = keys.unique(return_inverse=True)
        nobody = int(len(there) > 0 and bool(there[0] < 0))
        there = there[nobody:]
        return there // self.groups, there % self.groups, padded(segment - nobody, len(there))

    def side_by_side(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample and expert of each segment of some samples, a [S, L, d] and g [S, L, p]."""
        owners, experts, index = self._segments
        mine = (owners >= samples.start) & (owners < samples.stop)
        index = index[mine]
        a, g = taken(self.a, index), taken(g, index, filled=True)
        return owners[mine] - samples.start, experts[mine], a if a.dtype == g.dtype else a.to(g.dtype), g

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        return self.run("gradients", g, samples)

    def reach(self, g: Tensor) -> Reach:
        return Reach(*self.run("terms", g, slice(0, self.count)))

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        factors = of_rows(factors, self.owners)
        return self.run("total", g * factors[:, None].to(norm_dtype(g.dtype)), slice(0, self.count))

    def run(self, what: str, g: Tensor, samples: slice) -> Tensor:
        """Compute one of the results below; as one operation in a traced step, which follows no loop over experts."""
        if not is_traced():
            found: Tensor = getattr(self, what)(g, samples)
            return found
        matrices = self.parameter.detach()
        return grouped(what, matrices, self.a, self.ends, self.owners, g, self.count, samples.start, samples.stop)

    def gradients(self, g: Tensor, samples: slice) -> Tensor:
        """Per-sample gradients [b, E, d, p]."""
        owners, experts, a, g = self.side_by_side(g, samples)
        shape = samples.stop - samples.start, *self.parameter.shape
        total = torch.zeros(shape, dtype=norm_dtype(g.dtype), device=g.device)
        total[owners, experts] = products(a.transpose(1, 2), g.transpose(1, 2))
        return total

    def squares(self, g: Tensor, samples: slice) -> Tensor:
        """Squared norms [b], by Gram matrices."""
        owners, _, a, g = self.side_by_side(g, samples)
        squares = gram_product(a, g, self.workspace(g)) if len(a) else a.new_zeros(0)
        return squares.new_zeros(samples.stop - samples.start).index_add_(0, owners, squares)

    def terms(self, g: Tensor, samples: slice) -> Tensor:
        """The fields of the reach [3, b]."""
        owners, _, a, g = self.side_by_side(g, samples)
        found = torch.stack(of_operands(a, g, self.inputs, self.outputs))
        return found.new_zeros(len(found), samples.stop - samples.start).index_add_(1, owners, found)

    def total(self, g: Tensor, samples: slice) -> Tensor:
        """Sum of the gradients of all rows, [E, d, p]."""
        total, start = torch.zeros_like(self.parameter, dtype=g.dtype), 0
        for expert, end in enumerate(self.ends.tolist()):
            if end > start:
                total[expert] = product(self.a[start:end], g[start:end])
            start = end
        return total


@operation
def grouped(
    what: str, matrices: Tensor, a: Tensor, ends: Tensor, owners: Tensor, g: Tensor, count: int, start: int, stop: int
) -> Tensor:
    """Compute a result of `GroupedWeight` where rows may be sorted in any way.

    Args:
        what: "gradients", "squares", "terms" or "total".
        matrices, a, ends: [E, d, p], [n, d] and [E], as for the rule.
        owners: [n], the sample of each row.
        g: [n, p], gradient of the output.
        count: B.
        start, stop: range of samples.
    """
    if isinstance(g, FakeTensor):
        shape = {"squares": (stop - start,), "terms": (3, stop - start), "total": matrices.shape}
        return g.new_empty(shape.get(what, (stop - start, *matrices.shape)), dtype=norm_dtype(g.dtype))
    rule = GroupedWeight(matrices, a, ends)
    rule.of_rows(Rows(owners, count))
    found: Tensor = getattr(rule, what)(g, slice(start, stop))
    return found


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.grouped_mm of rows [n, d], split into groups by `offs`, and one matrix for each group."""
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None:
        raise Refused("grouped_mm has a rule for rows [n, d] in groups times [E, d, p], without a bias", "use matmul")
    options = {} if out_dtype is None else {"out_dtype": out_dtype}
    return GROUPED(mat_a, mat_b, offs=offs, **options), ((mat_b, GroupedWeight, mat_a, offs),)


def grouped_by_transformers(input: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Sequence[Gradient]]:
    """The product of `grouped_mm`, as an operator of transformers that TorchDynamo captures in its place.

    Args:
        input: [n, d], sorted by expert.
        weight: [E, d, p].
        offs: [E], end of each expert's rows.
    """
    output = torch.ops.transformers.grouped_mm_fallback(input, weight, offs)
    return output, ((weight, GroupedWeight, input, offs),)


GROUPED: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
"""The operation, under its name in this version of torch."""
