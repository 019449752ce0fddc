# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""The Triton programs behind `clipping.accel`, which alone imports this module: it needs Triton.

Each program reduces one tile to one number and writes it to a place of its own: no atomic operation, so that the same
tensors give the same bits. The tiles of a sample are added up afterwards, by one sum of torch's. Positions are
multiplied by strides in 64 bits: a batch may have more than 2³¹ entries. What is outside a tensor is read as zero.
"""

import triton
import triton.language as tl


@triton.jit
def gram(
    a,
    g,
    out,
    positions,
    inputs,
    outputs,
    a_sample,
    a_position,
    a_input,
    g_sample,
    g_position,
    g_output,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Σ (a_t · a_s)(g_t · g_s) over a block of positions t and one of positions s: out [n · pairs]."""
    sample, rows, columns, weight = _pair(positions, BLOCK_T)
    dtype = g.dtype.element_ty  # under autocast a may be wider than what was multiplied
    of_inputs = _products(
        a + sample * a_sample,
        rows,
        columns,
        positions,
        inputs,
        a_position,
        a_input,
        dtype,
        BLOCK_T,
        BLOCK_K,
        PRECISION,
        WIDEN,
    )
    of_outputs = _products(
        g + sample * g_sample,
        rows,
        columns,
        positions,
        outputs,
        g_position,
        g_output,
        dtype,
        BLOCK_T,
        BLOCK_K,
        PRECISION,
        WIDEN,
    )
    tl.store(out + tl.program_id(0), tl.sum(of_inputs * of_outputs) * weight)


