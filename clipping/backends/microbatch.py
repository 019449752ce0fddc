"""Reference backends: `Microbatch` (one sample at a time) defines the result, and `NonPrivate` does not clip.

`TfMicrobatch` clips the mean of several samples, which is a different mechanism; do not compare it with the others.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from clipping.backends.base import Backend
from clipping.core.reference import gradients, one_by_one, with_zeros
from clipping.core.types import ClippedGradient, Parameters
from clipping.numerics.rounding_bounds import excess


class Microbatch(Backend):
    """One forward and backward pass a sample: Σ_i c_i g_i by its definition.

    Exact for every model that autograd can differentiate, and slow: B small steps in place of one large one.
    """

    name = "microbatch"
    trusted = True

    def _rounding(self, batch_size: int) -> tuple[float, float] | None:
        return excess(batch_size, 0, 0, 1, self._dtype())

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return one_by_one(self.model, self.loss_fn, parameters, inputs, targets, clip=self.clip, together=self.together)


class TfMicrobatch(Microbatch):
    """TF Privacy's microbatches: clips the mean gradient of each m = `together` samples in a row, Σ_k c_k ḡ_k.

    **Not per-sample clipping**, unless m = 1. Replacing one sample moves one clipped mean anywhere in the ball of
    radius C, so it moves the sum by up to 2C, not C. Adding or removing one moves later samples to other microbatches,
    and each of these moves the sum by up to 2C. A larger m is faster, but only K = B/m means of length at most C stand
    against the same noise. (TF Privacy, `num_microbatches` = K of `DPKerasSGDOptimizer`; l2_norm_clip is its "max L2
    norm of per microbatch gradients". It then divides by K; this backend does not.)

    If m does not divide B, the last microbatch is smaller; TF Privacy refuses such a batch. `norms` are [K], of the
    means.
    """

    trusted = False

    def _rounding(self, batch_size: int) -> None:
        return None  # one record moves several means


@cache
def tf_microbatch(together: int) -> type[TfMicrobatch]:
    """The backend ``tf_microbatch:M``, with microbatches of M samples.

    Args:
        together: M, at least 1.
    """
    return type(f"TfMicrobatch{together}", (TfMicrobatch,), {"name": f"tf_microbatch:{together}", "together": together})


class NonPrivate(Backend):
    """Ordinary training: ∂(Σ_i ℓ_i)/∂θ, the baseline of every ratio. Ignores `clip` and computes no norms."""

    name = "nonprivate"
    compilable = True
    private = False
    trusted = True

    def problems(self) -> list[Any]:
        return []  # no per-sample gradient is needed, so BatchNorm is fine

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        return self.of_losses(lambda: self.losses(inputs, targets, batch_size), parameters, (), batch_size)

    def of_losses(
        self, losses: Callable[[], Tensor], parameters: Parameters, batch: Sequence[Tensor], batch_size: int
    ) -> ClippedGradient:
        found = losses()
        grads = gradients(found.sum(), parameters)
        return ClippedGradient(with_zeros(grads, parameters), None, found.detach())
