"""y = a Wᵀ + b on any number of dimensions: W [p, d], a [B, *, d], y [B, *, p]; everything between is positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.rules.base import Bias, Rule, gram_product


class LinearWeight(Rule):
    """∂/∂W of one sample is Σ_t g_t a_tᵀ = gᵀa, [p, d]."""

    has_ghost = True

    def __init__(self, weight: Tensor, a: Tensor) -> None:
        outputs, inputs = weight.shape
        super().__init__(weight, positions=math.prod(a.shape[1:-1]), inputs=inputs, outputs=outputs)
        self.a = a

    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        a, g = self._positions(g, samples)
        return torch.bmm(g.transpose(1, 2), a)

    def _ghost(self, g: Tensor, samples: slice) -> Tensor:
        return gram_product(*self._positions(g, samples))

    def _positions(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """a [b, T, d] and g [b, T, p], of g's dtype: under autocast the input may be wider than what was multiplied."""
        a, g = self.a[samples].to(g.dtype), g[samples]
        count = a.shape[0]
        return a.reshape(count, -1, self.inputs), g.reshape(count, -1, self.outputs)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, list[Rule]]:
    """torch.nn.functional.linear and the rules of its parameters."""
    rules: list[Rule] = [LinearWeight(weight, input)]
    if bias is not None:
        rules.append(Bias(bias, channel=-1))
    return F.linear(input, weight, bias), rules
