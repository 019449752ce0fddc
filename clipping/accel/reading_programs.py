# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""How the Triton programs of `clipping.accel.cuda` read rows, pixels and patches. Importing this requires Triton.

Offsets are 64-bit integers. What lies outside a tensor is zero.
"""

import triton
import triton.language as tl


@triton.jit
def _of_layer(tensors, layer):
    """The tensor of this number, among those of all layers."""
    found = tensors[0]
    for i in tl.static_range(1, len(tensors)):
        found = tl.where(layer == i, tensors[i], found)
    return found


@triton.jit
def _of_input(
    d,
    channels,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
):
    """Channel of inputs d, in the order (kernel row, kernel column, channel), and where they lie in their patch.

    If the kernel has one pixel, all lie in one place, which saves addresses.
    """
    if KERNEL_H * KERNEL_W == 1:
        channel, down, across = d, tl.full((1,), -PADDING_H, tl.int32), tl.full((1,), -PADDING_W, tl.int32)
    else:
        offset = d // channels
        channel = d % channels
        down = (offset // KERNEL_W) * DILATION_H - PADDING_H
        across = (offset % KERNEL_W) * DILATION_W - PADDING_W
    return channel, down, across


@triton.jit
def _inputs(
    x,
    t,
    positions,
    known,
    patch,
    image,
    out_width,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    POINT: tl.constexpr,
):
    """Inputs of patches at positions t, zero beyond them, outside the image and if not `known`: [len(t), len(known)].

    patch is from `_of_input`. image: height, width, and strides of rows, columns and channels.
    """
    channel, down, across = patch
    height, width, x_row, x_column, x_channel = image
    if POINT:
        there = (t < positions)[:, None] & known[None, :]
        at = t.to(tl.int64)[:, None] * x_column
    else:
        y = tl.where(t < positions, t // out_width * STRIDE_H, height + PADDING_H)[:, None] + down[None, :]
        z = (t % out_width * STRIDE_W)[:, None] + across[None, :]
        there = (y >= 0) & (y < height) & (z >= 0) & (z < width) & known[None, :]
        at = y.to(tl.int64) * x_row + z.to(tl.int64) * x_column
    return tl.load(x + at + channel.to(tl.int64)[None, :] * x_channel, mask=there, other=0.0)


@triton.jit
def _rows(x, t, positions, k, features, x_position, x_feature):
    """Features k of x at positions t, zero beyond both: [len(t), len(k)]."""
    there = (t < positions)[:, None] & (k < features)[None, :]
    return tl.load(
        x + t.to(tl.int64)[:, None] * x_position + k.to(tl.int64)[None, :] * x_feature, mask=there, other=0.0
    )


@triton.jit
def _pixels(x, rows, columns, height, width, k, channels, x_row, x_column, x_channel):
    """Pixels of an image [channels, height, width] in channels k, zero outside the image: [len(rows), len(k)]."""
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    at = rows.to(tl.int64) * x_row + columns.to(tl.int64) * x_column
    there = inside[:, None] & (k < channels)[None, :]
    return tl.load(x + at[:, None] + (k.to(tl.int64) * x_channel)[None, :], mask=there, other=0.0)
