"""The weight of a convolution, as a linear layer of patches, and the ways to the norms of its gradients.

The per-sample gradient needs no patches. With the batch folded into the groups, the library's kernel for a
convolution's weight gradient returns one gradient for each sample (Rochette et al. 2019, arXiv:1912.06015).
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import HALF, norm_dtype, wide_dtype
from clipping.core.microbatching import Parts
from clipping.numerics import kernels
from clipping.numerics.convolution_memory import Convolution
from clipping.numerics.per_sample import gram_product, part
from clipping.numerics.products import product, products
from clipping.rules.base import Direct, Gram, Spec, Way, Work
from clipping.rules.linear import Bilinear
from clipping.rules.pixel_gram import Geometry, every, pairs, patches, phases, pixel_gram_product, pixel_norms


class OfPatches(Bilinear):
    """A weight [p·groups, C/groups, *kernel] that multiplies the patches of an image.

    Args:
        weight: [p·groups, C/groups, *kernel].
        x: [B, C, *size], already padded if the padding differs between the two sides.
        output_size: spatial size of the output.
        stride, padding, dilation: one number a spatial dimension.
        groups: as in torch.nn.Conv2d.
        share: `chunked_conv.Share` of the convolution's node, or None.
        image: [C, *size] of a transposed convolution's output: patches are taken of its gradient, in place of x.

    Methods take:
        x, g: some samples' input, and their output's gradient (or its `Spec`).
        samples: slice of the batch.
        fold: factor by which the number of groups is multiplied.
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
        image: torch.Size | None = None,
    ) -> None:
        super().__init__(
            weight,
            positions=math.prod(output_size),
            inputs=math.prod(weight.shape[1:]),
            outputs=weight.shape[0] // groups,
            groups=groups,
        )
        self.x, self.stride, self.padding, self.dilation, self.share = x, stride, padding, dilation, share
        self.kernel, self.output_size = list(weight.shape[2:]), output_size
        self.image, self.transposed = x.shape[1:] if image is None else image, image is not None

    def grouped(self, x: Tensor) -> Tensor:
        """[b, groups · C, *size] to [b · groups, C, *size]."""
        return x if self.groups == 1 else x.reshape(-1, x.shape[1] // self.groups, *x.shape[2:])

    def laid_out(self, g: Tensor, *, ghost: bool) -> Tensor:
        return self._turned(g, image=self.transposed) if ghost else g  # instantiation folds images into channels

    def lay_out_input(self, g: Tensor) -> None:
        if self.turns(g):
            self.x = self._turned(self.x.to(g.dtype), image=not self.transposed)

    def images(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """Return `operands`, `turned`."""
        return self.turned(*self.operands(g, samples))

    def turned(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return `operands` in the layout that GPU kernels read fast, copied unless they were laid out before."""
        return self._turned(x, image=True), self._turned(g, image=False)

    def turns(self, g: Tensor | Spec) -> bool:
        """True if GPU kernels read patches of channels last, because other layouts would be read entry by entry."""
        multiplied = g.dtype in HALF and len(self.kernel) == 2 and math.prod(self.kernel) > 1 and self.groups == 1
        in_lines = not self.image[0] % 16 and not (self.outputs % 16 and self.positions % 16)
        return multiplied and in_lines and kernels.fused.runs(self.parameter)

    def _turned(self, x: Tensor, *, image: bool) -> Tensor:
        """x with channels last if kernels read that faster.

        Args:
            image: True for what patches are taken of. The other operand may as well have its positions last.
        """
        if not self.turns(x) or x.is_contiguous(memory_format=torch.channels_last):
            return x
        if not image and kernels.tiles.in_lines(x.flatten(2), 2):
            return x
        return kernels.fused.turned(x.detach())

    def bytes_of_operands(self, g: Tensor | Spec) -> tuple[int, int]:
        size = g.element_size()
        return math.prod(self.x.shape[1:]) * size, math.prod(g.shape[1:]) * size

    def operands(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        x, g = part(self.x, samples), part(g, samples)
        x = x if x.dtype == g.dtype else x.to(g.dtype)
        return (g, x) if self.transposed else (x, g)

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
        return math.prod(self.image[1:]) / math.prod(self.stride)

    def multiplications_of_pixels(self) -> float:
        """Multiplications of one sample's Gram matrices of pixels and of the output's gradient."""
        grams = sum(1 for _ in phases(self.geometry()))
        return self.positions**2 * self.groups * self.outputs + grams * self.pixels_of_phase() ** 2 * self.image[0]

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


def _of_any_values(g: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a dense weight of this shape with arbitrary values, in g's memory if it fits.

    The library requires one, but reads its values only for the input gradient.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if g.untyped_storage().nbytes() < math.prod(shape) * g.element_size():
        return g.new_empty(shape)
    return g.as_strided(shape, strides, 0)


class FromOperands(Direct[OfPatches]):
    """Instantiates the gradients from some samples' operands."""

    @abstractmethod
    def gradients(self, rule: OfPatches, x: Tensor, g: Tensor) -> Tensor:
        """Return the per-sample gradients, [b, ...] in the order of the weight's entries.

        Args:
            x, g: some samples' input and output gradient, as `operands` returns them.
        """


class _Unfold(FromOperands):
    """Unfolds patches, and multiplies."""

    name = "unfold"

    def gradients(self, rule: OfPatches, x: Tensor, g: Tensor) -> Tensor:
        a, g = rule.by_position(x, g)
        return products(g, a)

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        work, unfolded = super().work(rule, g), rule.unfolded() * g.element_size()
        return work._replace(traffic=work.traffic + 3 * unfolded, workspace=work.workspace + unfolded)


class _Grouped(FromOperands):
    """Folds the batch into the groups of the library's weight gradient."""

    name = "grouped"

    def gradients(self, rule: OfPatches, x: Tensor, g: Tensor) -> Tensor:
        x, g = (y.to(wide_dtype(y.dtype)).reshape(1, -1, *y.shape[2:]) for y in (x, g))
        return rule.weight_gradient(x, g, x.shape[1] // rule.image[0])

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        """Many small products instead of one weight gradient: dot products if depthwise."""
        work, on_tensor_cores = super().work(rule, g), g.dtype in HALF and not rule.parameter.is_cpu
        slower = 30 if rule.is_depthwise else 8 if on_tensor_cores else 1.5
        return work._replace(multiplications=slower * work.multiplications)

    def bytes_at_once(self, rule: OfPatches, g: Tensor | Spec, block: int) -> int:
        if not rule.parameter.is_cpu:
            return super().bytes_at_once(rule, g, block)
        outputs, *others = rule.parameter.shape
        fits = rule.samples(g) * outputs * rule.positions >= block * rule.parameter.numel()
        spare = 0 if fits else block * rule.instantiated_bytes(g)
        x, y = ([1, block * channels, *size] for channels, *size in (rule.image, (outputs, *rule.output_size)))
        folded = Convolution(x, (block * outputs, *others), y, rule.stride, block * rule.groups, g.dtype)
        return spare + folded.weight_gradient()


class _Shifts(FromOperands):
    """For each kernel offset of a depthwise convolution, sums g · x where both exist."""

    name = "shifts"

    def gradients(self, rule: OfPatches, x: Tensor, g: Tensor) -> Tensor:
        x, g = (y.to(wide_dtype(y.dtype)) for y in (x, g))
        found = g.new_zeros(*g.shape[:2], 1, *rule.kernel)
        for remainders, offsets in phases(rule.geometry()):
            phase = every(x, remainders, rule.stride)
            for offset in itertools.product(*offsets):
                spans = [
                    (max(0, -o), min(n, m - o)) for o, n, m in zip(offset, g.shape[2:], phase.shape[2:], strict=True)
                ]
                if all(low < high for low, high in spans):
                    at = [slice(*span) for span in spans]
                    of = [slice(low + o, high + o) for (low, high), o in zip(spans, offset, strict=True)]
                    places = zip(rule.stride, offset, remainders, rule.padding, rule.dilation, strict=True)
                    k = [(s * o + r + p) // d for s, o, r, p, d in places]
                    where: tuple[slice | int, ...] = (slice(None), slice(None), 0, *k)
                    found[where] = (g[:, :, *at] * phase[:, :, *of]).flatten(2).sum(2)
        return found

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        """Touches only where image and shifted kernel overlap."""
        moved = math.prod(min(k, 2 * n - 1) for k, n in zip(rule.kernel, rule.image[1:], strict=True))
        bytes_ = rule.positions * rule.groups * g.element_size()
        return Work(0.0, 3 * moved * bytes_, super().work(rule, g).workspace + bytes_)


class _Pairs(FromOperands):
    """For a depthwise convolution of small images: forms all g_t x_n, then sums the pairs of each kernel offset."""

    name = "pairs"

    def gradients(self, rule: OfPatches, x: Tensor, g: Tensor) -> Tensor:
        x, g = (y.to(wide_dtype(y.dtype)) for y in (x, g))
        pixels = x[0, 0].numel()
        each = torch.eye(pixels, dtype=x.dtype, device=x.device).view(pixels, 1, *x.shape[2:])
        # [n, offset, t]: 1 where t reads n
        joins = patches(each, rule.geometry()).reshape(pixels, rule.inputs, rule.positions)
        found = g.flatten(2).flatten(0, 1)[:, :, None] * x.flatten(2).flatten(0, 1)[:, None]
        return found.flatten(1) @ joins.permute(2, 0, 1).flatten(0, 1)

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        count, size = rule.positions * math.prod(rule.image[1:]) * rule.groups, g.element_size()
        return Work(count * rule.inputs, 2 * count * size, super().work(rule, g).workspace + count * size)


class _Patches(Gram[OfPatches]):
    """Gram matrices of unfolded patches."""

    name = "patches"

    def norms(self, rule: OfPatches, g: Tensor, samples: slice) -> Parts:
        a, of = (y.transpose(1, 2) for y in rule.by_position(*rule.operands(g, samples)))
        return (rule.add_groups(gram_product(a, of, rule.workspace(g))),)

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        work, unfolded = super().work(rule, g), 2 * rule.unfolded() * norm_dtype(g.dtype).itemsize
        return work._replace(traffic=work.traffic + unfolded, workspace=work.workspace + unfolded)

    def bytes_at_once(self, rule: OfPatches, g: Tensor | Spec, block: int) -> int:
        return int(block * rule.work(g, self.name).workspace)


class _Pixels(Way[OfPatches]):
    """Gram matrices of pixels, shifted (`clipping.rules.pixel_gram`): whole ones for the GPU kernel, if they fit."""

    name = "pixels"

    def norms(self, rule: OfPatches, g: Tensor, samples: slice) -> Parts:
        x, of = map(rule.grouped, rule.operands(g, samples))
        if self._is_whole(rule, g):
            return rule.by_sample(pixel_norms(x, of, rule.geometry(), rule.lost(g)))
        return (rule.add_groups(pixel_gram_product(x, of, rule.geometry(), rule.workspace(g))),)

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        wide = norm_dtype(g.dtype).itemsize
        if self._is_whole(rule, g):
            entries, of_outputs = self._pairs(rule), rule.groups * rule.positions**2
            products = of_outputs * rule.outputs + (entries - of_outputs) * rule.image[0] / rule.groups
            read = sum(1 for _ in phases(rule.geometry())) / math.prod(rule.stride)  # pixels are copied by phase
            copied = read * rule.bytes_of_operands(g)[0] if math.prod(rule.stride) > 1 else 0
            return Work(products, 2 * (entries * wide + copied), entries * wide + copied)
        count, phase = rule.positions**2 * rule.groups, rule.pixels_of_phase() ** 2
        traffic = 3 * sum(rule.kernel) * count * wide
        return Work(rule.multiplications_of_pixels(), traffic, (2 * count + phase * rule.groups) * wide)

    def _is_whole(self, rule: OfPatches, g: Tensor | Spec) -> bool:
        fits = self._pairs(rule) * norm_dtype(g.dtype).itemsize <= rule.room()
        runs = len(rule.kernel) <= 2 and kernels.fused.runs(rule.parameter)
        return fits and runs and g.dtype in kernels.cuda.DTYPES

    def _pairs(self, rule: OfPatches) -> int:
        return rule.groups * pairs(rule.geometry(), rule.image[1:], rule.output_size)


UNFOLD, GROUPED, PATCHES = _Unfold(), _Grouped(), _Patches()
ANY = _Pixels(), PATCHES, UNFOLD, GROUPED
POINTWISE = PATCHES, UNFOLD  # patches are pixels
DEPTHWISE = _Shifts(), GROUPED, _Pairs()  # a Gram matrix of one channel is an outer product
