"""Two backward passes: one for the norms, one for the gradient of Σ_i c_i ℓ_i.

The first pass computes activation gradients only; at each use of a parameter its squared norms are found and added up,
by Gram matrices (ghost norm) or from the instantiated per-sample gradient. The second is an ordinary backward pass with
each sample's loss multiplied by its factor, which treats c as a constant. (Li et al. 2021, arXiv:2110.05679; for
convolutions and the mixed rule Bu et al. 2022, arXiv:2205.10683, Algorithm 1)

Several uses of one parameter add up *before* the norm: such a parameter's per-sample gradient is instantiated.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from clipping.interface import Backend, ClippedGradient, Parameters, UnsupportedModel, norm_dtype
from clipping.oracle import gradients, with_zeros
from clipping.rules import Rule
from clipping.rules.base import sum_of_squares
from clipping.tape import Tape, Use, unrecorded


class TwoPass(Backend):
    """The machine under `Ghost` and `MixedGhost`, which differ in the route of a norm alone."""

    _graph_checked = False

    @abstractmethod
    def by_ghost(self, rule: Rule) -> bool:
        """Is this rule's norm found by Gram matrices (asked only where it has them)?"""

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        tape = Tape(parameters, batch_size)
        with tape:
            losses = self.losses(inputs, targets, batch_size)
        problems = list(tape.problems)
        if not self._graph_checked:
            problems += unrecorded(losses, parameters, tape.counts) if not problems else []
            self._graph_checked = not problems
        if problems:
            tape.close()
            raise UnsupportedModel(self.name, problems)
        norms = _Norms(self, tape, losses)
        tape.squared_norm_pass(losses, norms.arrived)
        total = norms.total()
        factors = self.clip.factors(total)
        grads = gradients((factors.to(losses.dtype) * losses).sum(), parameters)
        self.coverage = self._coverage(tape, parameters)
        return ClippedGradient(with_zeros(grads, parameters), total, losses.detach())

    def route(self, rule: Rule, uses: int) -> bool:
        """True for the ghost norm, False for the instantiated gradient."""
        return uses == 1 and rule.has_ghost and self.by_ghost(rule)

    def _coverage(self, tape: Tape, parameters: Parameters) -> dict[str, float]:
        total = sum(p.numel() for p in parameters.values()) or 1
        ghost = sum(
            rule.parameter.numel()
            for use in tape.uses
            for name, rule in use.rules.items()
            if self.route(rule, tape.counts[name])
        )
        return {"ghost": ghost / total, "instantiated": 1 - ghost / total, "fallback": 0.0}


class Ghost(TwoPass):
    """Ghost norm wherever a use has one: weights of linear layers, convolutions and embeddings."""

    name = "ghost"

    def by_ghost(self, rule: Rule) -> bool:
        return True


class MixedGhost(TwoPass):
    """Ghost norm where it takes less space than the gradient: 2T² ≤ pd. (arXiv:2205.10683, equation 4.1)

    With groups there are as many Gram pairs as groups, and as many blocks of p·d entries: the rule is the same.
    """

    name = "mixed_ghost"

    def by_ghost(self, rule: Rule) -> bool:
        return 2 * rule.positions**2 <= rule.inputs * rule.outputs


class _Norms:
    """Adds up squared norms [B] as the gradients arrive, and what several uses of a parameter must share first."""

    def __init__(self, backend: TwoPass, tape: Tape, losses: Tensor) -> None:
        self._backend, self._counts = backend, tape.counts
        self._squares = torch.zeros(losses.shape, dtype=norm_dtype(losses.dtype), device=losses.device)
        self._shared: dict[str, Tensor] = {}

    def arrived(self, use: Use, g: Tensor) -> None:
        for name, rule in use.rules.items():
            if self._counts[name] == 1:
                squares = rule.squared_norms(g, ghost=self._backend.route(rule, 1))
                self._squares += squares.to(self._squares)
            else:
                gradient = rule.instantiate(g, slice(0, g.shape[0]))
                self._shared[name] = gradient + self._shared[name] if name in self._shared else gradient

    def total(self) -> Tensor:
        """‖g_i‖, [B]."""
        for gradient in self._shared.values():
            self._squares += sum_of_squares(gradient).to(self._squares)
        self._shared.clear()
        return self._squares.sqrt()
