"""Every backend against the oracle, in float64, on every case: norms and summed gradients within 1e-9."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, NOT_FOR, Case, cross_entropy, images
from torch import nn

import clipping.rules.base
from clipping import (
    Automatic,
    Flat,
    GlobalBound,
    PerLayer,
    UnsupportedModel,
    WrongGradient,
    compare,
    load_backend,
)

TOLERANCE = 1e-9
PRIVATE = ["vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"]
WITH_PEER = [*PRIVATE, "opacus_hooks"]  # the other peers, and every case, are in test_clipping_peers.py


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def median_clip(model, inputs, targets, loss_fn) -> Flat:
    """A threshold that clips some samples and not others."""
    norms = load_backend("microbatch")(model, loss_fn)(inputs, targets).norms
    return Flat(max_grad_norm=float(norms.median()))


def by_definition(model, inputs, targets, loss_fn, clip):
    """Σ_i c_i g_i written out with .backward() and nothing of ours."""
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    norms = []
    for i in range(len(targets)):
        model.zero_grad()
        loss_fn(model(inputs[i : i + 1]), targets[i : i + 1]).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        norm = sum(g.square().sum() for g in grads.values()).sqrt()
        norms.append(norm)
        for n, g in grads.items():
            sums[n] += g * min(1.0, clip.max_grad_norm / float(norm))
    model.zero_grad()
    return sums, torch.stack(norms)


def test_the_oracle_is_the_definition():
    model, x, y, loss = images(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    clip = median_clip(model, x, y, loss)
    sums, norms = by_definition(model, x, y, loss, clip)
    out = load_backend("microbatch")(model, loss, clip=clip)(x, y)
    torch.testing.assert_close(out.norms, norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.grads, sums, rtol=1e-12, atol=1e-15)
    assert 0 < int((norms > clip.max_grad_norm).sum()) < len(norms)


@pytest.mark.parametrize("backend", PRIVATE)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_exact(case: Case, backend: str):
    problem = case.make()
    model, inputs, targets, loss_fn = problem
    clip = median_clip(*problem)
    oracle = load_backend("microbatch")(model, loss_fn, clip=clip)(inputs, targets)
    try:
        with load_backend(backend)(model, loss_fn, clip=clip) as b:
            out = b(inputs, targets)
    except (UnsupportedModel, WrongGradient):
        assert case.name in NOT_FOR.get(backend, ())
        return
    assert case.name not in NOT_FOR.get(backend, ()), f"{backend} supports {case.name} now: take it off the list"
    agreement = compare(out, oracle)
    assert agreement.within(TOLERANCE), agreement
    assert (out.grads.keys(), out.norms.shape) == (oracle.grads.keys(), oracle.norms.shape)
    torch.testing.assert_close(out.losses, oracle.losses)


@pytest.mark.parametrize("backend", PRIVATE)
@pytest.mark.parametrize("case", ["conv2d groups", "linear 3-D", "embedding", "layer norm over positions", "tied head"])
def test_exact_in_blocks(case: str, backend: str, monkeypatch):
    """The same with a workspace so small that samples and Gram rows are treated one at a time."""
    monkeypatch.setattr(clipping.rules.base, "WORKSPACE", 64)
    test_exact(next(c for c in CASES if c.name == case), backend)


@pytest.mark.parametrize("backend", PRIVATE)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_exact_per_layer(case: Case, backend: str):
    """Each parameter clipped by its own norm: a use, a route and a weighted gradient at a time."""
    if case.name in NOT_FOR.get(backend, ()):
        pytest.skip("refused, as test_exact shows")
    model, inputs, targets, loss_fn = case.make()
    norms = load_backend("microbatch")(model, loss_fn)(inputs, targets).norms
    clip = PerLayer(float(norms.median()))
    oracle = load_backend("microbatch")(model, loss_fn, clip=clip)(inputs, targets)
    with load_backend(backend)(model, loss_fn, clip=clip) as b:
        agreement = compare(b(inputs, targets), oracle)
    assert agreement.within(TOLERANCE), agreement


@pytest.mark.parametrize("backend", WITH_PEER)
@pytest.mark.parametrize(
    "clip", [Automatic(0.5), Automatic(0.5, stabiliser=0.01), GlobalBound(0.5, bound=1.0)], ids=str
)
def test_exact_with_every_clipping_function(clip, backend: str):
    model, x, y, loss = images(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    oracle = load_backend("microbatch")(model, loss, clip=clip)(x, y)
    with load_backend(backend)(model, loss, clip=clip) as b:
        assert compare(b(x, y), oracle).within(TOLERANCE)


@pytest.mark.parametrize("backend", WITH_PEER)
@pytest.mark.parametrize("clip", [Flat(0.5), Automatic(0.5), GlobalBound(0.5, bound=1.0), PerLayer(0.5)], ids=str)
def test_removing_a_sample_moves_the_sum_by_no_more_than_the_sensitivity(clip, backend: str):
    """The black-box property that privacy rests on: nothing here knows how the backend works."""
    model, x, y, loss = images(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    x[0] *= 100
    with load_backend(backend)(model, loss, clip=clip) as b:
        whole = b(x, y).grads
        for left_out in range(len(x)):
            keep = [i for i in range(len(x)) if i != left_out]
            rest = b(x[keep], y[keep]).grads
            moved = torch.stack([(whole[n] - rest[n]).norm() for n in whole]).norm()
            assert moved <= clip.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("backend", WITH_PEER)
@pytest.mark.parametrize("batch", ["one sample", "tied norms", "zero gradient", "empty"])
def test_exact_on_edge_batches(batch: str, backend: str):
    model, x, _, _ = images(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    y = torch.tensor([0, 1, 2, 1, 0])
    clip = median_clip(model, x, y, cross_entropy)
    if batch == "one sample":
        x, y = x[:1], y[:1]
    elif batch == "tied norms":
        x, y = x[[0, 1, 1, 0]], y[[0, 1, 1, 0]]
        clip = Flat(float(load_backend("microbatch")(model, cross_entropy)(x, y).norms[1]))
    elif batch == "zero gradient":
        y[2] = -100  # cross_entropy's ignore_index: loss and gradient are exactly zero
    else:
        x, y = x[:0], y[:0]
    oracle = load_backend("microbatch")(model, cross_entropy, clip=clip)(x, y)
    with load_backend(backend)(model, cross_entropy, clip=clip) as b:
        out = b(x, y)
    if batch == "empty":
        assert out.norms.shape == out.losses.shape == (0,)
        assert all(not g.any() and g.shape == oracle.grads[n].shape for n, g in out.grads.items())
        return
    assert compare(out, oracle).within(TOLERANCE)
    if batch == "zero gradient":
        assert out.norms[2] == 0


@pytest.mark.parametrize("backend", ["nonprivate", "microbatch", *WITH_PEER])
def test_leaves_the_model_as_it_was(backend: str):
    model, x, _, _ = images(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))
    y = torch.tensor([0, 1, 2, 1, 0])
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    model[0].bias.requires_grad_(False)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}

    def state():
        return [
            *((p.requires_grad, sorted(vars(p)), p.grad is None) for p in model.parameters()),
            *(
                (sorted(vars(m)), m.training, len(m._forward_hooks), len(m._backward_hooks), m._is_full_backward_hook)
                for m in model.modules()
            ),
            model[1].inplace,
        ]

    before = state()
    with load_backend(backend)(model, cross_entropy) as b:
        first = b(x, y)
        second = b(x, y)
    assert state() == before
    assert (model[0].weight.grad == 7).all()
    torch.testing.assert_close(dict(model.named_parameters()), values, rtol=0, atol=0)
    torch.testing.assert_close(first.grads, second.grads, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="after close"):
        b(x, y)


@pytest.mark.parametrize("backend", WITH_PEER)
def test_batches_of_changing_size(backend: str):
    """Poisson sampling: no state of one call may leak into the next."""
    model, x, y, loss = images(nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3), batch=6)
    clip = median_clip(model, x, y, loss)
    with load_backend(backend)(model, loss, clip=clip) as b:
        for count in (4, 0, 1, 6, 2):
            oracle = load_backend("microbatch")(model, loss, clip=clip)(x[:count], y[:count])
            out = b(x[:count], y[:count])
            assert out.norms.shape == (count,)
            if count:
                assert compare(out, oracle).within(TOLERANCE)


@pytest.mark.parametrize("backend", WITH_PEER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_accumulates_norms_in_float32(backend: str, dtype: torch.dtype):
    model, x, y, loss = images(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    exact = load_backend("microbatch")(model, loss, clip=Flat(0.5))(x, y)
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype)
    with load_backend(backend)(model, loss, clip=Flat(0.5)) as b:
        out = b(x, y)
    assert out.norms.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(out.norms.double(), exact.norms, rtol=tolerance, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: none here")
@pytest.mark.parametrize("backend", PRIVATE)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_exact_on_cuda(case: Case, backend: str):
    from clipping.interface import map_tensors

    model, inputs, targets, loss_fn = case.make()
    clip = median_clip(model, inputs, targets, loss_fn)
    oracle = load_backend("microbatch")(model, loss_fn, clip=clip)(inputs, targets)
    inputs, targets = map_tensors(lambda t: t.cuda(), (inputs, targets))
    try:
        with load_backend(backend)(model.cuda(), loss_fn, clip=clip) as b:
            out = b(inputs, targets)
    except (UnsupportedModel, WrongGradient):
        assert case.name in NOT_FOR.get(backend, ())
        return
    out = type(out)({n: g.cpu() for n, g in out.grads.items()}, out.norms.cpu(), out.losses.cpu())
    assert compare(out, oracle).within(TOLERANCE)
