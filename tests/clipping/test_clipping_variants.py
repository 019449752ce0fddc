"""Variants of a backend, ``name:variant``: accepted wherever a backend is, and in no list.

TF Privacy's microbatches, ``tf_microbatch:M``, are another mechanism, held to its own definition and never to that of
clipping per sample.
"""

import json
import re

import pytest
import torch
from torch import nn

from clipping import BACKENDS, FAMILIES, VARIANTS, Flat, PerLayer, WrongGradient, is_backend, load_backend
from clipping.accel.ways import COMPILED
from clipping.backends.microbatch import TfMicrobatch, tf_microbatch
from clipping.checks.verification import compare, verify
from dpbench import PrivacyEngine
from dpbench.cli import main
from dpbench.errors import UsageError
from dpbench.measure import verify as measured
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.backends import validate_backend


def test_kernels_left_out_are_no_ways():
    cls = load_backend("bk_mixed:without_kernels")
    with cls(nn.Linear(4, 64), lambda outputs, targets: outputs.sum((1, 2))) as one:
        one(torch.randn(3, 8, 4), torch.zeros(3))
        costs = [each for plan in one.planner._plans.values() for each in plan.costs.values()]
    assert costs and all(way != COMPILED for each in costs for _, way, *_ in each.norms)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_its_name_and_strategy(name):
    cls = load_backend(name)
    assert cls.name == name and issubclass(cls, load_backend("bk_mixed"))
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Flatten(2), nn.Linear(4, 64))  # Gram norms are the cheaper
    with cls(model, lambda outputs, targets: outputs.flatten(1).square().sum(1)) as backend:
        part = name.partition(":")[2]
        assert backend.planner.strategy == ("auto" if part.startswith("without_") else part)
        verify(backend, torch.randn(3, 8, 4, 4), torch.zeros(3))
    assert validate_backend(name) is None and backend_class(name) is cls


