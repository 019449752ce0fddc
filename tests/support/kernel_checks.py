"""Checks the kernels of `clipping.accel` on a GPU or in Triton's interpreter, and compiles them.

The interpreter must be chosen before Triton is imported, so `test_clipping_kernels.py` runs this file as a process:

    TRITON_INTERPRET=1 python tests/support/kernel_checks.py   run all checks on the CPU: {name: error or null}
    python tests/support/kernel_checks.py compile 90 bfloat16  compile for a GPU, present or not: {name: error or null}
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from interpreter import compiled, interpreted, outcome
from torch import Tensor

from clipping.accel import cuda
from clipping.accel.cuda import convolution_norm
from clipping.rules.base import Route
from clipping.rules.convolution import ConvolutionWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def squares(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The squared norms [n] of a function that also returns reaches."""
    return lambda x, g: norm(x, g, (0.0, 0.0))[:, 0]


gram_norm, embedding_gram_norm = squares(cuda.gram_norm_and_reach), squares(cuda.embedding_gram_norm_and_reach)
instantiated_norm = squares(cuda.instantiated_norm_and_reach)
BOTH = (gram_norm, instantiated_norm)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Compare relative to the largest entry: float32 sums may be in another order."""
    assert found.dtype == torch.float32 and found.shape == expected.shape, (found.dtype, found.shape)
    error = (
        float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if len(found) else 0.0
    )
    assert error <= tolerance, f"relative error {error:.2e} of {expected.tolist()}, got {found.tolist()}"


def squared(a: Tensor, g: Tensor) -> Tensor:
    """‖gᵀa‖² in float64, with a first rounded to g's dtype."""
    return torch.einsum("ntp,ntd->npd", g.double(), a.to(g.dtype).double()).square().sum((1, 2))


