"""Limits of CUDA's kernels that a CPU can be held to: sizes of calls on tensors without values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from clipping import Flat, load_backend
from clipping.numerics.products import full_precision, product, products
from clipping.rules import base, norm
from clipping.rules.pixel_gram import Geometry, pixel_gram_product


class Groups(TorchDispatchMode):
    """How many groups each group norm had."""

    def __init__(self):
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_group_norm.default:
            self.seen.append(args[3] * args[6])
        return func(*args, **(kwargs or {}))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 1), nn.GroupNorm(32, 64), nn.Flatten())


def plain(outputs, _):
    return outputs.square().sum(1)


@pytest.mark.parametrize("batch_size", [2047, 2048, 4096])
def test_a_group_norm_of_many_samples_stays_within_the_grid(batch_size, monkeypatch):
    """One sample's groups folded with another's: 2,048 samples of 32 groups are one group too many for CUDA."""
    assert norm.most_groups(torch.empty(0)) > 4096 * 32
    monkeypatch.setattr(norm, "most_groups", lambda x: 65_535)
    model = normalised().to("meta")
    x, targets = torch.empty(batch_size, 3, 2, 2, device="meta"), torch.empty(batch_size, device="meta")
    with load_backend("bk_mixed")(model, plain, verify=False) as backend, Groups() as groups:
        backend(x, targets)
    assert max(groups.seen) <= 65_535 and sum(groups.seen) == batch_size * 32
    assert len(groups.seen) == -(-batch_size * 32 // 65_535)


def test_a_group_norm_in_portions_is_the_same(monkeypatch):
    torch.manual_seed(0)
    model, x, targets = normalised().double(), torch.randn(7, 3, 2, 2, dtype=torch.float64), torch.zeros(7)
    found = []
    for most in (2**31, 64):
        monkeypatch.setattr(norm, "most_groups", lambda x, most=most: most)
        with load_backend("bk_mixed")(model, plain, clip=Flat(0.1)) as backend:
            found.append(backend(x, targets))
    torch.testing.assert_close(found[0].norms, found[1].norms, rtol=1e-12, atol=0)
    for name, grad in found[0].grads.items():
        torch.testing.assert_close(grad, found[1].grads[name], rtol=1e-10, atol=1e-14)


def test_portions_of_a_group_norm_are_joined_once_in_the_backward_pass(monkeypatch):
    """A view of each portion would make zeros for the whole batch, as often as there are portions."""
    monkeypatch.setattr(norm, "most_groups", lambda x: 64)
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x, scale, shift = torch.randn(7, 64, 2, requires_grad=True), *(torch.randn(64, requires_grad=True) for _ in "ab")
    g = torch.randn(7, 64, 2)
    with Names():
        found = norm.group_norm(lambda p, n: p.repeat(n), x, 32, scale, shift)
        grads = torch.autograd.grad(found, (x, scale, shift), g)
    assert names.count("native_group_norm_backward") == 4 and "slice_backward" not in names and "add" not in names
    expected = F.group_norm(x, 32, scale, shift)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, scale, shift), g))


@pytest.mark.parametrize("batch_size", [2047, 2048, 4096])
def test_a_group_norm_of_a_cuda_device_is_cut(batch_size):
    """The device itself decides, not a test's stand-in; forward only, for autograd on CUDA asks for its driver."""
    with FakeTensorMode(), Groups() as groups:
        x = torch.empty(batch_size, 64, 2, 2, device="cuda")
        assert norm.group_norm(lambda p, n: p.repeat(n), x, 32).shape == x.shape
    assert len(groups.seen) == -(-batch_size * 32 // 65_535) and max(groups.seen) <= 65_535


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


def test_workspace_grows_with_a_gpus_memory(monkeypatch):
    rule = base.Bias(nn.Parameter(torch.zeros(3)), -1)
    assert rule.room() == base.WORKSPACE["cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("Card", (), {"total_memory": 80 * 2**30})
    )
    base.share_of_gpu.cache_clear()
    assert base.share_of_gpu(0) == 80 * 2**30 // base.SHARE > base.WORKSPACE["cuda"]
    base.share_of_gpu.cache_clear()


def test_products_of_float32_are_never_tf32_and_the_switch_is_put_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with full_precision():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_products_of_half_precision_on_cuda_ask_for_float32_and_cast_nothing():
    """On fake tensors of a CUDA device: no copy in float32 is made of what tensor cores multiply."""

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with FakeTensorMode(), Casts():
        x = torch.empty(2, 5, 8, dtype=torch.bfloat16, device="cuda")
        assert products(x, x).dtype == torch.float32
        assert not any("_to_copy" in name for name in names)
        wide = torch.empty(5, 8, device="cuda")
        assert product(wide, x[0]).dtype == torch.float32  # by the two halves of its digits
    assert sum("mm" in name for name in names) == 3


def test_autocast_casts_an_image_once_as_in_ordinary_training():
    class Wide(nn.Module):
        def forward(self, x):
            return x.float()  # as a norm's output is on CUDA

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Wide(), nn.ConvTranspose2d(4, 3, 3), nn.Flatten())
    x, targets, found = torch.randn(5, 3, 8, 8), torch.zeros(5), []

    class Images(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16 and result.dim() == 4:
                found[-1].append(list(result.shape[:2]))
            return result

    for name in ("nonprivate", "bk_ghost"):
        with load_backend(name)(model, plain, verify=False) as backend, torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):  # what a first step looks at, it looks at once
                found.append([])
                with Images():
                    backend(x, targets)
    assert found[1] == found[3] == [[5, 3], [5, 4], [5, 4]]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_products_of_two_dtypes_are_float32_on_every_device(dtypes):
    """A tied embedding under autocast: its gradient is float32, that of the linear layer which shares it bfloat16."""
    given = [torch.randn(2, 5, 8).to(dtype) for dtype in dtypes]
    expected = torch.bmm(given[0].float(), given[1].float().transpose(1, 2))
    torch.testing.assert_close(products(*given), expected)
    with FakeTensorMode():
        x, y = (torch.empty(2, 5, 8, dtype=dtype, device="cuda") for dtype in dtypes)
        assert products(x, y).dtype == torch.float32


def test_the_two_halves_of_a_number_are_sixteen_bits_of_it():
    from clipping.numerics.products import _halves

    x = torch.randn(1000)
    upper, lower = _halves(x)
    assert ((upper.double() + lower.double() - x.double()).abs() <= 2.0**-16 * x.double().abs()).all()
    assert F.mse_loss(upper.float(), x) > 0
