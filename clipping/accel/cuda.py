"""Squared per-sample norms on CUDA by Triton kernels, which store no Gram matrices or per-sample gradients.

    gram_norm_and_reach             Σ_{t,s} (a_t · a_s)(g_t · g_s) = ‖gᵀa‖²     operations 2 · n T² (d + p) / 2
    embedding_gram_norm_and_reach   Σ_{t,s} [id_t = id_s] (g_t · g_s)           operations 2 · n T² p / 2
    instantiated_norm_and_reach     ‖Σ_t g_t a_tᵀ‖²                             operations 2 · n T p d
    convolution_norm                the same over the patches of an image, without unfolding it
    row_reach                       Σ_t ‖a_t‖ ‖g_t‖, and the rest of a reach (`clipping.numerics.rounding_bounds`)

A program reduces one tile of the Gram matrices, or of the per-sample gradient, to one number in registers. A norm
allocates 16 bytes for each tile of up to 128 × 128 numbers. Gram matrices are symmetric, so half of the tiles are
computed. Their diagonals hold the squared norms of rows, so the first two kernels compute the reach in the same pass.
The third launches extra programs that read rows.

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

Norms check nothing: ask `supported` first.

Functions take:
    a: [n, T, d], of any strides; rounded to g's dtype, as autocast rounds it.
    g: [n, T, p], of any strides.
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

from clipping.numerics.traced_operations import operation
from clipping.rules.pixel_gram import in_two_dimensions

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
            a, g = (torch.full((1, 1, 1), value, device=device) for value in (2.0, 3.0))
            untraced: Any = instantiated_norm_and_reach  # a step may be traced now, and this must run
            found = float(untraced.__wrapped__(a, g, (0.0, 0.0))[0, 0])
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
def gram_norm_and_reach(a: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """Σ_{t,s} (a_t · a_s)(g_t · g_s) = ‖gᵀa‖² of each sample, without storing Gram matrices, and `row_reach`.

    The result is [n, 4] float32. Rounding may make the square of a vanishing gradient slightly negative.
    """
    sizes = *a.shape[1:], g.shape[2]
    positions, inputs, outputs = sizes
    tiles = _gram_tiles(positions, max(inputs, outputs), g.dtype, _generation(g), dense=_is_dense(a, g))
    constants = {"BLOCK_T": tiles.rows, "BLOCK_K": tiles.depth}
    return _with_reach("gram", (a, g), sizes, pairs(positions, tiles.rows), tiles, lost, constants)


@operation
def embedding_gram_norm_and_reach(ids: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """Σ_{t,s} [id_t = id_s] (g_t · g_s) of each sample, ‖∂/∂W‖² of an embedding, and the reach: [n, 4] float32.

    g must be zero where the padding row was read. The reach is that of rows a_t of norm 1.
    """
    _, positions, outputs = g.shape
    tiles = _gram_tiles(positions, outputs, g.dtype, _generation(g), dense=_is_dense(g))
    constants = {"BLOCK_T": tiles.rows, "BLOCK_K": tiles.depth}
    return _with_reach("embedding_gram", (ids, g), g.shape[1:], pairs(positions, tiles.rows), tiles, lost, constants)


@operation
def instantiated_norm_and_reach(a: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """‖Σ_t g_t a_tᵀ‖² of each sample, never negative, without storing its gradient, and `row_reach`: [n, 4] float32."""
    sizes = positions, inputs, outputs = *a.shape[1:], g.shape[2]
    tiles = _gradient_tiles(positions, inputs, outputs, g.dtype, _generation(g), dense=_is_dense(a, g))
    each = math.ceil(positions / ROWS) + math.ceil(outputs / tiles.rows) * math.ceil(inputs / tiles.columns)
    blocks = {"BLOCK_T": tiles.depth, "BLOCK_D": tiles.columns, "BLOCK_P": tiles.rows}
    constants = {**blocks, "ROWS": ROWS, "COLUMNS": COLUMNS * tiles.warps}
    return _with_reach("instantiated", (a, g), sizes, each, tiles, lost, constants)


@operation
def row_reach(a: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """Σ_t ‖a_t‖ ‖g_t‖, Σ_t ‖a_t‖ · lost[0] + ‖g_t‖ · lost[1] and Σ_t ‖a_t‖² ‖g_t‖² of each sample, in one pass.

    The result is [n, 4] float32, with a first column of 0.
    """
    positions, *_ = sizes = *a.shape[1:], g.shape[2]
    constants = {"ROWS": ROWS, "COLUMNS": COLUMNS * BY_ROWS.warps}
    return _with_reach("rows", (a, g), sizes, math.ceil(positions / ROWS), BY_ROWS, lost, constants)


def _with_reach(
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


def pairs(positions: int, rows: int) -> int:
    """Return the number of unordered pairs of blocks of positions.

    Args:
        positions: T.
        rows: positions in a block.
    """
    blocks = math.ceil(positions / rows)
    return blocks * (blocks + 1) // 2


def _is_dense(*tensors: Tensor) -> bool:
    """True if all have one 2-byte dtype, and sizes and strides allow rows to begin at multiples of 32 bytes."""
    return len({x.dtype for x in tensors}) == 1 and all(
        x.element_size() == 2 and x.stride(2) == 1 and not any(size % 16 for size in (x.shape[2], *x.stride()[:2]))
        for x in tensors
    )


@operation
def convolution_norm(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """‖∂/∂W‖² of each sample, [n] float32, for a convolution, without storing patches or gradients.

    Args:
        x: [n, C, *size] with one or two spatial dimensions, of any strides; rounded to g's dtype.
        g: [n, P, *output size], of any strides.
        kernel, stride, padding, dilation: one number a spatial dimension; the same padding on both sides.
        groups: as in torch.nn.Conv2d.
    """
    x, g, options = in_two_dimensions(x, g, (kernel, stride, padding, dilation))
    channels, outputs = x.shape[1] // groups, g.shape[1] // groups
    positions, inputs = g.shape[2] * g.shape[3], channels * math.prod(kernel)
    tiles = _patch_tiles(positions, inputs, outputs, g.dtype, _generation(g) if rows_at_once(x, g) else 0)
    each = groups * math.ceil(outputs / tiles.rows) * math.ceil(inputs / tiles.columns) if positions else 0
    parts = g.new_empty(len(g), each, dtype=torch.float32)
    numbers = (groups, channels, outputs, *x.shape[2:], *g.shape[2:], *x.stride(), *g.stride())
    blocks = {"BLOCK_T": tiles.depth, "BLOCK_D": tiles.columns, "BLOCK_P": tiles.rows}
    constants = named(options) | blocks | tiles.options()
    launch("convolution", each, (x.detach(), g.detach(), parts), numbers, count=len(g), **constants)
    return whole(parts)


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


def _gram_tiles(positions: int, features: int, dtype: torch.dtype, generation: int, *, dense: bool = False) -> Tiles:
    """Use 128 positions if that pads the last block no more than 64 would, or if there are many blocks."""
    depth, large = 64 if dense else 32, _has_room(dtype, generation)
    if large and (positions >= 640 or -positions % 128 < 64):
        return Tiles(128, 128, _power(features, depth), 8, 4)
    rows = _power(positions, 64)  # two Gram tiles are in registers at once
    warps = max(rows * dtype.itemsize // 32, _warps(rows, rows, dtype))
    depth = 16 if dtype == torch.float32 and rows < 64 else depth  # addresses would spill
    return Tiles(rows, rows, _power(features, depth), warps, 4 if large else 3)


def _gradient_tiles(
    positions: int, inputs: int, outputs: int, dtype: torch.dtype, generation: int, *, dense: bool = False
) -> Tiles:
    depth = _power(positions, 64 if dense else 32)
    if _has_room(dtype, generation) and min(inputs, outputs) >= 512:
        return Tiles(128, 128, depth, 8, 3 if dense else 4)
    most = 64 if dtype == torch.float32 or min(inputs, outputs) < 512 else 128
    rows, columns = _power(outputs, most), _power(inputs, most)
    return Tiles(rows, columns, depth, _warps(rows, columns, dtype))


def _patch_tiles(positions: int, inputs: int, outputs: int, dtype: torch.dtype, generation: int) -> Tiles:
    """Tiles of a convolution, as large as registers allow; entries read one by one take more registers.

    Each tile of outputs reads the patches again, and each tile of inputs g; cache bandwidth bounds the time.
    """
    if generation not in (9, 10) or dtype == torch.float32 or min(inputs, outputs) < 64:
        return _gradient_tiles(positions, inputs, outputs, dtype, generation)
    rows = _power(outputs, 128)
    return Tiles(rows, _power(inputs, 16384 // rows), _power(positions, 32), 8, 4)


def rows_at_once(*images: Tensor) -> bool:
    """True if channels are last and strides are multiples of 16 entries, so that 16 bytes are read at once.

    Args:
        images: [n, C, *size].
    """
    return all(x.stride(1) == 1 and not any(s % 16 for s in (x.stride(0), *x.stride()[2:])) for x in images)


def _has_room(dtype: torch.dtype, generation: int) -> bool:
    """True if shared memory holds tiles of 128 by 128, or four stages: on data-centre GPUs since Hopper.

    Large tiles read half as much for each product.
    """
    return generation in (9, 10) and dtype != torch.float32


def _generation(x: Tensor) -> int:
    """Major compute capability of the device; 0 on a CPU."""
    return _capability(x.device)[0] if x.is_cuda else 0


def _power(size: int, most: int) -> int:
    """The least power of 2 that holds `size`, at least 16 (the smallest matrix product) and at most `most`."""
    return min(most, max(16, 1 << max(0, size - 1).bit_length()))


def _warps(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Warps that hold a tile's accumulators in registers: 32 for each thread, 16 for float32."""
    return min(8, max(1, rows * columns // (512 if dtype == torch.float32 else 1024)))


@functools.cache
def _program(name: str) -> Any:
    modules = (importlib.import_module(f"clipping.accel.{place}_programs") for place in ("cuda", "fused"))
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
