"""Rules of convolutions in one, two and three dimensions, with stride, padding, dilation and groups.

Let A [B, groups, T, d] be the patches of the padded input, with T = ∏ output size and d = C/groups · ∏ kernel size.
Then a convolution is a linear layer in each group: y = A Wᵀ, W [groups, p, d] (arXiv:2205.10683, equation 2.5).

The per-sample gradient needs no patches. With the batch folded into the groups, the library's kernel for a
convolution's weight gradient returns one gradient for each sample (Rochette et al. 2019, arXiv:1912.06015).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import HALF, as_autocast, norm_dtype, wide_dtype
from clipping.core.microbatching import concatenated, power_of_two
from clipping.numerics import kernels
from clipping.numerics.chunked_sums import added_at_once
from clipping.numerics.convolution_memory import Convolution
from clipping.numerics.gram import gram_product, part
from clipping.numerics.products import product, products
from clipping.numerics.rounding_bounds import Reach, of_lost, of_rows, row_norms
from clipping.rules.base import COMPILED, GRAM_KERNEL, NORM_KERNEL, Bias, Gradient, Route, Rule, Spec, Work
from clipping.rules.pixel_gram import (
    Geometry,
    compiled_norms,
    every,
    pairs,
    patches,
    phases,
    pixel_gram_product,
    pixel_norms,
    reach_of_pixels,
)
from clipping.rules.weight import Bilinear

BUSY = 2**23
"""Least entries of all portions together that keep a GPU busy: 512 tiles of 128 by 128, a few for each processor."""
MOST_PIXELS = 1024
"""Most pixels of an image for the compiled way; each thread holds the whole Gram matrix of one sample's pixels."""


