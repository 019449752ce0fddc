"""Squared per-sample norms of a convolution's weight gradient by Gram matrices of patches, in one Triton kernel.

    norms    Σ_{t,s} (a_t · a_s)(g_t · g_s) = ‖∂/∂W‖², a_t the patch of output position t     operations n T² (d + p)

The kernel reads patches from the image, without unfolding it. A program computes one tile of both Gram matrices and
writes four numbers: its part of the squared norm and of the reach, as the diagonals hold the squared norms of rows
(see `clipping.numerics.rounding_bounds`). Products use the gradient's dtype and accumulate in float32; products of
float32 use IEEE arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clipping.accel import cuda, fused
from clipping.numerics.traced_operations import operation
from clipping.rules.pixel_gram import in_two_dimensions

SIDE = 64
"""Most positions along a tile's side; twice as many if shared memory holds them."""


@operation
def norms(x: Tensor, g: Tensor, geometry: Sequence[Sequence[int]], groups: int, lost: tuple[float, float]) -> Tensor:
    """Squared norm, Σ_t ‖a_t‖ ‖g_t‖, Σ_t (‖a_t‖ · lost[0] + ‖g_t‖ · lost[1]) and Σ_t ‖a_t‖² ‖g_t‖² of each group.

    The result is [n · groups, 4] float32.

    Args:
        x: [n, C, *size], of any strides, in one or two dimensions; rounded to g's dtype.
        g: [n, P, *output size], of any strides.
        geometry: kernel, stride, padding and dilation of the convolution, one number a spatial dimension.
        groups: as in torch.nn.Conv2d.
        lost: factors of the rows' norms, from `clipping.numerics.rounding_bounds.of_lost`.
    """
    x, g, options = in_two_dimensions(x, g, geometry)
    channels, outputs, positions = x.shape[1] // groups, g.shape[1] // groups, g.shape[2] * g.shape[3]
    tiles = tiles_of(positions, channels, g.dtype, cuda._generation(g), cuda.rows_at_once(x, g))
    each = groups * _pairs(positions, tiles.rows)
    out = g.new_empty(len(g), each, 4, dtype=torch.float32)
    numbers = (groups, channels, outputs, *x.shape[2:], *g.shape[2:], *x.stride(), *g.stride(), *map(float, lost))
    step = max(1, cuda.PROGRAMS // max(1, each))
    for at in (slice(start, start + step) for start in range(0, len(g), step)):
        fused._run(
            "convolution_gram",
            out[at].numel() // 4,
            (x[at], g[at], out[at]),
            numbers,
            **fused._named(options),
            ALONE=positions <= tiles.rows,
            BLOCK=tiles.rows,
            BLOCK_K=tiles.depth,
            WIDEN=g.is_cpu and g.dtype == torch.bfloat16,  # in Triton's interpreter
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return fused._whole(out.view(len(g) * groups, -1, 4))


def multiplications(positions: int, channels: int, outputs: int, offsets: int) -> int:
    """Multiplications for one sample and group: whole tiles of a triangle with its diagonal.

    Args:
        positions: T.
        channels, outputs: of one group.
        offsets: ∏ kernel.
    """
    side, (channels, outputs) = cuda._power(positions, SIDE), (-(-size // 16) * 16 for size in (channels, outputs))
    return _pairs(positions, side) * side**2 * (offsets * channels + outputs)


def _pairs(positions: int, side: int) -> int:
    blocks = math.ceil(positions / side)
    return blocks * (blocks + 1) // 2


def tiles_of(positions: int, channels: int, dtype: torch.dtype, generation: int, at_once: bool) -> cuda.Tiles:
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
    side = cuda._power(positions, 2 * SIDE if large else SIDE)
    depth = cuda._power(channels, (4096 if half else 2048) // side)
    return cuda.Tiles(side, side, depth, max(4, cuda._warps(side, side, dtype)), 4 if large else 3)
