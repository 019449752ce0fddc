"""Products of matrices: the same values by any strides, in float32, and padded where that pays."""

import itertools

import pytest
import torch
from fake_graph import Recorder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from clipping.accel import nodes
from clipping.numerics import products as module
from clipping.numerics.products import aligned, multiplied, product, products
from clipping.numerics.traced_operations import tracing
from clipping.rules import linear
from clipping.rules.base import Route
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import LinearWeight, cross_gram
from clipping.rules.pixel_gram import Geometry, pixel_gram_product

LAYOUTS = {
    "contiguous": lambda n, rows, k: torch.randn(n, rows, k),
    "transposed": lambda n, rows, k: torch.randn(n, k, rows).transpose(1, 2),
    "a part": lambda n, rows, k: torch.randn(n, rows + 3, k + 5)[:, 1 : rows + 1, 2 : k + 2],
    "a part, transposed": lambda n, rows, k: torch.randn(n, k, rows + 4).transpose(1, 2)[:, 2 : rows + 2],
    "expanded": lambda n, rows, k: torch.randn(1, rows, k).expand(n, rows, k),
}


@pytest.mark.parametrize(("n", "rows", "columns", "k"), [(3, 7, 5, 11), (1, 40, 6, 9), (2, 4, 30, 16), (2, 1, 1, 1)])
def test_strides_make_no_difference(n, rows, columns, k):
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        x, y = LAYOUTS[left](n, rows, k), LAYOUTS[right](n, columns, k)
        expected = torch.einsum("nik,njk->nij", x.double(), y.double())
        for found, want in ((products(x, y), expected), (product(x[0].t(), y[0].t()), expected[0])):
            assert found.is_contiguous() and torch.allclose(found.double(), want, atol=1e-4), (left, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_multiplied_in_float32_or_wider(dtype):
    """What is in half precision is multiplied in float32: rounded it would have lost the digits of a sum."""
    x, wide = torch.randn(2, 8, 8).to(dtype), torch.promote_types(dtype, torch.float32)
    assert torch.equal(products(x, x), torch.bmm(x.to(wide), x.to(wide).transpose(1, 2)))
    assert torch.equal(product(x[0], x[1]), x[0].to(wide).t() @ x[1].to(wide))


def test_products_of_half_precision_on_cuda_ask_for_float32_and_cast_nothing():
    """On fake tensors of a CUDA device: no copy in float32 is made of what tensor cores multiply."""
    with FakeTensorMode(), Recorder() as recorder:
        x = torch.empty(2, 5, 8, dtype=torch.bfloat16, device="cuda")
        assert products(x, x).dtype == torch.float32
        assert not any("_to_copy" in str(function) for function, *_ in recorder.ran)
        wide = torch.empty(5, 8, device="cuda")
        assert product(wide, x[0]).dtype == torch.float32  # by the two halves of its digits
    assert sum("mm" in str(function) for function, *_ in recorder.ran) == 3


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_products_of_two_dtypes_are_float32_on_every_device(dtypes):
    """A tied embedding under autocast: its gradient is float32, that of the linear layer which shares it bfloat16."""
    given = [torch.randn(2, 5, 8).to(dtype) for dtype in dtypes]
    expected = torch.bmm(given[0].float(), given[1].float().transpose(1, 2))
    torch.testing.assert_close(products(*given), expected)
    with FakeTensorMode():
        x, y = (torch.empty(2, 5, 8, dtype=dtype, device="cuda") for dtype in dtypes)
        assert products(x, y).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gram_matrices_of_pixels_are_neither_tf32_nor_widened_first(dtype):
    found: list[tuple[torch.dtype, torch.dtype, str]] = []
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "bmm":
                found.append((args[0].dtype, result.dtype, matmul.fp32_precision))
            return result

    try:
        matmul.fp32_precision = "tf32"
        with FakeTensorMode(), Products():
            x, g = (torch.empty(2, 3, size, size, device="cuda", dtype=dtype) for size in (6, 4))
            squares = pixel_gram_product(x, g, Geometry([3, 3], [1, 1], [0, 0], [1, 1]), 2**26)
        assert squares.dtype == torch.float32 and matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    assert {each[:2] for each in found} == {(dtype, torch.float32)}
    assert dtype != torch.float32 or {each[2] for each in found} == {"ieee"}


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)])
def test_a_traced_product_is_one_operation_that_sets_its_own_precision(shape):
    """A graph would multiply in TF32 later, where the caller allows it."""
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda")
        with tracing():
            graph = make_fx(lambda x: multiplied(x, x.mT), tracing_mode="fake")(x)
    ran = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert torch.ops.dpbench.kernel.default in ran and not ran & {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}


