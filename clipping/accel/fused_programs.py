# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""Triton programs of `clipping.accel.fused`. Importing this module requires Triton.

Each program writes to its own place. There are no atomic operations, so the same tensors give the same bits. Reads
outside a tensor give zero. Diagonals of Gram matrices are clamped at 0 before the square root, as rounding may make
them negative.
"""

import triton
import triton.language as tl

from clipping.accel.cuda_programs import _dot, _pair, _store_reach


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

    A sums shifts of x [n, phases, pixels, pixels] over the kernel's offsets; G is g [n, positions, positions]. The
    columns of out [n · pairs, 4] are this sum, Σ_t √A_tt √G_tt, Σ_t √G_tt · of_outputs + √A_tt · of_inputs and
    Σ_t A_tt G_tt.
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
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
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
def convolution_gram(
    x,
    g,
    out,
    groups,
    channels,
    outputs,
    height,
    width,
    out_height,
    out_width,
    x_sample,
    x_channel,
    x_row,
    x_column,
    g_sample,
    g_channel,
    g_row,
    g_column,
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
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ A_tu G_tu over a block of positions t and one of u, and the reach over t = u.

    A and G are the inner products of patches and of gradient rows, of one sample and group. `channels` and `outputs`
    are those of one group. out is [n · groups · tiles, 4], as in `shifted`. ALONE is True if there is one block.
    """
    positions = out_height * out_width
    found, first, second = _pair(positions, BLOCK)
    sample, group = found // groups, found % groups
    x += sample * x_sample + group * channels * x_channel
    g += sample * g_sample + group * outputs * g_channel
    t = first * BLOCK + tl.arange(0, BLOCK)
    u = second * BLOCK + tl.arange(0, BLOCK)
    # positions beyond the output are read outside the image, as zero
    t_row, t_column = tl.where(t < positions, t // out_width, out_height), t % out_width
    u_row, u_column = tl.where(u < positions, u // out_width, out_height), u % out_width
    dtype = g.dtype.element_ty  # under autocast x may be wider than the dtype it was multiplied in
    of_g = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, outputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = _pixels(g, t_row, t_column, out_height, out_width, k, outputs, g_row, g_column, g_channel)
        right = left
        if not ALONE:
            right = _pixels(g, u_row, u_column, out_height, out_width, k, outputs, g_row, g_column, g_channel)
        of_g = _dot(left, tl.trans(right), of_g)
    t_row = tl.where(t < positions, t_row * STRIDE_H - PADDING_H, height)
    u_row = tl.where(u < positions, u_row * STRIDE_H - PADDING_H, height)
    t_column, u_column = t_column * STRIDE_W - PADDING_W, u_column * STRIDE_W - PADDING_W
    chunks = tl.cdiv(channels, BLOCK_K)
    of_x = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(KERNEL_H * KERNEL_W * chunks):
        down = step // chunks // KERNEL_W * DILATION_H
        across = step // chunks % KERNEL_W * DILATION_W
        k = step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
        left = _pixels(x, t_row + down, t_column + across, height, width, k, channels, x_row, x_column, x_channel)
        right = left
        if not ALONE:
            right = _pixels(x, u_row + down, u_column + across, height, width, k, channels, x_row, x_column, x_channel)
        of_x = _dot(left.to(dtype), tl.trans(right.to(dtype)), of_x)
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, tl.sum(of_x * of_g) * tl.where(first == second, 1.0, 2.0))
    same = t[:, None] == u[None, :]
    of_a, of_g = tl.sum(tl.where(same, of_x, 0.0), 1), tl.sum(tl.where(same, of_g, 0.0), 1)
    _store_reach(out, of_a, of_g, of_inputs, of_outputs)


@triton.jit
def weighted_patches(
    x,
    g,
    factors,
    out,
    channels,
    outputs,
    height,
    width,
    out_height,
    out_width,
    each,
    x_sample,
    x_channel,
    x_row,
    x_column,
    g_sample,
    g_channel,
    g_row,
    g_column,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Σ_i c_i Σ_t g_itp patch_itd over a tile of (p, d) of a portion of `each` samples: out [n / each, p, d].

    In out, d is (channel, kernel row, kernel column); tiles have the channel last. The factor scales float32 sums of
    unscaled operands.
    """
    inputs = channels * KERNEL_H * KERNEL_W
    positions = out_height * out_width
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    tiles = tl.cdiv(outputs, BLOCK_P) * tiles_d
    portion = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    channel, offset = d % channels, d // channels
    down = (offset // KERNEL_W) * DILATION_H - PADDING_H
    across = (offset % KERNEL_W) * DILATION_W - PADDING_W
    x += portion * each * x_sample
    g += portion * each * g_sample
    factors += portion * each
    blocks = tl.cdiv(positions, BLOCK_T)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for step in range(each * blocks):
        sample = (step // blocks).to(tl.int64)
        t = step % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
        row = tl.where(t < positions, t // out_width, out_height)
        of_g = _pixels(
            g + sample * g_sample, row, t % out_width, out_height, out_width, p, outputs, g_row, g_column, g_channel
        )
        y = tl.where(t < positions, row * STRIDE_H, height + PADDING_H)[:, None] + down[None, :]
        z = (t % out_width * STRIDE_W)[:, None] + across[None, :]
        inside = (y >= 0) & (y < height) & (z >= 0) & (z < width) & (d < inputs)[None, :]
        at = y.to(tl.int64) * x_row + z.to(tl.int64) * x_column + channel.to(tl.int64)[None, :] * x_channel
        of_x = tl.load(x + sample * x_sample + at, mask=inside, other=0.0)
        found = _dot(tl.trans(of_g), of_x, tl.zeros((BLOCK_P, BLOCK_D), tl.float32))
        total += found * tl.load(factors + sample)
    at = p.to(tl.int64)[:, None] * inputs + (channel * (KERNEL_H * KERNEL_W) + offset)[None, :]
    tl.store(out + portion * outputs * inputs + at, total, mask=(p < outputs)[:, None] & (d < inputs)[None, :])


@triton.jit
def _pixels(x, rows, columns, height, width, k, channels, x_row, x_column, x_channel):
    """Pixels of an image [channels, height, width] in channels k, zero outside the image: [len(rows), len(k)]."""
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    at = rows.to(tl.int64) * x_row + columns.to(tl.int64) * x_column
    there = inside[:, None] & (k < channels)[None, :]
    return tl.load(x + at[:, None] + (k.to(tl.int64) * x_channel)[None, :], mask=there, other=0.0)


@triton.jit
def turned(x, out, norms, channels, pixels, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):
    """Transpose a block of pixels of x [n, channels, pixels] to out [n, pixels, channels]; write norms [n, pixels]."""
    blocks = tl.cdiv(pixels, BLOCK_N)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    x += sample * channels * pixels
    out += sample * channels * pixels
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        there = (c < channels)[:, None] & (at < pixels)[None, :]
        values = tl.load(x + c.to(tl.int64)[:, None] * pixels + at[None, :], mask=there, other=0.0)
        tl.store(out + at.to(tl.int64)[None, :] * channels + c[:, None], values, mask=there)
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, 0)
    tl.store(norms + sample * pixels + at, tl.sqrt(squares), mask=at < pixels)


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
def added(parts, rest, out, entries, COUNT: tl.constexpr, RESTS: tl.constexpr, BLOCK: tl.constexpr):
    """Σ over the rows of parts [COUNT, entries] and of rest [RESTS, entries], in float64: out [entries] float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < entries
    total = tl.zeros((BLOCK,), tl.float64)
    for _ in range(COUNT):
        total += tl.load(parts + at, mask=there, other=0.0).to(tl.float64)
        parts += entries
    for _ in range(RESTS):
        total += tl.load(rest + at, mask=there, other=0.0).to(tl.float64)
        rest += entries
    tl.store(out + at, total.to(tl.float32), mask=there)


@triton.jit
def scale(x, mean, rstd, g, out, positions, features, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Σ_t g (x - mean) rstd over a block of positions and of features: out [n · blocks, features].

    All are contiguous: x and g [n, positions, features], mean and rstd [n, positions].
    """
    columns = tl.cdiv(features, BLOCK_N)
    blocks = tl.cdiv(positions, BLOCK_T)
    line = tl.program_id(0) // columns
    sample = (line // blocks).to(tl.int64)
    t = line % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = sample * positions + t
    there = t < positions
    inside = there[:, None] & (at < features)[None, :]
    where = rows[:, None] * features + at[None, :]
    of_mean = tl.load(mean + rows, mask=there, other=0.0).to(tl.float32)
    of_rstd = tl.load(rstd + rows, mask=there, other=0.0).to(tl.float32)
    of_x = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    of_g = tl.load(g + where, mask=inside, other=0.0).to(tl.float32)
    found = tl.where(inside, (of_x - of_mean[:, None]) * of_rstd[:, None] * of_g, 0.0)
    tl.store(out + line.to(tl.int64) * features + at, tl.sum(found, 0), mask=at < features)


@triton.jit
def weighted(
    a,
    g,
    factors,
    out,
    count,
    each,
    positions,
    inputs,
    outputs,
    a_sample,
    a_position,
    g_sample,
    g_position,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Σ_i c_i Σ_t g_itp a_itd over a tile of (p, d), for the `each` samples i of one portion.

    out is [portions, outputs, inputs]; a and g have contiguous features. A block of positions belongs to one sample.
    Its products are exact, its sum is float32, and the factor scales the sum in registers.
    """
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    tiles = tl.cdiv(outputs, BLOCK_P) * tiles_d
    portion = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(positions, BLOCK_T)
    first = portion * each
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for k in range((tl.minimum(count, first + each) - first) * blocks):
        sample = (first + k // blocks).to(tl.int64)
        t = k % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
        wide = t.to(tl.int64)
        there = t < positions
        of_g = g + sample * g_sample + wide[None, :] * g_position + p[:, None]
        of_a = a + sample * a_sample + wide[:, None] * a_position + d[None, :]
        left = tl.load(of_g, mask=there[None, :] & (p < outputs)[:, None], other=0.0)
        right = tl.load(of_a, mask=there[:, None] & (d < inputs)[None, :], other=0.0)
        found = _dot(left, right, tl.zeros((BLOCK_P, BLOCK_D), tl.float32))
        total += found * tl.load(factors + sample)
    at = portion.to(tl.int64) * outputs * inputs + p.to(tl.int64)[:, None] * inputs + d[None, :]
    tl.store(out + at, total, mask=(p < outputs)[:, None] & (d < inputs)[None, :])
