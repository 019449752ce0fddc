"""Tile sizes of the kernels of `clipping.accel.cuda`, by sizes, layout and dtype: none spills registers.

And how long multiprocessors take for the tiles of a launch.

Functions take:
    positions, features, inputs, outputs: T, the longest rows of a Gram matrix, d and p.
    dtype: of the products' operands.
    generation: major compute capability.
    at_once: from `rows_at_once`.
    geometry: kernel, stride, padding and dilation of a convolution, one number a spatial dimension each.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clipping.rules.pixel_gram import LINEAR

SIDE = 128
"""Side of a large tile."""
MULTIPROCESSORS = 132
"""An H100's. Each holds one program of `weighted`, which needs more than half of the registers."""
STARTED = 100
"""Positions that a program of `gradient` sums in a large tile in the time in which it starts."""


class Tiles(NamedTuple):
    """Tile sizes of a kernel: powers of 2, at least 16.

    Attributes:
        rows: positions t of a Gram tile, or outputs p of a gradient tile.
        columns: positions s (as many as rows), or inputs d.
        depth: entries summed at a time: features of a Gram tile, positions of a gradient tile.
        warps: groups of 32 threads for each tile.
        stages: depths in shared memory at once.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 3

    def options(self) -> dict[str, int]:
        """Options of Triton."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def sides(self) -> dict[str, int]:
        """Options, the sides of a gradient tile, and the stages of its program's own loops."""
        sides = {"BLOCK_T": self.depth, "BLOCK_D": self.columns, "BLOCK_P": self.rows, "STAGES": self.stages}
        return sides | self.options()

    def reads_once(self, geometry: Sequence[Sequence[int]]) -> bool:
        """True if a block that meets itself is read once, though others meet it."""
        return reads_rows(geometry) and self.rows == SIDE


