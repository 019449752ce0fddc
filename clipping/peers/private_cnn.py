"""Adapter of private_CNN: mixed ghost clipping (arXiv:2205.10683), as published by its authors.

It runs two backward passes, and computes every weight gradient in both. Linear layers and embeddings have ghost norms,
convolutions the mixed rule. The clipping function is ours.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD

from clipping.core.types import Parameters, Problem
from clipping.peers.base import Peer, Step, norms_of


class PrivateCNN(Peer):
    """`PrivacyEngine(ghost_clipping=True, mixed=True)` without noise. Runs its step, but no optimiser step."""

    name = "private_cnn"
    library = "private_CNN"
    package = "private_CNN"
    install = "clone JialinMao/private_CNN from GitHub and put it on PYTHONPATH"
    captured = ("activations", "max_batch_len", "use_gc")

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        if self.clip.per_layer:
            yield Problem("clip", "private_CNN has one factor a sample, not one a layer", "use mixed_ghost")

    def _attach(self, parameters: Parameters) -> Any:
        with self._mode():
            engine = importlib.import_module(self.package).PrivacyEngine(
                self.model,
                batch_size=1,  # the divisor of its step
                sample_size=2,
                epochs=1,
                max_grad_norm=1.0,
                noise_multiplier=0.0,
                record_snr=False,
                ghost_clipping=True,
                mixed=True,
            )
            engine.attach(SGD(parameters.values(), lr=0.0))
        return engine

    def _step(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Step:
        found: list[Tensor] = []

        def factors() -> Tensor:
            self._owed([name for name, p in parameters.items() if not hasattr(p, "norm_sample")], "norm")
            found.append(norms_of([p.norm_sample for p in parameters.values()], losses))  # type: ignore[attr-defined]
            return self.clip.factors(found[0]).to(losses.dtype)

        self._engine.get_coef_sample = factors
        with self._mode():
            losses = self.losses(inputs, targets, batch_size)
            self._engine.step(loss=losses)
            self._engine.unlock()  # as its optimizer.step() does
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return Step(grads, found[0], losses.detach())

    def _route(self, module: nn.Module, name: str) -> str:
        ghost = getattr(module, "use_gc", isinstance(module, (nn.Linear, nn.Embedding)))
        return "ghost" if ghost and name == "weight" else "instantiated"

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """Set the mode of its hooks, a global of its module, and restore it afterwards."""
        hooks = importlib.import_module(f"{self.package}.privacy_utils.autograd_grad_sample")
        before = hooks.get_hooks_mode()
        hooks.set_hooks_mode("ghost_norm_mixed")
        try:
            yield
        finally:
            hooks.set_hooks_mode("ghost_norm_mixed")  # a step that failed half-way leaves the hooks disabled
            hooks.set_hooks_mode(before)
