"""Layer norm and group norm: y = γ x̂ + β with x̂ = (x - mean)·rstd, statistics of one sample only.

The per-sample gradient of γ is Σ_t g x̂. The mean and rstd that the forward kernel computed anyway are kept, so that x̂
is not computed a second time by a normalisation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipping.interface import norm_dtype
from clipping.rules.base import Bias, Rule, blocks


class LayerNormWeight(Rule):
    """γ [*normalized]: Σ over the positions between the batch and the normalised dimensions."""

    def __init__(self, weight: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        super().__init__(weight)
        self.x, self.mean, self.rstd = x, mean, rstd

    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        dtype = norm_dtype(g.dtype)
        parts = []
        # g·x̂ is as large as the activation: blocks keep that within the workspace
        for part in blocks(g[samples].shape[0], 2 * math.prod(g.shape[1:]) * dtype.itemsize):
            at = slice(samples.start + part.start, samples.start + part.stop)
            product = (self.x[at] - self.mean[at]).to(dtype).mul_(self.rstd[at]).mul_(g[at])
            positions = tuple(range(1, product.dim() - self.parameter.dim()))
            parts.append(product.sum(positions) if positions else product)
        return torch.cat(parts)


class GroupNormWeight(Rule):
    """γ [C]: rstd (Σ_t g x - mean Σ_t g), which needs sums over positions only and no x̂ at all."""

    def __init__(self, weight: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        super().__init__(weight)
        self.x, self.mean, self.rstd = x, mean, rstd

    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        dtype = norm_dtype(g.dtype)
        channels = self.parameter.shape[0]
        x, g = (y[samples].to(dtype).reshape(-1, channels, math.prod(y.shape[2:])) for y in (self.x, g))
        per_group = channels // self.mean.shape[1]
        mean = self.mean[samples].repeat_interleave(per_group, 1).to(dtype)
        rstd = self.rstd[samples].repeat_interleave(per_group, 1).to(dtype)
        count, channels, positions = x.shape
        products = torch.bmm(g.reshape(count * channels, 1, positions), x.reshape(count * channels, positions, 1)).view(
            count, channels
        )
        return rstd * (products - mean * g.sum(2))


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, list[Rule]]:
    """torch.nn.functional.layer_norm and the rules of its parameters."""
    output, mean, rstd = torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)
    rules: list[Rule] = []
    if weight is not None:
        rules.append(LayerNormWeight(weight, input, mean.detach(), rstd.detach()))
    if bias is not None:
        rules.append(_LayerNormBias(bias))
    return output, rules


class _LayerNormBias(Rule):
    """β [*normalized]: Σ_t g."""

    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        g = g[samples]
        positions = tuple(range(1, g.dim() - self.parameter.dim()))
        return g.sum(positions, dtype=norm_dtype(g.dtype)) if positions else g


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, list[Rule]]:
    """torch.nn.functional.group_norm and the rules of its parameters."""
    batch, channels = input.shape[:2]
    # the kernel wants a dense input; torch.group_norm makes it so in the same way
    x = input if input.is_contiguous() else input.contiguous()
    output, mean, rstd = torch.native_group_norm(
        x, weight, bias, batch, channels, math.prod(input.shape[2:]), num_groups, eps
    )
    rules: list[Rule] = []
    if weight is not None:
        rules.append(GroupNormWeight(weight, x, mean.detach(), rstd.detach()))
    if bias is not None:
        rules.append(Bias(bias, channel=1))
    return output, rules
