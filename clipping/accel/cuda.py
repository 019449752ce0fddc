"""Per-sample norms and clipped sums on CUDA by Triton kernels, which store no Gram matrices or per-sample gradients.

    gram_norms           Σ_{t,u} (a_t · a_u)(g_t · g_u) = ‖gᵀa‖²     operations 2 · n T² (d + p) / 2
    embedding_gram_norms Σ_{t,u} [id_t = id_u] (g_t · g_u)           operations 2 · n T² p / 2
    gradient_norms       ‖Σ_t g_t a_tᵀ‖²                             operations 2 · n T p d
    row_reach            Σ_t ‖a_t‖ ‖g_t‖, and the rest of a reach (`clipping.numerics.rounding_bounds`)
    weighted             Σ_i c_i g_iᵀ a_i in half precision, the factors multiplying float32 sums in registers: no
                         scaled or wide copy is allocated or rounded

A program reduces one tile of the Gram matrices, or of the per-sample gradient, to one number in registers. Gram
matrices are symmetric, so half of the tiles are computed. Norms return the reach as well, from the same pass: the
diagonals of Gram matrices hold the squared norms of rows, and programs of `gradient_norms` sum the squares of what they
read.

**Images.** Rows a_t are the patches of a convolution's input, which are read where they lie, without unfolding. Those
of a linear layer are the pixels of an image of one row, for a kernel of one pixel (`clipping.rules.pixel_gram.LINEAR`).

**Exactness.** Accumulators are float32. Products of float32 use IEEE arithmetic, not TF32, whatever
torch.backends.cuda.matmul.allow_tf32 says. There are no atomic operations, and tiles depend on sizes, layout and dtype,
not on timing: the same tensors give the same bits in every run and process.

**Launching** does not synchronise. There is no autotuning, which would have to time kernels and could choose other
tiles, and so other last bits, in the next run. Rows that begin at multiples of 32 bytes get deep tiles, as they are
copied to shared memory without passing through registers. The first call with a new kind of sizes compiles on the host.
The first call of `supported` runs one program and checks its result. If Triton cannot launch (it needs a C compiler,
Python's headers and a writable folder), it warns, and torch's operations run instead. The tiles spill no
registers on compute capabilities 8.0 and 9.0.

Importing this module does not import Triton. If `supported` returns False, the formulas of `clipping.rules` are the
exact fallback. Fake tensors of a CUDA device give fake results and allocate what a launch would.

Kernels check nothing: ask `supported` first.

Functions take:
    x: images [n, C, *size] in one or two dimensions, of any strides; rounded to g's dtype, as autocast rounds it.
    g: [n, P, *output size], of any strides.
    geometry: kernel, stride, padding and dilation of the convolution, one number a spatial dimension each.
    groups: as in torch.nn.Conv2d.
    ids: [n, T] integers, of any strides.
    lost: factors of the rows' norms, from `clipping.numerics.rounding_bounds.of_lost`.
"""

import functools
import importlib
import importlib.util
import math
import os
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from clipping.accel.tiles import (
    SIDE,
    Tiles,
    gradient_tiles,
    gram_tiles,
    power,
    reads_rows,
    rows_at_once,
    sum_tiles,
)
from clipping.numerics.traced_operations import operation
from clipping.rules.pixel_gram import LINEAR, in_two_dimensions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int64, torch.int32)

CAPABILITY = (8, 0)
"""Older devices have no bfloat16."""

ROWS, COLUMNS = 32, 16
"""Positions of a program that reads rows, and features that each of its warps reads at a time."""
PROGRAMS = 2**31 - 1
"""Most programs in one launch; larger batches take several launches."""
WARPS = 8
"""Groups of 32 threads in a program without tiles of its own."""
LINE = 1024
"""Positions or entries of such a program."""
MULTIPROCESSORS = 132
"""An H100's. Each holds one program of `weighted`, which needs more than half of the registers."""
MOVED = 32 / 3
"""A portion's entry, written and read again at 3 TB/s, in numbers of half precision from the L2 cache at 8 TB/s."""
AHEAD = 128
"""Number of factors that a program reads at once, to find the next 0 among them."""
BESIDE = 2
"""Most further outputs' gradients of one Gram kernel: a query's beside a value's and a key's."""


