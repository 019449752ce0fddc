"""The two ends of every comparison: one sample at a time, which defines the answer, and no clipping at all.

And a third that is not to be compared with them: `TfMicrobatch`, which clips the mean of several samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from clipping.backends.base import Backend
from clipping.core.reference import gradients, one_by_one, with_zeros
from clipping.core.types import ClippedGradient, Parameters
from clipping.numerics.rounding_bounds import excess


class Microbatch(Backend):
    """Forward and backward for one sample after the other: Σ_i c_i g_i by its definition.

    Exact for whatever model autograd can differentiate, and slow: B small steps in place of one large one.
    """

    name = "microbatch"
    trusted = True

    def _rounding(self, batch_size: int) -> tuple[float, float] | None:
        return excess(batch_size, 0, 0, 1, self._dtype())

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return one_by_one(self.model, self.loss_fn, parameters, inputs, targets, clip=self.clip, together=self.together)


class TfMicrobatch(Microbatch):
    """TF Privacy's microbatches: the mean gradient of each m = `together` samples in a row is clipped, Σ_k c_k ḡ_k.

    **Another mechanism than per-sample clipping**, unless m = 1. One sample replaced moves one clipped mean anywhere in
    the ball of radius C, so the sum by 2C, not C; one added or removed moves those after it to other microbatches, and
    the sum by up to 2C for each. Larger m is faster, and the signal smaller: K = B/m means of length C at the most
    beside the same noise. (TF Privacy, `num_microbatches` = K of `DPKerasSGDOptimizer`, whose l2_norm_clip is the "max
    L2 norm of per microbatch gradients"; it then divides by K, as nothing here does.)

    The last microbatch of a batch that m does not divide is smaller; TF Privacy refuses such a batch. `norms` are [K],
    of the means.
    """

    trusted = False

    def _rounding(self, batch_size: int) -> None:
        return None  # one record moves more than one mean


@cache
def tf_microbatch(together: int) -> type[TfMicrobatch]:
    """``tf_microbatch:M``: the backend for microbatches of M samples.

    Args:
        together: M, at least 1.
    """
    return type(f"TfMicrobatch{together}", (TfMicrobatch,), {"name": f"tf_microbatch:{together}", "together": together})


class NonPrivate(Backend):
    """Ordinary training: ∂(Σ_i ℓ_i)/∂θ. The baseline of every ratio; `clip` is ignored and norms are not known."""

    name = "nonprivate"
    compilable = True
    private = False
    trusted = True

    def problems(self) -> list[Any]:
        return []  # nothing per sample is asked of the model, BatchNorm included

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        return self.of_losses(lambda: self.losses(inputs, targets, batch_size), parameters, (), batch_size)

    def of_losses(
        self, losses: Callable[[], Tensor], parameters: Parameters, batch: Sequence[Tensor], batch_size: int
    ) -> ClippedGradient:
        """See `clipping.backends.base.Backend.of_losses`."""
        found = losses()
        grads = gradients(found.sum(), parameters)
        return ClippedGradient(with_zeros(grads, parameters), None, found.detach())
