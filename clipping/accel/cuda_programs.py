# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""Triton programs of `clipping.accel.cuda`. Importing this module requires Triton.

Each program reduces one tile to one or four numbers and writes them to its own place. There are no atomic operations,
so the same tensors give the same bits. torch then sums the tiles of a sample. Offsets are 64-bit integers, as a batch
may have more than 2³¹ entries. Reads outside a tensor give zero.
"""

import triton
import triton.language as tl


@triton.jit
def _nothing():
    pass


INTERPRETED = tl.constexpr(not isinstance(_nothing, triton.JITFunction))
"""True if TRITON_INTERPRET=1 was set before Triton was imported, so that its own functions are interpreted as well."""


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
    of_inputs,
    of_outputs,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ (a_t · a_s)(g_t · g_s) over a block of positions t and one of s, and the reach over t = s: [n · pairs, 4]."""
    sample, first, second = _pair(positions, BLOCK_T)
    a += sample * a_sample
    g += sample * g_sample
    out += tl.program_id(0).to(tl.int64) * 4
    dtype = g.dtype.element_ty  # under autocast a may be wider than the dtype it was multiplied in
    if first == second:
        of_a = _products(a, first, first, positions, inputs, a_position, a_input, dtype, True, BLOCK_T, BLOCK_K)
        of_g = _products(g, first, first, positions, outputs, g_position, g_output, dtype, True, BLOCK_T, BLOCK_K)
        tl.store(out, tl.sum(of_a * of_g))
        _store_reach(out, _diagonal(of_a, BLOCK_T), _diagonal(of_g, BLOCK_T), of_inputs, of_outputs)
    else:
        of_a = _products(a, first, second, positions, inputs, a_position, a_input, dtype, False, BLOCK_T, BLOCK_K)
        of_g = _products(g, first, second, positions, outputs, g_position, g_output, dtype, False, BLOCK_T, BLOCK_K)
        _store_alone(out, 2.0 * tl.sum(of_a * of_g))


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
    of_inputs,
    of_outputs,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ [id_t = id_s] (g_t · g_s) over blocks of positions t and s, and the reach over t = s: [n · pairs, 4]."""
    sample, first, second = _pair(positions, BLOCK_T)
    ids += sample * ids_sample
    g += sample * g_sample
    out += tl.program_id(0).to(tl.int64) * 4
    rows = (first * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    columns = (second * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row_ids = tl.load(ids + rows * ids_position, mask=rows < positions, other=0)
    column_ids = tl.load(ids + columns * ids_position, mask=columns < positions, other=0)
    same = row_ids[:, None] == column_ids[None, :]  # ids read outside may match, but their products are zero
    dtype = g.dtype.element_ty
    if first == second:
        of_g = _products(g, first, first, positions, outputs, g_position, g_output, dtype, True, BLOCK_T, BLOCK_K)
        tl.store(out, tl.sum(tl.where(same, of_g, 0.0)))
        _store_reach(out, (rows < positions).to(tl.float32), _diagonal(of_g, BLOCK_T), of_inputs, of_outputs)
    else:
        of_g = _products(g, first, second, positions, outputs, g_position, g_output, dtype, False, BLOCK_T, BLOCK_K)
        _store_alone(out, 2.0 * tl.sum(tl.where(same, of_g, 0.0)))


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
    of_inputs,
    of_outputs,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Σ (Σ_t g_tp a_td)² over a tile of (p, d), or the reach over a block of positions: out [n · (blocks + tiles), 4].

    The first programs of a sample compute the reach.
    """
    blocks = tl.cdiv(positions, ROWS)
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    each = blocks + tl.cdiv(outputs, BLOCK_P) * tiles_d
    sample = (tl.program_id(0) // each).to(tl.int64)
    tile = tl.program_id(0) % each - blocks
    a += sample * a_sample
    g += sample * g_sample
    out += tl.program_id(0).to(tl.int64) * 4
    dtype = g.dtype.element_ty
    if tile < 0:
        first = (tile + blocks) * ROWS
        of_a = _squares(a, first, positions, inputs, a_position, a_input, dtype, ROWS, COLUMNS)
        of_g = _squares(g, first, positions, outputs, g_position, g_output, dtype, ROWS, COLUMNS)
        tl.store(out, 0.0)
        _store_reach(out, of_a, of_g, of_inputs, of_outputs)
    else:
        p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
        d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
        a_at = a + d.to(tl.int64)[None, :] * a_input
        g_at = g + p.to(tl.int64)[:, None] * g_output
        total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        for start in range(0, positions, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            wide = t.to(tl.int64)
            there = t < positions
            left = tl.load(g_at + wide[None, :] * g_position, mask=there[None, :] & (p < outputs)[:, None], other=0.0)
            right = tl.load(a_at + wide[:, None] * a_position, mask=there[:, None] & (d < inputs)[None, :], other=0.0)
            total = _dot(left, right.to(dtype), total)
        _store_alone(out, tl.sum(total * total))


@triton.jit
def rows(
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
    of_inputs,
    of_outputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The reach over a block of positions: out [n · blocks, 4], with a first column of 0."""
    blocks = tl.cdiv(positions, ROWS)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * ROWS
    dtype = g.dtype.element_ty
    of_a = _squares(a + sample * a_sample, first, positions, inputs, a_position, a_input, dtype, ROWS, COLUMNS)
    of_g = _squares(g + sample * g_sample, first, positions, outputs, g_position, g_output, dtype, ROWS, COLUMNS)
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, 0.0)
    _store_reach(out, of_a, of_g, of_inputs, of_outputs)


@triton.jit
def _squares(
    x,
    first,
    positions,
    features,
    x_position,
    x_feature,
    dtype: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """‖x_t‖² of the positions from `first` on, summed over COLUMNS features at a time: [ROWS]."""
    t = first + tl.arange(0, ROWS)
    at = x + t.to(tl.int64)[:, None] * x_position
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, features, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        there = (t < positions)[:, None] & (k < features)[None, :]
        each = tl.load(at + k.to(tl.int64)[None, :] * x_feature, mask=there, other=0.0).to(dtype).to(tl.float32)
        total += each * each
    return tl.sum(total, 1)


@triton.jit
def _diagonal(x, BLOCK_T: tl.constexpr):
    """x_tt: [BLOCK_T]."""
    t = tl.arange(0, BLOCK_T)
    return tl.sum(tl.where(t[:, None] == t[None, :], x, 0.0), 1)


@triton.jit
def _store_reach(out, of_a, of_g, of_inputs, of_outputs):
    """Store Σ_t ‖a_t‖ ‖g_t‖, Σ_t ‖a_t‖ · of_inputs + ‖g_t‖ · of_outputs and Σ_t ‖a_t‖² ‖g_t‖² in out[1:4].

    of_a and of_g are the squares ‖a_t‖² and ‖g_t‖²; rounding may have made them negative.
    """
    a_norms, g_norms = tl.sqrt(tl.maximum(of_a, 0.0)), tl.sqrt(tl.maximum(of_g, 0.0))
    terms = a_norms * g_norms
    tl.store(out + 1, tl.sum(terms))
    tl.store(out + 2, tl.sum(a_norms) * of_inputs + tl.sum(g_norms) * of_outputs)
    tl.store(out + 3, tl.sum(terms * terms))


@triton.jit
def _store_alone(out, found):
    """Store a squared norm and zeros for the reach in out[0:4]."""
    tl.store(out, found)
    for i in tl.static_range(1, 4):
        tl.store(out + i, 0.0)


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
):
    """Σ (Σ_t g_tp patch_td)² over a tile of (p, d) of one group, d = (kernel row, kernel column, channel).

    `channels` and `outputs` are those of one group: out [n · groups · tiles]. Patches are read from x directly.
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
        total = _dot(of_outputs, patches.to(dtype), total)
    tl.store(out + tl.program_id(0), tl.sum(total * total))


@triton.jit
def _pair(positions, BLOCK_T: tl.constexpr):
    """This program's sample and its two blocks of positions, the first not before the second.

    Each pair occurs once, as the matrix is symmetric. The triangle of B rows is folded into a rectangle of B columns
    if B is odd, else of B + 1: the remaining rows, reversed, fill the space below its diagonal.
    """
    blocks = tl.cdiv(positions, BLOCK_T)
    pairs = blocks * (blocks + 1) // 2
    width = blocks | 1
    more = width - blocks
    row = tl.program_id(0) % pairs // width
    column = tl.program_id(0) % pairs % width
    turned = column < row + more
    first = tl.where(turned, blocks - 1 - column, column - more)
    second = tl.where(turned, blocks - more - row, row)
    return (tl.program_id(0) // pairs).to(tl.int64), first, second


@triton.jit
def _products(
    x,
    first,
    second,
    positions,
    features,
    x_position,
    x_feature,
    dtype: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x_t · x_s for positions t of the first block and s of the second, [BLOCK_T, BLOCK_T], float32.

    If they are the `SAME` block, it is loaded once.
    """
    total = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    rows = (first * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    columns = (second * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    rows_at = x + rows[:, None] * x_position
    columns_at = x + columns[:, None] * x_position
    for start in range(0, features, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        at = k.to(tl.int64)[None, :] * x_feature
        there = (k < features)[None, :]
        left = tl.load(rows_at + at, mask=(rows < positions)[:, None] & there, other=0.0).to(dtype)
        right = left
        if not SAME:
            right = tl.load(columns_at + at, mask=(columns < positions)[:, None] & there, other=0.0).to(dtype)
        total = _dot(left, tl.trans(right), total)
    return total


@triton.jit
def _dot(x, y, total):
    """total + x @ y, accumulated in float32.

    Triton's interpreter reads a bfloat16 operand as an integer, so it widens. This changes nothing, as products of
    half precision are exact in float32.
    """
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")
