"""What would break the guarantee without a sound: failed steps, infinities, buffers, half a checkpoint."""

from __future__ import annotations

import io
import re

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from clipping import UnsupportedModel
from dpbench import Misuse, PrivacyEngine, PrivacyWarning


def make(model=None, optimizer=torch.optim.SGD, **changes):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    settings = {"batch_size": 4, "sample_size": 100, "max_grad_norm": 0.5, "noise_multiplier": 0.0}
    engine = PrivacyEngine(model, **(settings | changes))
    made = optimizer(model.parameters(), lr=0.1)
    engine.attach(made)
    return model, made, engine


def losses_of(model, count=4, seed=0):
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(x), torch.zeros(count, dtype=torch.long), reduction="none")


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def says(kind, pattern):
    return pytest.raises(kind, match=re.compile(rf"^(?=[^\n]*\Z).*{pattern}"))


def test_parts_of_a_batch_whose_step_failed_are_not_in_the_next():
    """A record of both would move the sum by 2C, where the noise covers C."""
    ends = []
    for failing in (True, False):
        model, optimizer, engine = make()
        if failing:
            optimizer.virtual_step(loss=losses_of(model, seed=1))
            with says(Misuse, "got a scalar"):
                optimizer.step(loss=losses_of(model, seed=2).mean())
            assert engine.steps == 0
        optimizer.step(loss=losses_of(model, seed=3))
        assert engine.steps == 1
        ends.append(parameters(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)  # the one left out shows in the order of operations alone


def test_a_part_that_failed_leaves_the_others():
    ends = []
    for failing in (True, False):
        model, optimizer, _ = make()
        optimizer.virtual_step(loss=losses_of(model, seed=1))
        if failing:
            with says(Misuse, "got a scalar"):
                optimizer.virtual_step(loss=losses_of(model, seed=2).mean())
        optimizer.step(loss=losses_of(model, seed=3))
        ends.append(parameters(model))
    assert torch.equal(*ends)


class Failing(torch.optim.SGD):
    """Raises after it has moved the first parameter."""

    on = False

    def step(self, closure=None):
        if self.on:
            first = self.param_groups[0]["params"][0]
            first.data -= first.grad
            raise RuntimeError("out of something")
        return super().step(closure)


def test_an_optimizer_that_fails_halfway_has_spent_the_step():
    model, optimizer, engine = make(optimizer=Failing, noise_multiplier=1.0)
    before = parameters(model)
    optimizer.on = True
    with pytest.raises(RuntimeError, match="out of something"):
        optimizer.step(loss=losses_of(model))
    assert not torch.equal(before, parameters(model))
    assert engine.steps == 1 and engine.privacy_spent().steps == 1
    optimizer.on = False
    optimizer.step(loss=losses_of(model))
    assert engine.steps == 2


@pytest.mark.parametrize("empty", [False, True])
def test_noise_that_fails_leaves_no_sum_behind(monkeypatch, empty):
    model, optimizer, engine = make(noise_multiplier=1.0)
    add = engine.noise.add_to_flat

    def failing(*given):
        add(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.noise, "add_to_flat", failing)
    before = parameters(model)
    optimizer.virtual_step(loss=losses_of(model, seed=1))
    with pytest.raises(KeyboardInterrupt):
        if empty:
            engine.empty_step()
        else:
            optimizer.step(loss=losses_of(model))
    assert torch.equal(before, parameters(model))
    assert engine.steps == 1 and not engine._sums  # its places are taken: the noise may have been seen
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "microbatch"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_not_released(backend, value):
    """The same record would make every parameter NaN, whatever the noise: its presence is plain to see."""
    model, optimizer, engine = make(backend=backend, noise_multiplier=1.0)
    optimizer.step(loss=losses_of(model))
    before = parameters(model)
    optimizer.virtual_step(loss=losses_of(model, seed=5))
    x = torch.randn(3, 5)
    x[1] = value
    with says(FloatingPointError, r"expected finite gradients, got NaN or inf in '[02]\.(weight|bias)'"):
        optimizer.step(loss=model(x).square().sum(1))
    assert torch.equal(before, parameters(model)) and engine.steps == 1
    optimizer.step(loss=losses_of(model, seed=6))
    assert torch.isfinite(parameters(model)).all() and engine.steps == 2


def checkpoint(model, optimizer, engine):
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), engine.state_dict()], file)
    file.seek(0)
    return torch.load(file)


