"""Compute the Gram matrix of a convolution's patches without forming the patches.

Let a_t be the patch of output position t. Its entry (c, k) is x[c, s·t + dk − P] for channel c, kernel offset k,
stride s, dilation d and padding P, and zero outside of x. Then

    a_t · a_u = Σ_k Σ_c x[c, st + dk − P] x[c, su + dk − P] = Σ_k X[st + dk − P, su + dk − P],

a sum of diagonal shifts of the *pixel* Gram matrix X = xᵀx, where shifts outside of the image add nothing. With a
stride, st + dk − P = s(t + o) + r for one remainder r and one offset o. Only pixels of equal remainder are multiplied,
so X splits into s matrices in each dimension, one for each phase x[r::s]. With N pixels and K kernel offsets in one
group, one sample takes Σ_r (N/s²)²·C + KT² multiplications and additions instead of T²·C·K, and no unfolded copy of x.

The offsets of a phase are all combinations of those in each dimension, so shifts are summed one dimension after the
other: the number of passes over T² entries is the sum of the kernel's sides, not their product.

Functions take:
    x, g: images [n, C, *size], and the gradient of the output, [n, p, *output size].
    geometry: of the convolution.
    least: see `clipping.numerics.rounding_bounds.of_lost`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import HALF, norm_dtype
from clipping.numerics import kernels
from clipping.numerics.per_sample import part
from clipping.numerics.products import products

HALVED = 256
"""Number of positions from which to use the symmetry: the margins of small blocks cost more than it saves."""


class Geometry(NamedTuple):
    """Geometry of a convolution; each field has one number for each spatial dimension."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]


LINEAR = Geometry([1], [1], [0], [1])
"""Geometry of a linear layer, whose rows are images of one row."""