def meetings(positions: int, rows: int, *, once: bool) -> int:
    """How often tiles of a Gram matrix copy each block of positions to shared memory: for each block that it meets.

    Args:
        rows: positions of a block.
        once: True if a block that meets itself is read once, else twice.
    """
    blocks = -(-positions // rows)
    return blocks + (blocks > 1 and not once)


def entries(inputs: int, outputs: int, rows: int, columns: int) -> int:
    """Entries of a position that all tiles of a gradient copy to shared memory.

    Args:
        rows, columns: outputs and inputs of a tile.
    """
    return -(-outputs // rows) * inputs + -(-inputs // columns) * outputs


def gram_tiles(
    positions: int,
    features: int,
    dtype: torch.dtype,
    generation: int,
    at_once: bool,
    geometry: Sequence[Sequence[int]] = LINEAR,
) -> Tiles:
    """Use 128 positions if that pads the last block no more than 64 would, or if there are many blocks.

    Addresses of patches, and of entries read one by one, take registers; so tiles of patches are shallower.
    """
    large, is_point = _has_room(dtype, generation), _is_point(geometry)
    depth = 64 if at_once else 32
    if large and at_once and (positions >= 640 or -positions % 128 < 64):
        return Tiles(SIDE, SIDE, power(features, depth if is_point else 32), 8, 4)
    rows = power(positions, 64)  # two Gram tiles are in registers at once
    warps = max(rows * dtype.itemsize // 32, _warps(rows, rows, dtype))
    if dtype == torch.float32:
        return Tiles(rows, rows, 16, warps, 2 if is_point else 3)
    return Tiles(rows, rows, power(features, depth), warps, 4 if large else 3)


def gradient_tiles(
    positions: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    generation: int,
    at_once: bool,
    geometry: Sequence[Sequence[int]] = LINEAR,
) -> Tiles:
    """As large as registers allow. Each tile of outputs reads the patches again, and each tile of inputs g."""
    large, is_point = _has_room(dtype, generation), _is_point(geometry)
    depth = power(positions, 16 if dtype == torch.float32 else 64 if at_once and is_point else 32)
    if large and at_once and not is_point and min(inputs, outputs) >= 64:
        rows = power(outputs, 128)
        return Tiles(rows, power(inputs, 16384 // rows), depth, 8, 4)
    if large and is_point and min(inputs, outputs) >= 512:
        return Tiles(128, 128, depth, 8, 3 if at_once else 4)
    most = 64 if dtype == torch.float32 or min(inputs, outputs) < 512 or not (at_once or is_point) else 128
    rows, columns = power(outputs, most), power(inputs, most)
    stages = 2 if dtype == torch.float32 or (at_once and not is_point) else 3  # addresses of a third would spill
    return Tiles(rows, columns, depth, _warps(rows, columns, dtype), stages)


def sum_tiles(
    positions: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    generation: int,
    at_once: bool,
    geometry: Sequence[Sequence[int]] = LINEAR,
) -> Tiles:
    """Twice as many inputs as outputs, if there are: a tile reads a quarter less for each product than a square."""
    if not at_once or not _is_point(geometry):
        tiles = gradient_tiles(positions, inputs, outputs, dtype, generation, at_once, geometry)
        return tiles if at_once else tiles._replace(columns=min(tiles.columns, 64), warps=8)
    if not _has_room(dtype, generation):
        return Tiles(SIDE, SIDE, power(positions, 32), 8, 4)
    is_wide = inputs > SIDE
    return Tiles(SIDE, 2 * SIDE if is_wide else SIDE, power(positions, 32 if is_wide else 64), 8, 4)


def reads_rows(geometry: Sequence[Sequence[int]]) -> bool:
    """True if patches are pixels, in their order."""
    kernel, stride, padding, _ = geometry
    return math.prod([*kernel, *stride]) == 1 and not any(padding)


def _is_point(geometry: Sequence[Sequence[int]]) -> bool:
    """True for a kernel of one pixel, whose patches are pixels."""
    return math.prod(geometry[0]) == 1


def rows_at_once(x: Tensor, g: Tensor, geometry: Sequence[Sequence[int]] = LINEAR) -> bool:
    """True for half precision that is read 32 bytes at once: multiples of 16 channels, or of positions, lie last.

    Args:
        x: [n, C, *size]. If patches are taken of it, its channels lie last.
        g: [n, P, T].
    """
    dims = (1, x.dim() - 1) if reads_rows(geometry) else (1,)
    return x.dtype == g.dtype and any(in_lines(x, dim) for dim in dims) and (in_lines(g, 1) or in_lines(g, 2))


def in_lines(x: Tensor, dim: int) -> bool:
    """True for half precision in lines of multiples of 32 bytes.

    Args:
        dim: dimension of the lines.
    """
    others = [size for i, size in enumerate(x.stride()) if i != dim]
    return x.element_size() == 2 and x.stride(dim) == 1 and not any(size % 16 for size in (x.shape[dim], *others))


def _has_room(dtype: torch.dtype, generation: int) -> bool:
    """True if shared memory holds tiles of 128 by 128, or four stages: on data-centre GPUs since Hopper.

    Large tiles read half as much for each product.
    """
    return generation in (9, 10) and dtype != torch.float32


def power(size: int, most: int) -> int:
    """The least power of 2 that holds a size, at least 16 (the smallest matrix product).

    Args:
        size: number of entries.
        most: largest result.
    """
    return min(most, max(16, 1 << max(0, size - 1).bit_length()))


def _warps(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Warps that hold a tile's accumulators in registers: 32 for each thread, 16 for float32."""
    return min(8, max(1, rows * columns // (512 if dtype == torch.float32 else 1024)))


@functools.cache
def samples_in_turn(count: int, positions: int, programs: int, beside: int) -> int:
    """Samples that a program of `gradient` takes in turn: many, to start rarely, but so that all end at once.

    Args:
        count, positions, programs: B, T, and programs for each sample.
        beside: programs that a multiprocessor holds.
    """

    def cost(size: int) -> tuple[int, int]:
        rounds = -(-(-(-count // size) * programs) // (beside * MULTIPROCESSORS))
        return rounds * (size * positions + STARTED), -size

    return min(range(1, count + 1), key=cost, default=1)


def busiest(count: int, size: int, tiles: int) -> int:
    """Samples that the busiest multiprocessor sums in a tile: 288 tiles keep it as long as 396.

    A multiprocessor holds one program at a time. Programs begin in the order of portions; the last one may be smaller.

    Args:
        count, size, tiles: samples of all portions and of one, and programs of a portion.
    """
    whole, rest = divmod(count, size)
    rounds, more = divmod(whole * tiles, MULTIPROCESSORS)
    early, late = rounds * size, (rounds + 1) * size  # when others, and `more`, are free

    def ended(time: int) -> int:
        """Programs of the last portion that have ended by then."""
        return (MULTIPROCESSORS - more) * ((time - early) // rest) + more * max(0, (time - late) // rest)

    least = late if more else early
    return least + (bisect_left(range(least, late + tiles * rest), tiles, key=ended) if rest else 0)
