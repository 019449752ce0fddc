"""Rules of convolutions, also transposed, in one to three dimensions, with stride, padding, dilation and groups.

Let A [B, groups, T, d] be the patches of the padded input, with T = ∏ output size and d = C/groups · ∏ kernel size.
Then a convolution is a linear layer in each group: y = A Wᵀ, W [groups, p, d] (arXiv:2205.10683, equation 2.5).
A transposed convolution exchanges the roles: the patches come from the output's gradient, and the input multiplies
them.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import as_autocast, wide_dtype
from clipping.numerics import kernels
from clipping.numerics.rounding_bounds import Reach, of_rows, row_norms
from clipping.rules.base import Gradient, Refused, Spec
from clipping.rules.elementwise import Bias
from clipping.rules.patches import ANY, DEPTHWISE, POINTWISE, UNFOLD, FromOperands, OfPatches
from clipping.rules.pixel_gram import reach_of_pixels


class ConvolutionWeight(OfPatches):
    """∂/∂W of one sample, [p·groups, C/groups, *kernel]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ways = POINTWISE if self.is_pointwise() else DEPTHWISE if self.is_depthwise else ANY
        self.ways = (*self.ways, *kernels.ways.of(self))
        self.settings = self.image[1:], *map(tuple, self.geometry())

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        x, g = self.operands(g, samples)
        chosen = self.named(way)
        found = (chosen if isinstance(chosen, FromOperands) else UNFOLD).gradients(self, x, g)
        return found.view(len(x), *self.parameter.shape)

    def reach(self, g: Tensor) -> Reach:
        """Reach from norms of pixels; a patch's squared norm sums their squares over the kernel's offsets."""

        def of_block(samples: slice) -> Reach:
            x, of = self.operands(g, samples)
            count = x.shape[0] * self.groups
            pixels = row_norms(x.reshape(count, -1, *x.shape[2:]), 1)
            norms = row_norms(of.reshape(count, self.outputs, self.positions), 1)
            by_kernel = kernels.fused.runs(pixels, norms)
            if len(self.kernel) <= 2 and (by_kernel or kernels.cpu.supported(pixels, norms)):
                found = reach_of_pixels if by_kernel else kernels.cpu.patch_reach
                made = found(pixels, norms, self.geometry(), of.shape[-1], self.lost(of))
                return Reach.of_columns(made).of_groups(self.groups)
            pixels = pixels.unsqueeze(1).square_()
            convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
            ones = pixels.new_ones(1, 1, *self.kernel)
            sums = convolve(pixels, ones, None, self.stride, self.padding, self.dilation)
            reach = of_rows(sums.clamp_(min=0).sqrt_().view(count, -1), norms, self.inputs, self.outputs)
            return reach.of_groups(self.groups)

        return self._reach_of_rows(g, of_block, 4 * sum(self.bytes_of_operands(g)) // max(1, self.inputs))

    def gradients(self, x: Tensor, g: Tensor, count: int) -> Tensor:
        """Fold portions into the groups. Sample i goes to portion i mod `count`, so that this is a view."""
        x, g = (y.to(wide_dtype(y.dtype)) for y in (x, g))
        if count > 1:
            x, g = (y.reshape(len(y) // count, count * y.shape[1], *y.shape[2:]) for y in (x, g))
        return self.weight_gradient(x, g, count).view(count, *self.parameter.shape)

    def copied(self, g: Tensor | Spec) -> int:
        return max(self.bytes_of_operands(g))


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.conv1d, conv2d and conv3d, and the gradients of their parameters.

    For other padding modes torch.nn.Conv2d pads the input first and calls this with padding 0.
    """
    spatial, input = weight.dim() - 2, as_autocast(input)
    strides, dilations = of_each(stride, spatial), of_each(dilation, spatial)
    if isinstance(padding, str):
        totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = [total // 2 for total in totals]
        if any(total % 2 for total in totals):  # even kernels pad one more on the right
            sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
            input, pads = F.pad(input, sides), [0] * spatial
    else:
        pads = of_each(padding, spatial)
    geometry = strides, pads, dilations, groups
    function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    share = kernels.chunked_conv.Share() if kernels.chunked_conv.applies(input, weight, *geometry) else None
    if share is not None:
        output = kernels.chunked_conv.Pieces.apply(share, input, weight, bias, *geometry)
    else:
        output = function(input, weight, bias, *geometry)
    return output, ((weight, ConvolutionWeight, input, output.shape[2:], *geometry, share), (bias, Bias, output.shape))


def of_each(value: int | tuple[int, ...], spatial: int) -> list[int]:
    """Return one number for each spatial dimension.

    Args:
        value: one number for all, or one for each dimension.
        spatial: number of spatial dimensions.
    """
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


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
    made_of = (input, input.shape[2:], strides, pads, dilations, groups, None, output.shape[1:])
    return output, ((weight, ConvolutionWeight, *made_of), (bias, Bias, output.shape))
