"""All per-sample gradients at once: torch.func.vmap over torch.func.grad (formerly functorch)."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipping.backends.base import Backend
from clipping.core.types import ClippedGradient, Parameters
from clipping.core.vmap import loss_of_one
from clipping.numerics.per_sample import norms_and_factors, weighted_sum
from clipping.numerics.rounding_bounds import excess, portion

T = TypeVar("T")


class Vmap(Backend):
    """Instantiates per-sample gradients [B, *shape] of every parameter, then forms norms, factors and the weighted sum.

    Supports what vmap can trace: no data-dependent control flow, no in-place update of a buffer. Needs B times the
    memory of the parameters, beside activations.
    """

    name = "vmap"
    _without_fused = False

    def _rounding(self, batch_size: int) -> tuple[float, float]:
        dtype = self._dtype()
        return excess(batch_size, 1, 0, min(batch_size, portion(batch_size, 1, dtype)), dtype)

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        trainable = {name: p.detach() for name, p in parameters.items()}
        of_one = grad(loss_of_one(self.model, self.loss_fn), has_aux=True)
        gradients = vmap(of_one, in_dims=(None, 0, 0), randomness="different")
        try:
            grads, losses = self._traced(lambda: gradients(trainable, inputs, targets))
        except RuntimeError as error:
            raise self.blamed(error, "torch.func.vmap cannot trace it", inputs, targets) from error
        norms, factors = norms_and_factors(grads, parameters, self.clip, losses)
        summed = {name: weighted_sum(factors[name], grads.pop(name)) for name in list(grads)}
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return ClippedGradient(summed, norms, losses)

    def _traced(self, run: Callable[[], T]) -> T:
        """Call `run`; from its first failure on without fused attention: torch's batching rule takes no mask."""
        if not self._without_fused:
            try:
                return run()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                self._without_fused = True
        with sdpa_kernel(SDPBackend.MATH):
            return run()
