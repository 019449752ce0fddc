"""Every read of a parameter in the graph of the losses is a use that the tape saw, in each call, or it is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipping.backends.tape
from clipping import Flat, UnsupportedModel, load_backend

TAPE = ("ghost", "bk_mixed")  # two passes, and one; all record alike


def squares(outputs, targets):
    return ((outputs.flatten(1) - targets[:, None]) ** 2).mean(1)


def batch(*shape):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, *shape, generator=generator, dtype=torch.float64), torch.arange(5).double()


class Mul(torch.autograd.Function):
    """A fused linear layer, whose parameter no mode sees."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)


class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layer, self.w = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 6))
        self.double()
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def forces(model, x):
    x = x.detach().clone().requires_grad_(True)
    energy = torch.tanh(F.linear(model.layer(x), model.w)).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def beside_another_use(model, x):
    return Mul.apply(x, model.w) + torch.where(x[:, :3] > 0, model.w[:, 0], x[:, :3])


def of_a_view(model, x):
    return Mul.apply(x, (2 * model.w).view(3, 6))


UNSEEN = {
    "a custom function": lambda model, x: Mul.apply(model.layer(x), model.w),
    "of what was made of a parameter": of_a_view,
    "beside another use of it": beside_another_use,
    "a derivative of a derivative": forces,
    "in training alone": lambda m, x: Mul.apply(m.layer(x), m.w) if m.training else F.linear(m.layer(x), m.w),
}


@pytest.mark.parametrize("backend", TAPE)
def test_a_read_that_the_tape_does_not_see_is_refused(backend):
    for verify in [True, False]:
        for run in UNSEEN.values():
            with (
                load_backend(backend)(Model(run), squares, verify=verify) as b,
                pytest.raises(UnsupportedModel, match="is read where the tape does not see it"),
            ):
                b(*batch(6))


@pytest.mark.parametrize("backend", TAPE)
def test_a_path_that_a_later_batch_takes_first_is_refused(backend):
    for verify in [True, False]:

        def run(model, x):
            h = model.layer(x.mean(1))
            return Mul.apply(h, model.w) if x.shape[1] >= 8 else F.linear(h, model.w)

        with load_backend(backend)(Model(run), squares, verify=verify) as b:
            b(*batch(4, 6))
            with pytest.raises(UnsupportedModel, match="w: is read where"):
                b(*batch(9, 6))


class HiddenLeaf(nn.Module):
    """wav2vec2's way: a hidden state is said to require a gradient; so does `enable_input_require_grads`."""

    def __init__(self, frozen):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        if self.training:
            x = x.clone()
            x.requires_grad = True
        h = self.first(x)
        if not h.requires_grad:
            h.requires_grad_(True)
        return self.head(h.tanh())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("backend", TAPE)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_leaf_that_the_model_makes_leads_to_every_use(frozen, backend, verify):
    model, (x, y) = HiddenLeaf(frozen), batch(4, 6)
    clip = Flat(0.1)
    with load_backend("microbatch")(model, squares, clip=clip) as oracle:
        expected = oracle(x, y)
    with load_backend(backend)(model, squares, clip=clip, verify=verify) as b:
        found = b(x, y)
    torch.testing.assert_close(found.norms, expected.norms)
    torch.testing.assert_close(found.grads, expected.grads)
    assert (expected.norms > 0.1).all()


def test_a_cast_that_autocast_keeps_is_no_read_of_its_own():
    model, (x, y) = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), batch(4, 6)
    with torch.autocast("cpu", torch.bfloat16), load_backend("bk_mixed")(model, squares, verify=False) as b:
        for _ in range(2):
            b(x.float(), y.float())


def test_a_gradient_that_does_not_arrive_is_refused(monkeypatch):
    class Loses(clipping.backends.tape.Tape):
        def _settle(self):
            super()._settle()
            self.arrivals._hooks.pop().remove()

    monkeypatch.setattr(clipping.backends.tape, "Tape", Loses)
    model = nn.Linear(6, 3).double()
    with (
        load_backend("ghost")(model, squares, verify=False) as b,
        pytest.raises(UnsupportedModel, match="linear with weight, bias arrived 0 times, expected once"),
    ):
        b(*batch(6))
