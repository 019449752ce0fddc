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
from clipping.core.dtypes import HALF
from clipping.numerics.per_sample import POINT
from clipping.rules.pixel_gram import LINEAR

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


NORMS = (cuda.gram_norms, cuda.gradient_norms)


def of_rows(norms: Callable[..., Tensor], a: Tensor, g: Tensor, lost: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Squared norms and reaches [n, 4] of a linear layer."""
    return norms(a.mT, g.mT, LINEAR, 1, lost)


def gram_norm(a: Tensor, g: Tensor) -> Tensor:
    return of_rows(cuda.gram_norms, a, g)[:, 0]


def gradient_norm(a: Tensor, g: Tensor) -> Tensor:
    return of_rows(cuda.gradient_norms, a, g)[:, 0]


def embedding_gram_norm(ids: Tensor, g: Tensor) -> Tensor:
    return cuda.embedding_gram_norms(ids, g, (0.0, 0.0))[:, 0]


BOTH = (gram_norm, gradient_norm)


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
            *(of_rows(norms, a, g, lost) for norms in NORMS),
        ):
            close(found[:, 1:], reach)
        ids = torch.randint(0, 4, (n, t), device=device)
        ones = torch.stack([of_g.sum(1), (lost[0] + of_g * lost[1]).sum(1), of_g.square().sum(1)], 1)
        close(cuda.embedding_gram_norms(ids, g, lost)[:, 1:], ones)
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
        for found in (norm(a, g) for norm in BOTH):
            assert found.tolist() == [0.0] * n and found.dtype == torch.float32
        close(
            embedding_gram_norm(torch.zeros(n, t, dtype=torch.int64, device=device), g),
            g.double().sum(1).square().sum(1),
        )


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
    options: Any = (([3, 3], [1, 1], [0, 0], [1, 1]), 1, (0.0, 0.0))
    for norms in NORMS:
        assert torch.equal(norms(x, y, *options), norms(x.to(narrow), y, *options))


def large(dtype: torch.dtype, device: str) -> None:
    """float16 squares overflow from 256 on, and a bfloat16 sum stops growing after 256 terms."""
    a, g = torch.full((2, 300, 2), 6e4, device=device).to(dtype), torch.full((2, 300, 3), 2e3, device=device).to(dtype)
    for norm in BOTH:
        close(norm(a, g), squared(a, g))
    ids = torch.zeros(2, 300, dtype=torch.int64, device=device)
    close(embedding_gram_norm(ids, a), a.double().sum(1).square().sum(1))
    x, rows = a.reshape(2, 2, 15, 20), a.reshape(4, 300, 1)
    for norms in NORMS:
        close(norms(x, x, POINT, 2, (0.0, 0.0))[:, 0], squared(rows, rows))


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
    for view in (a, by_sample, by_feature):
        view.copy_(draw(device, torch.float16, *view.shape))
        for norm in BOTH:
            close(norm(view, view), squared(view, view))
    close(embedding_gram_norm(ids, by_feature), by_feature.double().sum(1).square().sum(1))
    for view in (image, image.transpose(2, 3), image.transpose(1, 2), image.transpose(0, 2)):
        view.copy_(draw(device, torch.float16, *view.shape))
        rows = view.flatten(2).transpose(1, 2)
        for norms in NORMS:
            close(norms(view, view, POINT, 1, (0.0, 0.0))[:, 0], squared(rows, rows))


def unread(device: str) -> None:
    """Pixels in no patch, where the stride leaves a remainder, do not affect the norm."""
    x, g = draw(device, torch.float32, 2, 3, 10, 10), draw(device, torch.float32, 2, 4, 3, 3)
    options: Any = (([2, 2], [3, 3], [0, 0], [1, 1]), 1, (0.0, 0.0))
    found = [norms(x, g, *options) for norms in NORMS]
    x[:, :, 9], x[:, :, :, 9] = torch.inf, torch.nan
    assert all(torch.equal(norms(x, g, *options), each) for norms, each in zip(NORMS, found, strict=True))


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
    "what no patch reads": unread,
    **{f"embedding, ids of {dtype}": partial(embeddings, dtype) for dtype in (torch.int32, torch.int64)},
}


OPTIONS = {"STRIDE": 1, "PADDING": 1, "DILATION": 1, "KERNEL": 3}
GEOMETRY = {f"{name}_{axis}": value for name, value in OPTIONS.items() for axis in "HW"}
#: Images of rows of a linear layer, and the arguments that are 1 (which Triton turns into constants)
ROWS = {name: int("PADDING" not in name) for name in GEOMETRY} | {"height": 1, "out_height": 1}
LAST, FIRST = ("x_channel", "g_channel"), ("x_column", "g_column")
Tiled = Callable[..., cuda.Tiles]

# program, dtype, its tiles for a generation, constants, and whether sizes and strides are multiples of 16
COMPILED: dict[str, tuple[str, torch.dtype, Tiled, dict[str, int], bool]] = {}
for _dtype in DTYPES:
    for _case, _geometry, _constants in (("linear", LINEAR, ROWS), ("convolution", ((3, 3),), GEOMETRY)):
        for _layout in ("dense", "channels last", "channels first"):
            _ones, _dense = dict.fromkeys(FIRST if _layout == "channels first" else LAST, 1), _layout == "dense"
            for _program, _tiles in (
                ("gram", partial(cuda._gram_tiles, 4096, 4096)),
                ("gradient", partial(cuda._gradient_tiles, 4096, 4096, 4096)),
                ("weighted", partial(cuda._sum_tiles, 4096, 4096, 4096)),
            ):
                _tiled = partial(_tiles, _dtype, at_once=_dense, geometry=_geometry)
                if _dtype in HALF or (not _dense and _program != "weighted"):
                    _name = f"{_program}, {_case}, {_layout}, {_dtype}"
                    COMPILED[_name] = (_program, _dtype, _tiled, {**_constants, **_ones}, _dense)
    for _dense in (True, False) if _dtype in HALF else (False,):
        _tiled = partial(cuda._gram_tiles, 4096, 4096, _dtype, at_once=_dense)
        _name = f"embedding, {'dense, ' if _dense else ''}{_dtype}"
        COMPILED[_name] = ("embedding_gram", _dtype, _tiled, {"g_output": 1, "ids_position": 1}, _dense)
    COMPILED[f"rows, {_dtype}"] = ("rows", _dtype, lambda **_: cuda.BY_ROWS, {"a_input": 1, "g_output": 1}, False)
    COMPILED[f"collected, {_dtype}"] = ("collected", _dtype, lambda **_: cuda.BY_ROWS, {}, False)


def compile_(name: str, capability: int) -> None:
    """Compile for a GPU of this capability, present or not; no register may spill."""
    from clipping.accel import cuda_programs  # needs Triton

    program, dtype, tiled, constants, dense = COMPILED[name]
    tiles = tiled(generation=capability // 10)
    blocks = {"ALONE": 0, "BLOCK": cuda.LINE if program == "collected" else tiles.rows, "BLOCK_K": tiles.depth}
    values = {**constants, **blocks, **tiles.sides(), "ROWS": cuda.ROWS, "COLUMNS": cuda.COLUMNS * tiles.warps}
    element = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    others = ("out", "squares", "parts", "factors")
    kinds = {"ids": "*i64"} | dict.fromkeys("agx", element) | dict.fromkeys(others, "*fp32")
    aligned = ("x_", "g_", "channels", "outputs") if dense else ()  # `cuda.rows_at_once`
    compiled(getattr(cuda_programs, program), capability, kinds, values, aligned=aligned, **tiles.options())


def main(arguments: list[str]) -> dict[str, Any]:
    if arguments[:1] == ["compile"]:
        names = [name for name in COMPILED if name.endswith(f"torch.{arguments[2]}")]
        return {f"{name}, sm_{arguments[1]}": outcome(compile_, name, int(arguments[1])) for name in names}
    return interpreted(CHECKS)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
