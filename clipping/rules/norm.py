"""Layer, group, instance and RMS norm: y = γ x̂ + β with x̂ = (x - mean)·rstd, statistics of one sample only.

The per-sample gradient of γ is Σ_t g x̂. The mean and rstd that the forward kernel computed anyway are kept, so that x̂
is not computed a second time by a normalisation.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.interface import norm_dtype
from clipping.rules.base import Bias, Refused, Rule, blocks


class _Scale(Rule):
    """γ of a normalisation: Σ over positions of g x̂, in blocks of samples, for g x̂ is as large as the activation."""

    channel: int | None = None
    """The dimension that γ [C] runs along, or None if γ has the last dimensions' shape."""

    @abstractmethod
    def normalised(self, at: slice, dtype: torch.dtype) -> Tensor:
        """x̂ of some samples, in a tensor of its own."""

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        dtype = norm_dtype(g.dtype)
        parts = []
        for part in blocks(g[samples].shape[0], 2 * math.prod(g.shape[1:]) * dtype.itemsize, self.workspace(g)):
            at = slice(samples.start + part.start, samples.start + part.stop)
            parts.append(_sum_positions(self.normalised(at, dtype).mul_(g[at]), self.parameter, self.channel))
        return torch.cat(parts)


class LayerNormWeight(_Scale):
    """γ [*normalized], x̂ from the statistics that the forward kernel kept."""

    def __init__(self, weight: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        super().__init__(weight)
        self.x, self.mean, self.rstd = x, mean, rstd

    def normalised(self, at: slice, dtype: torch.dtype) -> Tensor:
        return (self.x[at].to(dtype) - self.mean[at]).mul_(self.rstd[at])


class RecomputedNormWeight(_Scale):
    """γ of a normalisation whose kernel keeps no statistics: x̂ = normalise(x) once more.

    Args:
        weight: γ.
        x: the input.
        normalise: x -> x̂, sample by sample.
        channel: as above.
    """

    def __init__(self, weight: Tensor, x: Tensor, normalise: Callable[[Tensor], Tensor], channel: int | None) -> None:
        super().__init__(weight)
        self.x, self.normalise, self.channel = x, normalise, channel

    def normalised(self, at: slice, dtype: torch.dtype) -> Tensor:
        return self.normalise(self.x[at].detach()).to(dtype)


def _sum_positions(x: Tensor, parameter: Tensor, channel: int | None) -> Tensor:
    """[b, ...] to [b, *parameter's shape]: sum over all other dimensions, in float32 or wider."""
    if channel is not None:
        x = x.movedim(channel, -1)
    positions = tuple(range(1, x.dim() - parameter.dim()))
    return x.sum(positions, dtype=norm_dtype(x.dtype)) if positions else x


class GroupNormWeight(Rule):
    """γ [C]: rstd (Σ_t g x - mean Σ_t g), which needs sums over positions only and no x̂ at all."""

    def __init__(self, weight: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        super().__init__(weight)
        self.x, self.mean, self.rstd = x, mean, rstd

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        size = math.prod(g.shape[1:]) * norm_dtype(g.dtype).itemsize
        parts = [
            self._part(g, slice(samples.start + part.start, samples.start + part.stop))
            for part in blocks(g[samples].shape[0], size, self.workspace(g) // 4)  # products that stay in the cache
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, g: Tensor, samples: slice) -> Tensor:
        dtype = norm_dtype(g.dtype)
        channels = self.parameter.shape[0]
        x, g = (y[samples].to(dtype).reshape(-1, channels, math.prod(y.shape[2:])) for y in (self.x, g))
        products, sums = (x * g).sum(2), g.sum(2)
        grouped = (*self.mean[samples].shape, -1)
        mean, rstd = self.mean[samples, :, None].to(dtype), self.rstd[samples, :, None].to(dtype)
        return (rstd * (products.view(grouped) - mean * sums.view(grouped))).view(-1, channels)


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

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        return _sum_positions(g[samples], self.parameter, None)


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


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, list[Rule]]:
    """torch.nn.functional.rms_norm and the rule of its weight."""
    output = F.rms_norm(input, normalized_shape, weight, eps)
    if weight is None:
        return output, []
    return output, [RecomputedNormWeight(weight, input, lambda x: F.rms_norm(x, normalized_shape, None, eps), None)]


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, list[Rule]]:
    """torch.nn.functional.instance_norm and the rules of its parameters."""
    if use_input_stats and running_mean is not None:
        raise Refused("running statistics are made of the batch and are not private", "track_running_stats=False")
    output = F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    rules: list[Rule] = []
    if weight is not None:
        rules.append(
            RecomputedNormWeight(
                weight,
                input,
                lambda x: F.instance_norm(x, running_mean, running_var, None, None, use_input_stats, momentum, eps),
                channel=1,
            )
        )
    if bias is not None:
        rules.append(Bias(bias, channel=1))
    return output, rules
