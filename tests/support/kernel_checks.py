"""Checks the kernels of `clipping.accel` on a GPU or in Triton's interpreter, and compiles them.

The interpreter must be chosen before Triton is imported, so `test_clipping_kernels.py` runs this file as a process:

    TRITON_INTERPRET=1 python tests/support/kernel_checks.py            run all checks on the CPU, or those named
    python tests/support/kernel_checks.py compile 90 torch.bfloat16     compile for a GPU, present or not

Both print {name: error or null}. The second compiles the programs of one dtype; `fused` names those of `accel.fused`.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from interpreter import compiled, main, outcome
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping import Flat, PerLayer, load_backend
from clipping.accel import cuda, fused, tiles, ways
from clipping.accel.tiles import SIDE, Tiles, gradient_tiles, gram_tiles, rows_at_once, sum_tiles
from clipping.accel.ways import GRADIENT_KERNEL, GRAM_KERNEL, NORM_KERNEL
from clipping.core.dtypes import HALF
from clipping.numerics import per_sample
from clipping.numerics.per_sample import POINT
from clipping.numerics.rounding_bounds import of_rows, row_norms
from clipping.rules.base import Route
from clipping.rules.convolution import ConvolutionWeight, convolution, transposed_convolution
from clipping.rules.linear import LinearWeight
from clipping.rules.normalisation import layer_norm
from clipping.rules.pixel_gram import LINEAR
from dpbench.conformance.modules import Net

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = (cuda.gram_norms, cuda.gradient_norms)

#: channels, outputs, size, kernel, stride, padding, dilation, groups
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "as in ResNet18": (4, 5, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "more tiles than one": (3, 2, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stride 2": (3, 4, (8, 6), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "stride 2, odd sizes": (3, 4, (7, 9), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "a shortcut": (3, 4, (7, 8), (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "a shortcut that begins in the padding": (3, 4, (7, 8), (1, 1), (2, 2), (1, 1), (1, 1), 1),
    "stride above the kernel": (2, 3, (9, 8), (2, 2), (3, 4), (1, 0), (1, 1), 1),
    "dilated": (2, 3, (9, 8), (3, 2), (1, 2), (2, 1), (2, 3), 1),
    "dilated by the stride": (2, 3, (9, 8), (3, 3), (2, 2), (2, 2), (2, 2), 1),
    "in groups": (4, 6, (5, 6), (3, 2), (1, 2), (1, 0), (1, 1), 2),
    "of one dimension": (3, 4, (40,), (5,), (2,), (2,), (1,), 1),
    "of one dimension, wide padding": (3, 4, (5,), (3,), (1,), (4,), (1,), 1),
    "more than a tile of outputs": (9, 70, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "one pixel for each position": (20, 17, (4, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "kernel larger than the image": (2, 3, (3, 2), (5, 5), (1, 1), (2, 2), (1, 1), 1),
    "padding larger than the kernel": (2, 3, (3, 3), (2, 2), (2, 2), (3, 3), (1, 1), 1),
    "one pixel": (3, 4, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "nothing but padding": (3, 4, (1, 1), (1, 1), (2, 2), (1, 1), (1, 1), 1),
}


def gram_norm(a: Tensor, g: Tensor) -> Tensor:
    """Squared norms [n] of a linear layer, by the kernel for Gram matrices."""
    return cuda.gram_norms(a.mT, g.mT, LINEAR, 1, (0.0, 0.0))[:, 0]


def gradient_norm(a: Tensor, g: Tensor) -> Tensor:
    return cuda.gradient_norms(a.mT, g.mT, LINEAR, 1, (0.0, 0.0))[:, 0]


def embedding_gram_norm(ids: Tensor, g: Tensor) -> Tensor:
    return cuda.embedding_gram_norms(ids, g, (0.0, 0.0))[:, 0]


BOTH = (gram_norm, gradient_norm)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Compare relative to the largest entry: float32 sums may be in another order."""
    assert found.shape == expected.shape and found.dtype == torch.float32, (found.shape, found.dtype)
    if found.numel():
        error = float((found.double() - expected).abs().max() / expected.double().abs().max().clamp(min=1e-30))
        assert error <= tolerance, f"relative error {error:.1e}: {found.tolist()} for {expected.tolist()}"


def squared(a: Tensor, g: Tensor) -> Tensor:
    """‖gᵀa‖² in float64, with a first rounded to g's dtype."""
    return torch.einsum("ntp,ntd->npd", g.double(), a.to(g.dtype).double()).square().sum((1, 2))


