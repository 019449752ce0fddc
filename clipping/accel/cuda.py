"""Per-sample norms and clipped sums on CUDA by Triton kernels, which store no Gram matrices and few gradients.

    gram_norms           Σ_{t,u} (a_t · a_u)(g_t · g_u) = ‖gᵀa‖²     operations 2 · n T² (d + p) / 2
    embedding_gram_norms Σ_{t,u} [id_t = id_u] (g_t · g_u)           operations 2 · n T² p / 2
    gradient_norms       ‖Σ_t g_t a_tᵀ‖²                             operations 2 · n T p d
    gradients            Σ_t g_t a_tᵀ, to be kept, and its squared norm: by the same program
    row_reach            Σ_t ‖a_t‖ ‖g_t‖, and the rest of a reach (`clipping.numerics.rounding_bounds`)
    weighted             Σ_i c_i g_iᵀ a_i in half precision, the factors multiplying float32 sums in registers: no
                         scaled or wide copy is allocated or rounded; of several equal layers, as one has too few tiles

A program reduces one tile of the Gram matrices, or of the per-sample gradient, to one number in registers. Gram
matrices are symmetric, so half of the tiles are computed. Norms return the reach as well, from the same pass: the
diagonals of Gram matrices hold the squared norms of rows, and programs of `gradient_norms` share those of pixels.

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
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from clipping.accel.tiles import (
    MULTIPROCESSORS,
    Tiles,
    busiest,
    gradient_tiles,
    gram_tiles,
    power,
    reads_rows,
    rows_at_once,
    samples_in_turn,
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
MOVED = 16 / 3
"""A sum's entry, written or read at 3 TB/s, in numbers of half precision from the L2 cache at 8 TB/s."""
LAYERS = 32
"""Most layers whose sums one launch forms."""
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
            untraced: Any = gram_norms_of_layers  # a step may be traced now, and this must run
            found = float(untraced.__wrapped__([x], [g], LINEAR, 1, (0.0, 0.0))[0, 0, 0])
        reason = None if found == 36.0 else f"a program computed {found} for 36.0"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason is not None:
        said = f"expected Triton's programs to run on {device}, but {reason}; torch's operations run instead, slower"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return reason


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
    """`gram_norms_of_layers` of one layer: [n · groups, 4] float32.

    Args:
        bias, beside: as there, of one layer.
    """
    return gram_norms_of_layers([x], [g], geometry, groups, lost, bias=bias, beside=[[y] for y in beside])[0]


