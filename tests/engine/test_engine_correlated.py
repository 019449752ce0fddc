"""Correlated noise in the engine: the stream and its restarts against the definition, batches, ε, checkpoints."""

import copy
import io
import math
import os

import numpy as np
import pytest
import torch
from attached import attached, cross_entropy, parameters, says
from scipy.linalg import toeplitz
from torch import nn

from accounting import SubsampledGaussian, load_accountant
from accounting.blt import best
from accounting.gaussian import epsilon_of_shift
from dpbench.engine import adjust
from dpbench.engine.correlated import Banded, Buffered
from dpbench.engine.errors import PrivacyWarning
from dpbench.engine.noise import At, Pseudo, Secure
from dpbench.engine.settings import resolve

BANDS, N, B = 4, 120, 10
KINDS = pytest.mark.parametrize("kind", ["banded", "blt"])


def stream(kind, source, steps):
    return Banded(source, BANDS, steps) if kind == "banded" else Buffered(source, best(3, steps, steps))


def seeded(seed=0):
    return Pseudo(torch.Generator().manual_seed(seed))


def rows(noise, steps, n=1000, deviation=1.0, first=1):
    """[T, n], the noise of so many steps on totals of 0."""
    zero = torch.zeros(n, dtype=torch.float64)
    return torch.stack([noise.added(zero, deviation, At(first + t, 0, 0)) for t in range(steps)]).numpy()


def matrix(noise, steps):
    column = np.zeros(steps)
    c = noise.coefficients if isinstance(noise, Banded) else noise.blt.coefficients(steps)
    column[: len(c)] = c
    return toeplitz(column, np.zeros(steps))


@KINDS
def test_the_stream_is_the_inverse_of_the_matrix_times_independent_normals(kind):
    noise = stream(kind, seeded(), 12)
    found = rows(noise, 12, deviation=3.0)
    source = seeded()
    z = np.stack([source.added(torch.zeros(1000, dtype=torch.float64), 1.0, At(t, 0, 0)).numpy() for t in range(12)])
    np.testing.assert_allclose(matrix(noise, 12) @ found, 3.0 * z, atol=1e-12)