def draw(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def made(
    case: tuple[Any, ...], device: str, dtype: torch.dtype, *, transposed: bool = False
) -> tuple[Any, Any, Tensor]:
    """A convolution's rule in `dtype` and in float64, and its output's gradient in float64."""
    channels, outputs, size, kernel, stride, padding, dilation, groups = case
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = torch.randn(*shape, *kernel, dtype=torch.float64, device=device).to(dtype)
    x = torch.randn(3, channels, *size, dtype=torch.float64, device=device).to(dtype)
    found = []
    for each in (dtype, torch.float64):
        if transposed:
            made_of = (x.to(each), weight.to(each), None, stride, padding, 0, groups, dilation)
            output, gradients = transposed_convolution(*made_of)
        else:
            output, gradients = convolution(x.to(each), weight.to(each), None, stride, padding, dilation, groups)
        parameter, kind, *others = gradients[0]
        found.append(kind(parameter, *others))
    g = torch.randn(output.shape, dtype=torch.float64, device=device).to(dtype)
    return *found, g


def with_kernels(run: Callable[[], Any]) -> Any:
    """Call `run` with kernels, even on a CPU (in the interpreter)."""
    before, fused.runs = fused.runs, lambda *tensors: tensors[0].dtype != torch.float64
    try:
        return run()
    finally:
        fused.runs = before


def same_step(found: Any, plain: Any, said: object = None) -> None:
    """Compare a step's norms and sums."""
    close(found.norms, plain.norms)
    for key, grad in plain.grads.items():
        assert found.grads[key].shape == grad.shape
        assert (found.grads[key] - grad).abs().max() <= 1e-5 * grad.abs().max(), (said, key)


def linear_layers(dtype: torch.dtype, device: str) -> None:
    """Norm and reach of every way equal those in float64, and so does the reach alone."""
    for n, t, d, p in [(2, 1, 1, 1), (2, 5, 3, 7), (3, 17, 1, 33), (1, 70, 40, 9), (2, 37, 300, 16), (2, 131, 5, 70)]:
        a, g = draw(device, dtype, n, t, d), draw(device, dtype, n, t, p)
        rule, terms = LinearWeight(torch.empty(p, d, device=device), a), a.double().norm(dim=2) * g.double().norm(dim=2)
        alone = with_kernels(lambda rule=rule, g=g: rule.reach(g))
        for way in ("gram", GRAM_KERNEL, NORM_KERNEL):
            route = Route(True, way)
            squares, reach = with_kernels(lambda rule=rule, route=route, g=g: rule.squares_and_reach(g, route))
            close(squares, squared(a, g))
            for found in (reach, alone):
                close(found.terms, terms.sum(1))
                close(found.apart, terms.square().sum(1))
                close(found.lost, of_rows(row_norms(a), row_norms(g), d, p).lost)
        beside = [draw(device, dtype, n, t, p) for _ in range(cuda.BESIDE)]  # of other layers of this input
        for others in (beside[:1], beside) if t > 1 else ():
            rule.beside, whole = others, torch.cat([g, *others], 2)
            for way in ("gram", GRAM_KERNEL):
                squares, reach = with_kernels(partial(rule.squares_and_reach, g, Route(True, way)))
                close(squares, squared(a, whole))
                least = (a.double().norm(dim=2) * whole.double().norm(dim=2)).sum(1)
                assert (reach.terms >= least * (1 - 1e-5)).all() and (reach.terms <= 2 * least).all()
        rule.beside = ()
        rule.bias, more = True, torch.cat([a, torch.ones_like(a[..., :1])], 2)  # inputs have one more entry, 1
        for way in ("gram", GRAM_KERNEL) if t > 1 else ():
            squares, reach = with_kernels(lambda rule=rule, way=way, g=g: rule.squares_and_reach(g, Route(True, way)))
            close(squares, squared(more, g))
            for found, of in zip(reach, of_rows(row_norms(more), row_norms(g), d + 1, p), strict=True):
                close(found, of)


def halves(device: str) -> None:
    """Gram matrices of many positions in halves of halves, with and without a bias; others at once."""
    whole, per_sample.SPLIT = per_sample.SPLIT, 32
    for count, positions in ((2, 64), (3, 48), (2, 40)):
        a, g = draw(device, torch.bfloat16, count, positions, 5), draw(device, torch.bfloat16, count, positions, 7)
        for bias in (False, True):
            found = with_kernels(
                lambda a=a, g=g, bias=bias: per_sample.gram_norms_and_reach(a, g, (1.0, 2.0), bias=bias)
            )
            others = [draw(device, torch.bfloat16, *g.shape) for _ in "ab"]
            norms = partial(per_sample.gram_norms_and_reach, a, lost=(1.0, 2.0), bias=bias)
            several = with_kernels(partial(norms, g, beside=others))
            close(several, found.double() + sum(with_kernels(partial(norms, each)).double() for each in others))
            rows = torch.cat([a, torch.ones_like(a[..., :1])], 2) if bias else a
            close(found[:, 0], squared(rows, g))
            terms = rows.double().norm(dim=2), g.double().norm(dim=2)
            reach = terms[0] * terms[1], terms[0] + 2 * terms[1], (terms[0] * terms[1]).square()
            close(found[:, 1:], torch.stack([each.sum(1) for each in reach], 1))
    per_sample.SPLIT = whole


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


def large_blocks(device: str) -> None:
    """Those of Hopper, which are read once where they meet themselves."""
    before, cuda.generation = cuda.generation, lambda x: 9
    for positions in (250, 384):
        a, g = draw(device, torch.float16, 2, positions, 16), draw(device, torch.float16, 2, positions, 32)
        close(gram_norm(a, g), squared(a, g))
    cuda.generation = before


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
    lost = (0.5, 3.0)
    for n, t, p, rows in [(2, 1, 1, 1), (2, 6, 3, 2), (1, 75, 20, 9), (3, 33, 70, 1000)]:
        ids = torch.randint(0, rows, (n, 2 * t), device=device, dtype=ids_dtype)[:, ::2]
        for dtype in DTYPES:
            g = draw(device, dtype, n, t, p)
            g[:, 0] = 0  # as for the padding row
            found, of_g = cuda.embedding_gram_norms(ids, g, lost), g.double().norm(dim=2)
            close(found[:, 0], squared(F.one_hot(ids.long(), rows).to(dtype), g))
            reach = [of_g.sum(1), (lost[0] + of_g * lost[1]).sum(1), of_g.square().sum(1)]
            close(found[:, 1:], torch.stack(reach, 1))


def convolutions(name: str, device: str, *, transposed: bool = False) -> None:
    """Squared norms and reaches equal those of torch's operations in float64."""
    for dtype in (torch.float32, torch.bfloat16):
        rule, wide, g = made(CONVOLUTIONS[name], device, dtype, transposed=transposed)
        alone = with_kernels(lambda rule=rule, g=g: rule.reach(g))
        least = rule.reach(g).lost  # by torch's operations, in the dtype that underflows
        close(alone.lost, least)
        expected = wide.squared_norms(g.double(), Route())
        for way in ("pixels" if "pixels" in rule.ghosts else "patches", GRAM_KERNEL, NORM_KERNEL):
            route = Route(ghost=True, way=way)
            squares, reach = with_kernels(lambda rule=rule, g=g, route=route: rule.squares_and_reach(g, route))
            assert bool(reach) == (way != "patches")
            assert (squares - expected).abs().max() <= 1e-5 * max(expected.max(), squares.new_tensor(1e-30)), way
            for found in filter(None, (reach, alone)):
                close(found.terms, wide.reach(g.double()).terms)
                close(found.apart, wide.reach(g.double()).apart)
            if reach:
                none = way == "pixels" and name == "nothing but padding"
                close(reach.lost, torch.zeros_like(least) if none else least)
        if GRADIENT_KERNEL in rule.instantiations:
            kept = rule.named(GRADIENT_KERNEL).kept
            found, squares = with_kernels(lambda rule=rule, g=g, kept=kept: kept(rule, g, slice(0, 3)))
            close(found, wide.instantiate(g.double(), slice(0, 3)))
            close(squares, expected)


def sums_of_rows(device: str) -> None:
    """Of linear layers in half precision: exact products in float32, in one portion and in several."""
    for dtype in (torch.bfloat16, torch.float16):
        for count, positions, inputs, outputs, turned in (
            (0, 16, 16, 16, False),
            (1, 16, 16, 16, False),
            (5, 33, 32, 144, False),
            (3, 17, 272, 144, False),  # two programs sum a tile's bias
            (3, 17, 528, 144, False),  # four
            (9, 130, 16, 32, True),
            (4, 70, 144, 160, True),
        ):
            if device == "cpu" and dtype == torch.float16 and positions > 33:
                continue  # the interpreter takes seconds
            a, g = (torch.randn(count, positions, size, device=device).to(dtype) for size in (inputs, outputs))
            weight = torch.empty((inputs, outputs) if turned else (outputs, inputs), device=device)
            rule, factors = LinearWeight(weight, a, turned), torch.rand(count, device=device) * 2.0**-7
            expected = torch.einsum("n,nto,nti->oi", factors.double(), g.double(), a.double())
            summed(rule, g, factors, expected.t() if turned else expected)
            if count and not turned:  # along with a bias
                rule.bias, of_bias = True, torch.einsum("n,nto->o", factors.double(), g.double())
                summed(rule, g, factors, torch.cat([expected.flatten(), of_bias]))
            if count:  # of any strides
                several, turned_around = a.repeat(1, 1, 2)[..., :inputs], a.mT.contiguous().mT
                for x, known in ((a, True), (several, True), (a[..., :15], False), (turned_around, positions == 16)):
                    assert rows_at_once(x.mT, g.mT) == known


def sums_over_images(device: str) -> None:
    """Of a remainder, and of a factor of 0, too."""
    for dtype, case in (
        (torch.bfloat16, (16, 32, (5, 4), (3, 2), (2, 1), (1, 0), (1, 1), 1)),
        (torch.float16, (3, 5, (6, 5), (3, 3), (1, 2), (0, 1), (2, 1), 1)),
        (torch.float16, (3, 70, (8, 9), (1, 1), (1, 1), (0, 0), (1, 1), 1)),
    ):
        rule, wide, g = made(case, device, dtype)
        factors = torch.tensor([0.5, 0.0, 3.0], device=device)
        summed(rule, g, factors, wide.weighted(g.double(), factors.double()))


def sums_of_unlike_factors(device: str) -> None:
    """Factors of many sizes and of 0, at the ends, too; what is not finite is seen through a factor of 0."""
    factors = torch.tensor([0.0, 1e-18, 0.0, 0.0, 2.0, 1e18, 3.0, 0.0], device=device)
    a, g = (draw(device, torch.float16, 8, 20, 16) for _ in "ag")
    used = g / factors.where(factors > 0, 1)[:, None, None].clamp(1e-3, 1e3).half()
    rule = LinearWeight(torch.empty(16, 16, device=device), a)
    for some in (factors, factors.where(factors < 1e17, 0)):
        summed(rule, used, some, torch.einsum("n,nto,nti->oi", some.double(), used.double(), a.double()))
    for spoiled in (rule.a, g):
        spoiled[2, 3, 4] = torch.inf
        assert with_kernels(lambda: rule.weighted(g, factors)).isnan().any()
        spoiled[2, 3, 4] = 0


def sums_of_equal_layers(device: str) -> None:
    """In one launch, of one portion and of several, with and without a bias: those of each layer alone, to the bit."""
    before, dtype = cuda.portion_of, torch.float16
    for count, positions, inputs, outputs, turned in (
        (5, 33, 32, 144, False),
        (3, 17, 272, 16, False),
        (4, 16, 16, 32, True),
    ):
        factors = torch.rand(count, device=device) * 2.0**-7
        operands = [[draw(device, dtype, count, positions, size) for size in (inputs, outputs)] for _ in range(3)]
        weight = torch.empty((inputs, outputs) if turned else (outputs, inputs), device=device)
        for bias in (None,) if turned else (None, True):
            rules, gs = [LinearWeight(weight, a, turned) for a, _ in operands], [g for _, g in operands]
            for rule in rules:
                rule.bias = bias
            for size in (2, count):
                cuda.portion_of = lambda *_, size=size: size
                found = with_kernels(lambda rules=rules, gs=gs, factors=factors: ways.weighted(rules, gs, factors))
                for rule, g, each in zip(rules, gs, found, strict=True):
                    assert torch.equal(each, with_kernels(partial(rule.weighted, g, factors)))
    cuda.portion_of = before


def norms_of_equal_layers(device: str) -> None:
    """In one launch and in several, with layers beside them: those of each layer alone, to the bit."""
    before, options = cuda.PROGRAMS, (LINEAR, 1, (1.0, 2.0))
    for positions in (5, 70):
        a, *several = (draw(device, torch.float16, 3, 2, positions, 16) for _ in "abcd")
        for bias, beside in ((False, several[1:]), (True, several[1:2]), (False, [])):
            images = [[y.mT for y in x] for x in (a, several[0], *beside)]
            alone = [
                cuda.gram_norms(x, g, *options, bias=bias, beside=more) for x, g, *more in zip(*images, strict=True)
            ]
            for cuda.PROGRAMS in (before, 9):
                x, g, *more = images
                assert torch.equal(
                    cuda.gram_norms_of_layers(x, g, *options, bias=bias, beside=more), torch.stack(alone)
                )
    cuda.PROGRAMS = before


def summed(rule: Any, g: Tensor, factors: Tensor, expected: Tensor) -> None:
    """Σ_i c_i g_i as expected, in portions of one sample, two or all; all at once, or in turn."""
    before = cuda.portion_of
    for size in {1, 2, max(1, len(factors))}:
        cuda.portion_of = lambda *_, size=size: size
        for room in (2**30, 0):
            rule.room = lambda room=room: room
            found = with_kernels(lambda: rule.weighted(g, factors))
            close(found, expected, 2e-6 if g.device.type == "cpu" else 1e-5)  # tensor cores cut off what they add
    cuda.portion_of = before


def transposed(device: str) -> None:
    for name in ("stride 2", "in groups"):
        convolutions(name, device, transposed=True)


def any_strides(device: str) -> None:
    """The same results to the bit of images of any strides, in several launches or in turn, and of a wider input."""
    narrow, lost = torch.float16, (1.0, 2.0)  # the interpreter rounds bfloat16 downwards
    rule, wide, g = made((4, 6, (5, 4), (2, 1), (1, 1), (1, 0), (1, 1), 2), device, torch.float32)
    last, turned = g.to(memory_format=torch.channels_last), rule.x.transpose(2, 3).contiguous().transpose(2, 3)
    whole, in_turn = cuda.PROGRAMS, cuda.samples_in_turn
    for norms in (cuda.gram_norms, cuda.gradient_norms):
        found = norms(rule.x, g, rule.geometry(), 2, lost)
        close(found[:, 0].view(3, 2).sum(1), wide.squared_norms(g.double(), Route()))
        cuda.PROGRAMS, cuda.samples_in_turn = 8, lambda *_: 2
        assert torch.equal(found, norms(turned, last, rule.geometry(), 2, lost))
        cuda.PROGRAMS, cuda.samples_in_turn = whole, in_turn
        both = [norms(x, g.to(narrow), rule.geometry(), 2, lost) for x in (rule.x, rule.x.to(narrow))]
        assert torch.equal(*both)


def turned(device: str) -> None:
    """Half precision is copied, channels last: the output's gradient once for norm and sum, which stay the same."""
    dtype, factors = torch.float16, torch.rand(3, device=device)
    rule, wide, g = made((16, 32, (5, 4), (3, 2), (2, 1), (1, 0), (1, 1), 1), device, dtype)
    for y in (g, g.mT.contiguous().mT, g.contiguous(memory_format=torch.channels_last)):
        assert with_kernels(lambda y=y: rule.laid_out(y, ghost=False)) is y
        last = with_kernels(lambda y=y: rule.laid_out(y, ghost=True))
        for x, of in zip(with_kernels(lambda: rule.images(g, slice(0, 3))), (rule.x, g), strict=True):
            assert torch.equal(x, of) and x.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(last, y) and with_kernels(lambda last=last: rule.laid_out(last, ghost=True)) is last
        for way in (GRAM_KERNEL, NORM_KERNEL):
            squares, reach = with_kernels(lambda last=last, way=way: rule.squares_and_reach(last, Route(True, way)))
            close(squares, wide.squared_norms(g.double(), Route()))
            close(reach.terms, wide.reach(g.double()).terms)
        for _ in range(2):
            found = with_kernels(lambda last=last: rule.weighted(last, factors))
            close(found, wide.weighted(g.double(), factors.double()))
            with_kernels(lambda last=last: rule.lay_out_input(last))
            assert rule.x.is_contiguous(memory_format=torch.channels_last)
    for transposed in (False, True):  # of whole lines of positions, only what patches are taken of
        rule, wide, g = made((16, 16, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1), device, dtype, transposed=transposed)
        last = with_kernels(lambda rule=rule, g=g: rule.laid_out(g, ghost=True))
        x, of = with_kernels(lambda rule=rule, last=last: rule.images(last, slice(0, 3)))
        assert (last is g) != transposed and of.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        for way in (GRAM_KERNEL, NORM_KERNEL, GRADIENT_KERNEL):
            squares = with_kernels(lambda rule=rule, last=last, way=way: rule.squared_norms(last, Route(way=way)))
            close(squares, wide.squared_norms(g.double(), Route()))
        close(
            with_kernels(lambda rule=rule, last=last: rule.weighted(last, factors)),
            wide.weighted(g.double(), factors.double()),
        )


def rows(device: str) -> None:
    for count, positions in ((1, 1), (3, 5), (2, 1500)):
        a, g = (torch.rand(count, positions, device=device) for _ in "ab")
        for x in (a, a[:, :1], a[:, :1].expand(count, positions), a.repeat(1, 2)[:, ::2]):
            found = with_kernels(lambda x=x, g=g: of_rows(x, g, 3, 5))
            of = x if x.shape == g.shape else x.expand_as(g)
            close(found.terms, (of.double() * g.double()).sum(1))
            close(found.lost, of_rows(of, g, 3, 5).lost)


def sums_in_float64(device: str) -> None:
    for count, *shape in ((1, 1), (3, 5), (40, 33, 70)):
        parts = torch.randn(count, *shape, device=device) * 2.0 ** torch.randint(
            -20, 20, (count, *shape), device=device
        )
        torch.testing.assert_close(fused.added(parts), parts.double().sum(0).float(), rtol=2e-7, atol=1e-12)
        expected = (parts.double().sum(0) + 2 * parts[:1].double().sum(0)).float()
        torch.testing.assert_close(
            fused.added(parts, parts[:1].repeat(2, *[1] * len(shape))), expected, rtol=2e-7, atol=1e-9
        )
    parts = torch.tensor([[2.0**24], *[[1.0]] * 8], device=device)  # float32 would lose each 1
    assert fused.added(parts).item() == 2.0**24 + 8


def layer_norms(device: str) -> None:
    """Gradients of γ and β of each sample, with the input's in the same pass; and all three by torch's operations."""
    shapes = ((2, 17, 5), [5]), ((3, 70, 130), [130]), ((2, 3, 6, 4, 5), [4, 5]), ((1, 16, 5000), [5000])
    for (shape, sizes), dtype in product(shapes, (torch.float32, torch.float16)):  # bfloat16 is rounded downwards
        g, *operands = (draw(device, dtype, *size) for size in (shape, shape, sizes, sizes))
        x, *others = (y.mul_(3).add_(5).requires_grad_() for y in operands)
        output, gradients = with_kernels(partial(layer_norm, x, sizes, *others))
        rules = [kind(parameter, *others) for parameter, kind, *others in gradients]
        share, rstd, dims = rules[0].share, rules[0].rstd.double(), tuple(range(-len(sizes), 0))
        normal, scaled = (x.detach().double() - rules[0].mean.double()) * rstd, g.double() * others[0].detach().double()
        along = normal * (scaled * normal).mean(dims, keepdim=True)
        expected = (scaled - scaled.mean(dims, keepdim=True) - along) * rstd
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        for of in (g, g.transpose(0, 1).contiguous().transpose(0, 1)):
            share.input_only = True
            for rule, terms in zip(rules, (normal * g.double(), g.double()), strict=True):
                found = with_kernels(lambda rule=rule, of=of: rule.instantiate(of, slice(0, len(of))))
                close(found, terms.flatten(1, -1 - len(sizes)).sum(1))
            left, _ = share.left(of)
            (of_x,) = torch.autograd.grad(output, x, of, retain_graph=True)
            assert of_x.data_ptr() == left.data_ptr() and share.left(of) is None and not share.input_only
            close(of_x.float(), expected, tolerance)
        for only in (True, False):
            share.input_only = only
            of_x, *of_others = torch.autograd.grad(output, operands, g, create_graph=True, allow_unused=True)
            close(of_x.detach().float(), expected, tolerance)
            assert [each is None for each in of_others] == [only] * 2 and of_x.requires_grad
        share.leave(g, (g, g))
        with torch.no_grad():
            x.add_(1)
        assert "inplace operation" in str(outcome(torch.autograd.grad, output, x, g))


def whole_steps_of_one_input(device: str) -> None:
    """Norms and sums of layers that read one input, by every way with Gram matrices, and of others beside them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        h = torch.stack([layer(h) for layer in net.many]).prod(0)
        return torch.cat([layer(h) for layer in net.last], 2).float().sin().sum((1, 2))

    many = nn.ModuleList(nn.Linear(16, 32) for _ in range(4))
    last = nn.ModuleList([nn.Linear(32, 16, bias=False), nn.Linear(32, 16), nn.Linear(32, 8)])
    model, x = (
        Net(forward, first=nn.Linear(16, 16), many=many, last=last).to(device, torch.bfloat16),
        torch.randn(5, 20, 16, device=device).bfloat16(),
    )

    def step() -> Any:
        with load_backend("bk_ghost")(model, lambda y, _: y, clip=Flat(0.5), verify=False) as backend:
            return backend(x, torch.zeros(5, device=device))

    before, best, taken, plain = ways.shares_input, LinearWeight.best_way, list[bool](), step()
    ways.shares_input = lambda *given: taken.append(before(*given)) or taken[-1]
    for way, shared in (("gram", 4), (GRAM_KERNEL, 2)):  # the kernel takes three of four, and whole lines
        LinearWeight.best_way = lambda self, g, *, ghost, way=way: way if ghost else best(self, g, ghost=ghost)
        found = with_kernels(step)
        assert taken.count(True) == shared, taken
        taken.clear()
        same_step(found, plain)
    ways.shares_input, LinearWeight.best_way = before, best


def whole_steps_of_layer_norms(device: str) -> None:
    """Norms and sums of models with layer norms, one used twice and one in a checkpoint, in one and two passes."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: net.once(net.first(y)).tanh(), x, use_reentrant=False)
        return net.twice(net.twice(h.unflatten(1, (-1, 2))).tanh()).sin().sum((1, 2, 3))

    layers = {"first": nn.Linear(6, 12), "once": nn.LayerNorm(12), "twice": nn.LayerNorm((2, 12), bias=False)}
    model, x, targets = (
        Net(forward, **layers).to(device),
        torch.randn(3, 40, 6, device=device),
        torch.zeros(3, device=device),
    )
    before, seen = fused.of_layer_norm, list[int]()
    fused.of_layer_norm = lambda *given: seen.append(1) or before(*given)
    for name, clip in (("bk_mixed", Flat(0.5)), ("bk_mixed", PerLayer(0.5)), ("mixed_ghost", Flat(0.5))):

        def step(name: str = name, clip: Any = clip) -> Any:
            with load_backend(name)(model, lambda y, _: y, clip=clip, verify=False) as backend:
                return backend(x, targets)

        plain, found = step(), with_kernels(step)
        assert len(seen) == 3, (name, seen)
        seen.clear()
        same_step(found, plain, name)
    fused.of_layer_norm = before


def infinities_come_through(device: str) -> None:
    """An overflow stays infinite for its own sample, and does not affect other samples."""
    case = CONVOLUTIONS["stride 2"]
    rule, _, g = made(case, device, torch.float32)
    rule.x[1, 0, 3, 3] = 3e38
    squares, reach = with_kernels(lambda: rule.squares_and_reach(g, Route(True, "pixels")))
    assert squares.isfinite().tolist() == [True, False, True] and reach.terms.isfinite().tolist() == [True, False, True]


def whole_steps_in_half_precision(device: str) -> None:
    """Norms and sums by every kernel are those of torch's operations on the same gradients, accumulated in float32."""
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(144, 3)).to(device, torch.bfloat16)
    x, targets = torch.randn(5, 3, 6, 6, device=device).bfloat16(), torch.randint(0, 3, (5,), device=device)

    def step() -> Any:
        before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True  # the same gradients
        try:
            with load_backend("bk_ghost")(model, of_outputs, clip=Flat(0.5), verify=False) as backend:
                return backend(x, targets)
        finally:
            torch.backends.cudnn.deterministic = before

    def of_outputs(outputs: Tensor, of: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.float(), of, reduction="none")

    plain, ghosts = step(), ConvolutionWeight.best_way
    for way in (GRAM_KERNEL, NORM_KERNEL, "pixels"):
        ConvolutionWeight.best_way = lambda self, g, *, ghost, way=way: way if ghost else ghosts(self, g, ghost=ghost)
        found = with_kernels(step)
        same_step(found, plain, way)
    ConvolutionWeight.best_way = ghosts


