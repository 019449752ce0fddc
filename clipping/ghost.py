"""Two backward passes: one for the norms, one for the gradient of Σ_i c_i ℓ_i.

The first pass computes activation gradients only; at each use of a parameter its squared norms are found and added up,
by Gram matrices (ghost norm) or from the instantiated per-sample gradient. The second is an ordinary backward pass with
each sample's loss multiplied by its factor, which treats c as a constant. (Li et al. 2021, arXiv:2110.05679; for
convolutions and the mixed rule Bu et al. 2022, arXiv:2205.10683, Algorithm 1)

Several uses of one parameter add up *before* the norm: ‖Σ_k u_k‖² = Σ_k ‖u_k‖² + 2 Σ_{k<l} <u_k, u_l>, by Gram matrices
where each pair has them (a tied embedding and head, a linear layer called twice), else instantiated and added.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from clipping.interface import Backend, ClippedGradient, Parameters, Problem, UnsupportedModel, norm_dtype
from clipping.oracle import gradients, with_zeros
from clipping.rules import Refused, Rule
from clipping.rules.base import blocks, sum_of_squares
from clipping.sources import Source
from clipping.tape import Tape, Use, unrecorded


class TwoPass(Backend):
    """The machine under `FastGradClip`, `Ghost` and `MixedGhost`, which differ in the route of a norm alone."""

    _graph_checked = False

    @abstractmethod
    def by_ghost(self, rule: Rule) -> bool:
        """Is this rule's norm found by Gram matrices (asked only where it has them)?"""

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        tape = Tape(parameters, (inputs, targets), batch_size)
        try:
            with tape:
                losses = self.losses(inputs, targets, batch_size)
            self._refuse(tape, losses, parameters)
            norms = _Norms(self, tape, losses)
            tape.backward(losses, norms.arrived)
        except Refused as refused:  # found out only when the gradient arrived
            raise UnsupportedModel(self.name, [Problem("model", refused.reason, refused.remedy)]) from refused
        finally:
            tape.close()
        with torch.no_grad():  # the factors are constants of the second pass
            total = norms.total()
            factors = self.clip.factors(total)
        grads = gradients((factors.to(losses.dtype) * losses).sum(), parameters)
        self.coverage = norms.coverage(parameters)
        return ClippedGradient(with_zeros(grads, parameters), total, losses.detach())

    def _refuse(self, tape: Tape, losses: Tensor, parameters: Parameters) -> None:
        problems = tape.problems
        if not problems and not self._graph_checked:
            problems = unrecorded(losses, tape, parameters)
            self._graph_checked = not problems
        if problems:
            raise UnsupportedModel(self.name, dict.fromkeys(problems))


class FastGradClip(TwoPass):
    """Every per-sample gradient instantiated, one use at a time, and let go once its norm is known.

    (Lee and Kifer 2020, arXiv:2009.03106)
    """

    name = "fastgradclip"

    def by_ghost(self, rule: Rule) -> bool:
        return False


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
        self._sums: dict[str, Tensor] = {}
        self._kept: dict[str, list[tuple[Rule, Tensor]]] = {}
        self._routes: dict[str, str] = {}

    def arrived(self, use: Use, g: Tensor) -> None:
        for source, rule in use.rules:
            alone = all(self._counts[name] == 1 for name in source.parameters)
            ghost = source.rearranged and rule.has_ghost and self._backend.by_ghost(rule)
            for name in source.parameters:
                self._routes[name] = "fallback" if rule.is_fallback else "ghost" if ghost else "instantiated"
            if alone and source.rearranged:
                self._squares += rule.squared_norms(g, ghost=ghost).to(self._squares)
            elif alone:
                self._squares += self._pulled_back(source, rule, g)
            elif ghost and source.is_parameter:
                self._kept.setdefault(next(iter(source.parameters)), []).append((rule, g))
            else:
                self._add(source, rule, g)

    def total(self) -> Tensor:
        """‖g_i‖, [B]."""
        for name, kept in self._kept.items():
            squares = self._pairwise(kept) if name not in self._sums else None
            if squares is not None:
                self._squares += squares
            else:
                for rule, g in kept:
                    self._accumulate(name, rule.instantiate(g, slice(0, rule.samples(g))))
                self._routes[name] = "instantiated"
        for gradient in self._sums.values():
            self._squares += sum_of_squares(gradient).to(self._squares)
        self._kept.clear()
        self._sums.clear()
        return self._squares.clamp_(min=0).sqrt()

    def coverage(self, parameters: Parameters) -> dict[str, float]:
        """Share of the parameters by the route of their norm; those that the loss did not reach cost nothing."""
        shares = dict.fromkeys(("ghost", "instantiated", "fallback"), 0.0)
        total = sum(p.numel() for p in parameters.values()) or 1
        for name, p in parameters.items():
            shares[self._routes.get(name, "instantiated")] += p.numel() / total
        return shares

    def _pairwise(self, kept: list[tuple[Rule, Tensor]]) -> Tensor | None:
        squares = torch.zeros_like(self._squares)
        for i, (rule, g) in enumerate(kept):
            squares += rule.squared_norms(g, ghost=True).to(squares)
            for other, other_g in kept[:i]:
                product = rule.inner(g, other, other_g)
                product = other.inner(other_g, rule, g) if product is None else product
                if product is None:
                    return None
                squares += 2 * product.to(squares)
        return squares

    def _pulled_back(self, source: Source, rule: Rule, g: Tensor) -> Tensor:
        size = rule.instantiated_bytes(g) + sum(p.numel() for p in source.parameters.values()) * g.element_size()
        parts = []
        for samples in blocks(rule.samples(g), size):
            found = source.pull_back(rule.instantiate(g, samples))
            parts.append(torch.stack([sum_of_squares(gradient) for gradient in found.values()]).sum(0))
        return torch.cat(parts).to(self._squares)

    def _add(self, source: Source, rule: Rule, g: Tensor) -> None:
        for name, gradient in source.pull_back(rule.instantiate(g, slice(0, rule.samples(g)))).items():
            self._accumulate(name, gradient)

    def _accumulate(self, name: str, gradient: Tensor) -> None:
        self._sums[name] = gradient + self._sums[name] if name in self._sums else gradient
