"""All per-sample gradients at once: torch.func.vmap over torch.func.grad (what functorch was)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipping.backends.base import Backend
from clipping.core.batches import forward, map_tensors
from clipping.core.types import ClippedGradient, Parameters
from clipping.numerics.per_sample import norms_and_factors, weighted_sum
from clipping.numerics.rounding_bounds import excess, portion

T = TypeVar("T")


class Vmap(Backend):
    """Per-sample gradients of every parameter, [B, *shape] each, then norms, factors and the weighted sum.

    Works for what vmap can trace: no data-dependent control flow, no in-place update of a buffer. Space B times the
    parameters, beside activations.
    """

    name = "vmap"
    _without_fused = False

    def _rounding(self, batch_size: int) -> tuple[float, float]:
        dtype = self._dtype()
        return excess(batch_size, 1, 0, min(batch_size, portion(batch_size, 1, dtype)), dtype)

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        trainable = {name: p.detach() for name, p in parameters.items()}

        def loss_of_one(values: dict[str, Tensor], sample: Any, target: Any) -> tuple[Tensor, Tensor]:
            sample, target = map_tensors(lambda x: x[None], (sample, target))
            losses = self._functional_losses(values, sample, target)
            return losses[0], losses[0].detach()

        per_sample = vmap(grad(loss_of_one, has_aux=True), in_dims=(None, 0, 0), randomness="different")
        device = next((p.device for p in trainable.values()), torch.device("cpu"))
        try:
            grads, losses = self._traced(lambda: per_sample(trainable, inputs, targets), device)
        except RuntimeError as error:
            raise self.blamed(error, "torch.func.vmap cannot trace it", inputs, targets) from error
        norms, factors = norms_and_factors(grads, parameters, self.clip, losses)
        summed = {name: weighted_sum(factors[name], grads.pop(name)) for name in list(grads)}
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return ClippedGradient(summed, norms, losses)

    def _traced(self, run: Callable[[], T], device: torch.device) -> T:
        """What it gives; without fused attention if it fails with that: torch's rule for many samples takes no mask.

        Whether it does is known from then on, and later steps do not try again.
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

    def _functional_losses(self, values: dict[str, Tensor], sample: Any, target: Any) -> Tensor:
        caller = _Caller(self.model)
        named = {f"model.{name}": value for name, value in values.items()}
        losses = self.loss_fn(functional_call(caller, named, (sample,)), target)
        if tuple(losses.shape) != (1,):
            raise ValueError(
                f"expected loss_fn to return one loss a sample, shape [1] for one sample, got {list(losses.shape)}; "
                "use reduction='none' and reduce all but the first dimension"
            )
        return losses


def _fuses_attention(device: torch.device) -> bool:
    """Whether scaled dot product attention has kernels there that vmap may not get along with."""
    return device.type == "cuda"


class _Caller(torch.nn.Module):
    """functional_call takes positional arguments; this hands it inputs of any of the three forms."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return forward(self.model, inputs)
