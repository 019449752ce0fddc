"""Fused Triton kernels for CUDA, each in place of several small launches of torch's operations.

    shifted_norms     Σ_{t,u} A_tu G_tu and the reach, from the Gram matrices of an image's pixels and of the output's
                      gradient; A sums shifts of the former (see `clipping.rules.pixel_gram`)
    patch_norms       the same results from the image itself, without unfolded patches or Gram matrices in memory
    reach             Σ_t ‖a_t‖ ‖g_t‖ from the norms of pixels or input rows, and of gradient rows (see
                      `clipping.numerics.rounding_bounds`)
    weighted_patches  Σ_i c_i g_i of a convolution's weight in half precision, without scaled or wide copies
    turned            images with channels last, and the norms of their pixels
    added             the sum of portions, in float64 (see `clipping.numerics.per_sample`)
    scale_gradient    Σ_t g x̂ of layer norm (see `clipping.rules.normalisation`), in one pass over g and x
    weighted          Σ_i c_i g_iᵀ a_i in half precision (see `clipping.accel.ways`): the factors multiply float32
                      sums in registers, so no scaled copy is allocated or rounded

`shifted_norms` reads each Gram matrix once; torch's operations would read and write it once for each side of the
kernel. All but `added` accumulate in float32. A program of `weighted` or `weighted_patches` sums the products of a
portion; any other program sums at most 4,096 products, and torch sums the results.

Functions take:
    geometry: kernel, stride, padding and dilation of a convolution, two numbers each; in `reach` None for rows.
    width: columns of the output's T positions; `reach` ignores it for rows.
    lost: factors of the rows' norms, from `clipping.numerics.rounding_bounds.of_lost`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clipping.accel import cuda
from clipping.core.microbatching import power_of_two
from clipping.numerics.traced_operations import operation
from clipping.rules.pixel_gram import in_two_dimensions

TILE = 64
"""Positions along a tile's side: 4,096 products, 16 for each thread."""
GRAM_SIDE = 64
"""Most positions along a side of a tile of `patch_norms`; twice as many if shared memory holds them."""
LINE = 1024
"""Positions in one program of `reach`, or entries in one of `added`."""
SIDE, DEPTHS, PROGRAMS = 128, (128, 64, 32, 16), 256
"""For `weighted`: a tile's side, positions it may read at a time, and programs that occupy a GPU twice."""


def runs(*tensors: Tensor) -> bool:
    """True if a kernel takes these tensors: on CUDA, and `cuda.supported`. On a CPU torch's operations always run."""
    return tensors[0].is_cuda and cuda.supported(*tensors)


