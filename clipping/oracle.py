"""The two ends of every comparison: one sample at a time, which defines the answer, and no clipping at all."""

from __future__ import annotations

from typing import Any

import torch

from clipping.interface import Backend, ClippedGradient, Parameters, map_tensors, norm_dtype
from clipping.samples import factors_by_name


class Microbatch(Backend):
    """Forward and backward for one sample after the other: Σ_i c_i g_i by its definition.

    Exact for whatever model autograd can differentiate, and slow: B small steps in place of one large one.
    """

    name = "microbatch"
    per_sample_loop = True
    trusted = True

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        norms, losses = [], []
        for i in range(batch_size):
            sample, target = map_tensors(lambda x, i=i: x[i : i + 1], (inputs, targets))  # type: ignore[misc]
            loss = self.losses(sample, target, batch_size=1)
            grads = with_zeros(gradients(loss.sum(), parameters), parameters)
            layers = [torch.linalg.vector_norm(g, dtype=norm_dtype(g.dtype))[None] for g in grads.values()]
            norm, factors = factors_by_name(torch.stack(layers), list(grads), self.clip) if layers else (None, {})
            norms.append(loss.new_zeros(1, dtype=norm_dtype(loss.dtype)) if norm is None else norm)
            for name, grad in grads.items():
                sums[name].addcmul_(grad, factors[name][0].to(grad.dtype))
            losses.append(loss.detach())
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return ClippedGradient(sums, torch.cat(norms), torch.cat(losses))


class NonPrivate(Backend):
    """Ordinary training: ∂(Σ_i ℓ_i)/∂θ. The baseline of every ratio; `clip` is ignored and norms are not known."""

    name = "nonprivate"
    private = False
    trusted = True

    def problems(self) -> list[Any]:
        return []  # nothing per sample is asked of the model, BatchNorm included

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        losses = self.losses(inputs, targets, batch_size)
        grads = gradients(losses.sum(), parameters)
        return ClippedGradient(with_zeros(grads, parameters), None, losses.detach())


def gradients(loss: torch.Tensor, parameters: Parameters, *, keep_graph: bool = False) -> dict[str, torch.Tensor]:
    """∂loss/∂θ for the parameters that it depends on; `.grad` is neither read nor written."""
    if not parameters or not loss.requires_grad:
        return {}
    grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep_graph, allow_unused=True)
    return {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def with_zeros(grads: dict[str, torch.Tensor], parameters: Parameters) -> dict[str, torch.Tensor]:
    """`grads` in the order of `parameters`, zeros where the loss did not depend on one."""
    return {name: grads[name] if name in grads else torch.zeros_like(p) for name, p in parameters.items()}