def draw(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def shapes(dtype: torch.dtype, device: str) -> None:
    for n, t, d, p in [(2, 1, 1, 1), (1, 1, 20, 3), (2, 5, 3, 7), (3, 17, 1, 33), (1, 70, 40, 9), (2, 131, 5, 70)]:
        a, g = draw(device, dtype, n, t, d), draw(device, dtype, n, t, p)
        for norm in BOTH:
            close(norm(a, g), squared(a, g))


def reaches(dtype: torch.dtype, device: str) -> None:
    """Of norms of rows: in the same pass as a norm, and alone. Also of rows that are padded to multiples of 16."""
    lost = (0.5, 3.0)
    for n, t, d, p in [(2, 1, 1, 1), (2, 5, 3, 7), (1, 70, 40, 9), (2, 131, 5, 70), (2, 37, 300, 16), (1, 150, 32, 64)]:
        a, g = draw(device, dtype, n, t, d), draw(device, dtype, n, t, p)
        of_a, of_g = a.double().norm(dim=2), g.double().norm(dim=2)
        terms = of_a * of_g
        reach = torch.stack([terms.sum(1), (of_a * lost[0] + of_g * lost[1]).sum(1), terms.square().sum(1)], 1)
        for found in (
            cuda.row_reach(a, g, lost),
            cuda.gram_norm_and_reach(a, g, lost),
            cuda.instantiated_norm_and_reach(a, g, lost),
        ):
            close(found[:, 1:], reach)
        ids = torch.randint(0, 4, (n, t), device=device)
        ones = torch.stack([of_g.sum(1), (lost[0] + of_g * lost[1]).sum(1), of_g.square().sum(1)], 1)
        close(cuda.embedding_gram_norm_and_reach(ids, g, lost)[:, 1:], ones)
        assert cuda.row_reach(a, g, lost)[:, 0].tolist() == [0.0] * n


def first_program(device: str) -> None:
    """The program that `cuda.trouble` tests first computes the right result."""
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        assert cuda.trouble(torch.device(device)) is None
    finally:
        torch.cuda.is_available = available


def nothing(device: str) -> None:
    """Sizes of zero: no samples or positions, or an empty gradient."""
    for n, t, d, p in [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (2, 3, 2, 0)]:
        a, g = draw(device, torch.float32, n, t, d), draw(device, torch.float32, n, t, p)
        for found in (gram_norm(a, g), instantiated_norm(a, g)):
            assert found.tolist() == [0.0] * n and found.dtype == torch.float32
        close(
            embedding_gram_norm(torch.zeros(n, t, dtype=torch.int64, device=device), g),
            g.double().sum(1).square().sum(1),
        )
    x = draw(device, torch.float32, 0, 2, 5, 5)
    assert convolution_norm(x, x, [1, 1], [1, 1], [0, 0], [1, 1], 1).tolist() == []


def views(device: str) -> None:
    """Channels first, strided features, an expanded row, an offset: results equal a dense copy's to the bit."""
    a, g = draw(device, torch.float32, 2, 12, 19), draw(device, torch.float32, 2, 7, 19)
    wide = draw(device, torch.float32, 5, 40, 30)
    row = draw(device, torch.float32, 2, 1, 6).expand(2, 19, 6)
    for left, right in [
        (a.transpose(1, 2), g.transpose(1, 2)),
        (wide[1:3, 2::2, ::3], wide[3:, 1:39:2, 5:9]),
        (row, g.transpose(1, 2)),
        (wide.transpose(0, 1)[:3], wide.flip(0).transpose(0, 1)[:3]),
    ]:
        for norm in BOTH:
            close(norm(left, right), squared(left, right))
            assert torch.equal(norm(left, right), norm(left.contiguous(), right.contiguous()))


def autocast(device: str) -> None:
    """The kernels round an input that is wider than the output's gradient, as the forward pass did."""
    narrow = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter rounds bfloat16 downwards
    a, g = draw(device, torch.float32, 2, 21, 6), draw(device, narrow, 2, 21, 9)
    for norm in BOTH:
        assert torch.equal(norm(a, g), norm(a.to(narrow), g))
        assert not torch.equal(norm(a, g), norm(a, g.float()))
    x, y = draw(device, torch.float32, 2, 3, 6, 6), draw(device, narrow, 2, 4, 4, 4)
    options: Any = ([3, 3], [1, 1], [0, 0], [1, 1], 1)
    assert torch.equal(convolution_norm(x, y, *options), convolution_norm(x.to(narrow), y, *options))


def large(dtype: torch.dtype, device: str) -> None:
    """float16 squares overflow from 256 on, and a bfloat16 sum stops growing after 256 terms."""
    a, g = torch.full((2, 300, 2), 6e4, device=device).to(dtype), torch.full((2, 300, 3), 2e3, device=device).to(dtype)
    for norm in BOTH:
        close(norm(a, g), squared(a, g))
    ids = torch.zeros(2, 300, dtype=torch.int64, device=device)
    close(embedding_gram_norm(ids, a), a.double().sum(1).square().sum(1))
    x = a.reshape(2, 2, 15, 20)
    close(
        convolution_norm(x, x, [1, 1], [1, 1], [0, 0], [1, 1], 2),
        squared(x.reshape(4, 300, 1), x.reshape(4, 300, 1)).view(2, 2).sum(1),
    )


def ieee(device: str) -> None:
    """TF32 would round (1 + 2⁻¹⁶): ‖gᵀa‖² of one position is the product of both squared norms."""
    a, g = torch.full((1, 1, 40), 1 + 2.0**-16, device=device), torch.full((1, 1, 40), 1 - 2.0**-15, device=device)
    for norm in BOTH:
        close(norm(a, g), squared(a, g), 3e-7)


def every_number_of_blocks(device: str) -> None:
    """Odd and even numbers of blocks, paired around a circle: each pair counts once."""
    for blocks in range(1, 8):
        a, g = draw(device, torch.float32, 1, 64 * blocks - 3, 2), draw(device, torch.float32, 1, 64 * blocks - 3, 3)
        close(gram_norm(a, g), squared(a, g))


def launched_in_turn(device: str) -> None:
    """More programs than fit into one launch."""
    a, g = draw(device, torch.float32, 5, 20, 3), draw(device, torch.float32, 5, 20, 4)
    whole, cuda.PROGRAMS = cuda.PROGRAMS, 4
    try:
        for norm in BOTH:
            close(norm(a, g), squared(a, g))
    finally:
        cuda.PROGRAMS = whole


def beyond_32_bits(device: str) -> None:
    """Entries 2³¹ and more apart, in a storage that gets memory only for the few pages it touches."""
    far = 2**30 + 4096
    storage = torch.empty(2 * far + 64, dtype=torch.float16, device=device)
    a = storage.as_strided((2, 3, 4), (4, far, 1))
    by_sample, by_feature = storage.as_strided((3, 2, 4), (far, 4, 1)), storage.as_strided((2, 4, 3), (4, 1, far))
    ids = torch.zeros(2, 4, dtype=torch.int64, device=device)
    image = storage.as_strided((2, 2, 3, 2), (4, 2, far, 1))
    options: Any = ([1, 1], [1, 1], [0, 0], [1, 1], 1)
    for view in (a, by_sample, by_feature):
        view.copy_(draw(device, torch.float16, *view.shape))
        for norm in BOTH:
            close(norm(view, view), squared(view, view))
    close(embedding_gram_norm(ids, by_feature), by_feature.double().sum(1).square().sum(1))
    for view in (image, image.transpose(2, 3), image.transpose(1, 2), image.transpose(0, 2)):
        view.copy_(draw(device, torch.float16, *view.shape))
        rows = view.flatten(2).transpose(1, 2)
        close(convolution_norm(view, view, *options), squared(rows, rows))


CONVOLUTIONS: dict[str, tuple[Any, ...]] = {  # C, P, size, kernel, stride, padding, dilation, groups
    "plain": (3, 5, (7, 6), (3, 3), (1, 1), (0, 0), (1, 1), 1),
    "same": (4, 6, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided with a remainder": (4, 6, (8, 7), (2, 2), (3, 2), (0, 0), (1, 1), 1),
    "everything": (6, 8, (9, 11), (3, 2), (2, 1), (1, 2), (1, 2), 2),
    "depthwise": (6, 12, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 6),
    "pointwise": (20, 17, (4, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one of each": (1, 1, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "kernel larger than the image": (2, 3, (3, 2), (5, 5), (1, 1), (2, 2), (1, 1), 1),
    "padding larger than the kernel": (2, 3, (3, 3), (2, 2), (2, 2), (3, 3), (1, 1), 1),
    "more than a tile": (9, 70, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "one dimension": (4, 6, (11,), (3,), (2,), (1,), (2,), 2),
}


def convolutions(name: str, device: str) -> None:
    inputs, outputs, size, kernel, stride, padding, dilation, groups = CONVOLUTIONS[name]
    weight = draw(device, torch.float64, outputs, inputs // groups, *kernel)
    function = F.conv1d if len(size) == 1 else F.conv2d
    for dtype in DTYPES if name == "everything" else DTYPES[:1]:
        x = draw(device, dtype, 2, inputs, *size)
        shape = function(x.double(), weight, None, stride, padding, dilation, groups).shape
        g = draw(device, dtype, *shape)
        options = (list(stride), list(padding), list(dilation), groups)
        rule = ConvolutionWeight(weight, x.double(), shape[2:], *options)
        expected = rule.squared_norms(g.double(), Route())
        close(convolution_norm(x, g, kernel, *options), expected)
        if len(size) == 2:
            last, turned = x.to(memory_format=torch.channels_last), g.transpose(2, 3).contiguous().transpose(2, 3)
            assert torch.equal(
                convolution_norm(last, turned, kernel, *options), convolution_norm(x, g, kernel, *options)
            )


def unread(device: str) -> None:
    """Pixels in no patch, where the stride leaves a remainder, do not affect the norm."""
    x, g = draw(device, torch.float32, 2, 3, 10, 10), draw(device, torch.float32, 2, 4, 3, 3)
    options: Any = ([2, 2], [3, 3], [0, 0], [1, 1], 1)
    found = convolution_norm(x, g, *options)
    x[:, :, 9], x[:, :, :, 9] = torch.inf, torch.nan
    assert torch.equal(convolution_norm(x, g, *options), found)


def transposed(device: str) -> None:
    """A transposed convolution has the weight gradient of a convolution with input and output gradient swapped."""
    x = draw(device, torch.float64, 2, 4, 5, 5)
    weight = draw(device, torch.float64, 4, 3, 3, 2).requires_grad_()
    y = F.conv_transpose2d(x, weight, None, 2, 1, 0, 2)
    g = draw(device, torch.float64, *y.shape)
    each = [torch.autograd.grad(y[i], weight, g[i], retain_graph=True)[0].square().sum() for i in range(2)]
    found = convolution_norm(g.float(), x.float(), [3, 2], [2, 2], [1, 1], [1, 1], 2)
    close(found, torch.stack(each))


def embeddings(ids_dtype: torch.dtype, device: str) -> None:
    for n, t, p, rows in [(2, 1, 1, 1), (2, 6, 3, 2), (1, 75, 20, 9), (3, 33, 70, 1000)]:
        ids = torch.randint(0, rows, (n, 2 * t), device=device, dtype=ids_dtype)[:, ::2]
        for dtype in DTYPES:
            g = draw(device, dtype, n, t, p)
            g[:, 0] = 0  # as for the padding row
            hot = F.one_hot(ids.long(), rows)
            close(embedding_gram_norm(ids, g), squared(hot.to(dtype), g))


CHECKS: dict[str, Callable[[str], None]] = {
    **{f"odd shapes in {dtype}": partial(shapes, dtype) for dtype in DTYPES},
    **{f"reaches in {dtype}": partial(reaches, dtype) for dtype in DTYPES},
    "the first program of all": first_program,
    "sizes of zero": nothing,
    "views of any strides": views,
    "autocast": autocast,
    **{f"large values in {dtype}": partial(large, dtype) for dtype in DTYPES[1:]},
    "products of float32 are exact": ieee,
    "every number of blocks": every_number_of_blocks,
    "launched in turn": launched_in_turn,
    "beyond 32 bits": beyond_32_bits,
    **{f"convolution: {name}": partial(convolutions, name) for name in CONVOLUTIONS},
    "convolution: what no patch reads": unread,
    "transposed convolution": transposed,
    **{f"embedding, ids of {dtype}": partial(embeddings, dtype) for dtype in (torch.int32, torch.int64)},
}


OPTIONS = {"KERNEL": 3, "STRIDE": 1, "PADDING": 1, "DILATION": 1}
CONVOLUTION = {f"{name}_{axis}": value for name, value in OPTIONS.items() for axis in "HW"}


FEATURES_LAST = ("a_input", "g_output", "ids_position")
POSITIONS_LAST = ("a_position", "g_position", "ids_position")

# program, dtype, tiles, constants, the arguments that are 1 (which Triton turns into constants), and whether sizes and
# strides are known to be multiples of 16
COMPILED: dict[str, tuple[str, torch.dtype, Callable[[int], cuda.Tiles], dict[str, int], tuple[str, ...], bool]] = {}
for _dtype in DTYPES:
    for _dense in (True, False) if _dtype != torch.float32 else (False,):
        _gram = partial(cuda._gram_tiles, 4096, 4096, _dtype, dense=_dense)
        _gradient = partial(cuda._gradient_tiles, 4096, 4096, 4096, _dtype, dense=_dense)
        _how = f"{'dense, ' if _dense else ''}{_dtype}"
        COMPILED |= {
            f"gram, {_how}": ("gram", _dtype, _gram, {}, FEATURES_LAST, _dense),
            f"embedding, {_how}": ("embedding_gram", _dtype, _gram, {}, FEATURES_LAST, _dense),
            f"instantiated, {_how}": ("instantiated", _dtype, _gradient, {}, FEATURES_LAST, _dense),
        }
    _patches = partial(cuda._patch_tiles, 4096, 4096, 4096, _dtype)
    COMPILED |= {
        f"gram, positions last, {_dtype}": ("gram", _dtype, _gram, {}, POSITIONS_LAST, False),
        f"rows, {_dtype}": ("rows", _dtype, lambda _: cuda.BY_ROWS, {}, FEATURES_LAST, False),
        f"convolution, {_dtype}": ("convolution", _dtype, _gradient, CONVOLUTION, ("x_column", "g_column"), False),
        f"channels last, {_dtype}": ("convolution", _dtype, _patches, CONVOLUTION, ("x_channel", "g_channel"), False),
    }


def compile_(name: str, capability: int) -> None:
    """Compile for a GPU of this capability, present or not; no register may spill."""
    from clipping.accel import cuda_programs  # needs Triton

    program, dtype, tiled, constants, ones, dense = COMPILED[name]
    tiles = tiled(capability // 10)
    blocks = {"BLOCK_T": tiles.rows, "BLOCK_K": tiles.depth}
    if program in ("instantiated", "convolution"):
        blocks = {"BLOCK_T": tiles.depth, "BLOCK_D": tiles.columns, "BLOCK_P": tiles.rows}
    values = {**constants, **blocks, "ROWS": cuda.ROWS, "COLUMNS": cuda.COLUMNS * tiles.warps}
    values |= dict.fromkeys(ones, 1)
    element = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    kinds = {"out": "*fp32", "ids": "*i64"} | dict.fromkeys("agx", element)
    aligned = ("inputs", "outputs", "a_", "g_") if dense else ()  # `cuda._is_dense`, `cuda.rows_at_once`
    if "x_channel" in ones:
        aligned = ("x_", "g_", "channels", "outputs")
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled(getattr(cuda_programs, program), capability, kinds, values, aligned=aligned, **options)


def main(arguments: list[str]) -> dict[str, Any]:
    if arguments[:1] == ["compile"]:
        names = [name for name in COMPILED if name.endswith(f"torch.{arguments[2]}")]
        return {f"{name}, sm_{arguments[1]}": outcome(compile_, name, int(arguments[1])) for name in names}
    return interpreted(CHECKS)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
