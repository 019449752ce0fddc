# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""Triton programs of `clipping.accel.fused`. Importing this module requires Triton.

They follow the rules of `clipping.accel.cuda_programs`.
"""

import triton
import triton.language as tl

from clipping.accel.cuda_programs import _store_reach


@triton.jit
def shifted(
    x,
    g,
    out,
    positions,
    width,
    pixels,
    rows,
    columns,
    of_inputs,
    of_outputs,
    of_bias,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    PHASES_H: tl.constexpr,
    PHASES_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ A_tu G_tu over a block of positions t and one of u, and the reach over t = u.

    A is of_bias and shifts of x [n, phases, pixels, pixels], summed over the kernel's offsets. G is g [n, positions,
    positions]. The columns of out [n · pairs, 4] are this sum, Σ_t √A_tt √G_tt, Σ_t √G_tt · of_outputs + √A_tt ·
    of_inputs and Σ_t A_tt G_tt.
    """
    blocks = tl.cdiv(positions, BLOCK)
    distances = blocks // 2 + 1  # the cyclic distance of any two blocks is at most blocks // 2
    sample = (tl.program_id(0) // (blocks * distances)).to(tl.int64)
    pair = tl.program_id(0) % (blocks * distances)
    first = pair // distances
    distance = pair % distances
    weight = tl.where((distance == 0) | (2 * distance == blocks), 1.0, 2.0)
    t = first * BLOCK + tl.arange(0, BLOCK)
    u = (first + distance) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = (t < positions)[:, None] & (u < positions)[None, :]
    x += sample * (PHASES_H * PHASES_W) * pixels * pixels
    g += sample * positions * positions
    sums = tl.zeros((BLOCK, BLOCK), tl.float32) + of_bias
    for k in range(KERNEL_H * KERNEL_W):
        phase_h, down = _read(k // KERNEL_W, STRIDE_H, PADDING_H, DILATION_H, PHASES_H)
        phase_w, across = _read(k % KERNEL_W, STRIDE_W, PADDING_W, DILATION_W, PHASES_W)
        t_row, t_column = t // width + down, t % width + across
        u_row, u_column = u // width + down, u % width + across
        t_inside = (t_row >= 0) & (t_row < rows) & (t_column >= 0) & (t_column < columns)
        u_inside = (u_row >= 0) & (u_row < rows) & (u_column >= 0) & (u_column < columns)
        of_t = ((phase_h * PHASES_W + phase_w) * pixels + t_row * columns + t_column).to(tl.int64) * pixels
        of_u = u_row * columns + u_column
        inside = there & t_inside[:, None] & u_inside[None, :]
        sums += tl.load(x + of_t[:, None] + of_u[None, :], mask=inside, other=0.0)
    of_g = tl.load(g + t.to(tl.int64)[:, None] * positions + u[None, :], mask=there, other=0.0)
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, tl.sum(sums * of_g) * weight)
    same = there & (t[:, None] == u[None, :])
    of_a, of_g = tl.sum(tl.where(same, sums, 0.0), 1), tl.sum(tl.where(same, of_g, 0.0), 1)
    _store_reach(out, of_a, of_g, of_inputs, of_outputs)


@triton.jit
def _read(k, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, PHASES: tl.constexpr):
    """The phase that offset k of the kernel reads, and the distance from the position within it."""
    at = k * DILATION - PADDING + STRIDE * PADDING  # not negative, so that the remainder is Python's
    phase = at % STRIDE if PHASES > 1 else 0
    return phase, at // STRIDE - PADDING


@triton.jit
def turned(x, out, channels, pixels, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):
    """Transpose a block of channels and pixels of x [n, channels, pixels] to out [n, pixels, channels]."""
    rows, columns = tl.cdiv(channels, BLOCK_C), tl.cdiv(pixels, BLOCK_N)
    sample, block = (tl.program_id(0) // (rows * columns)).to(tl.int64), tl.program_id(0) % (rows * columns)
    c = block // columns * BLOCK_C + tl.arange(0, BLOCK_C)
    at = block % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    x += sample * channels * pixels
    out += sample * channels * pixels
    there = (c < channels)[:, None] & (at < pixels)[None, :]
    values = tl.load(x + c.to(tl.int64)[:, None] * pixels + at[None, :], mask=there)
    tl.store(out + at.to(tl.int64)[None, :] * channels + c[:, None], values, mask=there)


@triton.jit
def reach(
    x,
    g,
    out,
    positions,
    width,
    rows,
    columns,
    x_sample,
    x_row,
    x_column,
    g_sample,
    g_position,
    of_inputs,
    of_outputs,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ_t a_t g_t, Σ_t g_t · of_outputs + a_t · of_inputs and Σ_t a_t² g_t² over a block of positions: [n · blocks, 3].

    x [n, rows, columns] holds norms of pixels, and a_t² sums the squares of those that position t reads. g
    [n, positions] holds norms of rows.
    """
    blocks = tl.cdiv(positions, BLOCK)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    t = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = t < positions
    x += sample * x_sample
    of_g = tl.load(g + sample * g_sample + t.to(tl.int64) * g_position, mask=there, other=0.0)
    row = (t // width) * STRIDE_H - PADDING_H
    column = (t % width) * STRIDE_W - PADDING_W
    if KERNEL_H * KERNEL_W == 1:
        inside = there & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        of_x = tl.load(x + row.to(tl.int64) * x_row + column.to(tl.int64) * x_column, mask=inside, other=0.0)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for k in range(KERNEL_H * KERNEL_W):
            y = row + (k // KERNEL_W) * DILATION_H
            z = column + (k % KERNEL_W) * DILATION_W
            inside = there & (y >= 0) & (y < rows) & (z >= 0) & (z < columns)
            pixel = tl.load(x + y.to(tl.int64) * x_row + z.to(tl.int64) * x_column, mask=inside, other=0.0)
            squares += pixel * pixel
        of_x = tl.sqrt(squares)
    terms = of_x * of_g
    out += tl.program_id(0).to(tl.int64) * 3
    tl.store(out, tl.sum(terms))
    tl.store(out + 1, tl.sum(of_x) * of_inputs + tl.sum(of_g) * of_outputs)
    tl.store(out + 2, tl.sum(terms * terms))


@triton.jit
def added(parts, rest, out, entries, count, others, BLOCK: tl.constexpr):
    """Σ over the rows of parts [count, entries] and of rest [others, entries], in float64: out [entries] float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < entries
    total = tl.zeros((BLOCK,), tl.float64)
    for _ in range(count):
        total += tl.load(parts + at, mask=there, other=0.0).to(tl.float64)
        parts += entries
    for _ in range(others):
        total += tl.load(rest + at, mask=there, other=0.0).to(tl.float64)
        rest += entries
    tl.store(out + at, total.to(tl.float32), mask=there)


@triton.jit
def layer_norm(
    x,
    mean,
    rstd,
    weight,
    g,
    of_x,
    sums,
    positions,
    features,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of x, and Σ_t g x̂ and Σ_t g over a block of EACH positions: sums [n · blocks, 2, features].

    All are contiguous: x, g and of_x [n, positions, features], mean and rstd [n, positions], weight [features]. ROWS
    rows of BLOCK features are read at a time. With h = g · weight, the gradient is rstd (h - mean(h) - x̂ mean(h x̂)).
    """
    blocks = tl.cdiv(positions, EACH)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * EACH
    at = tl.arange(0, BLOCK)
    known = at < features
    of_weight = tl.load(weight + at, mask=known, other=0.0).to(tl.float32)[None, :]
    scale, shift = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, EACH, ROWS):
        t = first + start + tl.arange(0, ROWS)
        rows, there = sample * positions + t, t < positions
        inside = there[:, None] & known[None, :]
        where = rows[:, None] * features + at[None, :]
        of_mean = tl.load(mean + rows, mask=there, other=0.0).to(tl.float32)[:, None]
        of_rstd = tl.load(rstd + rows, mask=there, other=0.0).to(tl.float32)[:, None]
        of_g = tl.load(g + where, mask=inside, other=0.0).to(tl.float32)
        normal = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (normal - of_mean) * of_rstd, 0.0)
        scale += of_g * normal
        shift += of_g
        of_g *= of_weight
        along = tl.sum(of_g * normal, 1)[:, None] / features
        found = (of_g - tl.sum(of_g, 1)[:, None] / features - normal * along) * of_rstd
        tl.store(of_x + where, found.to(of_x.dtype.element_ty), mask=inside)
    sums += tl.program_id(0).to(tl.int64) * 2 * features
    tl.store(sums + at, tl.sum(scale, 0), mask=known)
    tl.store(sums + features + at, tl.sum(shift, 0), mask=known)