@KINDS
def test_totals_do_not_move_the_stream(kind):
    first, second = stream(kind, seeded(), 6), stream(kind, seeded(), 6)
    for t in range(1, 7):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(t))
        moved = first.added(x, 2.0, At(t, 0, 1))
        assert moved.dtype == torch.float32 and moved.shape == x.shape
        alone = second.added(torch.zeros(5, 3, dtype=torch.float64), 2.0, At(t, 0, 1))
        torch.testing.assert_close(moved.double(), x.double() + alone, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("event", ["left out", "gap", "shape", "copy", "fresh key", "fork"])
@KINDS
def test_a_stream_starts_anew(kind, event, monkeypatch):
    noise, n = stream(kind, Secure(), 20), 100_000
    noise.in_turn(1)
    before, step, size = rows(noise, 6, n), 7, n
    noise.in_turn(1)  # a batch that follows
    if event == "left out":
        noise.in_turn(2)
    if event == "gap":
        step = 8
    if event == "shape":
        size = n - 1
    if event == "copy":
        noise = copy.deepcopy(noise)
    if event == "fresh key":
        noise.load_state_dict(noise.state_dict())
    if event == "fork":
        monkeypatch.setattr(os, "getpid", lambda: -1)
    after = rows(noise, 1, size, first=step)[0]
    assert np.std(after) == pytest.approx(1 / noise._first, rel=0.02)
    assert np.abs(np.corrcoef([after, *before[:, :size]])[0, 1:]).max() < 0.02


@KINDS
def test_a_stream_goes_on_where_nothing_happens_and_by_replay(kind):
    noise, n = stream(kind, Secure(), 20), 100_000
    before = rows(noise, 6, n)
    state = copy.deepcopy(noise.state_dict())
    after = rows(noise, 3, n, first=7)
    assert np.corrcoef([after[0], *before])[0, -1] < -0.2
    other = stream(kind, Secure(), 20)
    other.load_state_dict(state, replay=True)
    np.testing.assert_array_equal(rows(other, 3, n, first=7), after)
    seed = stream(kind, seeded(), 20)
    with pytest.raises(ValueError, match="the same kind of noise"):
        Secure().load_state_dict(seed.state_dict())
    with pytest.raises(ValueError, match="the same kind of noise"):
        Banded(Secure(), BANDS + 1, 20).load_state_dict(state, replay=True)
    with pytest.raises(ValueError, match=r"planned steps|the same kind"):
        stream(kind, Secure(), 2).load_state_dict(state, replay=True)
    with pytest.raises(ValueError, match="the same kind of noise"):
        Buffered(Secure(), best(1, 20, 20)).load_state_dict(state, replay=True)


@KINDS
def test_the_deviation_never_falls(kind):
    noise = stream(kind, Secure(), 20)
    assert [noise.deviation(2.0, s) for s in (1.0, 1.5, 1.2)] == [2.0, 3.0, 3.0]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


X = torch.randn(N, 5, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randint(3, (N,), generator=torch.Generator().manual_seed(2))
DATA = torch.utils.data.TensorDataset(X, Y)
SETTINGS = {"batch_size": B, "sample_size": N, "max_grad_norm": 1.0, "noise": f"banded:{BANDS}", "target_delta": 1e-3}
BLT = {"noise": "blt:2", "sampling": "one_pass"}


def training(model=None, **changed):
    return attached(net() if model is None else model, lr=0.5, **SETTINGS | {"steps": 40} | changed)


def train(model, optimizer, engine, steps, **loading):
    last = engine.steps + steps
    while engine.steps < last:
        for x, y in engine.data_loader(DATA, **loading):
            optimizer.step(loss=cross_entropy(model(x), y))
            if engine.steps == last:
                break
    return parameters(model)


@pytest.mark.parametrize("changed", [{}, BLT])
def test_checkpoints_carry_the_stream(changed):
    model, optimizer, engine = training(**changed)
    train(model, optimizer, engine, 7)
    weights, file = copy.deepcopy(model.state_dict()), io.BytesIO()
    torch.save(engine.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    moved = train(model, optimizer, engine, 6)
    engine.detach()
    for replay in (True, False):
        model, optimizer, engine = training(**changed)
        model.load_state_dict(weights)
        engine.load_state_dict(state, replay=replay)
        again = train(model, optimizer, engine, 6)
        assert torch.equal(again, moved) == replay
        assert engine.privacy_spent().steps == 13
        engine.detach()


def test_other_parameters_than_in_the_step_before_start_anew():
    model, optimizer, engine = training()
    train(model, optimizer, engine, 3)
    model[0].weight.requires_grad_(False)
    train(model, optimizer, engine, 2)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, engine, 1)
    (rows,) = [past.rows for (_, labels, _), past in engine.noise._past.items() if 0 in labels and past.step == 6]
    assert (rows.abs().sum(1) > 0).sum() == 1  # of this step alone


def test_epsilon_is_that_of_poisson_steps_of_a_group():
    model, optimizer, engine = training()
    train(model, optimizer, engine, 9)
    spent = engine.privacy_spent()
    step = SubsampledGaussian(1.0, BANDS * B / N)
    assert spent.epsilon == load_accountant("prv").epsilon(step, steps=3, delta=1e-3)
    assert (spent.sampling, spent.adjacency, spent.sampled_by) == ("cyclic_poisson", "add_remove", "engine")
    assert spent.private and spent.noise.startswith("banded, correlated over 4 steps") and "in turn" in str(spent)
    engine.detach()
    _, _, engine = training(noise_multiplier=None, target_epsilon=2.0, accountant="rdp")
    assert engine.settings.guarantee(40, 1e-3).epsilon <= 2.0 < engine.settings.guarantee(41, 1e-3).epsilon


def of_blocks(engine, steps):
    step = SubsampledGaussian(1.0, BANDS * B / N)
    return load_accountant("prv").epsilon(step, steps=-(-steps // BANDS), delta=1e-3)


def of_one_gaussian(engine, steps, accountant="prv"):
    step = SubsampledGaussian(engine.noise_multiplier / engine.settings.blt.sensitivity(steps), 1.0)
    return load_accountant(accountant).epsilon(step, steps=1, delta=1e-3)


@pytest.mark.parametrize("accountant", ["prv", "gdp", "pld", "rdp"])
def test_epsilon_of_a_blt_is_that_of_one_gaussian(accountant):
    model, optimizer, engine = training(**BLT, noise_multiplier=None, target_epsilon=4.0, accountant=accountant)
    assert engine.settings.blt == best(2, 40, N // B) and engine.settings.steps_per_epoch == N // B
    for _ in range(2):  # the count is honest within the plan
        train(model, optimizer, engine, 20)
        spent = engine.privacy_spent()
        assert spent.epsilon == pytest.approx(of_one_gaussian(engine, engine.steps, accountant), rel=1e-12)
        assert (spent.sampling, spent.adjacency, spent.kind) == ("one_pass", "zero_out", "upper_bound")
        assert spent.private and spent.sampled_by == "engine" and spent.noise.startswith("blt, correlated over all")
    assert 3.99 < spent.epsilon <= 4.0
    with pytest.warns(PrivacyWarning, match="beyond the 40"):
        train(model, optimizer, engine, 1)  # and beyond it
    assert 4.0 < engine.privacy_spent().epsilon == pytest.approx(of_one_gaussian(engine, 41, accountant), rel=1e-12)


EACH = pytest.mark.parametrize(
    ("changed", "epsilon", "period"), [({}, of_blocks, BANDS), (BLT, of_one_gaussian, N // B)]
)


@EACH
def test_steps_that_were_gone_back_behind_count_as_periods_of_their_own(changed, epsilon, period):
    model, optimizer, engine = training(**changed)
    train(model, optimizer, engine, 4)
    state = copy.deepcopy([optimizer.state_dict(), engine.state_dict()])
    train(model, optimizer, engine, 2)
    optimizer.load_state_dict(state[0])
    engine.load_state_dict(state[1])
    train(model, optimizer, engine, 1)
    assert engine.privacy_spent().epsilon == epsilon(engine, 5 + 2 * period)


@EACH
def test_a_batch_that_was_left_out_counts_and_ends_the_stream(changed, epsilon, period):
    model, optimizer, engine = training(**changed)
    train(model, optimizer, engine, 4)
    loader = iter(engine.data_loader(DATA))
    next(loader)
    x, y = next(loader)
    optimizer.step(loss=cross_entropy(model(x), y))
    assert engine.steps == 5 and engine.drawn == 6
    for past in engine.noise._past.values():  # of this step alone: one row of bands, or the same in each buffer
        filled = past.rows[past.rows.abs().sum(1) > 0]
        assert torch.equal(filled, filled[:1].expand_as(filled)) and len(filled) in (1, engine.noise._count)
    assert engine.privacy_spent().epsilon == epsilon(engine, 6)


@pytest.mark.parametrize("seed", range(4))
def test_epsilon_of_a_blt_covers_every_history(seed):
    """Batches left out and checkpoints gone back to, in any order: ε is at least that of what a record moved."""
    rng, engine = np.random.default_rng(seed), attached(attach=False)[2]
    for apart in rng.integers(2, 6, 50).tolist():
        arguments = {"epochs": None, "steps": 20, "target_epsilon": None, "noise_multiplier": 3.0, "target_delta": 1e-5}
        sizes = {"batch_size": 10, "sample_size": 10 * apart, "sampling": "one_pass", "max_batch_size": None}
        settings = resolve(accountant="gdp", buffers=2, **sizes, **arguments)
        rows, part, steps, drawn, abandoned, saved = [], 0, 0, 0, 0, None
        for event in rng.choice(["step", "left out", "save", "back"], 20, p=[0.7, 0.1, 0.1, 0.1]):
            if event == "step":
                rows.append((part, drawn % apart))
                drawn, steps = drawn + 1, steps + 1
            elif event == "left out":
                drawn, part = drawn + int(rng.integers(1, 4)), part + 1
            elif event == "save":
                saved = steps, drawn
            elif saved is not None:
                abandoned, (steps, drawn), part = steps + abandoned - saved[0], saved, part + 1
        c = settings.blt.coefficients(len(rows))
        parts = np.array([row[0] for row in rows])
        matrix = np.where(parts[:, None] == parts, toeplitz(c, np.zeros(len(rows))), 0.0)
        moved = [matrix[:, [row[1] == place for row in rows]].sum(1) for place in range(apart)]
        needed = epsilon_of_shift(math.log(np.linalg.norm(moved, axis=1).max() / 3.0), math.log(1e-5))
        engine.settings, engine.steps, engine.drawn, engine._abandoned.count = settings, steps, drawn, abandoned
        assert engine.privacy_spent().epsilon >= needed * (1 - 1e-9)


@pytest.mark.parametrize(
    ("changed", "other", "message"),
    [
        ({}, {"noise": "banded:3"}, "as in the checkpoint"),
        (BLT, BLT | {"steps": 50}, "planned_steps=40 as in"),
        (BLT, BLT | {"noise": "gaussian"}, "kind of noise"),
    ],
)
def test_checkpoints_must_agree_and_the_noise_multiplier_is_one(changed, other, message):
    _, _, engine = training(**changed)
    with pytest.raises(ValueError, match="one noise_multiplier throughout with b"):
        adjust.set_noise_multiplier(engine, 2.0)
    state = engine.state_dict()
    engine.detach()
    with pytest.raises(ValueError, match=message):
        training(**other)[2].load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"noise": "blt:2"}, "expected sampling='one_pass' with noise='blt:2', got 'poisson'"),
        ({"noise": "blt:2", "sampling": "shuffled"}, "expected sampling='one_pass' with noise='blt:2', got 'shuffled'"),
        (BLT | {"noise": "blt:0"}, "a whole number N >= 1, got 'blt:0'"),
        (BLT | {"noise": "blt"}, "one of gaussian, discrete, banded:N, blt:N, got 'blt'"),
        (BLT | {"group_size": 2}, "expected group_size=1 with noise='blt:2', got 2"),
        (BLT | {"max_batch_size": 20}, "max_batch_size"),
        ({"noise": "banded"}, "one of gaussian, discrete, banded:N, blt:N, got 'banded'"),
        ({"noise": "banded:1"}, "a whole number N >= 2, got 'banded:1'"),
        ({"noise": "banded:x"}, "a whole number N >= 2, got 'banded:x'"),
        ({"noise": "banded:13"}, "at most sample_size // batch_size = 12 bands, got 13"),
        ({"sampling": "shuffled"}, "expected sampling='poisson' with noise='banded:4'"),
        ({"group_size": 2}, "expected group_size=1 with noise='banded:4', got 2"),
    ],
)
def test_what_has_no_bound_is_refused(changed, message):
    with says(ValueError, message):
        training(**changed)
