"""Products of matrices by either library: the same values, whatever the strides; not by oneDNN where it cannot."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clipping.numerics import products as module
from clipping.numerics.products import product, products

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture(params=[1, math.inf], ids=["onednn", "bmm"])
def called(request, monkeypatch):
    """Everything by one library; what it was called with."""
    if request.param == 1 and not HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    calls = []
    real = module._onednn
    monkeypatch.setattr(module, "onednn_from", lambda threads: request.param)
    monkeypatch.setattr(module, "_onednn", lambda x, y: (calls.append((x.shape, y.shape)), real(x, y))[1])
    return calls, request.param == 1


LAYOUTS = {
    "contiguous": lambda n, rows, k: torch.randn(n, rows, k),
    "transposed": lambda n, rows, k: torch.randn(n, k, rows).transpose(1, 2),
    "a part": lambda n, rows, k: torch.randn(n, rows + 3, k + 5)[:, 1 : rows + 1, 2 : k + 2],
    "a part, transposed": lambda n, rows, k: torch.randn(n, k, rows + 4).transpose(1, 2)[:, 2 : rows + 2],
    "expanded": lambda n, rows, k: torch.randn(1, rows, k).expand(n, rows, k),
}


@pytest.mark.parametrize(("n", "rows", "columns", "k"), [(3, 7, 5, 11), (1, 40, 6, 9), (2, 4, 30, 16), (2, 1, 1, 1)])
def test_strides_make_no_difference(called, n, rows, columns, k):
    calls, by_onednn = called
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        calls.clear()
        x, y = LAYOUTS[left](n, rows, k), LAYOUTS[right](n, columns, k)
        expected = torch.einsum("nik,njk->nij", x.double(), y.double())
        for found, want in ((products(x, y), expected), (product(x[0].t(), y[0].t()), expected[0])):
            assert found.is_contiguous() and torch.allclose(found.double(), want, atol=1e-4), (left, right)
        assert bool(calls) == by_onednn, (left, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_float32_is_onednn_s(monkeypatch, dtype):
    """And what is in half precision is multiplied in float32: rounded it would have lost the digits of a sum."""
    x, wide = torch.randn(2, 8, 8).to(dtype), torch.promote_types(dtype, torch.float32)
    monkeypatch.setattr(
        module, "onednn_from", lambda threads: math.inf if dtype == torch.bfloat16 else pytest.fail("asked")
    )
    assert torch.equal(products(x, x), torch.bmm(x.to(wide), x.to(wide).transpose(1, 2)))
    assert torch.equal(product(x[0], x[1]), x[0].to(wide).t() @ x[1].to(wide))


def test_fake_tensors_time_nothing(monkeypatch):
    monkeypatch.setattr(module, "onednn_from", lambda threads: pytest.fail("asked"))
    with FakeTensorMode():
        x = torch.empty(2, 512, 512)
        assert products(x, x).shape == (2, 512, 512)


@pytest.mark.parametrize(
    ("ratios", "from_side"),
    [((0.5, 0.5, 0.5, 1.2, 2, 3), 256), ((2, 0.5, 0.5, 0.5, 0.5, 0.5), None), ((0.5,) * 6, 128)],
    ids=["from a size on", "not the largest, so none", "all"],
)
def test_the_size_is_the_smallest_of_those_that_win_without_a_gap(monkeypatch, ratios, from_side):
    if not HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    turns = list(ratios)
    monkeypatch.setattr(module, "_ratio", lambda run, other: turns.pop(0))
    found = module._timed_from()
    assert found == (math.inf if from_side is None else from_side**3)


@pytest.mark.parametrize("disturbed", [0.01, 100.0], ids=["one", "the other"])
def test_a_disturbed_turn_decides_nothing(monkeypatch, disturbed):
    """Each turn takes 3 and 2 seconds, but for one in which either takes `disturbed` times as long."""
    now, runs = 0.0, 0

    def takes(seconds):
        nonlocal now, runs
        now, runs = now + seconds * (disturbed if runs == module.TURNS else 1), runs + 1

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    assert module._ratio(lambda: takes(3), lambda: takes(2)) == pytest.approx(1.5)


def test_without_onednn_there_is_no_size(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert module._timed_from() == math.inf