def test_zeros_are_added_to_rows(monkeypatch):
    monkeypatch.setattr(module, "PADS_FROM", 1)
    x = torch.randn(3, 4, 19).to(torch.float16)
    found = aligned(x, 128)
    assert found.shape == (3, 4, 32) and found.is_contiguous()
    assert torch.equal(found[..., :19], x) and not found[..., 19:].any()
    assert aligned(found, 128) is found and aligned(x, 127) is x and aligned(x.float(), 128).shape == x.shape


@pytest.fixture
def padded(monkeypatch):
    """Whatever is unaligned, on a CPU."""
    monkeypatch.setattr(module, "PADS_FROM", 1)
    monkeypatch.setattr(module, "OTHERS", 1)
    monkeypatch.setattr(linear, "on_gpu", lambda x: True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "fold"), [(24, 19, 1), (19, 24, 1), (13, 19, 2)])
def test_norms_and_sums_are_exact(padded, inputs, outputs, fold, transposed):
    weight = torch.empty((inputs, outputs) if transposed else (outputs, inputs))
    a, g = (torch.randn(4 * fold, 5, size).to(torch.bfloat16) for size in (inputs, outputs))
    rule, factors = LinearWeight(weight, a, transposed, fold), torch.rand(4)
    at_arrival = rule.laid_out(g, ghost=True)
    assert at_arrival.shape[-1] == (32 if outputs == 19 else 24)
    x, y = (each.double().unflatten(0, (4, fold)).flatten(1, 2) for each in (a, g))
    each = torch.einsum("nti,nto->nio" if transposed else "nti,nto->noi", x, y)
    for of in (g, at_arrival):
        for ghost, ways in ((True, rule.ghosts), (False, rule.instantiations)):
            for way in ways:
                found = rule.squared_norms(of, Route(ghost, way)).double()
                torch.testing.assert_close(found, each.square().sum((1, 2)), rtol=1e-5, atol=0)
        torch.testing.assert_close(rule.instantiate_all(of, Route()).double(), each, rtol=1e-5, atol=1e-5)
        total = torch.einsum("n,npd->pd", factors.double(), each)
        for found in (rule.weighted(of, factors), rule.gradients(*rule._scaled(of, factors, slice(0, 4)), 2).sum(0)):
            assert found.shape == weight.shape and found.is_contiguous()
            torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=1e-5)
        expected = (x.norm(dim=2) * y.norm(dim=2)).sum(1)
        torch.testing.assert_close(rule.reach(of).terms.double(), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(
            cross_gram(*rule.operands(of, slice(0, 4)), *rule.operands(g, slice(0, 4)), 2**20).double(),
            each.square().sum((1, 2)), rtol=1e-5, atol=0,
        )  # fmt: skip


def test_the_input_s_gradient_is_a_product_of_padded_rows(padded, monkeypatch):
    """In the tape's backward pass, whether the rule has padded them or not; in any other, there are all gradients."""
    monkeypatch.setattr(nodes, "on_gpu", lambda x: True)
    operands = [torch.randn(*shape).bfloat16().requires_grad_() for shape in ((4, 5, 24), (19, 24), (19,))]
    output, ((weight, kind, *others), _) = linear.linear(*operands)
    rule, g = kind(weight, *others), torch.randn(4, 5, 19).bfloat16()
    wide = [x.detach().double().requires_grad_() for x in operands]
    expected = torch.autograd.grad(torch.nn.functional.linear(*wide), wide, g.double())
    for arrives in (True, False):
        rule.share.input_only = True
        if arrives:
            assert rule.share.left(g) is None and rule.laid_out(g, ghost=True) is rule.share.left(g)[0]
        with Recorder() as recorder:
            found = torch.autograd.grad(output, operands, g, retain_graph=True, allow_unused=True)
        assert found[1:] == (None, None) and not rule.share.input_only and rule.share.left(g) is None
        torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-2, atol=1e-1)
        assert sum("copy_" in str(function) for function, *_ in recorder.ran) == (1 if arrives else 2)
    for found, of in zip(torch.autograd.grad(output, operands, g, create_graph=True), expected, strict=True):
        torch.testing.assert_close(found.double(), of, rtol=1e-2, atol=1e-1)


def of_two_uses(rule, g, other, other_g) -> None:
    expected = (rule.instantiate_all(g, Route()).double() * other.instantiate_all(other_g, Route()).double()).flatten(1)
    found = rule.inner(g, other, other_g)
    torch.testing.assert_close(found.double(), expected.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("hidden", "tokens"), [(19, 24), (24, 19), (19, 21)])
def test_cross_terms_of_a_tied_embedding_and_a_padded_head_are_exact(padded, hidden, tokens):
    weight = torch.empty(tokens, hidden)
    a, g, h = (torch.randn(4, 5, size).to(torch.bfloat16) for size in (hidden, hidden, tokens))
    rule, head = EmbeddingWeight(weight, torch.randint(tokens, (4, 5))), LinearWeight(weight, a)
    for at_arrival in (h, head.laid_out(h, ghost=True)):
        of_two_uses(rule, g, head, at_arrival)
