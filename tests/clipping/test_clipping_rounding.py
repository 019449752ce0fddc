"""Bounds of rounding, and what follows from them; tests/conformance/test_sensitivity.py has the hard records."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import Automatic, Flat, load_backend
from clipping.core.clip_functions import floor
from clipping.numerics.products import full_precision_on_cpu
from clipping.numerics.rounding_bounds import CAP, Doubt, Reach

BACKENDS = ["microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"]


class Weighed(nn.Module):
    """A linear layer, and a loss whose gradient at each output is the record's own: [B, T, d], [B, T, p]."""

    def __init__(self, inputs=64, outputs=64):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, a: Tensor, g: Tensor) -> Tensor:
        return (self.linear(a) * g).sum((1, 2))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.convolution(x))).mean((2, 3)))


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
    with load_backend(name)(Weighed(16, 1), lambda losses, _: losses, verify=False, **options) as backend:
        for count in (before, before + 1):
            batch = a.expand(count, -1, -1), g.expand(count, -1, -1)
            sums.append(backend(batch, torch.zeros(count)).grads["linear.weight"])
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


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("name", ["ghost", "bk_ghost", "fastgradclip"])
def test_ordinary_records_keep_their_factors(name):
    """Lower by less than a thousandth; the norms that are returned are the norms."""
    torch.manual_seed(0)
    model, x, targets = Images(), torch.randn(8, 3, 16, 16), torch.arange(8)
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


class Shared(nn.Module):
    """An embedding that is read twice, once as the head; a convolution; a norm's scale and shift."""

    def __init__(self):
        super().__init__()
        self.table, self.convolution, self.norm = nn.Embedding(7, 6), nn.Conv1d(6, 6, 3, padding=1), nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.convolution(self.table(ids).transpose(1, 2)).transpose(1, 2)
        return self.linear(self.norm(x)).mean(1) @ self.table.weight.T


@pytest.mark.parametrize("name", ["fastgradclip", "ghost", "mixed_ghost"])
def test_a_second_pass_in_portions_is_the_same(name, monkeypatch):
    """Where one product would round too much: here from three samples on."""
    monkeypatch.setattr("clipping.norms.collection.SMALL", 2**40)
    torch.manual_seed(0)
    model, ids, targets = Shared().double(), torch.randint(0, 7, (9, 5)), torch.randint(0, 7, (9,))
    found = {}
    for backend, most in (("microbatch", 100), (name, 100), (name, 2)):
        for module in ("backends.tape", "rules.linear", "numerics.per_sample"):
            monkeypatch.setattr(f"clipping.{module}.portion", lambda *_, most=most: most)
        with load_backend(backend)(model, plain, clip=Flat(0.5), verify=False) as opened:
            found[backend, most] = opened(ids, targets)
    reference = found.pop(("microbatch", 100)).grads
    for each in found.values():
        for key, grad in each.grads.items():
            torch.testing.assert_close(grad, reference[key], rtol=1e-10, atol=1e-14)
    whole, portions = (torch.cat([g.flatten() for g in each.grads.values()]) for each in found.values())
    assert not torch.equal(whole, portions)  # summed in another order: portions were taken


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
    torch.manual_seed(0)
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
