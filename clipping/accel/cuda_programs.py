# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""Triton programs of `clipping.accel.cuda`. Importing this module requires Triton.

x holds images [n, channels, height, width] of a convolution's input, and g [n, outputs, positions] its output's
gradient, of out_width positions a row. If POINT, patches are pixels in their order, and the image has one row: of a
linear layer, too.

Each program writes to its own place. There are no atomic operations, so the same tensors give the same bits. Most
programs reduce one tile to a few numbers, and torch sums the tiles of a sample. Offsets are 64-bit integers, as a batch
may have more than 2³¹ entries. Reads outside a tensor give zero. Diagonals of Gram matrices are clamped at 0 before the
square root, as rounding may make them negative.
"""

import triton
import triton.language as tl

from clipping.accel.reading_programs import _inputs, _of_input, _pixels, _rows


@triton.jit
def _nothing():
    pass


INTERPRETED = tl.constexpr(not isinstance(_nothing, triton.JITFunction))
"""True if TRITON_INTERPRET=1 was set before Triton was imported, so that its own functions are interpreted as well."""


@triton.jit
def gram(
    x,
    g,
    more_g,
    most_g,
    out,
    groups,
    channels,
    outputs,
    height,
    width,
    positions,
    out_width,
    x_sample,
    x_channel,
    x_row,
    x_column,
    g_sample,
    g_channel,
    g_position,
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
    POINT: tl.constexpr,
    ALONE: tl.constexpr,
    BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ A_tu G_tu over a block of positions t and one of u, and the reach over t = u.

    A and G are the inner products of patches and of gradient rows, of one sample and group. `channels` and `outputs`
    are those of one group. out is [n · groups · tiles, 4], as in `shifted`. ALONE is 1 if there is one block, and 2 if
    a block that meets itself is to be read once.
    of_bias is 1 if inputs have one more entry, 1, else 0. Rows of g continue in more_g if BESIDE is 1, and in most_g if
    it is 2.
    """
    found, first, second = _pair(positions, BLOCK)
    sample, group = found // groups, found % groups
    x += sample * x_sample + group * channels * x_channel
    of_sample = sample * g_sample + group * outputs * g_channel
    g += of_sample
    t = first * BLOCK + tl.arange(0, BLOCK)
    u = second * BLOCK + tl.arange(0, BLOCK)
    same = first == second
    dtype = g.dtype.element_ty  # under autocast x may be wider than the dtype it was multiplied in
    of_g = tl.zeros((BLOCK, BLOCK), tl.float32)
    of_g = _gram_of_rows(g, t, u, same, positions, outputs, g_position, g_channel, of_g, dtype, ALONE, BLOCK_K)
    if BESIDE > 0:
        g = more_g + of_sample
        of_g = _gram_of_rows(g, t, u, same, positions, outputs, g_position, g_channel, of_g, dtype, ALONE, BLOCK_K)
    if BESIDE > 1:
        g = most_g + of_sample
        of_g = _gram_of_rows(g, t, u, same, positions, outputs, g_position, g_channel, of_g, dtype, ALONE, BLOCK_K)
    of_x = tl.zeros((BLOCK, BLOCK), tl.float32)
    if POINT:
        of_x = _gram_of_rows(x, t, u, same, positions, channels, x_column, x_channel, of_x, dtype, ALONE, BLOCK_K)
    else:
        # positions beyond the output are read outside the image, as zero
        t_row = tl.where(t < positions, t // out_width * STRIDE_H - PADDING_H, height)
        u_row = tl.where(u < positions, u // out_width * STRIDE_H - PADDING_H, height)
        t_column, u_column = t % out_width * STRIDE_W - PADDING_W, u % out_width * STRIDE_W - PADDING_W
        chunks = tl.cdiv(channels, BLOCK_K)
        for step in range(KERNEL_H * KERNEL_W * chunks):
            down = step // chunks // KERNEL_W * DILATION_H
            across = step // chunks % KERNEL_W * DILATION_W
            k = step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
            left = _pixels(x, t_row + down, t_column + across, height, width, k, channels, x_row, x_column, x_channel)
            right = left
            if ALONE != 1:
                y, z = u_row + down, u_column + across
                right = _pixels(x, y, z, height, width, k, channels, x_row, x_column, x_channel)
            of_x = _dot(left.to(dtype), tl.trans(right.to(dtype)), of_x)
    of_x += of_bias
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, tl.sum(of_x * of_g) * tl.where(first == second, 1.0, 2.0))
    equal = (t[:, None] == u[None, :]) & (t < positions)[:, None]
    of_a, of_g = tl.sum(tl.where(equal, of_x, 0.0), 1), tl.sum(tl.where(equal, of_g, 0.0), 1)
    _store_reach(out, of_a, of_g, of_inputs, of_outputs)


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
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ [id_t = id_u] (g_t · g_u) over a block of positions t and one of u; the reach over t = u: [n · tiles, 4]."""
    sample, first, second = _pair(positions, BLOCK)
    ids += sample * ids_sample
    g += sample * g_sample
    t = first * BLOCK + tl.arange(0, BLOCK)
    u = second * BLOCK + tl.arange(0, BLOCK)
    dtype = g.dtype.element_ty
    of_g = tl.zeros((BLOCK, BLOCK), tl.float32)
    of_g = _products(g, t, u, positions, outputs, g_position, g_output, of_g, dtype, False, BLOCK_K)
    of_t = tl.load(ids + t.to(tl.int64) * ids_position, mask=t < positions, other=0)
    of_u = tl.load(ids + u.to(tl.int64) * ids_position, mask=u < positions, other=0)
    alike = of_t[:, None] == of_u[None, :]  # ids read outside may match, but their products are zero
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, tl.sum(tl.where(alike, of_g, 0.0)) * tl.where(first == second, 1.0, 2.0))
    ones = ((t < positions) & (first == second)).to(tl.float32)
    same = t[:, None] == u[None, :]
    _store_reach(out, ones, tl.sum(tl.where(same, of_g, 0.0), 1), of_inputs, of_outputs)


@triton.jit
def gradient(
    x,
    g,
    out,
    squares,
    groups,
    channels,
    outputs,
    height,
    width,
    positions,
    out_width,
    x_sample,
    x_channel,
    x_row,
    x_column,
    g_sample,
    g_channel,
    g_position,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    POINT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ (Σ_t g_tp patch_td)² over a tile of (p, d) of one sample and group, with d in the order of `_of_input`.

    `channels` and `outputs` are those of one group: out [n · groups · tiles]. The programs of a row or column of tiles
    share the sums of squares of what they read at each position: squares [n · groups, tiles of p and of d, T]. They
    load it again: on Hopper, Triton 3.6 and 3.8 overwrite an operand while its product is computed, if the program also
    holds it in registers.
    """
    inputs = channels * KERNEL_H * KERNEL_W
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    tiles_p = tl.cdiv(outputs, BLOCK_P)
    found = (tl.program_id(0) // (tiles_p * tiles_d)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_p * tiles_d)
    sample, group = found // groups, found % groups
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    patch = _of_input(d, channels, KERNEL_H, KERNEL_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W)
    image = height, width, x_row, x_column, x_channel
    known = d < inputs
    x += sample * x_sample + group * channels * x_channel
    g += sample * g_sample + group * outputs * g_channel
    squares += found * (tiles_p + tiles_d) * positions
    dtype = g.dtype.element_ty
    for start in tl.range(tile % tiles_d * BLOCK_T, positions, tiles_d * BLOCK_T, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_T)
        of_g = _rows(g, t, positions, p, outputs, g_position, g_channel)
        _store_squares(squares + (tile // tiles_d).to(tl.int64) * positions, of_g, t, positions)
    for start in tl.range(tile // tiles_d * BLOCK_T, positions, tiles_p * BLOCK_T, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_T)
        of_x = _inputs(x, t, positions, known, patch, image, out_width, STRIDE_H, STRIDE_W, PADDING_H, POINT)
        _store_squares(squares + (tiles_p + tile % tiles_d).to(tl.int64) * positions, of_x.to(dtype), t, positions)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, positions, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        of_g = _rows(g, t, positions, p, outputs, g_position, g_channel)
        of_x = _inputs(x, t, positions, known, patch, image, out_width, STRIDE_H, STRIDE_W, PADDING_H, POINT)
        total = _dot(tl.trans(of_g), of_x.to(dtype), total)
    tl.store(out + tl.program_id(0), tl.sum(total * total))


@triton.jit
def _store_squares(out, x, t, positions):
    """Store the squared norms of the rows of x, [len(t), any], at t."""
    wide = x.to(tl.float32)
    tl.store(out + t, tl.sum(wide * wide, 1), mask=t < positions)


@triton.jit
def collected(parts, squares, out, tiles_p, tiles_d, positions, of_inputs, of_outputs, BLOCK: tl.constexpr):
    """Squared norm and reach of a sample and group over a block of positions, from the results of `gradient`: [n, 4].

    The first program of a sample and group sums the squared norms of its tiles.
    """
    blocks = tl.cdiv(positions, BLOCK)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = tl.arange(0, BLOCK)
    t = block * BLOCK + at
    tiles = tiles_p * tiles_d
    norm = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.where(block == 0, tiles, 0), BLOCK):
        norm += tl.load(parts + sample * tiles + start + at, mask=start + at < tiles, other=0.0)
    squares += sample * (tiles_p + tiles_d) * positions + t
    of_g, of_x = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for _ in range(tiles_p):
        of_g += tl.load(squares, mask=t < positions, other=0.0)
        squares += positions
    for _ in range(tiles_d):
        of_x += tl.load(squares, mask=t < positions, other=0.0)
        squares += positions
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, tl.sum(norm))
    _store_reach(out, of_x, of_g, of_inputs, of_outputs)


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
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, features, COLUMNS):
        each = _rows(x, t, positions, start + tl.arange(0, COLUMNS), features, x_position, x_feature)
        each = each.to(dtype).to(tl.float32)
        total += each * each
    return tl.sum(total, 1)


@triton.jit
def _store_reach(out, of_a, of_g, of_inputs, of_outputs):
    """Store Σ_t ‖a_t‖ ‖g_t‖, Σ_t ‖a_t‖ · of_inputs + ‖g_t‖ · of_outputs and Σ_t ‖a_t‖² ‖g_t‖² in out[1:4].

    of_a and of_g are the squares ‖a_t‖² and ‖g_t‖².
    """
    a_norms, g_norms = tl.sqrt(tl.maximum(of_a, 0.0)), tl.sqrt(tl.maximum(of_g, 0.0))
    terms = a_norms * g_norms
    tl.store(out + 1, tl.sum(terms))
    tl.store(out + 2, tl.sum(a_norms) * of_inputs + tl.sum(g_norms) * of_outputs)
    tl.store(out + 3, tl.sum(terms * terms))


@triton.jit
def _gram_of_rows(
    x,
    t,
    u,
    same,
    positions,
    features,
    x_position,
    x_feature,
    total,
    dtype: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add x_t · x_u of positions t and u to total, and return it; `same`: whether t and u are."""
    if ALONE < 2:
        total = _products(x, t, u, positions, features, x_position, x_feature, total, dtype, ALONE == 1, BLOCK_K)
    elif same:
        total = _products(x, t, u, positions, features, x_position, x_feature, total, dtype, True, BLOCK_K)
    else:
        total = _products(x, t, u, positions, features, x_position, x_feature, total, dtype, False, BLOCK_K)
    return total


@triton.jit
def _products(
    x,
    t,
    u,
    positions,
    features,
    x_position,
    x_feature,
    total,
    dtype: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + x_t · x_u, rounded to dtype before they are multiplied: [len(t), len(u)]; if ALONE, u is t."""
    for start in range(0, features, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = _rows(x, t, positions, k, features, x_position, x_feature)
        right = left
        if not ALONE:
            right = _rows(x, u, positions, k, features, x_position, x_feature)
        total = _dot(left.to(dtype), tl.trans(right.to(dtype)), total)
    return total


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
def _dot(x, y, total):
    """total + x @ y, accumulated in float32.

    Triton's interpreter reads a bfloat16 operand as an integer, so it widens. This changes nothing, as products of
    half precision are exact in float32.
    """
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")
