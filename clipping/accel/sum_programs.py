# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""The Triton program of `clipping.accel.cuda.weighted`. Importing this module requires Triton.

It follows the rules of `clipping.accel.cuda_programs`.
"""

import triton
import triton.language as tl

from clipping.accel.cuda_programs import _dot
from clipping.accel.reading_programs import _inputs, _of_input, _of_layer, _rows


@triton.jit
def weighted(
    xs,
    gs,
    factors,
    out,
    channels,
    outputs,
    height,
    width,
    positions,
    out_width,
    count,
    each,
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
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Σ_i c_i Σ_t g_itp patch_itd over a tile of (p, d), for the `each` samples i of one portion.

    xs and gs hold x and g of each layer, alike in sizes and strides: out is [portions, layers, p, d]. In out, d is
    (channel, kernel row, kernel column); tiles have the order of `_of_input`. A block of positions belongs to one
    sample. Products are exact and their sum is float32, in units of the factor of its last sample: between two samples,
    the ratio of their factors scales it. So one sum takes registers, and the tile can be large.

    Samples with a factor of 0 are left out. If such a sample has an entry that is not finite, its tile is NaN.

    If BIAS, a layer's sums in out end with Σ_i c_i Σ_t g_itp, by a product with ones.
    """
    inputs = channels * KERNEL_H * KERNEL_W
    tiles_d = tl.cdiv(inputs, BLOCK_D)
    tiles = tl.cdiv(outputs, BLOCK_P) * tiles_d
    portion = tl.program_id(0) // (len(xs) * tiles)
    layer = tl.program_id(0) // tiles % len(xs)
    tile = tl.program_id(0) % tiles
    x, g = _of_layer(xs, layer), _of_layer(gs, layer)
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    patch = _of_input(d, channels, KERNEL_H, KERNEL_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W)
    image = height, width, x_row, x_column, x_channel
    known = d < inputs
    sample = portion * each
    end = tl.minimum(count, sample + each)
    blocks = tl.cdiv(positions, BLOCK_T)
    nothing = 0.0  # or NaN
    unused = sample
    while unused < end:
        unused += _run(factors + unused, end - unused, AHEAD)
        if unused < end:
            g_at = g + unused.to(tl.int64) * g_sample
            x_at = x + unused.to(tl.int64) * x_sample
            for start in range(0, positions, 16):
                t = start + tl.arange(0, 16)
                of_g = _rows(g_at, t, positions, p, outputs, g_position, g_channel)
                of_x = _inputs(x_at, t, positions, known, patch, image, out_width, STRIDE_H, STRIDE_W, PADDING_H, POINT)
                nothing += tl.sum(of_g.to(tl.float32) * 0.0) + tl.sum(of_x.to(tl.float32) * 0.0)
        unused += 1
    unit = 1.0
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    if BIAS:
        of_bias = tl.zeros((BLOCK_P, 16), tl.float32)  # a product has 16 columns or more
        ones = tl.full((BLOCK_T, 16), 1.0, tl.float32).to(g.dtype.element_ty)
    while sample < end:
        stop = sample + _run(factors + sample, end - sample, AHEAD)
        if stop > sample:
            ratio = tl.div_rn(unit, tl.load(factors + sample))
            total *= ratio
            if BIAS:
                of_bias *= ratio
            start = 0
            for _ in tl.range((stop - sample) * blocks, num_stages=STAGES):
                t = start + tl.arange(0, BLOCK_T)
                g_at = g + sample.to(tl.int64) * g_sample
                x_at = x + sample.to(tl.int64) * x_sample
                of_g = _rows(g_at, t, positions, p, outputs, g_position, g_channel)
                of_x = _inputs(x_at, t, positions, known, patch, image, out_width, STRIDE_H, STRIDE_W, PADDING_H, POINT)
                total = _dot(tl.trans(of_g), of_x, total)
                if BIAS:
                    of_bias = _dot(tl.trans(of_g), ones, of_bias)
                is_last = start + BLOCK_T >= positions
                if is_last:
                    after = tl.load(factors + tl.minimum(sample + 1, stop - 1))
                    ratio = tl.div_rn(tl.load(factors + sample), after)
                    total *= ratio
                    if BIAS:
                        of_bias *= ratio
                start = tl.where(is_last, 0, start + BLOCK_T)
                sample += tl.where(is_last, 1, 0)
            unit = tl.load(factors + stop - 1)
        else:
            sample += 1
    at = p.to(tl.int64)[:, None] * inputs + (patch[0] * (KERNEL_H * KERNEL_W) + d // channels)[None, :]
    out += (tl.program_id(0) // tiles).to(tl.int64) * outputs * (inputs + (BIAS > 0))
    tl.store(out + at, total * unit + nothing, mask=(p < outputs)[:, None] & known[None, :])
    if BIAS:
        of_bias = tl.max(of_bias, 1) * unit + nothing
        tl.store(out + outputs * inputs + p, of_bias, mask=(p < outputs) & (tile % tiles_d == 0))


@triton.jit
def _run(factors, count, AHEAD: tl.constexpr):
    """Return the number of factors, at most `count` and AHEAD, before the first 0."""
    at = tl.arange(0, AHEAD)
    found = tl.load(factors + at, mask=at < count, other=0.0)
    return tl.min(tl.where(found == 0, at, AHEAD))
