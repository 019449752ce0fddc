"""Form Σ_i c_i g_i of one use of parameters, once the factors are known.

Functions take:
    source, rule, g: the tensor that is read, its rule, and the gradient of the use's output, [B, ...].
    factors: c, [B].
    grads: name -> the sum of that parameter so far; updated.
    uses: the rule and the output's gradient of each use; emptied.
    parts: per-sample gradients, in blocks of samples; emptied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipping.core.dtypes import wide_dtype
from clipping.core.microbatching import added, blocks, sum_dtype
from clipping.numerics.per_sample import part, weighted_sum
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Rule, Spec


def pulled_back_in(source: Source, rule: Rule, g: Tensor | Spec) -> list[slice]:
    """Blocks of samples whose gradients are pulled back to the parameters at once."""
    entries = sum(p.numel() for p in source.parameters.values())
    return blocks(rule.samples(g), rule.instantiated_bytes(g) + entries * g.element_size(), rule.workspace(g))


def add_sum(grads: dict[str, Tensor], source: Source, rule: Rule, g: Tensor, factors: Tensor) -> None:
    """Add Σ_i c_i g_i of one use to the sums of its parameters.

    If the tensor does more than rearrange them, each gradient is pulled back again, as for the norms. Pulling back the
    sum would round differently: where it cancels (the mean, in weight standardisation) only rounding may be left.
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
    """Σ_i c_i g_i of all uses of one parameter. Frees each use once it is added."""
    rule, g = uses.pop(0)
    total = rule.weighted(g, factors)
    while uses:
        rule, g = uses.pop(0)
        total += rule.weighted(g, factors)
    return total


def weighted_sum_of(parts: list[Tensor], factors: Tensor) -> Tensor:
    """Σ_i c_i g_i of per-sample gradients in blocks of samples. Frees each block once it is added."""
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
