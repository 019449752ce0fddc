"""Adapter of Opacus: its four ways to per-sample gradients or norms, with our clipping function.

Three modes keep the per-sample gradients of every parameter as `p.grad_sample` [B, *shape]; they are clipped and summed
here as in `DPOptimizer`. The ghost mode keeps only norms, and runs a second backward pass. In all modes autograd also
computes the ordinary weight gradient, as in training with Opacus.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from clipping.core.clip_functions import factors_by_name
from clipping.core.dtypes import norm_dtype
from clipping.core.types import Parameters, Problem
from clipping.peers.base import Peer, Step, norms_of


class _Opacus(Peer):
    library = "Opacus"
    package = "opacus"
    install = "pip install opacus"

    def _step(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Step:
        losses = self._losses(inputs, targets, batch_size)
        losses.sum().backward()
        losses = losses.detach()
        found = samples_of(parameters, "grad_sample", batch_size)
        bare = [name for name, p in parameters.items() if p.grad is not None and name not in found]
        self._owed(bare, f"per-sample gradient [{batch_size}, ...]")
        # norms as in DPOptimizer, in the precision of the gradients; parameters that the loss does not reach count, too
        zero = torch.zeros_like(losses, dtype=norm_dtype(losses.dtype))
        layers = [found[name].flatten(1).norm(2, dim=1).to(zero) if name in found else zero for name in parameters]
        norms, factors = factors_by_name(torch.stack(layers), list(parameters), self.clip, parameters=0)
        # as in DPOptimizer, all per-sample gradients live until the last sum, and are summed in their own precision
        sums = {name: torch.einsum("i,i...", factors[name].to(grad.dtype), grad) for name, grad in found.items()}
        return Step(sums, norms, losses)

    def _losses(self, inputs: Any, targets: Any, batch_size: int) -> Tensor:
        """`losses`, with Opacus' wrapper in place of the model."""
        model, self.model = self.model, self._engine
        try:
            return self.losses(inputs, targets, batch_size)
        finally:
            self.model = model


class _Hooked(_Opacus):
    in_place = False  # a full backward hook makes a module's output a view
    functorch = False

    def _attach(self, parameters: Parameters) -> Any:
        from opacus.grad_sample import GradSampleModule

        return GradSampleModule(self.model, loss_reduction="sum", force_functorch=self.functorch)

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        for name, module in self.model.named_modules():
            own = list(module.parameters(recurse=False))
            if any(p.requires_grad for p in own) and list(module.buffers()):
                reason = f"Opacus refuses a trainable {type(module).__name__} with buffers"
                yield Problem(name or "model", reason, "use a tape backend, vmap or microbatch")
        if all(not m.training for m in self.model.modules()):
            yield Problem("model", "Opacus' hooks capture nothing in eval mode", "model.train()")

    def _shares(self, parameters: Parameters) -> dict[str, float]:
        # Opacus looks for no formula inside a module that has parameters of its own and no formula
        hooked = self._engine.iterate_submodules(self.model)
        self._by_formula = {m for m in hooked if type(m) in self._engine.GRAD_SAMPLERS}
        return super()._shares(parameters)


class OpacusHooks(_Hooked):
    """Opacus' default, `grad_sample_mode="hooks"`: a formula for each type of layer, else functorch."""

    name = "opacus_hooks"

    def _route(self, module: nn.Module, name: str) -> str:
        return "instantiated" if module in self._by_formula else "fallback"


class OpacusFunctorch(_Hooked):
    """`grad_sample_mode="functorch"`: vmap(grad) for every layer, or outermost module with own parameters."""

    name = "opacus_functorch"
    functorch = True


class OpacusEw(_Opacus):
    """`grad_sample_mode="ew"`: PyTorch's expanded weights, tensors with per-sample rules for some functions."""

    name = "opacus_ew"

    def _attach(self, parameters: Parameters) -> Any:
        from opacus.grad_sample import GradSampleModuleExpandedWeights

        return GradSampleModuleExpandedWeights(self.model, loss_reduction="sum")


class OpacusGhost(_Hooked):
    """`grad_sample_mode="ghost"`: norms in one backward pass, Σ c_i ℓ_i in a second.

    Only nn.Linear and nn.Embedding have a ghost norm. Other layers are instantiated one at a time, by functorch where
    Opacus has no formula. Both passes compute every weight gradient.
    """

    name = "opacus_ghost"

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        if self.clip.per_layer:
            yield Problem("clip", "Opacus' ghost mode has one factor a sample, not one a layer", "use opacus_hooks")

    def _attach(self, parameters: Parameters) -> Any:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        return GradSampleModuleFastGradientClipping(self.model, loss_reduction="sum", use_ghost_clipping=True)

    def _step(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Step:
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        found: dict[str, Tensor] = {}

        def zero_grad() -> None:
            found.update(samples_of(parameters, "_norm_sample", batch_size))
            bare = [name for name, p in parameters.items() if p.grad is not None and name not in found]
            self._owed(bare, f"norms [{batch_size}]")
            for p in parameters.values():
                p.grad = None

        def factors() -> Tensor:
            return self.clip.factors(norms_of(found.values(), losses)).to(losses.dtype)

        self._engine.enable_hooks()  # its second pass turns them off
        self._engine.get_clipping_coef = factors
        losses = self._losses(inputs, targets, batch_size)
        between = SimpleNamespace(zero_grad=zero_grad)  # a minimal optimizer
        DPTensorFastGradientClipping(self._engine, between, losses, "sum").backward()
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return Step(grads, norms_of(found.values(), losses), losses.detach())

    def _route(self, module: nn.Module, name: str) -> str:
        if module not in self._by_formula:
            return "fallback"
        return "ghost" if type(module) in self._engine.NORM_SAMPLERS and name == "weight" else "instantiated"


def samples_of(parameters: Parameters, attribute: str, batch_size: int) -> dict[str, Tensor]:
    """The per-sample results that Opacus left on parameters, by name: `grad_sample` [B, *shape] or `_norm_sample` [B].

    Args:
        attribute: "grad_sample" or "_norm_sample".
    """
    found = {}
    for name, p in parameters.items():
        kept = getattr(p, attribute, None)
        shape = (batch_size, *p.shape) if attribute == "grad_sample" else (batch_size,)
        if isinstance(kept, Tensor) and kept.shape == shape:
            found[name] = kept
    return found