@operation
def gram_norms_of_layers(
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    geometry: Sequence[Sequence[int]],
    groups: int,
    lost: tuple[float, float],
    *,
    bias: bool = False,
    beside: Sequence[Sequence[Tensor]] = (),
) -> Tensor:
    """‖∂/∂W‖² of each layer, sample and group, and the reach: [layers, n · groups, 4] float32.

    Rounding may make the square of a vanishing gradient slightly negative.

    Args:
        xs, gs: x and g of each layer, alike in sizes and strides.
        bias: the gradient includes a bias, as a weight of inputs of 1.
        beside: further outputs' gradients [n, P, T] of each layer, at most `BESIDE`, with the strides of g, for a
            geometry of rows.
    """
    images = [_of_images(x, g, geometry, groups) for x, g in zip(xs, gs, strict=True)]
    x, g, options, sizes = images[0]
    channels, outputs, *_, positions, _ = sizes
    tiles = gram_tiles(positions, max(channels, outputs), g.dtype, generation(g), rows_at_once(x, g, options), options)
    each = len(images) * groups * pairs(positions, tiles.rows)
    out = g.new_empty(len(g), each, 4, dtype=torch.float32)
    numbers = (groups, *sizes, *x.stride(), *g.stride(), *map(float, (*lost, bias)))
    alone = 1 if positions <= tiles.rows else 2 * tiles.reads_once(options)
    constants = {"ALONE": alone, "BLOCK": tiles.rows, "BLOCK_K": tiles.depth, **tiles.options()}
    of_x, of_g = (tuple(image[i] for image in images) for i in (0, 1))
    given = (of_x, *[of_g, *(tuple(y.detach() for y in several) for several in beside), of_g, of_g][: 1 + BESIDE], out)
    launch("gram", each, given, numbers, count=len(g), BESIDE=len(beside), **_of_patches(options), **constants)
    found = whole(out.view(len(g) * len(images) * groups, each // (len(images) * groups), 4))
    return found.view(len(g), len(images), groups, 4).transpose(0, 1).flatten(1, 2)


@operation
def gradient_norms(
    x: Tensor, g: Tensor, geometry: Sequence[Sequence[int]], groups: int, lost: tuple[float, float]
) -> Tensor:
    """The results of `gram_norms`, from tiles of the per-sample gradient: never negative."""
    x, g, options, sizes = _of_images(x, g, geometry, groups)
    _, _, *pixels, positions, width = sizes
    squares = g.new_empty(len(g), groups * (math.prod(pixels) + positions), dtype=torch.float32)
    parts = _by_gradient_tiles(x, g, options, sizes, groups, squares, kept=False)
    block = power(positions, LINE)
    out = parts.new_empty(len(g) * groups, -(-positions // block) if parts.numel() else 0, 4)
    collected = (parts.shape[1] // groups, *pixels, positions, width, *map(float, lost))
    launch("collected", out.numel() // 4, (parts, squares, out), collected, BLOCK=block, **_of_patches(options))
    return whole(out)


@operation
def gradients(x: Tensor, g: Tensor, geometry: Sequence[Sequence[int]], groups: int) -> tuple[Tensor, Tensor]:
    """Per-sample gradients [n, P, C / groups, *kernel], and their squared norms [n]: float32."""
    x, g, options, sizes = _of_images(x, g, geometry, groups)
    made = g.new_empty(len(g), groups * sizes[1], sizes[0], *geometry[0], dtype=torch.float32)
    return made, _by_gradient_tiles(x, g, options, sizes, groups, made, kept=True).sum(1)


def _by_gradient_tiles(
    x: Tensor,
    g: Tensor,
    options: Sequence[Sequence[int]],
    sizes: Sequence[int],
    groups: int,
    out: Tensor,
    *,
    kept: bool,
) -> Tensor:
    """Sum of squares of each tile [n, groups · tiles]; squared norms of pixels and rows in `out`, or the gradients.

    Args:
        x, g, options, sizes: from `_of_images`.
    """
    channels, outputs, *_, positions, _ = sizes
    inputs = channels * math.prod(options[0])
    tiles = gradient_tiles(positions, inputs, outputs, g.dtype, generation(g), rows_at_once(x, g, options), options)
    each = groups * -(-outputs // tiles.rows) * -(-inputs // tiles.columns) if positions else 0
    parts = g.new_empty(len(g), each, dtype=torch.float32)
    in_turn = samples_in_turn(len(g), positions, each, WARPS // tiles.warps)
    size = 1 if kept else max(in_turn, -(-len(g) * each // PROGRAMS))
    numbers = (*sizes, len(g), size, groups, *x.stride(), *g.stride())
    constants = _of_patches(options) | tiles.sides() | {"KEPT": kept}
    launch("gradient", -(-len(g) // size) * each, (x, g, parts, out), numbers, 2, **constants)
    return parts


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
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    factors: Tensor,
    size: int,
    geometry: Sequence[Sequence[int]],
    *,
    bias: bool = False,
) -> Tensor:
    """Σ_i c_i g_i of weights without groups, of each portion and layer: [portions, layers, P, C, *kernel] float32.

    Args:
        xs, gs: x and g of each layer, alike in sizes and strides.
        factors: c [n], float32, contiguous.
        size: samples of a portion, from `portion_of`.
        bias: a layer's sums are [P · C · ∏ kernel + P] and end with those of a bias.
    """
    kernel = geometry[0]
    images = [_of_images(x, g, geometry, 1) for x, g in zip(xs, gs, strict=True)]
    x, g, options, sizes = images[0]
    channels, outputs, *_, positions, _ = sizes
    inputs = channels * math.prod(options[0])
    tiles = sum_tiles(positions, inputs, outputs, g.dtype, generation(g), rows_at_once(x, g, options), options)
    shape = (outputs * (inputs + 1),) if bias else (outputs, channels, *kernel)
    out = factors.new_empty(max(1, -(-len(g) // size)), len(images), *shape)
    numbers = (*sizes, len(g), size, *x.stride(), *g.stride())
    constants = _of_patches(options) | tiles.sides() | {"BIAS": bias, "AHEAD": AHEAD}
    programs = len(out) * len(images) * -(-outputs // tiles.rows) * -(-inputs // tiles.columns)
    given = (tuple(each[0] for each in images), tuple(each[1] for each in images), factors, out)
    launch("weighted", programs, given, numbers, **constants)
    return out


class Sums(NamedTuple):
    """Clipped sums of equal layers.

    Attributes:
        samples: B, rounded up to a power of two. So one more record changes the last portion only, unless the batch
            size passes a power of two.
        most: largest portion by rounding, for any batch size up to the next power of two.
        positions, inputs, outputs: T, d and p.
        rows, columns: outputs and inputs of a tile.
    """

    samples: int
    most: int
    positions: int
    inputs: int
    outputs: int
    rows: int
    columns: int

    def cost(self, size: int, layers: int) -> float:
        """Time of one launch and of adding its portions up: each portion is written, read, and their sum is written.

        Args:
            size, layers: samples of a portion, and layers in the launch.
        """
        tiles = layers * -(-self.inputs // self.columns) * -(-self.outputs // self.rows)
        portions = -(-self.samples // size)
        read = busiest(self.samples, size, tiles) * self.positions * MULTIPROCESSORS * (self.rows + self.columns)
        moved = 2 * portions + 1 if portions > 1 else 1
        return read + moved * tiles * self.rows * self.columns * MOVED


@functools.cache
def portion_of(sums: Sums, layers: int = 1) -> int:
    """Samples in a portion, so that few portions keep a GPU busy; of several layers, as few portions as there may be.

    Args:
        sums, layers: sizes, and number of layers in one launch.
    """
    most = min(sums.most, sums.samples)
    fewest = -(-sums.samples // -(-sums.samples // most))
    return min(range(1, most + 1) if layers == 1 else [fewest], key=lambda size: (sums.cost(size, layers), -size))


@functools.cache
def layers_of(sums: Sums, most: int) -> int:
    """Layers in one launch, so that it fills a GPU: 11 of 72 tiles each, or 22 of 18, and not 12; few, to save memory.

    Args:
        sums: sizes.
        most: largest result.
    """
    return min(range(1, most + 1), key=lambda count: (sums.cost(portion_of(sums, count), count) / count, count))


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
    tensors: Sequence[Any],
    numbers: Sequence[float],
    results: int = 1,
    *,
    count: int = 1,
    **constants: Any,
) -> None:
    """Launch `each` programs for each sample, at most `PROGRAMS` at a time; none for fake tensors.

    Args:
        program, each: its name, and programs for each sample.
        tensors, results: [count, ...] if count is above 1, or tuples of several layers' tensors; and how many of them,
            the last ones, are written.
        numbers: the arguments after the tensors.
        count: number of samples.
        constants: compile-time arguments and options of Triton.
    """
    if isinstance(tensors[-1], FakeTensor) or not each:
        return
    kernel, step = _program(program), max(1, PROGRAMS // each)
    with torch.cuda.device_of(tensors[-1]):
        for at in (slice(start, min(start + step, count)) for start in range(0, count, step)):
            some = tensors if count <= step else _at(tensors, at)
            kernel[((at.stop - at.start) * each,)](*some, *numbers, **{"num_warps": WARPS, **constants})


def _at(tensors: Sequence[Any], samples: slice) -> list[Any]:
    return [x[samples] if isinstance(x, Tensor) else tuple(_at(x, samples)) for x in tensors]


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
