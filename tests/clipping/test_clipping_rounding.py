"""Bounds of rounding, and what follows from them; tests/conformance/test_sensitivity.py has the hard records.

Products that round their operands, as CUDA's do to TF32, are tried on a CPU, where the same rules sum rounded operands.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import Automatic, Flat, load_backend
from clipping.accel import cpu
from clipping.backends import tape as tape_backends
from clipping.core.clip_functions import floor
from clipping.numerics import products as matmul
from clipping.numerics import rounding_bounds as rounding
from clipping.numerics.products import full_precision_on_cpu
from clipping.numerics.rounding_bounds import ALLOWANCE, CAP, OPERANDS, TF32, Doubt, Reach, rounds_operands
from clipping.rules.convolution import ConvolutionWeight
from dpbench.conformance.cases import cross_entropy as plain
from dpbench.conformance.modules import Net

BACKENDS = ["microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"]


def weighed(layer: nn.Module) -> Net:
    """A layer, and a loss whose gradient at each output is the record's own: x [B, ...], g as the layer's output."""
    return Net(lambda net, x, g: (net.layer(x) * g).flatten(1).sum(1), layer=layer)


def images() -> nn.Module:
    return nn.Conv2d(3, 8, 3, padding=1, bias=False)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets, reduction="none")


@pytest.mark.parametrize("before", [4095, 4096])
@pytest.mark.parametrize("name", ["ghost", "mixed_ghost", "bk_mixed"])
def test_one_record_more_changes_no_route_of_the_others(name, before):
    """All of them cancel. Kept and summed each is of length C; by another way to its norm it is left out nearly."""
    made = torch.Generator().manual_seed(1)
    a, g = 100 + torch.randn(1, 64, 16, generator=made), torch.randint(-7, 8, (1, 64, 1), generator=made).float()
    g[:, -1] = -g[:, :-1].sum(1)
    options = {"timing": False} if name == "bk_mixed" else {}
    sums = []
    model = weighed(nn.Linear(16, 1, bias=False))
    with load_backend(name)(model, lambda losses, _: losses, verify=False, **options) as backend:
        for count in (before, before + 1):
            batch = a.expand(count, -1, -1), g.expand(count, -1, -1)
            sums.append(backend(batch, torch.zeros(count)).grads["layer.weight"])
    assert (sums[1] - sums[0]).norm() <= 1.01


def test_routes_are_chosen_for_one_size_of_batches():
    with load_backend("ghost")(nn.Linear(4, 3), plain, verify=False) as backend:
        for count, chosen in ((3, 4), (8, 4), (9, 16), (5, 16)):
            backend(torch.randn(count, 4), torch.zeros(count, dtype=torch.int64))
            assert backend.chosen_for == chosen
    for expected, first, chosen in ((100, 70, 128), (100, 128, 128), (100, 129, 128), (100, 30, 32), (100, 500, 512)):
        with load_backend("ghost")(nn.Linear(4, 3), plain, verify=False) as backend:
            backend.expected = expected
            backend(torch.randn(first, 4), torch.zeros(first, dtype=torch.int64))
            assert backend.chosen_for == chosen, first


def test_to_verify_a_batch_chooses_no_route():
    with load_backend("ghost")(nn.Linear(4, 3), plain) as backend:
        backend(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))
        assert backend.settle() == {"chosen_for": 64}
        backend.resume({"chosen_for": 256})
        assert backend.settle() == {"chosen_for": 256}


@pytest.mark.parametrize("name", BACKENDS)
def test_sums_leave_in_float32_at_least(name):
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = nn.Linear(4, 3).to(dtype)
        with load_backend(name)(model, cross_entropy if dtype != torch.float64 else plain) as backend:
            found = backend(torch.randn(5, 4, dtype=dtype), torch.zeros(5, dtype=torch.int64))
        assert {grad.dtype for grad in found.grads.values()} == {wide}


@pytest.mark.parametrize("name", ["ghost", "bk_ghost", "fastgradclip"])
def test_ordinary_records_keep_their_factors(name):
    """Lower by less than a thousandth; the norms that are returned are the norms."""
    parts = {"convolution": nn.Conv2d(3, 8, 3, padding=1), "norm": nn.GroupNorm(2, 8), "head": nn.Linear(8, 10)}
    model = Net(lambda net, x: net.head(torch.relu(net.norm(net.convolution(x))).mean((2, 3))), **parts)
    x, targets = torch.randn(8, 3, 16, 16), torch.arange(8)
    grads, norms = [], []
    for backend_name in (name, "microbatch"):
        with load_backend(backend_name)(model, cross_entropy, clip=Flat(0.01), verify=False) as backend:
            found = backend(x, targets)
        grads.append(torch.cat([g.flatten() for g in found.grads.values()]))
        norms.append(found.norms)
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    assert (grads[0] - grads[1]).norm() < 1e-3 * grads[1].norm()


def test_what_a_record_may_move_the_sum_by():
    for name in BACKENDS:
        with load_backend(name)(nn.Linear(4, 3), plain, clip=Flat(2.0)) as backend:
            assert 2 < backend.sensitivity_bound(4096) < 2 * (1 + 1e-3)  # of T = 1,024, before it was called
            before = backend.sensitivity_bound(64)
            backend(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))
            assert 2 < backend.sensitivity_bound(64) <= before < 2 * (1 + 1e-3)
            assert backend.sensitivity_bound(64) <= backend.sensitivity_bound(64, worst=True)
            assert backend.sensitivity_bound(64) < backend.sensitivity_bound(1024)
    for name in ("nonprivate", "tf_microbatch:2"):
        with load_backend(name)(nn.Linear(4, 3), plain) as backend:
            assert backend.sensitivity_bound(64) == math.inf


def test_the_bound_is_the_norm_where_nothing_cancels_and_the_reach_where_all_does():
    squares = torch.tensor([4.0, 0.0, math.nan, math.inf])
    doubt = Doubt(squares, parameters=10)
    terms = torch.tensor([2.0, 1e6, math.inf, 1.0])
    doubt.add(Reach(terms, torch.zeros(4), terms.square()), 64, 4, gram=True, of=squares)
    plain_norm, cancelled, overflowed, infinite = doubt.bound(squares).tolist()
    assert plain_norm == pytest.approx(2, rel=1e-5)
    assert cancelled == pytest.approx(1e6 / CAP[0], rel=1e-3)
    assert overflowed == infinite == math.inf  # a factor of 0


def test_automatic_clipping_leaves_out_what_has_no_digits():
    for dtype in (torch.float32, torch.float64):
        norms = floor(dtype) * torch.tensor([0.0, 0.5, 1.5], dtype=dtype)
        factors = Automatic(1.0).factors(norms)
        assert factors[:2].tolist() == [0, 0] and factors[2] > 0


@pytest.fixture
def medium():
    torch.set_float32_matmul_precision("medium")
    yield torch.backends.mkldnn.matmul
    torch.set_float32_matmul_precision("highest")


def test_norms_and_sums_are_not_rounded_to_bfloat16_on_a_cpu(medium):
    """On a processor with instructions for bfloat16, "medium" rounds operands: a record could move the sum 1.004 C."""
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(1, 64, 256)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.mean(1), targets)

    with load_backend("bk_ghost")(model, loss, clip=Flat(0.01), verify=False) as backend:
        grads = backend(x, torch.zeros(1, dtype=torch.long)).grads
        assert math.hypot(*(float(g.double().norm()) for g in grads.values())) <= backend.sensitivity_bound(1)
    assert medium.fp32_precision == "bf16"
    with full_precision_on_cpu():
        assert medium.fp32_precision == torch.backends.mkldnn.conv.fp32_precision == "ieee"
    assert medium.fp32_precision == "bf16"


def to_tf32(x: Tensor, truncate: bool = False) -> Tensor:
    """Eleven bits of each number: rounded, or cut off."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits if truncate else bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture(params=[False, True], ids=["rounded", "cut off"])
