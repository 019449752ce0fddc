"""Fused Triton kernels for CUDA, each in place of several small launches of torch's operations.

    shifted_norms     Σ_{t,u} A_tu G_tu and the reach, from the Gram matrices of an image's pixels and of the output's
                      gradient; A sums shifts of the former (see `clipping.rules.pixel_gram`)
    reach             Σ_t ‖a_t‖ ‖g_t‖ from the norms of pixels or input rows, and of gradient rows (see
                      `clipping.numerics.rounding_bounds`)
    turned            images with channels last
    added             the sum of portions, in float64 (see `clipping.numerics.per_sample`)
    of_layer_norm     gradients of layer norm: of its input, and of γ and β of each sample, in one pass over g and x

`shifted_norms` reads each Gram matrix once; torch's operations would read and write it once for each side of the
kernel. All but `added` accumulate in float32. A program sums at most 4,096 products, and torch sums the results.

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
from clipping.accel.tiles import power
from clipping.numerics.traced_operations import operation

TILE = 64
"""Positions along a tile's side: 4,096 products, 16 for each thread."""
FEATURES = 2 * TILE**2
"""Most features of a layer norm: a program holds whole rows in registers."""
ROWS = 32
"""Positions of a program that reads such rows. Its sums of γ and β are an eighth of what it reads of one operand in
half precision."""


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
    *,
    bias: bool = False,
) -> Tensor:
    """Squared norm, Σ_t √A_tt √G_tt, Σ_t (√A_tt · lost[0] + √G_tt · lost[1]) and Σ_t A_tt G_tt: [n, 4] float32.

    Args:
        x: [n, ∏ phases, N, N] float32, contiguous: Gram matrices of the pixels of each phase of an image.
        g: [n, T, T] float32, contiguous: the Gram matrix of the output's gradient.
        grid: rows and columns of the N pixels.
        phases: number of phases in each dimension: the stride, or 1 if the kernel reads one phase only.
        bias: as in `cuda.gram_norms`.
    """
    count, positions, _ = g.shape
    block = power(positions, TILE)
    blocks = math.ceil(positions / block)
    each = blocks * (blocks // 2 + 1)
    out = g.new_empty(count, each, 4)
    numbers = (positions, width, x.shape[2], *grid, *map(float, (*lost, bias)))
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
    block = power(positions, cuda.LINE)
    out = g.new_empty(count, math.ceil(positions / block), 3)
    numbers = (positions, width, *x.shape[1:], *x.stride(), *g.stride(), *map(float, lost))
    cuda.launch("reach", out.numel() // 3, (x, g, out), numbers, **cuda.named(geometry), BLOCK=block)
    return cuda.whole(out)


@operation
def turned(x: Tensor) -> Tensor:
    """A copy of images with channels last.

    Args:
        x: [n, C, *size], in two dimensions.
    """
    x, channels, pixels = x.contiguous(), x.shape[1], math.prod(x.shape[2:])
    out = torch.empty_like(x, memory_format=torch.channels_last)
    blocks = {"BLOCK_C": power(channels, TILE), "BLOCK_N": power(pixels, TILE)}
    programs = len(x) * math.ceil(pixels / blocks["BLOCK_N"]) * math.ceil(channels / blocks["BLOCK_C"])
    cuda.launch("turned", programs, (x, out), (channels, pixels), **blocks)
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
    numbers = out.numel(), len(parts), 0 if rest is None else len(rest)
    cuda.launch("added", math.ceil(out.numel() / cuda.LINE), given, numbers, BLOCK=cuda.LINE)
    return out


@operation
def of_layer_norm(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """∂/∂x, like x, and Σ_t g x̂ and Σ_t g of each sample: [n, 2, features] float32; x̂ = (x - mean) rstd.

    Args:
        x, g: [n, *, features].
        mean, rstd: [n, *], one number for each position, contiguous.
        weight: γ, at most `FEATURES` entries.
    """
    x, weight, g = x.contiguous(), weight.contiguous(), g.contiguous()
    count, positions, features = len(x), mean.numel() // max(1, len(x)), weight.numel()
    blocks = math.ceil(positions / ROWS)
    of_x, sums = torch.empty_like(x), mean.new_empty(count, blocks, 2, features, dtype=torch.float32)
    given, tiles = (x, mean, rstd, weight, g, of_x, sums), tiles_of_layer_norm(features)
    cuda.launch("layer_norm", blocks, given, (positions, features), 2, count=count, **tiles)
    return of_x, cuda.whole(sums)


def tiles_of_layer_norm(features: int) -> dict[str, int]:
    """Constants and options of the program: each thread holds 16 entries of each operand, or fewer of few features.

    Args:
        features: entries of γ.
    """
    block = power(features, FEATURES)
    rows = min(ROWS, max(1, TILE**2 // block))
    return {"EACH": ROWS, "ROWS": rows, "BLOCK": block, "num_warps": max(cuda.WARPS, block // 512)}