@operation
def shifted_norms(
    x: Tensor,
    g: Tensor,
    geometry: Sequence[Sequence[int]],
    grid: Sequence[int],
    phases: Sequence[int],
    width: int,
    lost: tuple[float, float],
) -> Tensor:
    """Squared norm, Σ_t √A_tt √G_tt, Σ_t (√A_tt · lost[0] + √G_tt · lost[1]) and Σ_t A_tt G_tt: [n, 4] float32.

    Args:
        x: [n, ∏ phases, N, N] float32, contiguous: Gram matrices of the pixels of each phase of an image.
        g: [n, T, T] float32, contiguous: the Gram matrix of the output's gradient.
        grid: rows and columns of the N pixels.
        phases: number of phases in each dimension: the stride, or 1 if the kernel reads one phase only.
    """
    count, positions, _ = g.shape
    block = cuda._power(positions, TILE)
    blocks = math.ceil(positions / block)
    each = blocks * (blocks // 2 + 1)
    out = g.new_empty(count, each, 4)
    numbers = (positions, width, x.shape[2], *grid, *map(float, lost))
    constants = {"PHASES_H": phases[0], "PHASES_W": phases[1], "BLOCK": block}
    cuda.launch("shifted", each, (x, g, out), numbers, count=count, **cuda.named(geometry), **constants)
    return cuda.whole(out)


@operation
def reach(
    x: Tensor, g: Tensor, lost: tuple[float, float], geometry: Sequence[Sequence[int]] | None = None, width: int = 0
) -> Tensor:
    """Σ_t a_t g_t, Σ_t (a_t · lost[0] + g_t · lost[1]) and Σ_t a_t² g_t² of each sample: [n, 3] float32.

    For a convolution, a_t² is the sum of the squared norms of the pixels that position t reads.

    Args:
        x: norms, float32: of an image's pixels [n, rows, columns]; or a_t of rows [n, T], or [n, 1] if all are equal.
        g: [n, T] float32: norms of rows.
    """
    count, positions = g.shape
    if geometry is None:
        x, geometry, width = x.expand(count, positions).unsqueeze(1), ([1, 1], [1, 1], [0, 0], [1, 1]), positions
    block = cuda._power(positions, LINE)
    out = g.new_empty(count, math.ceil(positions / block), 3)
    numbers = (positions, width, *x.shape[1:], *x.stride(), *g.stride(), *map(float, lost))
    cuda.launch("reach", out.numel() // 3, (x, g, out), numbers, **cuda.named(geometry), BLOCK=block)
    return cuda.whole(out)


@operation
def patch_norms(
    x: Tensor, g: Tensor, geometry: Sequence[Sequence[int]], groups: int, lost: tuple[float, float]
) -> Tensor:
    """`shifted_norms` of each group of a convolution, [n · groups, 4] float32, from the image itself.

    Args:
        x: [n, C, *size], of any strides, in one or two dimensions; rounded to g's dtype.
        g: [n, P, *output size], of any strides.
        geometry: kernel, stride, padding and dilation of the convolution, one number a spatial dimension.
        groups: as in torch.nn.Conv2d.
    """
    x, g, options = in_two_dimensions(x, g, geometry)
    channels, outputs, positions = x.shape[1] // groups, g.shape[1] // groups, g.shape[2] * g.shape[3]
    tiles = gram_tiles(positions, channels, g.dtype, cuda._generation(g), cuda.rows_at_once(x, g))
    each = groups * cuda.pairs(positions, tiles.rows)
    out = g.new_empty(len(g), each, 4, dtype=torch.float32)
    numbers = (groups, channels, outputs, *x.shape[2:], *g.shape[2:], *x.stride(), *g.stride(), *map(float, lost))
    cuda.launch(
        "convolution_gram",
        each,
        (x, g, out),
        numbers,
        count=len(g),
        **cuda.named(options),
        ALONE=positions <= tiles.rows,
        BLOCK=tiles.rows,
        BLOCK_K=tiles.depth,
        **tiles.options(),
    )
    return cuda.whole(out.view(len(g) * groups, -1, 4))


def multiplications(positions: int, channels: int, outputs: int, offsets: int) -> int:
    """Multiplications for one sample and group: whole tiles of a triangle with its diagonal.

    Args:
        positions: T.
        channels, outputs: of one group.
        offsets: ∏ kernel.
    """
    side = cuda._power(positions, GRAM_SIDE)
    channels, outputs = (-(-size // 16) * 16 for size in (channels, outputs))
    return cuda.pairs(positions, side) * side**2 * (offsets * channels + outputs)


def gram_tiles(positions: int, channels: int, dtype: torch.dtype, generation: int, at_once: bool) -> cuda.Tiles:
    """Choose tiles by sizes, dtype and layout.

    Args:
        positions: T.
        channels: of one group.
        dtype: of the operands.
        generation: major compute capability of the device.
        at_once: result of `cuda.rows_at_once`; if False, tiles are shallower, as entries pass through registers.
    """
    half = dtype != torch.float32 and at_once
    large = half and generation in (9, 10)
    side = cuda._power(positions, 2 * GRAM_SIDE if large else GRAM_SIDE)
    depth = cuda._power(channels, (4096 if half else 2048) // side)
    return cuda.Tiles(side, side, depth, max(4, cuda._warps(side, side, dtype)), 4 if large else 3)


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Images with channels last, copied if necessary, and the float32 norms of their pixels [n, *size].

    Args:
        x: [n, C, *size], in two dimensions.
    """
    if x.is_contiguous(memory_format=torch.channels_last):
        return x, torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    return _turned(x)


@operation
def _turned(x: Tensor) -> tuple[Tensor, Tensor]:
    x, channels, pixels = x.contiguous(), x.shape[1], math.prod(x.shape[2:])
    out = torch.empty_like(x, memory_format=torch.channels_last)
    norms = x.new_empty(len(x), *x.shape[2:], dtype=torch.float32)
    blocks = {"BLOCK_C": cuda._power(channels, TILE), "BLOCK_N": cuda._power(pixels, TILE)}
    programs = len(x) * math.ceil(pixels / blocks["BLOCK_N"])
    cuda.launch("turned", programs, (x, out, norms), (channels, pixels), 2, **blocks)
    return out, norms


@operation
def weighted_patches(x: Tensor, g: Tensor, factors: Tensor, geometry: Sequence[Sequence[int]], portions: int) -> Tensor:
    """Σ_i c_i g_i of a convolution's weight, in equal portions of the batch: [portions, P, C, *kernel] float32.

    Args:
        x: [n, C, *size], in two dimensions, of any strides.
        g: [n, P, *output size], of any strides, of x's dtype.
        factors: c [n], float32, contiguous.
        portions: a divisor of n.
    """
    channels, outputs, kernel = x.shape[1], g.shape[1], geometry[0]
    positions, inputs = math.prod(g.shape[2:]), channels * math.prod(kernel)
    generation = cuda._generation(g) if cuda.rows_at_once(x, g) else 0
    tiles = cuda._patch_tiles(positions, inputs, outputs, g.dtype, generation)
    out = g.new_empty(portions, outputs, channels, *kernel, dtype=torch.float32)
    numbers = (channels, outputs, *x.shape[2:], *g.shape[2:], len(g) // portions, *x.stride(), *g.stride())
    cuda.launch(
        "weighted_patches",
        portions * math.ceil(outputs / tiles.rows) * math.ceil(inputs / tiles.columns),
        (x, g, factors, out),
        numbers,
        **cuda.named(geometry),
        BLOCK_T=tiles.depth,
        BLOCK_D=tiles.columns,
        BLOCK_P=tiles.rows,
        **tiles.options(),
    )
    return out


@operation
def added(parts: Tensor, rest: Tensor | None = None) -> Tensor:
    """Sum both over their first dimension in float64: [*shape] float32.

    Args:
        parts: [count, *shape], float32, contiguous.
        rest: [any, *shape], likewise, or None.
    """
    out = parts.new_empty(parts.shape[1:])
    given = (parts, parts if rest is None else rest, out)
    counts = {"COUNT": len(parts), "RESTS": 0 if rest is None else len(rest)}
    cuda.launch("added", math.ceil(out.numel() / LINE), given, (out.numel(),), **counts, BLOCK=LINE)
    return out


@operation
def scale_gradient(x: Tensor, mean: Tensor, rstd: Tensor, g: Tensor, features: int) -> Tensor:
    """Σ_t g (x - mean) rstd of each sample: [n, features] float32.

    Args:
        x, g: [n, *, features], contiguous.
        mean, rstd: [n, *], one number for each position, contiguous.
        features: entries of γ.
    """
    count, positions = len(x), mean.numel() // max(1, len(x))
    block = cuda._power(positions, TILE)
    out = g.new_empty(count, math.ceil(positions / block), features, dtype=torch.float32)
    programs = count * out.shape[1] * math.ceil(features / TILE)
    cuda.launch("scale", programs, (x, mean, rstd, g, out), (positions, features), BLOCK_T=block, BLOCK_N=TILE)
    return cuda.whole(out)


def weighs(*tensors: Tensor) -> bool:
    """True if `weighted` takes these: half precision, rows of a multiple of 16 entries, and at least 16 positions.

    Args:
        tensors: [n, T, features] each.
    """
    return runs(*tensors) and tensors[0].shape[1] >= DEPTHS[-1] and cuda._is_dense(*tensors)


def portion_of(count: int, most: int, inputs: int, outputs: int) -> int:
    """Samples in a portion: a power of two, smaller if the weight has few tiles.

    One more record changes the last portion only, unless the batch size passes a power of two.

    Args:
        count: B.
        most: limit by rounding, for any batch size up to the next power of two.
        inputs, outputs: d and p.
    """
    count = power_of_two(count)
    size, tiles = min(count, 1 << (most.bit_length() - 1)), -(-inputs // SIDE) * -(-outputs // SIDE)
    while size > 1 and count // size * tiles < PROGRAMS:
        size //= 2
    return size


@operation
def weighted(a: Tensor, g: Tensor, factors: Tensor, size: int) -> Tensor:
    """Σ_i c_i g_iᵀ a_i of each portion of `size` samples: [portions, p, d] float32.

    Args:
        a: [n, T, d], accepted by `weighs`.
        g: [n, T, p], likewise.
        factors: c [n], float32.
        size: from `portion_of`.
    """
    count, positions, inputs = a.shape
    outputs = g.shape[2]
    padded = {depth: -(-positions // depth) * depth for depth in DEPTHS}
    depth = next((depth for depth in DEPTHS if padded[depth] <= 1.15 * positions), DEPTHS[-1])
    depth = depth if cuda._has_room(g.dtype, cuda._generation(g)) else min(depth, 64)
    out = factors.new_empty(max(1, -(-count // size)), outputs, inputs)
    numbers = (count, size, positions, inputs, outputs, *a.stride()[:2], *g.stride()[:2])
    programs = len(out) * -(-inputs // SIDE) * -(-outputs // SIDE)
    constants = {"BLOCK_T": depth, "BLOCK_D": SIDE, "BLOCK_P": SIDE}
    cuda.launch("weighted", programs, (a, g, factors.contiguous(), out), numbers, **constants)
    return out