def test_training_resumed_without_the_engine_s_state_is_refused():
    model, optimizer, engine = make(optimizer=torch.optim.Adam, noise_multiplier=1.0)
    for seed in range(3):
        optimizer.step(loss=losses_of(model, seed=seed))
    states = checkpoint(model, optimizer, engine)
    spent = engine.privacy_spent().epsilon
    model, optimizer, engine = make(optimizer=torch.optim.Adam, noise_multiplier=1.0)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    message = "expected engine.load_state_dict beside the optimizer's.*checkpoint of step 3 where the engine counts 0"
    for refused in (lambda: optimizer.step(loss=losses_of(model)), engine.privacy_spent, engine.empty_step):
        with says(Misuse, message):
            refused()
    engine.load_state_dict(states[2])
    optimizer.step(loss=losses_of(model))
    assert engine.steps == 4 and engine.privacy_spent().epsilon > spent
    engine.detach()
    assert "privacy_steps" not in optimizer.param_groups[0]


def test_half_a_logical_batch_of_another_process_is_refused():
    model, optimizer, engine = make()
    optimizer.virtual_step(loss=losses_of(model))
    state = engine.state_dict()
    assert state["place"] == [0, 1]
    with says(ValueError, "of process 0 of 1 in the middle of a logical batch, got that of 1 of 2"):
        engine.load_state_dict(state | {"place": [1, 2]})
    engine.load_state_dict(state)
    optimizer.step(loss=losses_of(model))
    engine.load_state_dict(engine.state_dict() | {"place": [1, 2]})  # of nothing, any process's will do


def test_running_statistics_of_an_instance_norm_are_refused():
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True))
    with says(UnsupportedModel, "1: InstanceNorm with running statistics.*track_running_stats=False"):
        make(model)
    make(model.eval())  # frozen
    make(nn.Sequential(nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, affine=True)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_grad_scaler_is_refused(optimizer):
    model, optimizer, engine = make(optimizer=optimizer)
    own = sorted(vars(optimizer))
    scaler = torch.amp.GradScaler("cpu")
    losses = scaler.scale(losses_of(model))
    with says(Misuse, "expected no GradScaler.*bfloat16 needs no scaling"):
        scaler.step(optimizer, loss=losses)
    assert own == sorted(vars(optimizer)) and engine.steps == 0
    optimizer.step(loss=losses_of(model))
    engine.detach()
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_an_optimizer_of_several_gradients_a_step_is_refused():
    model = nn.Linear(5, 3)
    engine = PrivacyEngine(model, batch_size=4, sample_size=100, max_grad_norm=0.5, noise_multiplier=1.0)
    with says(Misuse, "expected an optimizer of one gradient a step, got LBFGS, which asks for several by a closure"):
        engine.attach(torch.optim.LBFGS(model.parameters()))


class Counts(nn.Linear):
    def __init__(self, name):
        super().__init__(5, 3)
        self.name = name
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("rebound", torch.zeros(5))

    def forward(self, x):
        if self.name:
            self.seen.lerp_(x.mean(0), 0.1) if self.name == "seen" else setattr(self, self.name, x.mean(0))
        return super().forward(x)


@pytest.mark.parametrize("name", ["seen", "rebound", ""])
def test_a_sharded_model_that_writes_to_a_buffer_is_told_once(name, tmp_path, recwarn):
    """No look can rerun its steps: the processes would wait for each other."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Counts(name)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        model, optimizer, _ = make(model)
        for _ in range(2):
            optimizer.step(loss=losses_of(model))
    finally:
        dist.destroy_process_group()
    told = [str(each.message) for each in recwarn if issubclass(each.category, PrivacyWarning)]
    assert sum(f"buffer {name!r} changed in the forward pass" in each for each in told) == bool(name)
