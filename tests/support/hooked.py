"""A backend with module hooks and per-sample gradients, as libraries have; tests derive faulty backends from it.

`changed` makes others, of the oracle.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from clipping import Backend, ClippedGradient, Problem, UnsupportedModel
from clipping.backends.microbatch import Microbatch
from clipping.core.reference import with_zeros
from clipping.numerics.per_sample import norms_and_factors, weighted_sum

KNOWN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.GroupNorm, nn.LayerNorm)

Grads = dict[str, Tensor]


def changed(change: Callable[[Tensor, Any], Tensor]) -> type[Microbatch]:
    """The oracle, with change(gradient, inputs) in the place of every sum."""

    class Changed(Microbatch):
        name = "changed"

        def _clipped(self, parameters: Any, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
            out = super()._clipped(parameters, inputs, targets, batch_size)
            return ClippedGradient({n: change(g, inputs) for n, g in out.grads.items()}, out.norms, out.losses)

    return Changed


class Hooked(Backend):
    """Per-sample gradients of each layer, from its input and the gradient of its output."""

    name = "hooked"

    def problems(self) -> list[Problem]:
        found = list(super().problems())
        for name, module in self.model.named_modules():
            if type(module) not in KNOWN and any(p.requires_grad for p in module.parameters(recurse=False)):
                found.append(Problem(name, f"{type(module).__name__} has no rule", "freeze it"))
        return found

    def _clipped(self, parameters: Any, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        self.parameters, self.grads, self.calls = parameters, self.begin(), Counter[int]()
        self.at = self.derivative_in_forward
        hooks = [m.register_forward_hook(self.forward_hook) for m in self.model.modules() if type(m) in KNOWN]
        try:
            losses = self.losses(inputs, targets, batch_size)
        finally:
            for hook in hooks:
                hook.remove()
        self.refuse_other_reads(losses)
        self.refuse_mixed_rows(losses)
        self.at = self.arrived
        self.backward(losses)
        norms, factors = self.norms_and_factors(losses)
        sums = self.sums(losses, factors)
        return ClippedGradient(with_zeros(sums, parameters), norms, losses.detach())

    def backward(self, losses: Tensor) -> None:
        if losses.requires_grad:
            torch.autograd.grad(losses.sum(), list(self.parameters.values()), allow_unused=True, retain_graph=True)

    def begin(self) -> Grads:
        return {}

    def forward_hook(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        (x,) = inputs
        own = dict(module.named_parameters())
        for p in own.values():
            self.calls[id(p)] += 1
        if isinstance(module, nn.Embedding) and x.dim() < 2:
            raise UnsupportedModel(self.name, [Problem("model", "ids without positions", "none")])
        if output.requires_grad:
            output.register_hook(lambda g: self.at(module, own, x, g))

    def arrived(self, module: nn.Module, own: dict[str, nn.Parameter], x: Tensor, g: Tensor) -> None:
        names = {id(p): name for name, p in self.parameters.items()}
        for name, gradient in self.per_sample(module, own, x.detach(), g).items():
            if id(own[name]) in names:
                self.record(names[id(own[name])], gradient)

    def per_sample(self, module: nn.Module, own: dict[str, nn.Parameter], x: Tensor, g: Tensor) -> Grads:
        values = {name: p.detach() for name, p in own.items()}

        def of_one(x_one: Tensor, g_one: Tensor) -> Grads:
            return vjp(lambda v: functional_call(module, v, (x_one[None],)), values)[1](g_one[None])[0]

        return vmap(of_one)(x, g)

    def record(self, name: str, gradient: Tensor) -> None:
        self.grads[name] = self.grads[name] + gradient if name in self.grads else gradient

    def norms_and_factors(self, losses: Tensor) -> tuple[Tensor, Grads]:
        return norms_and_factors(self.grads, self.parameters, self.clip, losses)

    def sums(self, losses: Tensor, factors: Grads) -> Grads:
        return {name: weighted_sum(factors[name], gradient) for name, gradient in self.grads.items()}

    def refuse_other_reads(self, losses: Tensor) -> None:
        """Refuse a parameter that the graph reads more often than its layer was called: something else uses it, too."""
        reads, stack, seen = Counter[int](), [losses.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for child, _ in node.next_functions:
                reads[id(getattr(child, "variable", None))] += 1
                stack.append(child)
        if any(reads[id(p)] > self.calls[id(p)] for p in self.parameters.values()):
            raise UnsupportedModel(self.name, [Problem("model", "a parameter is read outside its layer", "none")])

    def derivative_in_forward(self, module: nn.Module, own: dict[str, nn.Parameter], x: Tensor, g: Tensor) -> None:
        """Refuse a derivative taken in the forward pass: it makes the losses depend on parameters in other ways."""
        raise UnsupportedModel(self.name, [Problem("model", "a derivative is taken in the forward pass", "none")])

    def refuse_mixed_rows(self, losses: Tensor) -> None:
        """In every step, refuse if the loss of the first sample has a gradient in rows of other samples."""
        self.at = self.row
        self.backward(losses[:1])

    def row(self, module: nn.Module, own: dict[str, nn.Parameter], x: Tensor, g: Tensor) -> None:
        if g[1:].any():
            raise UnsupportedModel(self.name, [Problem("model", "samples mix", "none")])
