"""Norms from the uses of parameters, as their gradients arrive in the backward pass.

Several uses of one parameter add up *before* the norm: ‖Σ_k u_k‖² = Σ_k ‖u_k‖² + 2 Σ_{k<l} <u_k, u_l>, by Gram matrices
where each pair has them (a tied embedding and head, a linear layer called twice), else instantiated and added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipping.functions import ClipFunction
from clipping.interface import Parameters, norm_dtype
from clipping.rules import Rule
from clipping.rules.base import blocks, sum_of_squares
from clipping.samples import weighted_sum
from clipping.sources import Source
from clipping.tape import Use


class Norms:
    """Adds up squared norms [B] as the gradients arrive, and what several uses of a parameter must share first."""

    def __init__(
        self,
        by_ghost: Callable[[Rule], bool],
        counts: Counter[str],
        losses: Tensor,
        parameters: Parameters,
        clip: ClipFunction,
    ) -> None:
        self._by_ghost, self._counts, self._parameters, self._clip = by_ghost, counts, parameters, clip
        self._squares = torch.zeros(losses.shape, dtype=norm_dtype(losses.dtype), device=losses.device)
        self._sums: dict[str, Tensor] = {}
        self._kept: dict[str, list[tuple[Rule, Tensor]]] = {}
        self._routes: dict[str, str] = {}

    def arrived(self, use: Use, g: Tensor) -> None:
        for source, rule in use.rules:
            alone = all(self._counts[name] == 1 for name in source.parameters)
            ghost = source.rearranged and rule.has_ghost and self._by_ghost(rule)
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


class LayerNorms(Norms):
    """Per-layer clipping: as soon as a parameter's norms are known, so are its factors and its weighted gradient.

    Attributes:
        grads: parameter name -> Σ_i c_i g_i.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.grads: dict[str, Tensor] = {}

    def arrived(self, use: Use, g: Tensor) -> None:
        for source, rule in use.rules:
            ghost = source.rearranged and rule.has_ghost and self._by_ghost(rule)
            alone = all(self._counts[name] == 1 for name in source.parameters)
            for name in source.parameters:
                self._routes[name] = "fallback" if rule.is_fallback else "ghost" if ghost and alone else "instantiated"
            if alone and source.rearranged:
                factors = self._factors(rule.squared_norms(g, ghost=ghost))
                self.grads |= {n: x[0] for n, x in source.pull_back(rule.weighted(g, factors)[None]).items()}
            else:
                self._add(source, rule, g)

    def total(self) -> Tensor:
        for name, gradient in self._sums.items():
            self.grads[name] = weighted_sum(self._factors(sum_of_squares(gradient)), gradient)
        self._sums.clear()
        return self._squares.sqrt()

    def _factors(self, squares: Tensor) -> Tensor:
        squares = squares.to(self._squares)
        self._squares += squares
        layers = squares.sqrt().expand(len(self._parameters), -1)  # a layer's factors depend on its own norms and on L
        return self._clip.factors(layers)[0]
