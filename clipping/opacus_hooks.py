"""Opacus behind our interface: `GradSampleModule`, then clip and sum as its `DPOptimizer` does.

Opacus keeps every parameter's per-sample gradient as `p.grad_sample` [B, *shape] and lets autograd compute the ordinary
weight gradient beside it, so both are done here: that is what training with it costs. Its hooks fail on in-place
operations, so `inplace` flags of modules (ReLU, Dropout) are off while this backend is open.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from clipping.interface import Backend, ClippedGradient, Parameters, Problem, UnsupportedModel
from clipping.oracle import with_zeros
from clipping.samples import norms_and_factors, weighted_sum


class OpacusHooks(Backend):
    """Opacus' default `grad_sample_mode="hooks"`, with the clipping function of this project."""

    name = "opacus_hooks"
    verify_in_eval = False  # its hooks capture nothing in eval mode

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from opacus.grad_sample import GradSampleModule

        self._inplace = [m for m in self.model.modules() if getattr(m, "inplace", False) is True]
        for module in self._inplace:
            module.inplace = False  # type: ignore[assignment]
        self._before = [(m, dict(vars(m))) for m in self.model.modules()]
        self._wrapped = GradSampleModule(self.model, loss_reduction="sum")
        self._wrapped.disable_hooks()  # but within a call of this backend: the model stays usable beside it

    @classmethod
    def unavailable(cls) -> str | None:
        if importlib.util.find_spec("opacus") is None:
            return "the package opacus is not installed; pip install opacus"
        return None

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        for name, module in self.model.named_modules():
            own = list(module.parameters(recurse=False))
            if any(p.requires_grad for p in own) and list(module.buffers()):
                reason = f"Opacus refuses a trainable {type(module).__name__} with buffers"
                yield Problem(name or "model", reason, "use a tape backend, vmap or microbatch")
        if all(not m.training for m in self.model.modules()):
            yield Problem("model", "Opacus' hooks capture nothing in eval mode", "model.train()")

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        before = {name: p.grad for name, p in parameters.items()}
        for p in parameters.values():
            p.grad = None
        self._wrapped.enable_hooks()
        try:
            losses = self._forward_and_backward(inputs, targets, batch_size)
            grads = self._grad_samples(parameters, batch_size)
        finally:
            self._wrapped.disable_hooks()
            self._wrapped.set_grad_sample_to_none()
            for name, p in parameters.items():
                p.grad = before[name]
        norms, factors = norms_and_factors(grads, parameters, self.clip, losses)
        # all per-sample gradients live until the last sum, as they do until DPOptimizer.zero_grad()
        summed = {name: weighted_sum(factors[name], grad) for name, grad in grads.items()}
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return ClippedGradient(with_zeros(summed, parameters), norms, losses)

    def _forward_and_backward(self, inputs: Any, targets: Any, batch_size: int) -> Tensor:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                losses = self.losses(inputs, targets, batch_size)
                losses.sum().backward()
        except Exception as error:
            self._wrapped.disable_hooks()
            raise self.blamed(error, "Opacus fails on it", inputs, targets) from error
        return losses.detach()

    def _grad_samples(self, parameters: Parameters, batch_size: int) -> dict[str, Tensor]:
        """Per-sample gradients [B, *shape] by name; a parameter without a gradient is left out."""
        problems, found = [], {}
        for name, p in parameters.items():
            grad: Any = getattr(p, "grad_sample", None)
            if isinstance(grad, Tensor) and grad.shape == (batch_size, *p.shape):
                found[name] = grad
            elif p.grad is not None:
                shape = list(grad.shape) if isinstance(grad, Tensor) else type(grad).__name__
                reason = f"Opacus left no per-sample gradient [{batch_size}, ...], got {shape}"
                problems.append(Problem(name, reason, "freeze it, or use a tape backend, vmap or microbatch"))
        if problems:
            raise UnsupportedModel(self.name, problems)
        return found

    def close(self) -> None:
        if not self._closed:
            self._wrapped.cleanup()
            for module, attributes in self._before:
                for attribute in set(vars(module)) - set(attributes):
                    delattr(module, attribute)  # activations of a forward pass that no backward pass followed
                module._is_full_backward_hook = attributes["_is_full_backward_hook"]
            for module in self._inplace:
                module.inplace = True  # type: ignore[assignment]
        super().close()
