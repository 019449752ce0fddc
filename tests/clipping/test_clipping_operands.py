"""Products that round their operands, as CUDA's do to TF32: on a CPU, where the same rules sum rounded operands."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn

from clipping import Flat, load_backend
from clipping.accel import cpu
from clipping.backends import tape as tape_backends
from clipping.numerics import products as matmul
from clipping.numerics import rounding_bounds as rounding
from clipping.numerics.rounding_bounds import ALLOWANCE, OPERANDS, TF32, Doubt, Reach, rounds_operands
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.linear import LinearWeight


def to_tf32(x: Tensor, truncate: bool = False) -> Tensor:
    """Eleven bits of each number: rounded, or cut off."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits if truncate else bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture(params=[False, True], ids=["rounded", "cut off"])
def tf32(request, monkeypatch):
    """Sums by a convolution, and by a product of matrices, have operands of eleven bits."""

    def rounded(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else to_tf32(x, request.param)

    for name in ("supported", "in_one_piece"):  # the kernels in C know no R: none of their processors rounds operands
        monkeypatch.setattr(cpu, name, lambda *tensors: False)
    gradient, product = ConvolutionWeight.weight_gradient, matmul.product
    monkeypatch.setattr(
        ConvolutionWeight, "weight_gradient", lambda self, x, g, fold: gradient(self, rounded(x), rounded(g), fold)
    )
    for module in (sys.modules[LinearWeight.__module__],):
        monkeypatch.setattr(module, "product", lambda x, y: product(rounded(x), rounded(y)))
    monkeypatch.setattr(rounding, "rounds_operands", lambda of, library: of.dtype != torch.float64)
    monkeypatch.setattr(tape_backends, "rounds_operands", lambda of, library: of.dtype != torch.float64)


class Images(nn.Module):
    """Each loss is weighed by the record itself: [B, 3, 8, 8] and [B, 8, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (self.convolution(x) * g).sum((1, 2, 3))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16, bias=False)

    def forward(self, a: Tensor, g: Tensor) -> Tensor:
        return (self.linear(a) * g).sum((1, 2))


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
    module = Images() if model == "images" else Rows()
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

    class Either(Images):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.convolution(x).sum((1, 2, 3)) if x.dim() == 4 else self.linear(x).sum(1)

    with load_backend("ghost")(Either(), lambda losses, _: losses, verify=False) as backend:
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_no_switch_rounds_products_of_float64(dtype):
    class Operand:
        is_cuda = True

    Operand.dtype = dtype
    assert not rounds_operands(Operand(), "cudnn") and not rounds_operands(Operand(), "cublas")


def test_each_library_has_a_switch_of_its_own():
    class Operand:
        is_cuda, dtype = True, torch.float32

    class Half(Operand):
        dtype = torch.bfloat16

    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matrices.fp32_precision, convolutions.fp32_precision
    try:
        for each in (("ieee", "tf32"), ("tf32", "ieee"), ("ieee", "ieee"), ("tf32", "tf32")):
            matrices.fp32_precision, convolutions.fp32_precision = each
            assert rounds_operands(Operand(), "cublas") == (each[0] == "tf32")
            assert rounds_operands(Operand(), "cudnn") == (each[1] == "tf32")
            assert rounds_operands(Half(), "cudnn") == (each[1] == "tf32")
            assert not rounds_operands(Half(), "cublas"), "its products are of bfloat16"
    finally:
        matrices.fp32_precision, convolutions.fp32_precision = before