class ConvolutionWeight(Bilinear):
    """∂/∂W of one sample, [p·groups, C/groups, *kernel].

    Args:
        weight: [p·groups, C/groups, *kernel].
        x: [B, C, *size], already padded if the padding differs between the two sides (`work` accepts a `Spec`).
        output_size: spatial size of the output.
        stride, padding, dilation: one number a spatial dimension.
        groups: as in torch.nn.Conv2d.
        share: `chunked_conv.Share` of the convolution's node, or None.
    """

    ghosts: tuple[str, ...] = ("pixels", "patches")
    instantiations: tuple[str, ...] = ("unfold", "grouped")
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
        if self._is_pointwise():  # patches are pixels
            self.ghosts, self.instantiations = ("patches",), ("unfold",)
        elif weight.shape[1] == 1 and self.outputs == 1:  # depthwise: a Gram matrix of one channel is an outer product
            self.ghosts, self.instantiations = (), ("shifts", "grouped", "pairs")
        if len(self.kernel) <= 2 and self.ghosts:
            self.offer_kernels(GRAM_KERNEL, NORM_KERNEL)
            if max(self.positions, math.prod(x.shape[2:])) <= MOST_PIXELS:
                self.offer_compiled()

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        x, g = self.operands(g, samples)
        count = x.shape[0]
        if way != "unfold":  # "unfold" uses products that accumulate in a wide dtype themselves
            x, g = x.to(wide_dtype(g.dtype)), g.to(wide_dtype(g.dtype))
        if way == "shifts":
            return self._by_shifts(x, g)
        if way == "pairs":
            return self._by_pairs(x, g)
        if way != "grouped":
            a, g = self._positions(x, g)
            return products(g, a).view(count, *self.parameter.shape)
        folded_x = x.reshape(1, count * x.shape[1], *x.shape[2:])
        folded_g = g.reshape(1, count * g.shape[1], *g.shape[2:])
        return self._weight_gradient(folded_x, folded_g, count).view(count, *self.parameter.shape)

    def _by_shifts(self, x: Tensor, g: Tensor) -> Tensor:
        """Depthwise gradients [b, C, 1, *kernel]: for each kernel offset, sum g · x where both exist."""
        found = g.new_zeros(*g.shape[:2], 1, *self.kernel)
        for remainders, offsets in phases(self._geometry()):
            phase = every(x, remainders, self.stride)
            for offset in itertools.product(*offsets):
                spans = [
                    (max(0, -o), min(n, m - o)) for o, n, m in zip(offset, g.shape[2:], phase.shape[2:], strict=True)
                ]
                if all(low < high for low, high in spans):
                    at = [slice(*span) for span in spans]
                    of = [slice(low + o, high + o) for (low, high), o in zip(spans, offset, strict=True)]
                    places = zip(self.stride, offset, remainders, self.padding, self.dilation, strict=True)
                    k = [(s * o + r + p) // d for s, o, r, p, d in places]
                    where: tuple[slice | int, ...] = (slice(None), slice(None), 0, *k)
                    found[where] = (g[:, :, *at] * phase[:, :, *of]).flatten(2).sum(2)
        return found

    def _by_pairs(self, x: Tensor, g: Tensor) -> Tensor:
        """Depthwise gradients for small images: form all products g_t x_n, then sum the pairs of each kernel offset."""
        pixels = x[0, 0].numel()
        each = torch.eye(pixels, dtype=x.dtype, device=x.device).view(pixels, 1, *x.shape[2:])
        # [n, offset, t]: 1 where t reads n
        joins = patches(each, self._geometry()).reshape(pixels, self.inputs, self.positions)
        products = g.flatten(2).flatten(0, 1)[:, :, None] * x.flatten(2).flatten(0, 1)[:, None]
        return (products.flatten(1) @ joins.permute(2, 0, 1).flatten(0, 1)).view(*g.shape[:2], 1, *self.kernel)

    def reach(self, g: Tensor) -> Reach:
        """Reach from norms of pixels; a patch's squared norm sums their squares over the kernel's offsets."""

        def of_block(samples: slice) -> Reach:
            x, of = self.operands(g, samples)
            count = x.shape[0] * self.groups
            pixels = row_norms(x.reshape(count, -1, *x.shape[2:]), 1)
            norms = row_norms(of.reshape(count, self.outputs, self.positions), 1)
            by_kernel = kernels.fused.runs(pixels, norms)
            if len(self.kernel) <= 2 and (by_kernel or kernels.cpu.in_one_piece(pixels, norms)):
                found = reach_of_pixels if by_kernel else kernels.cpu.patch_reach
                made = found(pixels, norms, self._geometry(), of.shape[-1], self._least(of))
                return Reach.of_columns(made).of_groups(self.groups)
            pixels = pixels.unsqueeze(1).square_()
            convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
            ones = pixels.new_ones(1, 1, *self.kernel)
            sums = convolve(pixels, ones, None, self.stride, self.padding, self.dilation)
            reach = of_rows(sums.clamp_(min=0).sqrt_().view(count, -1), norms, self.inputs, self.outputs)
            return reach.of_groups(self.groups)

        return self._reach_of_rows(g, of_block, 4 * sum(self._each(g)) // max(1, self.inputs))

    def squares_and_reach(
        self, g: Tensor, route: Route, others: Sequence[tuple[Rule, Tensor]] = ()
    ) -> tuple[Tensor, list[Reach]]:
        way = route.way or self.best_way(g, ghost=route.ghost)
        if not route.ghost or not self._finds_reach(g, way):
            return super().squares_and_reach(g, route, others)
        turns = self._turns(g)

        def found(samples: slice) -> Tensor:
            return self._with_reach(*self.operands(g, samples), way, turns)

        made = concatenated(found, self.blocks(g, way, route.block))
        squares, reach = made[:, 0], Reach.of_columns(made[:, 1:]).of_groups(self.groups)
        return squares.view(-1, self.groups).sum(1) if self.groups > 1 else squares, [reach]

    def _finds_reach(self, g: Tensor, way: str) -> bool:
        if way == NORM_KERNEL:
            return self._turns(g)
        return way in (COMPILED, GRAM_KERNEL) or (way == "pixels" and self._whole(g))

    def _with_reach(self, x: Tensor, g: Tensor, way: str, turns: bool) -> Tensor:
        """[b·groups, 1 + k]: squared norms, and the columns for `Reach.of_columns`.

        `turns` is `_turns` of the whole batch: a block of one sample may have channels last where the batch has not.
        """
        if way in (GRAM_KERNEL, NORM_KERNEL):
            geometry, least = self._geometry(), self._least(g)
            turned = [kernels.fused.turned(y) for y in (x, g)] if turns else []
            (x, g), *norms = zip(*turned, strict=True) if turned else [(x, g)]
            if way == GRAM_KERNEL:
                return kernels.convolution_gram.norms(x, g, geometry, self.groups, least)
            ((pixels, rows),) = norms
            reach = reach_of_pixels(pixels, rows.flatten(1), geometry, g.shape[-1], least)
            return torch.cat([kernels.cuda.convolution_norm(x, g, *geometry, 1).unsqueeze(1), reach], 1)
        found = compiled_norms if way == COMPILED else pixel_norms
        return found(self._grouped(x), self._grouped(g), self._geometry(), self._least(g))

    def _whole(self, g: Tensor | Spec) -> bool:
        """True if whole Gram matrices of pixels are formed for the GPU kernel."""
        fits = self._pairs(g) * norm_dtype(g.dtype).itemsize <= self.room()
        return fits and len(self.kernel) <= 2 and kernels.fused.runs(self.parameter) and g.dtype in kernels.cuda.DTYPES

    def _turns(self, g: Tensor | Spec) -> bool:
        """True if GPU kernels get copies with channels last; otherwise they would read single entries several times."""
        if g.dtype not in HALF or len(self.kernel) != 2 or math.prod(self.kernel) == 1 or self.groups > 1:
            return False
        known = [y for y in (self.x, g) if isinstance(y, Tensor)]  # a gradient may not exist yet
        return not (all(map(_is_last, known)) or self.x.shape[1] % 16 or g.shape[1] % 16)

    def _least(self, g: Tensor) -> tuple[float, float]:
        return of_lost(g.dtype, self.inputs, self.outputs)

    def _pairs(self, g: Tensor | Spec) -> int:
        return self.groups * pairs(self._geometry(), self.x.shape[2:], g.shape[2:])

    def _grouped(self, x: Tensor) -> Tensor:
        """[b, groups · C, *size] to [b · groups, C, *size]."""
        return x if self.groups == 1 else x.reshape(-1, x.shape[1] // self.groups, *x.shape[2:])

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        if not self._sums_by_kernel(g):
            return super().weighted(g, factors)
        factors, geometry, turns = factors.to(torch.float32).contiguous(), self._geometry(), self._turns(g)

        def sums(samples: slice, count: int) -> Tensor:
            x, of = self.operands(g, samples)
            if turns:
                x, of = (y if _is_last(y) else kernels.fused.turned(y)[0] for y in (x, of))
            return kernels.fused.weighted_patches(x, of, part(factors, samples), geometry, count)

        return added_at_once(sums, self.samples(g), *self._kernel_portions(g))

    def _sums_by_kernel(self, g: Tensor | Spec) -> bool:
        """True if the kernel that scales no copy forms the sum."""
        ours = g.dtype in HALF and len(self.kernel) == 2 and self.groups == 1 and self.positions > 0
        return ours and kernels.fused.runs(self.parameter)

    def _kernel_portions(self, g: Tensor | Spec) -> tuple[int, int]:
        """Samples in a portion, and samples at once. There are enough portions to keep a GPU busy.

        As in `rounding_bounds.portion`, the batch size counts as the next power of two.
        """
        count, entries = power_of_two(self.samples(g)), self.parameter.numel()
        most = min(self._most(g), max(1, count * entries // BUSY))
        most = 1 << most.bit_length() - 1
        copied = sum(self._each(g)) if self._turns(g) else 1
        portions = max(1, self.room() // (2 * 4 * entries))  # two blocks may be added up at once
        return most, max(1, min(self.room() // copied, most * portions))

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return self.gradients(x, g, 1)[0]

    def gradients(self, x: Tensor, g: Tensor, count: int) -> Tensor:
        """Fold portions into the groups. Sample i goes to portion i mod `count`, so that this is a view."""
        x, g = (y.to(wide_dtype(y.dtype)) for y in (x, g))
        if count > 1:
            x, g = (y.reshape(len(y) // count, count * y.shape[1], *y.shape[2:]) for y in (x, g))
        return self._weight_gradient(x, g, count).view(count, *self.parameter.shape)

    def copied(self, g: Tensor | Spec) -> int:
        return max(self._each(g))

    def _each(self, g: Tensor | Spec) -> tuple[int, int]:
        """Bytes of one sample's input, and of its output gradient."""
        size = g.element_size()
        return math.prod(self.x.shape[1:]) * size, math.prod(g.shape[1:]) * size

    def operands(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        x, g = part(self.x, samples), part(g, samples)
        return x if x.dtype == g.dtype else x.to(g.dtype), g

    def _weight_gradient(self, x: Tensor, g: Tensor, fold: int) -> Tensor:
        """The library's weight gradient [fold · outputs, ...] of a convolution with `fold` times as many groups."""
        weight = self.parameter
        if fold == 1 and self._by_rows(len(g)):
            a, g = (y.transpose(1, 2).flatten(0, 1) for y in self._positions(x, g))
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

    def held_input(self) -> Tensor | None:
        return self.x

    def shapes(self) -> tuple[object, ...]:
        return *super().shapes(), self.x.shape[2:], *map(tuple, self._geometry())

    def work(self, g: Tensor | Spec, way: str) -> Work:
        work, size = super().work(g, way), g.element_size()
        unfolded = 0 if self._is_pointwise() else self.positions * self.inputs * self.groups
        if way == "unfold":
            return work._replace(traffic=work.traffic + 3 * unfolded * size, workspace=work.workspace + unfolded * size)
        if way == "shifts":  # only where image and shifted kernel overlap
            moved = math.prod(min(k, 2 * n - 1) for k, n in zip(self.kernel, self.x.shape[2:], strict=True))
            touched = 3 * moved * self.positions * self.groups
            return Work(0.0, touched * size, work.workspace + self.positions * self.groups * size)
        if way == "pairs":
            pairs = self.positions * math.prod(self.x.shape[2:]) * self.groups
            return Work(pairs * self.inputs, 2 * pairs * size, work.workspace + pairs * size)
        if way == "grouped":  # many small products instead of one weight gradient: dot products if depthwise
            on_tensor_cores = g.dtype in HALF and not self.parameter.is_cpu
            slower = 30 if "shifts" in self.instantiations else 8 if on_tensor_cores else 1.5
            return work._replace(multiplications=slower * work.multiplications)
        if way in (GRAM_KERNEL, NORM_KERNEL):
            copied, multiplications = sum(self._each(g)) if self._turns(g) else 0, work.multiplications
            if way == GRAM_KERNEL:
                sizes = self.positions, self.parameter.shape[1], self.outputs, math.prod(self.kernel)
                multiplications = self.groups * kernels.convolution_gram.multiplications(*sizes)
            return Work(multiplications, 2 * copied, work.workspace + copied)
        wide = norm_dtype(g.dtype).itemsize
        if way == "patches":
            return work._replace(
                traffic=work.traffic + 2 * unfolded * wide, workspace=work.workspace + 2 * unfolded * wide
            )
        if way not in ("pixels", COMPILED):
            return work
        if way == "pixels" and self._whole(g):
            bytes_ = self._pairs(g) * wide
            return Work(self._pairs(g) / self.groups * max(self.x.shape[1], g.shape[1]), 2 * bytes_, bytes_)
        channels, size_of_x = self.x.shape[1], math.prod(self.x.shape[2:])
        phase = (size_of_x / math.prod(self.stride)) ** 2
        grams = sum(1 for _ in phases(self._geometry()))
        pairs, shifts = self.positions**2 * self.groups, sum(self.kernel)
        multiplications = pairs * self.outputs + grams * phase * channels
        if way == COMPILED:  # half of the pairs
            return Work(multiplications / 2, math.prod(self.kernel) * pairs / 2 * wide, size)
        return Work(
            multiplications,
            3 * shifts * pairs * wide,
            (2 * pairs + phase * self.groups) * wide,
        )

    def norm_bytes(self, g: Tensor | Spec, way: str, block: int) -> int:
        if way in ("patches", "unfold"):
            return int(block * self.work(g, way).workspace)
        if way == COMPILED:
            features = max(self.parameter.shape[1], self.parameter.shape[0] // self.groups)
            return kernels.cpu.scratch_bytes(math.prod(self.x.shape[2:]), self.positions, features, block, g.dtype)
        if way != "grouped" or self.parameter.device.type != "cpu":
            return super().norm_bytes(g, way, block)
        spare = 0 if g.numel() >= block * self.parameter.numel() else block * self.instantiated_bytes(g)
        outputs, *kernel = self.parameter.shape  # the block's samples are folded into the groups
        x, y = ([1, block * shape[1], *shape[2:]] for shape in (self.x.shape, g.shape))
        folded = Convolution(x, (block * outputs, *kernel), y, self.stride, block * self.groups, g.dtype)
        return spare + folded.weight_gradient()

    def _ghost(self, g: Tensor, samples: slice, way: str) -> Tensor:
        available, finds_reach, turns = self.workspace(g), self._finds_reach(g, way), self._turns(g)
        x, g = self.operands(g, samples)
        count, groups = x.shape[0], self.groups
        if finds_reach:
            found = self._with_reach(x, g, way, turns)[:, 0]
        elif way == NORM_KERNEL:
            return kernels.cuda.convolution_norm(x, g, *self._geometry(), groups)
        elif way == "pixels":
            found = pixel_gram_product(self._grouped(x), self._grouped(g), self._geometry(), available)
        else:
            a, g = (y.transpose(1, 2) for y in self._positions(x, g))
            found = gram_product(a, g, available)
        return found.view(count, groups).sum(1) if groups > 1 else found

    def _geometry(self) -> Geometry:
        return Geometry(self.kernel, self.stride, self.padding, self.dilation)

    def _positions(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Patches [b·groups, d, T] and g [b·groups, p, T]."""
        count = x.shape[0] * self.groups
        a = (x if self._is_pointwise() else patches(x, self._geometry())).reshape(count, self.inputs, self.positions)
        return a, g.reshape(count, self.outputs, self.positions)

    def _is_pointwise(self) -> bool:
        return self._reads_one_pixel() and math.prod(self.stride) == 1

    def _reads_one_pixel(self) -> bool:
        return self.groups == 1 and math.prod(self.kernel) == 1 and not any(self.padding)


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
    return output, ((weight, ConvolutionWeight, input, output.shape[2:], *geometry, share), (bias, Bias, 1))


def _is_last(x: Tensor) -> bool:
    """True for images that have channels last."""
    return x.is_contiguous(memory_format=torch.channels_last)


def _of_any_values(g: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a dense weight of this shape with arbitrary values, in g's memory if it fits.

    The library requires one, but reads its values only for the input gradient.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if g.untyped_storage().nbytes() < math.prod(shape) * g.element_size():
        return g.new_empty(shape)
    return g.as_strided(shape, strides, 0)


def of_each(value: int | tuple[int, ...], spatial: int) -> list[int]:
    """Return one number for each spatial dimension.

    Args:
        value: one number for all, or one for each dimension.
        spatial: number of spatial dimensions.
    """
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values