def whole_steps_of_biases(device: str) -> None:
    """Norms and sums of linear layers with their biases; one whose gradient is another parameter's, too."""

    parts = {"first": nn.Linear(16, 32), "second": nn.Linear(32, 16), "more": torch.randn(32)}
    model = Net(lambda net, x: net.second((net.first(x) + net.more).relu()).float().sum((1, 2)), **parts)
    model, x = model.to(device, torch.bfloat16), torch.randn(5, 20, 16, device=device).bfloat16()

    def step() -> Any:
        with load_backend("bk_ghost")(model, lambda y, _: y.square(), clip=Flat(0.5), verify=False) as backend:
            return backend(x, torch.zeros(5, device=device))

    before, taken = ways.takes_bias, list[bool]()
    ways.takes_bias = lambda *given: taken.append(before(*given)) or taken[-1]
    plain, found = step(), with_kernels(step)
    ways.takes_bias = before
    assert taken == [False, False, True, True], taken
    same_step(found, plain)


def whole_steps_of_equal_layers(device: str) -> None:
    """Layers with a bias in one launch, two uses of one layer in another, and others alone: a sum of each."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in [*net.many, net.twice, net.twice]:
            x = layer(x).tanh()
        return net.last(x).float().sin().sum((1, 2))

    many = nn.ModuleList(nn.Linear(16, 16, bias=i != 2) for i in range(5))
    model = Net(forward, many=many, twice=nn.Linear(16, 16), last=nn.Linear(16, 32)).to(device, torch.bfloat16)
    x = torch.randn(5, 20, 16, device=device).bfloat16()

    def step() -> Any:
        with load_backend("bk_ghost")(model, lambda y, _: y, clip=Flat(0.5), verify=False) as backend:
            return backend(x, torch.zeros(5, device=device))

    plain, before, best = step(), (cuda.layers_of, cuda.weighted, cuda.gram_norms_of_layers), LinearWeight.best_way
    summed, normed, processors = list[int](), list[int](), tiles.MULTIPROCESSORS
    cuda.layers_of = lambda sums, most: most
    cuda.weighted = lambda xs, *given, **named: summed.append(len(xs)) or before[1](xs, *given, **named)
    cuda.gram_norms_of_layers = lambda xs, *given, **named: normed.append(len(xs)) or before[2](xs, *given, **named)
    tiles.MULTIPROCESSORS = 4 * 8  # four layers of five samples, rounded up, fill the GPU
    for way, expected in ((GRAM_KERNEL, [1, 1, 1, 1, 4]), ("gram", [4])):
        LinearWeight.best_way = lambda self, g, *, ghost, way=way: way if ghost else best(self, g, ghost=ghost)
        same_step(with_kernels(step), plain)
        assert (sorted(summed), sorted(normed)) == ([1, 1, 2, 2, 2], expected), (summed, normed)
        summed.clear(), normed.clear()
    cuda.layers_of, cuda.weighted, cuda.gram_norms_of_layers = before
    LinearWeight.best_way, tiles.MULTIPROCESSORS = best, processors


CHECKS: dict[str, Callable[[str], None]] = {
    **{f"linear layers in {dtype}": partial(linear_layers, dtype) for dtype in DTYPES},
    "halves of positions": halves,
    "the first program of all": first_program,
    "sizes of zero": nothing,
    "views of any strides": views,
    "autocast": autocast,
    **{f"large values in {dtype}": partial(large, dtype) for dtype in DTYPES[1:]},
    "products of float32 are exact": ieee,
    "every number of blocks": every_number_of_blocks,
    "large blocks": large_blocks,
    "beyond 32 bits": beyond_32_bits,
    "what no patch reads": unread,
    **{f"embedding, ids of {dtype}": partial(embeddings, dtype) for dtype in (torch.int32, torch.int64)},
    **{name: partial(convolutions, name) for name in CONVOLUTIONS},
    "transposed convolutions": transposed,
    "images of any strides": any_strides,
    "images turned": turned,
    "sums over images": sums_over_images,
    "rows": rows,
    "sums of rows": sums_of_rows,
    "sums of unlike factors": sums_of_unlike_factors,
    "sums of equal layers": sums_of_equal_layers,
    "norms of equal layers": norms_of_equal_layers,
    "layer norms": layer_norms,
    "sums in float64": sums_in_float64,
    "infinities come through": infinities_come_through,
    "whole steps in half precision": whole_steps_in_half_precision,
    "whole steps of biases": whole_steps_of_biases,
    "whole steps of one input": whole_steps_of_one_input,
    "whole steps of layer norms": whole_steps_of_layer_norms,
    "whole steps of equal layers": whole_steps_of_equal_layers,
}
QUICK = ("as in ResNet18", "stride 2", "rows", "layer norms", "sums in float64", "infinities come through")
"""Those that take the interpreter less than a second each."""


OPTIONS = {"STRIDE": 1, "PADDING": 1, "DILATION": 1, "KERNEL": 3}
GEOMETRY = {f"{name}_{axis}": value for name, value in OPTIONS.items() for axis in "HW"}
#: Images of rows of a linear layer, and the arguments that are 1 (which Triton turns into constants)
ROWS = {name: int("PADDING" not in name) for name in GEOMETRY} | {"height": 1, "POINT": 1}
LAST, FIRST = ("x_channel", "g_channel"), ("x_column", "g_position")


def compile_tiles(
    program: str,
    dtype: torch.dtype,
    tiled: Callable[..., Tiles],
    constants: dict[str, int],
    dense: bool,
    capability: int,
) -> None:
    """Compile a program for a GPU's tiles; `dense`: sizes and strides are multiples of 16 (`rows_at_once`)."""
    tiles = tiled(generation=capability // 10)
    blocks = {
        "ALONE": 2 * (bool(constants.get("POINT")) and tiles.rows == SIDE),
        "BIAS": dense,
        "KEPT": 0,
        "BESIDE": cuda.BESIDE * (bool(constants.get("POINT")) and (dense or dtype == torch.float32)),
        "POINT": 0,
        "BLOCK": cuda.LINE if program == "collected" else tiles.rows,
        "BLOCK_K": tiles.depth,
    }
    constants = {"AHEAD": cuda.AHEAD, "ROWS": cuda.ROWS, "COLUMNS": cuda.COLUMNS * tiles.warps, **constants}
    values = {**blocks, **constants, **tiles.sides()}
    element = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    others = ("out", "squares", "parts", "factors", "rest")
    layers = (element,) * (cuda.LAYERS if dense and constants.get("POINT") else 1)
    kinds = {"ids": "*i64"} | dict.fromkeys("agx", element) | dict.fromkeys(("xs", "gs", "more", "most"), layers)
    kinds |= dict.fromkeys(others, "*fp32")
    aligned = (
        ("x_", "g_", "channels", "outputs", *(("positions",) if "g_position" in constants else ())) if dense else ()
    )
    compiled(
        cuda._program(program),
        capability,
        kinds | {"xs": layers, "gs": layers},
        values,
        aligned=aligned,
        **tiles.options(),
    )


def compile_fused(program: str, kernel: int, capability: int) -> None:
    """Compile a program of `fused`; `kernel`: the kernel's sides."""
    from clipping.accel import fused_programs  # needs Triton

    geometry = {"KERNEL": kernel, "STRIDE": 2, "PADDING": 1, "DILATION": 1, "PHASES": min(2, kernel)}
    values = {f"{key}_{axis}": value for key, value in geometry.items() for axis in "HW"}
    values |= dict.fromkeys(("BLOCK_T", "BLOCK_N", "BLOCK_C"), fused.TILE)
    values["BLOCK"] = fused.TILE if program == "shifted" else cuda.LINE
    kinds = dict.fromkeys(("x", "g", "parts", "rest", "out"), "*fp32")
    compiled(getattr(fused_programs, program), capability, kinds, values, shared=48, num_warps=cuda.WARPS)


def compile_layer_norm(features: int, element: str, capability: int) -> None:
    """Compile the program of layer norm for a number of features."""
    from clipping.accel import fused_programs  # needs Triton

    kinds = dict.fromkeys(("x", "weight", "g", "of_x"), element) | dict.fromkeys(("mean", "rstd", "sums"), "*fp32")
    tiles = fused.tiles_of_layer_norm(features)
    warps = tiles.pop("num_warps")
    compiled(fused_programs.layer_norm, capability, kinds, tiles, aligned=("features",), shared=48, num_warps=warps)


COMPILED: dict[str, Callable[[int], None]] = {
    **{f"{program}, fused": partial(compile_fused, program, 3) for program in ("shifted", "reach")},
    **{f"{program}, fused": partial(compile_fused, program, 1) for program in ("turned", "added")},
    **{
        f"layer norm of {size}, {element}, fused": partial(compile_layer_norm, size, element)
        for size in (64, 4096, fused.FEATURES)
        for element in ("*fp32", "*bf16")
    },
    "reach of rows, fused": partial(compile_fused, "reach", 1),
}
for _dtype in DTYPES:
    for _case, _geometry, _constants, _dense_last in (
        ("linear", LINEAR, ROWS, FIRST),
        ("convolution", ((3, 3),), GEOMETRY, ("x_channel", "g_position")),
    ):
        _layouts = {"dense": LAST, "dense, positions last": _dense_last, "channels last": LAST, "channels first": FIRST}
        for _layout, _last in _layouts.items():
            _ones, _dense = dict.fromkeys(_last, 1), _layout.startswith("dense")
            for _program, _tiles in (
                ("gram", partial(gram_tiles, 4096, 4096)),
                ("gradient", partial(gradient_tiles, 4096, 4096, 4096)),
                ("weighted", partial(sum_tiles, 4096, 4096, 4096)),
                *((("kept", partial(gradient_tiles, 4096, 4096, 4096)),) if _case == "convolution" else ()),
            ):
                _tiled = partial(_tiles, _dtype, at_once=_dense, geometry=_geometry)
                if _dtype in HALF or (not _dense and (_program, _case) != ("weighted", "linear")):
                    _known, _of = {**_constants, **_ones}, "gradient" if _program == "kept" else _program
                    _known |= {"KEPT": int(_program == "kept")}
                    _compile = partial(compile_tiles, _of, _dtype, _tiled, _known, _dense)
                    COMPILED[f"{_program}, {_case}, {_layout}, {_dtype}"] = _compile
    for _dense in (True, False) if _dtype in HALF else (False,):
        _tiled = partial(gram_tiles, 4096, 4096, _dtype, at_once=_dense)
        _of_ids = {"g_output": 1, "ids_position": 1}
        _name = f"embedding, {'dense, ' if _dense else ''}{_dtype}"
        COMPILED[_name] = partial(compile_tiles, "embedding_gram", _dtype, _tiled, _of_ids, _dense)
    for _program, _ones in (("rows", {"a_input": 1, "g_output": 1}), ("collected", GEOMETRY)):
        _tiled = lambda **_: cuda.BY_ROWS  # noqa: E731
        COMPILED[f"{_program}, {_dtype}"] = partial(compile_tiles, _program, _dtype, _tiled, _ones, False)


if __name__ == "__main__":
    main(CHECKS, COMPILED)