def in_two_dimensions(x: Tensor, g: Tensor, options: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Turn a convolution in one dimension into one of images of one row; others stay as they are.

    Args:
        options: kernel, stride, padding and dilation, one number a spatial dimension each.
    """
    if len(options[0]) > 1:
        return x, g, [list(option) for option in options]
    lifted = [[neutral, *option] for neutral, option in zip((1, 1, 0, 1), options, strict=True)]
    return x.unsqueeze(2), g.unsqueeze(2), lifted


def phases(geometry: Geometry) -> Iterator[tuple[tuple[int, ...], tuple[list[int], ...]]]:
    """Yield (remainder r, its offsets o) in each spatial dimension, for every combination of remainders."""
    each = []
    for kernel, stride, padding, dilation in zip(*geometry, strict=True):
        offsets: dict[int, list[int]] = {}
        for k in range(kernel):
            offset, remainder = divmod(dilation * k - padding, stride)
            offsets.setdefault(remainder, []).append(offset)
        each.append(offsets)
    for remainders in itertools.product(*each):
        yield remainders, tuple(found[r] for found, r in zip(each, remainders, strict=True))


def every(x: Tensor, remainders: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The phase x[..., r::s] of [n, C, *size].

    Args:
        remainders: r, one number a spatial dimension.
        stride: s, one number a spatial dimension.
    """
    if all(s == 1 for s in stride):
        return x
    return x[:, :, *(slice(r, None, s) for r, s in zip(remainders, stride, strict=True))]


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Unfold x: a view [n, C, *kernel, *output size] of the padded images, with positions contiguous and last."""
    spatial = len(geometry.kernel)
    if any(geometry.padding):
        x = F.pad(x, [amount for pad in reversed(geometry.padding) for amount in (pad, pad)])
    for i, (kernel, stride, _, dilation) in enumerate(zip(*geometry, strict=True)):
        x = x.unfold(2 + i, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return x.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))


def compiled_norms(x: Tensor, g: Tensor, geometry: Geometry, least: tuple[float, float]) -> Tensor:
    """`pixel_norms` by the CPU kernel, for any number of samples."""
    x, g, options = in_two_dimensions(x, g, geometry)
    geometry = Geometry(*options)
    images = [(every(x, r, geometry.stride), list(itertools.product(*offsets))) for r, offsets in phases(geometry)]
    return kernels.cpu.pixel_norms(images, g, least)


def pixel_gram_product(x: Tensor, g: Tensor, geometry: Geometry, available: int) -> Tensor:
    """‖Σ_t g_t a_tᵀ‖² = Σ_{t,u} (a_t · a_u)(g_t · g_u) of a convolution of one group, without its patches.

    Computed in blocks of the output's first spatial dimension: two, or more if all pairs of positions exceed the
    available bytes. Each block is paired with itself and with the blocks before it; the latter pairs count twice.

    Args:
        available: bytes that Gram matrices may take (or one row of the output with itself, if that is more).

    Returns:
        [n], float32 or wider.
    """
    dtype = norm_dtype(g.dtype)
    kept = g.dtype if g.is_cuda and g.dtype in HALF else dtype  # on CUDA, products of half precision return float32
    x, g = x.to(kept), g.to(kept)
    count, _, rows, *_ = g.shape
    a_row = g[0, 0, 0].numel()
    step = max(1, int((available / max(1, 3 * count * dtype.itemsize)) ** 0.5) // max(1, a_row))
    step = min(step, rows if rows * a_row < HALVED else -(-rows // 2))
    total = g.new_zeros(count, dtype=dtype)
    for start in range(0, rows, step):
        here = slice(start, min(start + step, rows))
        for other in range(0, start + 1, step):
            there = slice(other, min(other + step, rows))
            found = _product(x, g, geometry, here, there)
            total += found if other == start else 2 * found
    return total


def pairs(geometry: Geometry, size: Sequence[int], output_size: Sequence[int]) -> int:
    """Return the number of entries of one sample's Gram matrices in `pixel_norms`.

    Args:
        size: size of an image, in pixels.
        output_size: size of the output, in positions.
    """
    counts = [len(found) for found in _remainders(geometry)]
    phases = [1 if count == 1 else stride for count, stride in zip(counts, geometry.stride, strict=True)]
    pixels = math.prod(-(-n // stride) for n, stride in zip(size, geometry.stride, strict=True))
    return math.prod(output_size) ** 2 + math.prod(phases) * pixels**2


def pixel_norms(x: Tensor, g: Tensor, geometry: Geometry, least: tuple[float, float]) -> Tensor:
    """`pixel_gram_product` by whole Gram matrices and the GPU kernel, and the columns of a reach.

    For one or two dimensions, where `kernels.fused.runs`. Each Gram matrix of pixels is one product of all phases.

    Returns:
        [n, 4], float32 or wider: squared norms, and the columns for
        `clipping.numerics.rounding_bounds.Reach.of_columns`.
    """
    x, g, options = in_two_dimensions(x, g, geometry)
    geometry, phases = Geometry(*options), [1, 1]
    for i, (remainders, stride) in enumerate(zip(_remainders(geometry), geometry.stride, strict=True)):
        if len(remainders) == 1:
            at = slice(min(remainders), None, stride)
            x = x[:, :, at] if i == 0 else x[:, :, :, at]
        elif rest := -x.shape[2 + i] % stride:
            x = F.pad(x, [0, 0] * (1 - i) + [0, rest])
        phases[i] = 1 if len(remainders) == 1 else stride
    count, channels, *size = x.shape
    if not x.numel():  # the kernel reads nothing but padding
        return g.new_zeros(count, 4, dtype=norm_dtype(g.dtype))
    grid = [n // phase for n, phase in zip(size, phases, strict=True)]
    if math.prod(phases) > 1:
        x = x.view(count, channels, grid[0], phases[0], grid[1], phases[1]).permute(0, 3, 5, 1, 2, 4)
        x = x.reshape(-1, channels, *grid)
    of_inputs, of_outputs = (products(rows, rows) for rows in (y.flatten(2).transpose(1, 2) for y in (x, g)))
    of_inputs = of_inputs.view(count, math.prod(phases), math.prod(grid), -1)
    return kernels.fused.shifted_norms(of_inputs, of_outputs, geometry, grid, phases, g.shape[3], least)


def reach_of_pixels(x: Tensor, g: Tensor, geometry: Geometry, width: int, least: tuple[float, float]) -> Tensor:
    """Reach from norms of pixels [n, *size] and of the output's gradient [n, T], by the GPU kernel.

    Args:
        x, g: the norms.
        width: last size of the output.

    Returns:
        [n, 3] float32: the columns for `clipping.numerics.rounding_bounds.Reach.of_columns`.
    """
    images, _, options = in_two_dimensions(x.unsqueeze(1), x.unsqueeze(1), geometry)
    return kernels.fused.reach(images[:, 0], g, least, options, width)


def _remainders(geometry: Geometry) -> list[set[int]]:
    """Return the phases of each dimension that the kernel reads."""
    return [{(d * k - p) % s for k in range(size)} for size, s, p, d in zip(*geometry, strict=True)]


def _product(x: Tensor, g: Tensor, geometry: Geometry, here: slice, there: slice) -> Tensor:
    """Return the part of the sum with t in the rows `here` and u in the rows `there` of the output."""
    count, others = g.shape[0], g.shape[3:]
    outputs = _between(part(g, here, 2), part(g, there, 2))
    inputs: Tensor | None = None
    for remainders, offsets in phases(geometry):
        phase = every(x, remainders, geometry.stride)
        length = phase.shape[2]
        reads = [
            slice(max(0, rows.start + min(offsets[0])), min(length, rows.stop + max(offsets[0])))
            for rows in (here, there)
        ]
        if not all(phase.shape[2:]) or any(rows.start >= rows.stop for rows in reads):
            continue
        left, right = (part(phase, rows, 2) for rows in reads)
        gram = _between(left, right).view(count, *left.shape[2:], *right.shape[2:])
        for dim in reversed(range(1, len(offsets))):
            span = (0, others[dim - 1], 0)
            gram = _shifted(gram, dim, offsets[dim], span, span)
        spans = [(rows.start, rows.stop, read.start) for rows, read in zip((here, there), reads, strict=True)]
        gram = _shifted(gram, 0, offsets[0], *spans)
        inputs = gram if inputs is None else inputs.add_(gram)
    if inputs is None:  # the kernel reads nothing but padding
        return outputs.new_zeros(count)
    return inputs.view(outputs.shape).mul_(outputs).sum((1, 2))


def _between(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of all pixels of x [n, C, *size] and of y, [n, ∏ size of x, ∏ size of y]."""
    x, y = x.flatten(2).transpose(1, 2), y.flatten(2)
    return products(x, y.transpose(1, 2)) if x.is_cuda else torch.bmm(x, y)


Span = tuple[int, int, int]


def _shifted(gram: Tensor, dim: int, offsets: list[int], left: Span, right: Span) -> Tensor:
    """Σ_o gram[.., y + o, .., z + o, ..] along one spatial dimension of t and of u; zero outside.

    Args:
        gram: [n, *size, *size].
        offsets: o.
        left, right: spans of t and u: first y, end y, and the y + o of the first row of `gram`.

    Returns:
        Contiguous.
    """
    dims = 1 + dim, 1 + dim + (gram.dim() - 1) // 2
    shape = list(gram.shape)
    for d, (begin, end, _) in zip(dims, (left, right), strict=True):
        shape[d] = end - begin
    total: Tensor | None = None
    for o in sorted(offsets, key=abs):  # the offset that covers everything comes first: it is not added to zeros
        size, of, into = shape.copy(), [0, 0], [0, 0]
        for i, (d, (begin, end, first)) in enumerate(zip(dims, (left, right), strict=True)):
            low = max(begin, first - o)
            size[d] = max(0, min(end, first + gram.shape[d] - o) - low)
            of[i], into[i] = low + o - first, low - begin
        if total is None:
            if size == shape:
                total = _window(gram, size, dims, of)
                total = total.clone(memory_format=torch.contiguous_format) if len(offsets) > 1 else total.contiguous()
                continue
            total = gram.new_zeros(shape)
        if all(size):
            _window(total, size, dims, into).add_(_window(gram, size, dims, of))
    assert total is not None
    return total


def _window(x: Tensor, size: list[int], dims: tuple[int, int], starts: list[int]) -> Tensor:
    """Return the part of x of this size from `starts` in two dimensions: one view, where `narrow` takes two."""
    if list(x.shape) == size:
        return x
    strides = x.stride()
    begin = sum(start * strides[d] for d, start in zip(dims, starts, strict=True))
    return x.as_strided(size, strides, x.storage_offset() + begin)
