"""Adapter of Opake, JetBrains' functional library: per-sample gradients of the whole model by torch.func.vmap.

Its thresholds are fixed or AUTO-S (`Flat`, `Automatic`). Opake rounds a threshold down to float32; where that would
change it, gradients are divided by C and clipped to 1. It replaces NaN and inf by 0 before clipping.
"""

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from clipping.core.clip_functions import Automatic, Flat
from clipping.core.types import Parameters, Problem
from clipping.core.vmap import loss_of_one
from clipping.peers.base import Peer, Step


class Opake(Peer):
    """`clipped_grad` or `auto_clipped_grad` on the whole batch at once, without noise."""

    name = "opake"
    library = "Opake"
    package = "opake.dpsgd"
    install = "pip install opake"
    captured = ()

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        if type(self.clip) not in (Flat, Automatic):
            yield Problem("clip", f"Opake has no {self.clip!r}", "use Flat or Automatic")
        elif self.clip.sensitivity == 0:
            yield Problem("clip", "Opake's threshold must be positive", "use C > 0")
        elif bool(self.clip.stabiliser) != isinstance(self.clip, Automatic):  # type: ignore[attr-defined]
            reason = "Opake has a stabiliser in automatic clipping, and none in flat clipping"
            yield Problem("clip", reason, "use Flat(C) or Automatic(C, stabiliser)")

    def _attach(self, parameters: Parameters) -> Any:
        library = importlib.import_module("opake.dpsgd.clipping")
        one = loss_of_one(self.model, self.loss_fn)
        bound, scale = self.clip.sensitivity, self._scale
        options: dict[str, Any] = {"batch_argnums": (1, 2), "return_aux": True}
        if scale != 1:
            options["pre_clipping_transform"] = lambda grads: {name: grad / scale for name, grad in grads.items()}

        def loss(values: dict[str, Tensor], sample: Any, target: Any) -> Tensor:
            return one(values, sample, target)[0]

        if isinstance(self.clip, Automatic):
            return library.auto_clipped_grad(loss, R=bound / scale, gamma=self.clip.stabiliser / scale, **options)
        return library.clipped_grad(loss, clipping_norm=bound / scale, **options)

    @property
    def _scale(self) -> float:
        """C if float32 cannot hold it, else 1."""
        bound = self.clip.sensitivity
        return bound if math.isfinite(bound) and torch.tensor(bound, dtype=torch.float32).item() != bound else 1.0

    def _step(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Step:
        clipped, state = self._engine
        given = {name: p.detach() for name, p in parameters.items()}
        (found, told), _ = clipped(given, inputs, targets, state=state)
        grads = {name: grad * self._scale for name, grad in found.pytree.items()} if self._scale != 1 else found.pytree
        return Step(grads, told.grad_norms * self._scale, told.loss_values)
