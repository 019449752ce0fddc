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

from clipping.accel.reading_programs import _inputs, _of_input, _of_layer, _pixels, _rows


@triton.jit
def _nothing():
    pass


INTERPRETED = tl.constexpr(not isinstance(_nothing, triton.JITFunction))
"""True if TRITON_INTERPRET=1 was set before Triton was imported, so that its own functions are interpreted as well."""


@triton.jit
def gram(
    xs,
    gs,
    more,
    most,
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

    A and G are the inner products of patches and of gradient rows, of one sample, layer and group. `channels` and
    `outputs` are those of one group. xs and gs hold x and g of each layer, alike in sizes and strides: out is
    [n · layers · groups · tiles, 4], as in `shifted`. ALONE is 1 if there is one block, and 2 if
    a block that meets itself is to be read once.
    of_bias is 1 if inputs have one more entry, 1, else 0. Rows of g continue in `more` if BESIDE is 1, and in `most`
    if it is 2.
    """
    found, first, second = _pair(positions, BLOCK)
    sample, group = found // (groups * len(xs)), found % groups
    layer = found // groups % len(xs)
    x = _of_layer(xs, layer) + sample * x_sample + group * channels * x_channel
    of_sample = sample * g_sample + group * outputs * g_channel
    g = _of_layer(gs, layer) + of_sample
    t = first * BLOCK + tl.arange(0, BLOCK)
    u = second * BLOCK + tl.arange(0, BLOCK)
    same = first == second
    dtype = g.dtype.element_ty  # under autocast x may be wider than the dtype it was multiplied in
    of_g = tl.zeros((BLOCK, BLOCK), tl.float32)
    of_g = _gram_of_rows(g, t, u, same, positions, outputs, g_position, g_channel, of_g, dtype, ALONE, BLOCK_K)
    if BESIDE > 0:
        g = _of_layer(more, layer) + of_sample
        of_g = _gram_of_rows(g, t, u, same, positions, outputs, g_position, g_channel, of_g, dtype, ALONE, BLOCK_K)
    if BESIDE > 1:
        g = _of_layer(most, layer) + of_sample
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
    rest,
    channels,
    outputs,
    height,
    width,
    positions,
    out_width,
    count,
    each,
    groups,
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
    KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ (Σ_t g_tp patch_td)² over a tile of (p, d), with d in the order of `_of_input`: out [n · groups · tiles].

    `channels` and `outputs` are those of one group. If KEPT, a program takes one sample, and stores the gradient in
    `rest`, where d is (channel, kernel row, kernel column). Else it takes `each` samples in turn, and the programs of a
    sample and group share the squared norms of its pixels and rows of g: rest [n · groups, pixels + T]. They load them
    again: on Hopper, Triton 3.6 and 3.8 overwrite an operand while its product is computed, if the program also holds
    it in registers.
    """
    inputs = channels * KERNEL_H * KERNEL_W
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    tiles = tl.cdiv(outputs, BLOCK_P) * tiles_d
    tile = tl.program_id(0) % tiles
    group = (tl.program_id(0) // tiles % groups).to(tl.int64)
    sample = (tl.program_id(0) // (tiles * groups)).to(tl.int64) * each
    end = tl.minimum(count, sample + each)
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    patch = _of_input(d, channels, KERNEL_H, KERNEL_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W)
    image = height, width, x_row, x_column, x_channel
    known = d < inputs
    x += group * channels * x_channel
    g += group * outputs * g_channel
    pixels = height * width
    numbers = pixels + positions
    dtype = g.dtype.element_ty
    x_at, g_at, squares = x + sample * x_sample, g + sample * g_sample, rest + (sample * groups + group) * numbers
    for _ in range(0, 0 if KEPT else end - sample):
        for start in range(tile * BLOCK_T, pixels, tiles * BLOCK_T):
            at = start + tl.arange(0, BLOCK_T)
            of_x = _squares(x_at, at, height, width, channels, x_row, x_column, x_channel, dtype, BLOCK_T, BLOCK_D)
            tl.store(squares + at, of_x, mask=at < pixels)
        for start in range((tiles - 1 - tile) * BLOCK_T, positions, tiles * BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            of_g = _squares(g_at, t, 1, positions, outputs, 0, g_position, g_channel, dtype, BLOCK_T, BLOCK_P)
            tl.store(squares + pixels + t, of_g, mask=t < positions)
        x_at, g_at, squares = x_at + x_sample, g_at + g_sample, squares + groups * numbers
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    start = 0
    for _ in tl.range((end - sample) * tl.cdiv(positions, BLOCK_T), num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_T)
        of_g = _rows(g + sample * g_sample, t, positions, p, outputs, g_position, g_channel)
        of_x = x + sample * x_sample
        of_x = _inputs(of_x, t, positions, known, patch, image, out_width, STRIDE_H, STRIDE_W, PADDING_H, POINT)
        total = _dot(tl.trans(of_g), of_x.to(dtype), total)
        is_last = start + BLOCK_T >= positions
        if not KEPT:
            if is_last:
                tl.store(out + (sample * groups + group) * tiles + tile, tl.sum(total * total))
                total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
            sample += tl.where(is_last, 1, 0)
        start = tl.where(is_last, 0, start + BLOCK_T)
    if KEPT:
        found = sample * groups + group
        tl.store(out + found * tiles + tile, tl.sum(total * total))
        at = p[:, None] * inputs + (patch[0] * (KERNEL_H * KERNEL_W) + d // channels)[None, :]
        tl.store(rest + found * outputs * inputs + at, total, mask=(p < outputs)[:, None] & known[None, :])


@triton.jit
def collected(
    parts,
    squares,
    out,
    tiles,
    height,
    width,
    positions,
    out_width,
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
    POINT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Squared norm and reach of a sample and group over a block of positions, from the results of `gradient`: [n, 4].

    A patch's squared norm sums those of its pixels. The first program of a sample and group sums the squared norms of
    its tiles.
    """
    blocks = tl.cdiv(positions, BLOCK)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = tl.arange(0, BLOCK)
    t = block * BLOCK + at
    norm = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.where(block == 0, tiles, 0), BLOCK):
        norm += tl.load(parts + sample * tiles + start + at, mask=start + at < tiles, other=0.0)
    pixels = height * width
    squares += sample * (pixels + positions)
    of_g = tl.load(squares + pixels + t, mask=t < positions, other=0.0)
    of_x = tl.zeros((BLOCK,), tl.float32)
    for k in range(KERNEL_H * KERNEL_W):
        if POINT:
            of_x += tl.load(squares + t, mask=t < positions, other=0.0)
        else:
            y = t // out_width * STRIDE_H - PADDING_H + k // KERNEL_W * DILATION_H
            z = t % out_width * STRIDE_W - PADDING_W + k % KERNEL_W * DILATION_W
            inside = (t < positions) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            of_x += tl.load(squares + y * width + z, mask=inside, other=0.0)
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
    t = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    dtype = g.dtype.element_ty
    of_a = _squares(a + sample * a_sample, t, 1, positions, inputs, 0, a_position, a_input, dtype, ROWS, COLUMNS)
    of_g = _squares(g + sample * g_sample, t, 1, positions, outputs, 0, g_position, g_output, dtype, ROWS, COLUMNS)
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, 0.0)
    _store_reach(out, of_a, of_g, of_inputs, of_outputs)


@triton.jit
def _squares(
    x,
    at,
    height,
    width,
    channels,
    x_row,
    x_column,
    x_channel,
    dtype: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Squared norms of an image's pixels, counted row by row, zero outside: [PIXELS], by CHANNELS at a time."""
    row, column = at // width, at % width
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for start in range(0, channels, CHANNELS):
        k = start + tl.arange(0, CHANNELS)
        each = _pixels(x, row, column, height, width, k, channels, x_row, x_column, x_channel)
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