@triton.jit
def embedding_gram(
    ids,
    g,
    out,
    positions,
    outputs,
    ids_sample,
    ids_position,
    g_sample,
    g_position,
    g_output,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Σ [id_t = id_s] (g_t · g_s) over a block of positions t and one of positions s: out [n · pairs]."""
    sample, rows, columns, weight = _pair(positions, BLOCK_T)
    ids += sample * ids_sample
    row_ids = tl.load(ids + rows * ids_position, mask=rows < positions, other=0)
    column_ids = tl.load(ids + columns * ids_position, mask=columns < positions, other=0)
    dtype = g.dtype.element_ty
    of_outputs = _products(
        g + sample * g_sample,
        rows,
        columns,
        positions,
        outputs,
        g_position,
        g_output,
        dtype,
        BLOCK_T,
        BLOCK_K,
        PRECISION,
        WIDEN,
    )
    # ids read outside are equal to some id, but their products are zero
    same = row_ids[:, None] == column_ids[None, :]
    tl.store(out + tl.program_id(0), tl.sum(tl.where(same, of_outputs, 0.0)) * weight)


@triton.jit
def instantiated(
    a,
    g,
    out,
    positions,
    inputs,
    outputs,
    a_sample,
    a_position,
    a_input,
    g_sample,
    g_position,
    g_output,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Σ (Σ_t g_tp a_td)² over a tile of (p, d): out [n · tiles]."""
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    tiles = tl.cdiv(outputs, BLOCK_P) * tiles_d
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    a_at = a + sample * a_sample + d.to(tl.int64)[None, :] * a_input
    g_at = g + sample * g_sample + p.to(tl.int64)[:, None] * g_output
    dtype = g.dtype.element_ty
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, positions, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        wide = t.to(tl.int64)
        there = t < positions
        of_outputs = tl.load(g_at + wide[None, :] * g_position, mask=there[None, :] & (p < outputs)[:, None], other=0.0)
        of_inputs = tl.load(a_at + wide[:, None] * a_position, mask=there[:, None] & (d < inputs)[None, :], other=0.0)
        total = _dot(of_outputs, of_inputs.to(dtype), total, PRECISION, WIDEN)
    tl.store(out + tl.program_id(0), tl.sum(total * total))


@triton.jit
def convolution(
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
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Σ (Σ_t g_tp patch_td)² over a tile of (p, d) of one group, d = (kernel row, kernel column, channel).

    `channels` and `outputs` are those of a group: out [n · groups · tiles]. The patches are read where they lie in x.
    """
    inputs = channels * KERNEL_H * KERNEL_W
    positions = out_height * out_width
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    tiles = tl.cdiv(outputs, BLOCK_P) * tiles_d
    tile = tl.program_id(0) % tiles
    group = (tl.program_id(0) // tiles) % groups
    sample = (tl.program_id(0) // tiles // groups).to(tl.int64)
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    offset = d // channels
    down = (offset // KERNEL_W) * DILATION_H - PADDING_H
    across = (offset % KERNEL_W) * DILATION_W - PADDING_W
    x_at = x + sample * x_sample + (group * channels + d % channels).to(tl.int64)[None, :] * x_channel
    g_at = g + sample * g_sample + (group * outputs + p).to(tl.int64)[:, None] * g_channel
    dtype = g.dtype.element_ty
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, positions, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        row = t // out_width
        column = t % out_width
        there = t < positions
        of_outputs = tl.load(
            g_at + (row.to(tl.int64) * g_row + column.to(tl.int64) * g_column)[None, :],
            mask=there[None, :] & (p < outputs)[:, None],
            other=0.0,
        )
        y = (row * STRIDE_H)[:, None] + down[None, :]
        z = (column * STRIDE_W)[:, None] + across[None, :]
        inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
        patches = tl.load(
            x_at + y.to(tl.int64) * x_row + z.to(tl.int64) * x_column,
            mask=inside & there[:, None] & (d < inputs)[None, :],
            other=0.0,
        )
        total = _dot(of_outputs, patches.to(dtype), total, PRECISION, WIDEN)
    tl.store(out + tl.program_id(0), tl.sum(total * total))


@triton.jit
def _pair(positions, BLOCK_T: tl.constexpr):
    """This program's sample, its two blocks of positions, and how often the pair counts.

    Block i meets the blocks i, i + 1, ... i + ⌊blocks / 2⌋ around the circle: each pair of blocks once, and the other
    triangle of the matrix, which is the same, by a weight of 2. Half the circle away, where the number of blocks is
    even, either block of a pair meets the other.
    """
    blocks = tl.cdiv(positions, BLOCK_T)
    distances = blocks // 2 + 1
    sample = (tl.program_id(0) // (blocks * distances)).to(tl.int64)
    pair = tl.program_id(0) % (blocks * distances)
    first = pair // distances
    distance = pair % distances
    second = (first + distance) % blocks
    rows = (first * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    columns = (second * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    weight = tl.where((distance == 0) | (2 * distance == blocks), 1.0, 2.0)
    return sample, rows, columns, weight


@triton.jit
def _products(
    x,
    rows,
    columns,
    positions,
    features,
    x_position,
    x_feature,
    dtype: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """x_t · x_s for positions t in rows and s in columns: [BLOCK_T, BLOCK_T], float32."""
    total = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    rows_at = x + rows[:, None] * x_position
    columns_at = x + columns[:, None] * x_position
    for start in range(0, features, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        at = k.to(tl.int64)[None, :] * x_feature
        there = (k < features)[None, :]
        left = tl.load(rows_at + at, mask=(rows < positions)[:, None] & there, other=0.0)
        right = tl.load(columns_at + at, mask=(columns < positions)[:, None] & there, other=0.0)
        total = _dot(left.to(dtype), tl.trans(right.to(dtype)), total, PRECISION, WIDEN)
    return total


@triton.jit
def _dot(x, y, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + x @ y, accumulated in float32. The products of bfloat16 are exact in float32: to widen changes nothing
    (for the interpreter, whose product of matrices reads the bits of a bfloat16 as an integer).
    """
    if WIDEN:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision=PRECISION)
    else:
        return tl.dot(x, y, total, input_precision=PRECISION)


INTERPRETED = not isinstance(gram, triton.JITFunction)
"""TRITON_INTERPRET=1 was set before Triton was imported (its own functions are then the interpreter's as well)."""