BY_ROWS = Tiles(ROWS, ROWS, ROWS, 8)


def supported(*tensors: Tensor) -> bool:
    """True if the kernels accept these tensors: of `DTYPES` or `IDS`, not wrapped by torch.func, on one CUDA device.

    Under Triton's interpreter a CPU will do. AMD GPUs are excluded: the tiles suit NVIDIA's, and are untested there.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not tensors or (tensors[0].is_cpu and not interpreted) or not _has_triton() or _is_rocm():
        return False
    device = tensors[0].device
    for x in tensors:
        if type(x) not in (Tensor, Parameter, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        if x.device != device or x.dtype not in (*DTYPES, *IDS):
            return False
    if device.type == "cuda":
        return _capability(device) >= CAPABILITY and trouble(device) is None
    return device.type == "cpu" and bool(_program("INTERPRETED"))


@functools.cache
def trouble(device: torch.device) -> str | None:
    """Run a small Triton program once in a process. Warn and return the reason if it fails, else return None.

    Without a GPU (the device is a fake tensor's) nothing runs, and the result is None.

    Args:
        device: a CUDA device of sufficient compute capability.

    Raises:
        torch.OutOfMemoryError: there is too little memory to run it.
    """
    if not torch.cuda.is_available():
        return None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            x, g = (torch.full((1, 1, 1), value, device=device) for value in (2.0, 3.0))
            untraced: Any = gram_norms  # a step may be traced now, and this must run
            found = float(untraced.__wrapped__(x, g, LINEAR, 1, (0.0, 0.0))[0, 0])
        reason = None if found == 36.0 else f"a program computed {found} for 36.0"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason is not None:
        said = f"expected Triton's programs to run on {device}, but {reason}; torch's operations run instead, slower"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return reason


@operation
def gram_norms(
    x: Tensor,
    g: Tensor,
    geometry: Sequence[Sequence[int]],
    groups: int,
    lost: tuple[float, float],
    *,
    bias: bool = False,
    beside: Sequence[Tensor] = (),
) -> Tensor:
    """‖∂/∂W‖² of each sample and group, and the reach: [n · groups, 4] float32.

    Rounding may make the square of a vanishing gradient slightly negative.

    Args:
        bias: the gradient includes a bias, as a weight of inputs of 1.
        beside: further outputs' gradients [n, P, T], at most `BESIDE`, with the strides of g, for a geometry of rows.
    """
    x, g, options, sizes = _of_images(x, g, geometry, groups)
    channels, outputs, *_, positions, _ = sizes
    tiles = gram_tiles(positions, max(channels, outputs), g.dtype, generation(g), rows_at_once(x, g, options), options)
    each = groups * pairs(positions, tiles.rows)
    out = g.new_empty(len(g), each, 4, dtype=torch.float32)
    numbers = (groups, *sizes, *x.stride(), *g.stride(), *map(float, (*lost, bias)))
    alone = 1 if positions <= tiles.rows else 2 * (reads_rows(options) and tiles.rows == SIDE)
    constants = {"ALONE": alone, "BLOCK": tiles.rows, "BLOCK_K": tiles.depth, **tiles.options()}
    given = (x, *[g, *(y.detach() for y in beside), g, g][: 1 + BESIDE], out)
    launch("gram", each, given, numbers, count=len(g), BESIDE=len(beside), **_of_patches(options), **constants)
    return whole(out.view(len(g) * groups, each // groups, 4))


@operation
def gradient_norms(
    x: Tensor, g: Tensor, geometry: Sequence[Sequence[int]], groups: int, lost: tuple[float, float]
) -> Tensor:
    """The results of `gram_norms`, from tiles of the per-sample gradient: never negative."""
    x, g, options, sizes = _of_images(x, g, geometry, groups)
    channels, outputs, *_, positions, _ = sizes
    inputs = channels * math.prod(options[0])
    tiles = gradient_tiles(positions, inputs, outputs, g.dtype, generation(g), rows_at_once(x, g, options), options)
    down, across, samples = -(-outputs // tiles.rows), -(-inputs // tiles.columns), len(g) * groups
    each = groups * down * across if positions else 0
    parts = g.new_empty(len(g), each, dtype=torch.float32)
    squares = g.new_empty(len(g), groups * (down + across), positions, dtype=torch.float32)
    numbers = (groups, *sizes, *x.stride(), *g.stride())
    constants = _of_patches(options) | tiles.sides()
    launch("gradient", each, (x, g, parts, squares), numbers, 2, count=len(g), **constants)
    block = power(positions, LINE)
    out = parts.new_empty(samples, -(-positions // block) if each else 0, 4)
    launch(
        "collected", out.numel() // 4, (parts, squares, out), (down, across, positions, *map(float, lost)), BLOCK=block
    )
    return whole(out)


def _of_images(
    x: Tensor, g: Tensor, geometry: Sequence[Sequence[int]], groups: int
) -> tuple[Tensor, Tensor, list[list[int]], tuple[int, ...]]:
    """Images in two dimensions, g [n, P, T], geometry, and channels and outputs of a group, image size, T and width.

    Positions of g are one dimension, as a program that computes their rows and columns would read them one by one.
    """
    x, g, options = in_two_dimensions(x.detach(), g.detach(), geometry)
    x = x.flatten(2).unsqueeze(2) if reads_rows(options) else x
    sizes = x.shape[1] // groups, g.shape[1] // groups, *x.shape[2:], g.shape[2] * g.shape[3], g.shape[3]
    return x, g.flatten(2), options, sizes


def _of_patches(options: Sequence[Sequence[int]]) -> dict[str, int]:
    """Compile-time arguments of a geometry in two dimensions."""
    return named(options) | {"POINT": reads_rows(options)}


@operation
def embedding_gram_norms(ids: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """Σ_{t,u} [id_t = id_u] (g_t · g_u) of each sample, ‖∂/∂W‖² of an embedding, and the reach: [n, 4] float32.

    The reach is for rows a_t of norm 1.

    Args:
        g: [n, T, p], of any strides, and zero where the padding row was read.
    """
    _, positions, outputs = g.shape
    tiles = gram_tiles(positions, outputs, g.dtype, generation(g), rows_at_once(g.mT, g.mT))
    constants = {"BLOCK": tiles.rows, "BLOCK_K": tiles.depth}
    return _of_rows("embedding_gram", (ids, g), g.shape[1:], pairs(positions, tiles.rows), tiles, lost, constants)


@operation
def row_reach(a: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """Σ_t ‖a_t‖ ‖g_t‖, Σ_t ‖a_t‖ · lost[0] + ‖g_t‖ · lost[1] and Σ_t ‖a_t‖² ‖g_t‖² of each sample, in one pass.

    The result is [n, 4] float32, with a first column of 0.

    Args:
        a, g: [n, T, d] and [n, T, p], of any strides.
    """
    positions, *_ = sizes = *a.shape[1:], g.shape[2]
    constants = {"ROWS": ROWS, "COLUMNS": COLUMNS * BY_ROWS.warps}
    return _of_rows("rows", (a, g), sizes, math.ceil(positions / ROWS), BY_ROWS, lost, constants)


def _of_rows(
    program: str,
    tensors: tuple[Tensor, Tensor],
    sizes: Sequence[int],
    each: int,
    tiles: Tiles,
    lost: tuple[float, float],
    constants: dict[str, Any],
) -> Tensor:
    """Squared norms and the columns of a reach [n, 4], by `each` programs for each sample; 0 if a size is 0."""
    a, g = (x.detach() for x in tensors)
    parts = g.new_empty(len(g), each if min(sizes) else 0, 4, dtype=torch.float32)
    numbers = *sizes, *a.stride(), *g.stride(), *map(float, lost)
    launch(program, parts.shape[1], (a, g, parts), numbers, count=len(g), **tiles.options(), **constants)
    return whole(parts)


@operation
def weighted(
    x: Tensor, g: Tensor, factors: Tensor, size: int, geometry: Sequence[Sequence[int]], *, bias: bool = False
) -> Tensor:
    """Σ_i c_i g_i of a weight without groups, of each portion of `size` samples: [portions, P, C, *kernel] float32.

    Args:
        factors: c [n], float32, contiguous.
        size: from `portion_of`.
        bias: the result is [portions, P · C · ∏ kernel + P] and ends with the sums of a bias.
    """
    kernel = geometry[0]
    x, g, options, sizes = _of_images(x, g, geometry, 1)
    channels, outputs, *_, positions, _ = sizes
    inputs = channels * math.prod(options[0])
    tiles = sum_tiles(positions, inputs, outputs, g.dtype, generation(g), rows_at_once(x, g, options), options)
    shape = (outputs * (inputs + 1),) if bias else (outputs, channels, *kernel)
    out = factors.new_empty(max(1, -(-len(g) // size)), *shape)
    numbers = (*sizes, len(g), size, *x.stride(), *g.stride())
    constants = _of_patches(options) | tiles.sides() | {"BIAS": bias, "AHEAD": AHEAD}
    programs = len(out) * -(-outputs // tiles.rows) * -(-inputs // tiles.columns)
    launch("weighted", programs, (x, g, factors, out), numbers, **constants)
    return out


@functools.cache
def portion_of(count: int, most: int, positions: int, inputs: int, outputs: int, rows: int, columns: int) -> int:
    """Samples in a portion, so that few portions keep a GPU busy: each is written and read once more.

    Args:
        count: B, rounded up to a power of two. So one more record changes the last portion only, unless the batch size
            passes a power of two.
        most: limit by rounding, for any batch size up to the next power of two.
        positions, inputs, outputs: T, d and p.
        rows, columns: outputs and inputs of a tile.
    """
    tiles = -(-inputs // columns) * -(-outputs // rows)

    def cost(size: int) -> tuple[float, int]:
        read = busiest(count, size, tiles) * positions * MULTIPROCESSORS * (rows + columns)
        return read + -(-count // size) * tiles * rows * columns * MOVED, -size

    return min(range(1, min(most, count) + 1), key=cost)


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


def pairs(positions: int, rows: int) -> int:
    """Return the number of unordered pairs of blocks of positions.

    Args:
        positions: T.
        rows: positions in a block.
    """
    blocks = math.ceil(positions / rows)
    return blocks * (blocks + 1) // 2


def launch(
    program: str,
    each: int,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    results: int = 1,
    *,
    count: int = 1,
    **constants: Any,
) -> None:
    """Launch `each` programs for each sample, at most `PROGRAMS` at a time; none for fake tensors.

    Args:
        program, each: its name, and programs for each sample.
        tensors, results: [count, ...] if count is above 1, and how many of them, the last ones, are written.
        numbers: the arguments after the tensors.
        count: number of samples.
        constants: compile-time arguments and options of Triton.
    """
    if isinstance(tensors[-1], FakeTensor) or not each:
        return
    kernel, step = _program(program), max(1, PROGRAMS // each)
    with torch.cuda.device_of(tensors[-1]):
        for at in (slice(start, min(start + step, count)) for start in range(0, count, step)):
            some = tensors if count <= step else [x[at] for x in tensors]
            kernel[((at.stop - at.start) * each,)](*some, *numbers, **{"num_warps": WARPS, **constants})


def named(geometry: Sequence[Sequence[int]]) -> dict[str, int]:
    """Name a convolution's geometry as the programs do.

    Args:
        geometry: two numbers each.
    """
    names = "KERNEL", "STRIDE", "PADDING", "DILATION"
    return {
        f"{name}_{axis}": option[i] for name, option in zip(names, geometry, strict=True) for i, axis in enumerate("HW")
    }


def whole(parts: Tensor) -> Tensor:
    """Sum parts: [n, parts, ...] to [n, ...].

    Args:
        parts: of each sample.
    """
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)


def generation(x: Tensor) -> int:
    """Major compute capability of the device; 0 on a CPU."""
    return _capability(x.device)[0] if x.is_cuda else 0


@functools.cache
def _program(name: str) -> Any:
    modules = (importlib.import_module(f"clipping.accel.{place}_programs") for place in ("cuda", "sum", "fused"))
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _is_rocm() -> bool:
    """True for a torch built for AMD GPUs, which also calls them "cuda"."""
    return torch.version.hip is not None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) for a missing GPU (of a fake tensor)."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)