def test_they_are_no_backends_of_their_own(capsys):
    assert not set(VARIANTS) & set(BACKENDS)
    assert main(["list", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)["backends"]
    assert [entry["name"] for entry in listed] == list(BACKENDS)


@pytest.mark.parametrize(("name", "meant"), [("bk_mixed:papr", "bk_mixed:paper"), ("gost", "ghost")])
def test_what_is_mistyped_is_told_the_nearest(name, meant):
    said = re.escape(f"got {name!r}; did you mean {meant!r}?")
    with pytest.raises(ValueError, match=rf"expected a backend, {said} \(one of .*bk_mixed:paper.*\)$"):
        load_backend(name)
    with pytest.raises(UsageError, match=rf"expected a backend, {said} \(one of .*or path/file.py:Class\)$"):
        validate_backend(name)


def problem(batch=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    inputs, targets = torch.randn(batch, 5, dtype=torch.float64), torch.randn(batch, 3, dtype=torch.float64)
    return model, (lambda outputs, targets: (outputs - targets).square().sum(1)), inputs, targets


def gradient(model, loss_fn, inputs, targets):
    """Of the mean loss, as one vector."""
    loss = loss_fn(model(inputs), targets).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def answer(name, model, loss_fn, inputs, targets, clip):
    with load_backend(name)(model, loss_fn, clip=clip) as backend:
        return backend(inputs, targets)


def flat(grads):
    return torch.cat([g.flatten() for g in grads.values()])


def test_microbatches_of_one_sample_are_clipping_per_sample():
    for clip in (Flat(0.7), PerLayer(0.7)):
        ours = answer("tf_microbatch:1", *problem(), clip)
        reference = answer("microbatch", *problem(), clip)
        assert compare(ours, reference).within(1e-14) and ours.norms.shape == (8,)


@pytest.mark.parametrize(("together", "batch", "bound"), [(8, 8, 0.3), (3, 7, 1.0)])
def test_the_sum_is_that_of_the_clipped_means_and_the_last_one_may_be_smaller(together, batch, bound):
    model, loss_fn, inputs, targets = problem(batch)
    parts = zip(inputs.split(together), targets.split(together), strict=True)
    means = torch.stack([gradient(model, loss_fn, *part) for part in parts])
    norms = means.norm(dim=1)
    assert norms.max() > bound
    out = answer(f"tf_microbatch:{together}", model, loss_fn, inputs, targets, Flat(bound))
    torch.testing.assert_close(flat(out.grads), (bound / norms).clamp(max=1) @ means)
    torch.testing.assert_close(out.norms, norms)
    assert out.losses.shape == (batch,)


def test_one_sample_replaced_can_move_the_sum_by_more_than_the_threshold():
    """The sensitivity that its docstring states: beyond C, up to 2C."""
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([[0.1], [0.1], [0.1], [100.0]], dtype=torch.float64)
    clip = Flat(1.0)
    sums = {
        name: [answer(name, model, lambda o, t: (o * t).sum(1), x, x.new_tensor([[1.0]] * 3 + [[end]]), clip).grads
               for end in (1.0, -1.0)]
        for name in ("tf_microbatch:4", "microbatch")
    }  # fmt: skip
    moved = {name: float((a["weight"] - b["weight"]).abs()) for name, (a, b) in sums.items()}
    assert moved["tf_microbatch:4"] == pytest.approx(2.0)
    # per sample: each of the two is within C of the sum without the sample, which is `sensitivity` under add/remove
    rest = answer("microbatch", model, lambda o, t: (o * t).sum(1), x[:3], torch.ones(3, 1).double(), clip).grads
    assert all(float((s["weight"] - rest["weight"]).abs()) <= 1 + 1e-12 for s in sums["microbatch"])


def test_it_is_verified_against_its_own_definition_on_two_microbatches():
    model, loss_fn, inputs, targets = problem()
    with tf_microbatch(3)(model, loss_fn, clip=Flat(0.5), verify=False) as backend:
        found, tolerance, samples = measured.against_oracle(backend, inputs, targets)
        assert found.within(tolerance) and samples == 6
        out = backend(inputs, targets)
    assert not compare(out, answer("microbatch", model, loss_fn, inputs, targets, Flat(0.5))).within(1e-2)


@pytest.mark.parametrize("fault", ["sum", "one"])
def test_a_faulty_one_is_found_out(fault):
    """The sum in place of the mean; and per-sample clipping, which passes for the other backends."""

    class Faulty(TfMicrobatch):
        name, together = "faulty", 2

        def _clipped(self, parameters, inputs, targets, batch_size):
            if fault == "one":
                return load_backend("microbatch")(self.model, self.loss_fn, clip=self.clip)(inputs, targets)
            doubled = lambda outputs, targets: 2 * problem()[1](outputs, targets)  # noqa: E731
            return tf_microbatch(2)(self.model, doubled, clip=self.clip, verify=False)(inputs, targets)

    model, loss_fn, inputs, targets = problem()
    with pytest.raises(WrongGradient):
        verify(Faulty(model, loss_fn, clip=Flat(100.0)), inputs, targets)


def test_names():
    assert tf_microbatch(16).together == 16 and load_backend("bk_mixed:paper").together == 1
    assert load_backend("tf_microbatch:16") is backend_class("tf_microbatch:16") is tf_microbatch(16)
    assert validate_backend("tf_microbatch:16") is None
    assert not set(FAMILIES) & set(BACKENDS)
    for name in ("tf_microbatch", "tf_microbatch:", "tf_microbatch:0", "tf_microbatch:-1", "tf_microbatch:x"):
        assert not is_backend(name)
        with pytest.raises(ValueError, match=r"got .*; did you mean 'tf_microbatch:M'\? .*tf_microbatch:M"):
            load_backend(name)
        with pytest.raises(UsageError, match=r"tf_microbatch:M.*or path/file.py:Class"):
            validate_backend(name)


def test_the_privacy_engine_refuses_it_in_one_line():
    said = re.escape("got 'tf_microbatch:4': it clips the mean of several, where a sample can move the sum by 2")
    with pytest.raises(ValueError, match=f"^expected a backend that clips each sample's gradient, {said}[^\n]*$"):
        PrivacyEngine(
            problem()[0],
            batch_size=4,
            sample_size=100,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            backend="tf_microbatch:4",
        )


def test_check_holds_it_to_its_own_definition(capsys, trials_here):
    assert main(["check", "--model", "cnn", "--backend", "tf_microbatch:2", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "ok" and row["max_grad_error"] < 1e-12