def tf32(request, monkeypatch):
    """Sums by a convolution, and by a product of matrices, have operands of eleven bits."""

    def rounded(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else to_tf32(x, request.param)

    # the kernels in C know no R: none of their processors rounds operands
    monkeypatch.setattr(cpu, "supported", lambda *tensors: False)
    gradient, product = ConvolutionWeight.weight_gradient, matmul.product
    monkeypatch.setattr(
        ConvolutionWeight, "weight_gradient", lambda self, x, g, fold: gradient(self, rounded(x), rounded(g), fold)
    )
    monkeypatch.setattr("clipping.rules.linear.product", lambda x, y: product(rounded(x), rounded(y)))
    monkeypatch.setattr(rounding, "rounds_operands", lambda of, library: of.dtype != torch.float64)
    monkeypatch.setattr(tape_backends, "rounds_operands", lambda of, library: of.dtype != torch.float64)


def records(kind: str, model: str) -> list[Tensor]:
    """The first is hard: its terms cancel to a share of their size, or all of it is one entry."""
    shapes = ((3, 8, 8), (8, 8, 8)) if model == "images" else ((40, 32), (40, 16))
    made = [torch.randn(4, *shape) for shape in shapes]
    over = (2, 3) if model == "images" else (1,)
    first = [x[:1].clone() for x in made]
    if kind == "one entry":
        first = [torch.zeros_like(x) for x in first]
        for x, size in zip(first, (1.0004, 1e3 * 1.0004), strict=True):  # nearly half a unit of eleven bits off
            x[(0,) * x.dim()] = size
    elif kind != "ordinary":
        share = float(kind)
        first[0] = first[0].mean(over, keepdim=True) + share * torch.randn_like(first[0]) + 1
        first[1] = 100 * (first[1] - first[1].mean(over, keepdim=True))
    return [torch.cat([one, rest[1:]]) for one, rest in zip(first, made, strict=True)]


@pytest.mark.parametrize("model", ["images", "rows"])
@pytest.mark.parametrize("name", ["fastgradclip", "ghost", "bk_mixed"])  # each kind of route
def test_one_record_moves_the_sum_by_what_is_stated(tf32, name, model):
    module = weighed(images() if model == "images" else nn.Linear(32, 16, bias=False))
    for kind in ("ordinary", "one entry", "1", "0.1", "0.01", "1e-3", "1e-5"):
        torch.manual_seed(0)
        inputs = records(kind, model)
        with load_backend(name)(module, lambda losses, _: losses, clip=Flat(1.0), verify=False) as backend:
            for _ in range(3 if name == "bk_mixed" else 1):  # the second step times routes and may change the plan
                full = backend(tuple(inputs), torch.zeros(4)).grads
            rest = backend(tuple(x[1:] for x in inputs), torch.zeros(3)).grads
            bound = backend.sensitivity_bound(4)
        moved = math.sqrt(sum(float((full[n].double() - rest[n].double()).square().sum()) for n in full))
        assert ALLOWANCE < bound - 1 < 1e-2
        assert moved <= bound, kind


def test_what_was_stated_of_a_product_stays_stated(monkeypatch):
    """The bound is of all that was seen: a later batch that goes without the convolution does not lower it."""
    monkeypatch.setattr(tape_backends, "rounds_operands", lambda of, library: library == "cudnn")

    either = lambda net, x: (net.convolution if x.dim() == 4 else net.linear)(x).flatten(1).sum(1)  # noqa: E731
    model = Net(either, convolution=images(), linear=nn.Linear(4, 1))
    with load_backend("ghost")(model, lambda losses, _: losses, verify=False) as backend:
        backend(torch.randn(2, 4), torch.zeros(2))
        assert backend.sensitivity_bound(2) - 1 < ALLOWANCE
        backend(torch.randn(2, 3, 8, 8), torch.zeros(2))
        backend(torch.randn(2, 4), torch.zeros(2))
        assert backend.sensitivity_bound(2) - 1 > ALLOWANCE


def test_what_cancels_is_lowered_by_what_its_operands_lose():
    squares = torch.tensor([1.0, 1.0, 1.0])
    terms, apart = torch.tensor([8.0, 100.0, 40.0]), torch.tensor([1.0, 100.0, 4.0])
    on_cuda = pytest.MonkeyPatch()
    on_cuda.setattr(rounding, "rounds_operands", lambda of, library: library == "cudnn")
    try:
        bounds = []
        for library in ("cublas", "cudnn"):
            doubt = Doubt(squares, parameters=10)
            doubt.add(Reach(terms, torch.zeros(3), apart.square()), 64, 64, gram=True, of=squares, library=library)
            bounds.append(doubt.bound(squares))
    finally:
        on_cuda.undo()
    matrices, convolutions = bounds
    expected = (1 + OPERANDS * TF32 * apart) / (1 + ALLOWANCE)
    assert torch.equal(matrices[0], convolutions[0]), "an ordinary record keeps its bound to the last bit"
    torch.testing.assert_close(convolutions, torch.maximum(matrices, expected))
    assert convolutions[2] > 1.005


def test_each_library_has_a_switch_of_its_own_and_none_rounds_products_of_float64():
    single, half, double, wide = (
        SimpleNamespace(is_cuda=True, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex128)
    )
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matrices.fp32_precision, convolutions.fp32_precision
    try:
        for each in (("ieee", "tf32"), ("tf32", "ieee"), ("ieee", "ieee"), ("tf32", "tf32")):
            matrices.fp32_precision, convolutions.fp32_precision = each
            assert rounds_operands(single, "cublas") == (each[0] == "tf32")
            assert rounds_operands(single, "cudnn") == rounds_operands(half, "cudnn") == (each[1] == "tf32")
            assert not rounds_operands(half, "cublas"), "its products are of bfloat16"
            assert not any(rounds_operands(x, library) for x in (double, wide) for library in ("cublas", "cudnn"))
    finally:
        matrices.fp32_precision, convolutions.fp32_precision = before
