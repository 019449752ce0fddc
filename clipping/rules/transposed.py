"""Transposed convolutions in one to three dimensions, by the rule of the adjoint convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import as_autocast
from clipping.core.microbatching import Parts
from clipping.numerics.gram import part
from clipping.numerics.rounding_bounds import Reach
from clipping.rules.base import Bias, Gradient, Refused, Spec, Work
from clipping.rules.convolution import ConvolutionWeight, of_each


class TransposedConvolutionWeight(ConvolutionWeight):
    """∂/∂W of a transposed convolution, [C, p, *kernel]: that of the adjoint convolution.

    The roles swap: patches are of the output's gradient, and the input multiplies them.
    """

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        return self._swapped(g).instantiate(self.x.to(g.dtype), samples, way)

    def work(self, g: Tensor | Spec, way: str) -> Work:
        return self._swapped(g).work(self.x, way)

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        return self._swapped(g).weighted(part(self.x, slice(0, g.shape[0])).to(g.dtype), factors)

    def norms(self, g: Tensor, samples: slice, way: str) -> Parts:
        return self._swapped(g).norms(self.x.to(g.dtype), samples, way)

    def reach(self, g: Tensor) -> Reach:
        return self._swapped(g).reach(self.x.to(g.dtype))

    def _swapped(self, g: Tensor | Spec) -> ConvolutionWeight:
        size = self.x.shape[2:]
        x = cast(Tensor, g)
        return ConvolutionWeight(self.parameter, x, size, self.stride, self.padding, self.dilation, self.groups)


def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.conv_transpose1d, 2d and 3d, and the gradients of their parameters."""
    spatial, input = weight.dim() - 2, as_autocast(input)
    strides, pads, dilations = (of_each(value, spatial) for value in (stride, padding, dilation))
    extra = of_each(output_padding, spatial)
    if any(e >= s for e, s in zip(extra, strides, strict=True)):
        raise Refused("output_padding as large as the stride has no rule", "output_padding < stride")
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    output = function(input, weight, bias, strides, pads, extra, groups, dilations)
    size = input.shape[2:]
    made_of = (input, size, strides, pads, dilations, groups)
    return output, ((weight, TransposedConvolutionWeight, *made_of), (bias, Bias, 1))
