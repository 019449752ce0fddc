"""Batch small gradients of many parameters into one matrix, to save launch overhead."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from clipping.numerics.per_sample import weighted_sum
from clipping.numerics.squares import sum_of_squares
from clipping.provenance.derived_parameters import Source


class Joined:
    """Per-sample gradients that are batched at the end of the backward pass."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._waiting: list[Tensor] = []

    def add(self, source: Source, gradients: Tensor) -> None:
        """Add gradients of one source.

        Args:
            source: the tensor that they belong to.
            gradients: [B, *shape].
        """
        self._sources.append(source)
        self._waiting.append(gradients if gradients.dim() == 2 else gradients.reshape(len(gradients), -1))

    def squares(self, like: Tensor) -> Tensor:
        """‖·‖² [B] over all gradients. Concatenates them into one matrix.

        Args:
            like: [B].
        """
        waiting, self._waiting = self._waiting, []
        self._waiting = [torch.cat(waiting, 1) if waiting else like.new_zeros(len(like), 0)]
        del waiting
        return sum_of_squares(self._waiting[0])

    def sums(self, factors: Tensor) -> Iterable[tuple[Source, Tensor]]:
        """Σ_i c_i g_i of each source. Call once, after `squares`; frees the gradients.

        Args:
            factors: c [B].
        """
        sizes = [source.tensor.numel() for source in self._sources]
        total = weighted_sum(factors, self._waiting.pop())
        return zip(self._sources, torch.ops.aten.split_with_sizes_copy.default(total, sizes), strict=True)
