"""Σ_i c_i g_i of one use of parameters, when the factors are known, and what it is added to.

Functions take:
    source, rule, g: what the use reads, made of the parameters; its rule; the gradient of its output, [B, ...].
    factors: c, [B].
    grads: name -> the sum of that parameter so far, which is added to.
    uses: of each use its rule and the gradient of its output; used up.
    parts: per-sample gradients, in blocks of samples; used up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipping.core.dtypes import wide_dtype
from clipping.core.microbatching import added, blocks, sum_dtype
from clipping.numerics.gram import part
from clipping.numerics.per_sample import weighted_sum
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Rule, Spec


def pulled_back_in(source: Source, rule: Rule, g: Tensor | Spec) -> list[slice]:
    """Blocks of samples whose gradients are pulled back to the parameters at once."""
    entries = sum(p.numel() for p in source.parameters.values())
    return blocks(rule.samples(g), rule.instantiated_bytes(g) + entries * g.element_size(), rule.workspace(g))


def add_sum(grads: dict[str, Tensor], source: Source, rule: Rule, g: Tensor, factors: Tensor) -> None:
    """Add Σ_i c_i g_i of one use to those of the parameters.

    Of a tensor that was made of them by more than rearranging, it is the sum of the very gradients that the norms came
    of, pulled back once more. To pull back their sum is to round it anew: where that cancels (the mean, in a weight
    that is standardised) nothing but rounding may be left, and in half precision it has few digits.
    """
    if source.rearranged:
        return source.add_to(grads, rule.weighted(g, factors))
    names: list[str] = []

    def weighed(samples: slice) -> Tensor:
        found = source.pull_back(rule.instantiate(g, samples))
        names[:] = found
        of_block = part(factors, samples)
        return torch.cat([weighted_sum(of_block, gradient).flatten() for gradient in found.values()])

    total = added(weighed, pulled_back_in(source, rule, g))
    shapes = [source.parameters[name].shape for name in names]
    for name, shape, found in zip(names, shapes, total.split([shape.numel() for shape in shapes]), strict=True):
        grads[name] = found.view(shape) + grads[name] if name in grads else found.view(shape)


def weighted_of_all(uses: list[tuple[Rule, Tensor]], factors: Tensor) -> Tensor:
    """Σ_i c_i g_i of all uses of one parameter; each is let go of when it is added."""
    rule, g = uses.pop(0)
    total = rule.weighted(g, factors)
    while uses:
        rule, g = uses.pop(0)
        total += rule.weighted(g, factors)
    return total


def weighted_sum_of(parts: list[Tensor], factors: Tensor) -> Tensor:
    """Σ_i c_i g_i of per-sample gradients in blocks of samples; each block is let go of when it is added."""
    if len(parts) == 1:
        return weighted_sum(factors, parts.pop())
    total, stop, wide = None, len(factors), wide_dtype(parts[0].dtype)
    while parts:
        gradients = parts.pop()
        start = stop - len(gradients)
        found = weighted_sum(part(factors, slice(start, stop)), gradients)
        total = found.to(sum_dtype(found)) if total is None else total.add_(found)
        stop = start
    assert total is not None
    return total.to(wide)
