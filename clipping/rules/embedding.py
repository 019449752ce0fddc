"""Embedding: W [V, p] read at ids [B, *]; a linear layer with one-hot inputs, a_t · a_s = [id_t = id_s]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import Parts, added, blocks
from clipping.numerics import kernels
from clipping.numerics.per_sample import part, sum_of_squares, within
from clipping.numerics.products import products
from clipping.numerics.rounding_bounds import Reach, of_operands, portion
from clipping.rules.base import Direct, Gradient, Refused, Route, Rule, Spec, Way, Work
from clipping.rules.linear import LinearWeight


class _Sorted(Way["EmbeddingWeight"]):
    """Sorts positions by id, adds up the gradients of equal ids, and sums the squares; skips rows that were not read.

    (The ghost norm of arXiv:2110.05679, §4.2, Σ_{t,s} [id_t = id_s] (g_t · g_s), has the same value and takes T²
    comparisons.)
    """

    name = "sorted"

    def norms(self, rule: EmbeddingWeight, g: Tensor, samples: slice) -> Parts:
        ids, g = rule.by_position(g, samples)
        ordered, order = ids.sort(1)
        rank = torch.zeros_like(ordered)
        rank[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)  # rank of each position's id in its sample
        at = torch.zeros_like(rank).scatter_(1, order, rank)
        return (sum_of_squares(_added_up(g, at, g.shape[1]).flatten(1)),)

    def work(self, rule: EmbeddingWeight, g: Tensor | Spec) -> Work:
        bytes_ = rule.positions * rule.outputs * norm_dtype(g.dtype).itemsize
        return Work(0.0, 4 * bytes_, 2 * bytes_)


class _Direct(Direct["EmbeddingWeight"]):
    def work(self, rule: EmbeddingWeight, g: Tensor | Spec) -> Work:
        return super().work(rule, g)._replace(multiplications=rule.positions * rule.outputs)


class EmbeddingWeight(Rule):
    """∂/∂W of one sample adds g_t to row id_t; positions that read the padding row add nothing.

    Args:
        weight: [V, p].
        ids: [B, *].
        padding_idx: as in torch.nn.Embedding.
        scale: [n, L], for bags: the weight of each position's row in the bag's output.

    Methods take:
        g, samples: as those of `Rule`.
    """

    ways: tuple[Way[Any], ...] = (_Sorted(), _Direct())

    def __init__(
        self, weight: Tensor, ids: Tensor, padding_idx: int | None = None, scale: Tensor | None = None
    ) -> None:
        rows, outputs = weight.shape
        super().__init__(weight, positions=math.prod(ids.shape[1:]), inputs=rows, outputs=outputs)
        self.ids, self.scale = ids, scale
        self.ways = (*EmbeddingWeight.ways, *kernels.ways.of(self))
        self.padding_idx = padding_idx if padding_idx is None or padding_idx >= 0 else rows + padding_idx

    def regroup(self, fold: int) -> Rule:
        self.fold, self.positions = fold, self.positions * fold
        return self

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        ids, g = self.by_position(g, samples)
        return _added_up(g, ids, len(self.parameter))

    def features(self, route: Route) -> int:
        return self.outputs if self.named(route.way).is_kernel else 0

    def reach(self, g: Tensor) -> Reach:
        def of_block(samples: slice) -> Reach:
            rows = self.by_position(g, samples)[1]
            return of_operands(rows.new_ones(1).expand(*rows.shape[:2], 1), rows, 1, self.outputs)

        return self._reach_of_rows(g, of_block, 2 * self.positions * self.outputs * g.element_size())

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        count, factors = self.samples(g), factors.to(norm_dtype(g.dtype))

        def summed(samples: slice) -> Tensor:
            ids, rows = self.by_position(g, samples)
            rows = rows * part(factors, samples)[:, None, None]
            return torch.zeros_like(self.parameter, dtype=rows.dtype).index_add_(0, ids.flatten(), rows.flatten(0, 1))

        return added(summed, blocks(count, 1, portion(count, self.positions, factors.dtype)))

    def summing_seconds(self, g: Tensor | Spec, *, kept: bool) -> float:
        if kept:
            return super().summing_seconds(g, kept=kept)
        entries, wide = self.positions * self.outputs, norm_dtype(g.dtype).itemsize
        return entries * (g.element_size() + 2 * wide) / self._rates(g)[1]  # scales rows and adds them

    def inner(self, g: Tensor, other: Rule, other_g: Tensor) -> Tensor | None:
        """Inner product with a linear layer of the same weight (a tied head): Σ_{t,s} (g_t · a_s) h_s[id_t].

        The layer's gradient is Σ_s h_s a_sᵀ, [V, p]; the embedding's has g_t in row id_t.
        """
        everyone = slice(0, self.samples(g))
        ids, g = self.by_position(g, everyone)
        columns = g
        if isinstance(other, EmbeddingWeight):
            other_ids, h = other.by_position(other_g, everyone)

            def same(rows: slice) -> Tensor:
                return products(h[:, rows], columns).mul_(other_ids[:, rows, None] == ids[:, None, :])

            return within(same, h.shape[1], columns, self.workspace(g))
        if not isinstance(other, LinearWeight):
            return None
        a, h = other.unpadded(other_g)

        def read(rows: slice) -> Tensor:
            at_ids = h[:, rows].gather(2, ids[:, None, :].expand(-1, h[:, rows].shape[1], -1))  # [B, rows, T]
            return products(a[:, rows], columns).mul_(at_ids)

        return within(read, h.shape[1], columns, self.workspace(g))

    def by_position(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """ids [b, T] and g [b, T, p], zero where the padding row was read."""
        rows = self.rows(samples)
        count = samples.stop - samples.start
        ids, g = self.ids[rows].reshape(count, -1), g[rows]
        if self.scale is not None:
            g = g[:, None] * self.scale[rows, :, None].to(g.dtype)
        g = g.reshape(count, -1, self.outputs)
        if self.padding_idx is not None:
            g = g.masked_fill((ids == self.padding_idx)[:, :, None], 0)
        return ids, g


def _added_up(g: Tensor, at: Tensor, rows: int) -> Tensor:
    """Add each position of g [n, T, p] to row `at` [n, T] of its sample: [n, rows, p], float32 or wider."""
    count, _, outputs = g.shape
    total = torch.zeros(count * rows, outputs, dtype=norm_dtype(g.dtype), device=g.device)
    places = at + rows * torch.arange(count, device=g.device)[:, None]  # adds whole rows, not single numbers
    return total.index_add_(0, places.flatten(), g.to(total.dtype).flatten(0, 1)).view(count, rows, outputs)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.embedding_bag in modes sum and mean: ids [B, T], or [N] and offsets [B]."""
    _refuse_options(max_norm, scale_grad_by_freq)
    if mode == "max":
        raise Refused("an embedding bag in mode max has no rule", "use an embedding and its maximum")
    output = F.embedding_bag(
        input,
        weight,
        offsets,
        mode=mode,
        sparse=sparse,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    scale = torch.ones_like(input, dtype=weight.dtype) if per_sample_weights is None else per_sample_weights.detach()
    if offsets is not None:
        input, scale = _padded(input, scale, offsets, include_last_offset)
    if mode == "mean":
        kept = (scale != 0) if padding_idx is None else (scale != 0) & (input != padding_idx)
        scale = scale / kept.sum(1, keepdim=True).clamp(min=1)
    return output, ((weight, EmbeddingWeight, input, padding_idx, scale),)


def _padded(ids: Tensor, scale: Tensor, offsets: Tensor, include_last_offset: bool) -> tuple[Tensor, Tensor]:
    """Pad bags of different sizes, ids [N], to rows [B, longest]; padding has scale 0."""
    ends = offsets[1:] if include_last_offset else F.pad(offsets[1:], (0, 1), value=ids.shape[0])
    starts = offsets[:-1] if include_last_offset else offsets
    lengths = ends - starts
    longest = int(lengths.max()) if len(lengths) else 0
    at = starts[:, None] + torch.arange(longest, device=ids.device)
    inside = at < ends[:, None]
    at = at.clamp(max=max(0, ids.shape[0] - 1))
    return ids[at], scale[at] * inside


def _refuse_options(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None:
        raise Refused("max_norm changes the weight in the forward pass", "renormalise it between steps")
    if scale_grad_by_freq:
        raise Refused("scale_grad_by_freq divides by counts over the whole batch", "scale_grad_by_freq=False")


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.embedding and the gradient of its weight."""
    _refuse_options(max_norm, scale_grad_by_freq)
    output = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return output, ((weight, EmbeddingWeight, input, padding_idx),)
