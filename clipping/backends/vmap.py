"""All per-sample gradients at once: torch.func.vmap over torch.func.grad (formerly functorch)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipping.backends.base import Backend
from clipping.core.types import ClippedGradient, Parameters
from clipping.core.vmap import per_sample
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
        gradients = per_sample(self.model, self.loss_fn)
        device = next((p.device for p in trainable.values()), torch.device("cpu"))
        try:
            grads, losses = self._traced(lambda: gradients(trainable, inputs, targets), device)
        except RuntimeError as error:
            raise self.blamed(error, "torch.func.vmap cannot trace it", inputs, targets) from error
        norms, factors = norms_and_factors(grads, parameters, self.clip, losses)
        summed = {name: weighted_sum(factors[name], grads.pop(name)) for name in list(grads)}
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return ClippedGradient(summed, norms, losses)

    def _traced(self, run: Callable[[], T], device: torch.device) -> T:
        """Call `run`; if it fails with fused attention, retry without: torch's batching rule takes no mask.

        The result of the retry is remembered, so later steps do not try again.
        """
        if self._without_fused or not _fuses_attention(device):
            with sdpa_kernel(SDPBackend.MATH) if self._without_fused else nullcontext():
                return run()
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._without_fused = True
            try:
                return self._traced(run, device)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                self._without_fused = False
                raise error from None


def _fuses_attention(device: torch.device) -> bool:
    """Whether this device has fused attention kernels, which vmap may not support."""
    return device.type == "cuda"
