"""Embedding: W [V, p] read at ids [B, *], a linear layer whose inputs are one-hot: a_t · a_s = [id_t = id_s]."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from clipping.rules.base import Refused, Rule, gram_inner


class EmbeddingWeight(Rule):
    """∂/∂W of one sample adds g_t to row id_t; positions that read the padding row add nothing.

    Ghost norm (arXiv:2110.05679, §4.2): Σ_{t,s} [id_t = id_s] (g_t · g_s).
    """

    has_ghost = True

    def __init__(self, weight: Tensor, ids: Tensor, padding_idx: int | None) -> None:
        rows, outputs = weight.shape
        super().__init__(weight, positions=math.prod(ids.shape[1:]), inputs=rows, outputs=outputs)
        self.ids = ids
        self.padding_idx = padding_idx if padding_idx is None or padding_idx >= 0 else rows + padding_idx

    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        ids, g = self._positions(g, samples)
        rows = g.new_zeros(ids.shape[0], *self.parameter.shape)
        return rows.scatter_add_(1, ids[:, :, None].expand_as(g), g)

    def _ghost(self, g: Tensor, samples: slice) -> Tensor:
        ids, g = self._positions(g, samples)
        return gram_inner(g, lambda rows: ids[:, rows, None] == ids[:, None, :])

    def _positions(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """ids [b, T] and g [b, T, p], zero where the padding row was read."""
        ids, g = self.ids[samples], g[samples]
        ids, g = ids.reshape(ids.shape[0], -1), g.reshape(g.shape[0], -1, self.outputs)
        if self.padding_idx is not None:
            g = g.masked_fill((ids == self.padding_idx)[:, :, None], 0)
        return ids, g


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, list[Rule]]:
    """torch.nn.functional.embedding and the rule of its weight."""
    if max_norm is not None:
        raise Refused("max_norm changes the weight in the forward pass", "renormalise it between steps")
    if scale_grad_by_freq:
        raise Refused("scale_grad_by_freq divides by counts over the whole batch", "scale_grad_by_freq=False")
    if sparse:
        raise Refused("sparse=True gives a sparse gradient", "sparse=False")
    output = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return output, [EmbeddingWeight(weight, input, padding_idx)]
