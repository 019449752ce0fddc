"""The weight of a convolution, as a linear layer of patches: its shapes, operands and the library's weight gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import HALF
from clipping.core.microbatching import Parts
from clipping.numerics.gram import part
from clipping.numerics.products import product
from clipping.numerics.rounding_bounds import Reach
from clipping.rules.base import Spec
from clipping.rules.pixel_gram import Geometry, patches, phases
from clipping.rules.weight import Bilinear


class OfPatches(Bilinear):
    """A weight [p·groups, C/groups, *kernel] that multiplies the patches of an image.

    Args:
        weight: [p·groups, C/groups, *kernel].
        x: [B, C, *size], already padded if the padding differs between the two sides (`work` accepts a `Spec`).
        output_size: spatial size of the output.
        stride, padding, dilation: one number a spatial dimension.
        groups: as in torch.nn.Conv2d.
        share: `chunked_conv.Share` of the convolution's node, or None.

    Methods take:
        x, g: some samples' input, and their output's gradient (or its `Spec`).
        found, squares: numbers of each sample and group.
        fold: how many times as many groups.
    """

    library = "cudnn"

    def __init__(
        self,
        weight: Tensor,
        x: Tensor,
        output_size: torch.Size,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        share: Any = None,
    ) -> None:
        super().__init__(
            weight,
            positions=math.prod(output_size),
            inputs=math.prod(weight.shape[1:]),
            outputs=weight.shape[0] // groups,
            groups=groups,
        )
        self.x, self.stride, self.padding, self.dilation, self.share = x, stride, padding, dilation, share
        self.kernel = list(weight.shape[2:])

    def add_groups(self, squares: Tensor) -> Tensor:
        """[b · groups] to [b]."""
        return squares if self.groups == 1 else squares.view(-1, self.groups).sum(1)

    def grouped(self, x: Tensor) -> Tensor:
        """[b, groups · C, *size] to [b · groups, C, *size]."""
        return x if self.groups == 1 else x.reshape(-1, x.shape[1] // self.groups, *x.shape[2:])

    def by_sample(self, found: Tensor) -> Parts:
        """Add up groups, of squared norms and the columns of a reach [b · groups, 1 + k]: the result of `Way.norms`."""
        return self.add_groups(found[:, 0]), *Reach.of_columns(found[:, 1:]).of_groups(self.groups)

    def turns(self, g: Tensor | Spec) -> bool:
        """True if GPU kernels get copies with channels last; otherwise they would read single entries several times."""
        if g.dtype not in HALF or len(self.kernel) != 2 or math.prod(self.kernel) == 1 or self.groups > 1:
            return False
        known = [y for y in (self.x, g) if isinstance(y, Tensor)]  # a gradient may not exist yet
        return not (all(map(is_last, known)) or self.x.shape[1] % 16 or g.shape[1] % 16)

    def bytes_of_operands(self, g: Tensor | Spec) -> tuple[int, int]:
        """Bytes of one sample's input, and of its output gradient."""
        size = g.element_size()
        return math.prod(self.x.shape[1:]) * size, math.prod(g.shape[1:]) * size

    def operands(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        x, g = part(self.x, samples), part(g, samples)
        return x if x.dtype == g.dtype else x.to(g.dtype), g

    def weight_gradient(self, x: Tensor, g: Tensor, fold: int) -> Tensor:
        """The library's weight gradient [fold · outputs, ...] of a convolution with `fold` times as many groups."""
        weight = self.parameter
        if fold == 1 and self._by_rows(len(g)):
            a, g = (y.transpose(1, 2).flatten(0, 1) for y in self.by_position(x, g))
            return product(g, a)
        if fold != 1 or weight.dtype != g.dtype:
            weight = _of_any_values(g, (fold * weight.shape[0], *weight.shape[1:]))
        return torch.ops.aten.convolution_backward.default(
            g,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            fold * self.groups,
            [False, True, False],
        )[1]

    def _by_rows(self, samples: int) -> bool:
        """True for few pixels and a large weight, which the CPU library would copy to another layout."""
        few = samples * self.positions * (self.inputs + self.outputs) <= self.inputs * self.outputs
        return few and self.parameter.device.type == "cpu" and self._reads_one_pixel()

    @property
    def is_depthwise(self) -> bool:
        """True if each channel has its own kernel and one output."""
        return self.parameter.shape[1] == 1 and self.outputs == 1

    def unfolded(self) -> int:
        """Entries of one sample's patches that are not pixels already."""
        return 0 if self.is_pointwise() else self.positions * self.inputs * self.groups

    def pixels_of_phase(self) -> float:
        """Pixels of the image that one remainder of the stride reads."""
        return math.prod(self.x.shape[2:]) / math.prod(self.stride)

    def multiplications_of_pixels(self) -> float:
        """Multiplications of one sample's Gram matrices of pixels and of the output's gradient."""
        grams = sum(1 for _ in phases(self.geometry()))
        return self.positions**2 * self.groups * self.outputs + grams * self.pixels_of_phase() ** 2 * self.x.shape[1]

    def geometry(self) -> Geometry:
        """Kernel, stride, padding and dilation."""
        return Geometry(self.kernel, self.stride, self.padding, self.dilation)

    def by_position(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Patches [b·groups, d, T] and g [b·groups, p, T]."""
        count = x.shape[0] * self.groups
        a = (x if self.is_pointwise() else patches(x, self.geometry())).reshape(count, self.inputs, self.positions)
        return a, g.reshape(count, self.outputs, self.positions)

    def is_pointwise(self) -> bool:
        """True if patches are pixels."""
        return self._reads_one_pixel() and math.prod(self.stride) == 1

    def _reads_one_pixel(self) -> bool:
        return self.groups == 1 and math.prod(self.kernel) == 1 and not any(self.padding)


def is_last(x: Tensor) -> bool:
    """True for images that have channels last.

    Args:
        x: [n, C, *size].
    """
    return x.is_contiguous(memory_format=torch.channels_last)


def _of_any_values(g: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a dense weight of this shape with arbitrary values, in g's memory if it fits.

    The library requires one, but reads its values only for the input gradient.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if g.untyped_storage().nbytes() < math.prod(shape) * g.element_size():
        return g.new_empty(shape)
    return g.as_strided(shape, strides, 0)
