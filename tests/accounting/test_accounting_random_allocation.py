"""Balls and bins: the bound against simulations of the pair, quadrature, whole instances, and other schemes."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr

from accounting import NoAnswer, SubsampledGaussian, compose, load_accountant, risk
from accounting.convolution import deltas_of, epsilon_of
from accounting.random_allocation import Epoch


def spent(sigma, t, steps=None, delta=1e-5, adjacency="add_remove", sampling="balls_and_bins", name="prv", **more):
    step = SubsampledGaussian(sigma, 1 / t, sampling=sampling, adjacency=adjacency, **more)
    return load_accountant(name).epsilon(step, steps=t if steps is None else steps, delta=delta)


def bound_of(sigma, t, epochs, eps, adds):
    at, delta = deltas_of([(Epoch(sigma, t, adds).on_grid(0.004 if t > 50 else 0.007 / sigma), epochs)])
    return float(np.exp(np.interp(eps, at, np.log(np.maximum(delta, 1e-300)))))


def simulated(sigma, t, epochs, adds, count, seed):
    """Losses of `epochs` epochs, drawn from the pair itself: [count]."""
    draw, total = np.random.default_rng(seed), np.zeros(count)
    for _ in range(epochs):
        z = sigma * draw.standard_normal((count, t))
        if not adds:
            z[:, 0] += 1.0  # all batches are alike
        y = (2.0 * z - 1.0) / (2.0 * sigma * sigma)
        top = y.max(1)
        total += top + np.log(np.exp(y - top[:, None]).mean(1))
    return -total if adds else total


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("sigma", "t", "epochs", "eps"), [(0.7, 20, 1, 1.0), (1.5, 100, 1, 0.1), (0.9, 13, 4, 1.5), (0.4, 7, 2, 3.0)]
)
def test_simulations_of_the_pair_are_met(sigma, t, epochs, eps, adds):
    losses = simulated(sigma, t, epochs, adds, 100_000, seed=t)
    terms = -np.expm1(np.minimum(eps - losses, 0.0))
    mean, error = terms.mean(), terms.std() / math.sqrt(losses.size)
    bound = bound_of(sigma, t, epochs, eps, adds)
    assert mean > 20 * error  # or the point would say nothing
    assert mean - 4 * error < bound < mean + 4 * error + 0.01 * mean


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("sigma", "eps"), [(1.0, 2.0), (0.5, 4.0), (2.0, 0.5)])
def test_two_batches_by_quadrature(sigma, eps, adds):
    """δ(ε) of the mean of two log-normals, one of them integrated in closed form."""
    x, h = np.linspace(-9.0, 9.0, 40_001, retstep=True)
    first = np.exp(x / sigma - 0.5 / sigma**2)
    left = 2.0 * math.exp(eps) - first if not adds else 2.0 * math.exp(-eps) - first  # E (W_2 − left)₊
    positive = np.maximum(left, 1e-300)
    d = (-np.log(positive) + 0.5 / sigma**2) * sigma
    call = np.where(left > 0, ndtr(d) - positive * ndtr(d - 1.0 / sigma), 1.0 - left)
    call = call - np.where(adds, 1.0 - left, 0.0)  # (c − W)₊ = (W − c)₊ − W + c
    exact = float((np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) * call).sum() * h)
    exact *= 0.5 * (math.exp(eps) if adds else 1.0)
    assert exact * (1 - 1e-9) <= bound_of(sigma, 2, 1, eps, adds) <= exact * 1.001


def test_nothing_is_lost_of_either_distribution():
    for sigma, t, h in ((1.0, 234, 4e-3), (0.3, 1000, 2e-2), (20.0, 10**6, 2e-6)):
        removed, added = (Epoch(sigma, t, adds).on_grid(h) for adds in (False, True))
        assert removed.weights.sum() + removed.at_infinity == pytest.approx(1.0, abs=1e-12)
        assert added.weights.sum() + added.at_infinity == pytest.approx(1.0, abs=1e-12)
        assert removed.at_infinity < 1e-15 and added.at_infinity < 1e-15
        assert np.exp(np.log(removed.weights) - removed.at).sum() == pytest.approx(1.0, abs=1e-12)


def test_a_coarser_grid_is_no_lower():
    found = [epsilon_of(Epoch(1.1, 50, False).on_grid(h), 10, 1e-5)[0] for h in (3.2e-2, 1.6e-2, 8e-3, 4e-3)]
    assert found == sorted(found, reverse=True) and found[0] < 1.1 * found[-1]


OTHERS = [(-1, -1), (0, 0), (1, 1), (1, -1)]


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize("sigma", [0.7, 1.5])
def test_no_instance_needs_more(adjacency, sigma):
    """Both sums of an epoch of two batches, of a record and two others: δ at the ε that is stated is no larger."""
    delta, (x, h) = 1e-4, np.linspace(-12.0, 12.0, 801, retstep=True)

    def density(gradients):
        total = 0.0
        for places in itertools.product((0, 1), repeat=len(gradients)):
            sums = [sum(g for g, place in zip(gradients, places, strict=True) if place == batch) for batch in (0, 1)]
            one, other = (np.exp(-0.5 * ((x - s) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi)) for s in sums)
            total = total + np.outer(one, other) / 2 ** len(gradients)
        return total

    eps = spent(sigma, 2, delta=delta, adjacency=adjacency)
    worst = 0.0
    for others in OTHERS:
        p = density((*others, 1))
        q = density({"add_remove": others, "zero_out": (*others, 0), "replace_one": (*others, -1)}[adjacency])
        for one, other in ((p, q), (q, p)):
            worst = max(worst, float(np.maximum(one - math.exp(eps) * other, 0.0).sum() * h * h))
    assert worst <= delta
    if adjacency != "replace_one":
        assert worst > 0.95 * delta


@pytest.mark.parametrize(
    ("sigma", "t", "delta", "lower", "upper"),
    [(1.0, 10, 1e-4, 1.6972, 1.7146), (1.1, 234, 1e-5, 0.2622, 0.2820), (0.8, 100, 1e-6, 1.8697, 1.8841)],
)
def test_another_library_agrees(sigma, t, delta, lower, upper):
    """Both bounds of PLD_accounting 2.0 (Feldman and Shenfeld 2026), with epsilon_accuracy 0.05."""
    assert lower < spent(sigma, t, delta=delta) < upper


def test_between_what_brackets_it():
    """One batch is the Gaussian mechanism; more batches are never less private, as more noise is."""
    assert spent(2.0, 1, steps=5) == spent(2.0, 1, steps=5, sampling="poisson")
    assert spent(1.0, 1.4, steps=3) == spent(1.0, 1, steps=3)  # one batch an epoch
    found = [spent(1.0, t, steps=2 * t) for t in (1, 2, 3, 8, 31, 100)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.4 * found[0]
    found = [spent(sigma, 20) for sigma in (0.05, 0.1, 0.3, 1.0, 5.0, 1e5)]
    assert found == sorted(found, reverse=True) and found[-1] < 1e-3
    assert spent(1.0, 20, delta=1e-80) <= spent(1.0, 20, delta=1e-80, sampling="shuffled", adjacency="zero_out")
    assert spent(1.0, 30, steps=31) == spent(1.0, 30, steps=60)  # of an epoch that has begun


def test_known_setting():
    """n = 60000, b = 256, σ = 1.1, 60 epochs: a little below Poisson sampling."""
    t = 60_000 / 256
    ours = spent(1.1, t, steps=14_040)
    assert ours == pytest.approx(2.341, abs=2e-3)
    assert 0.97 < ours / spent(1.1, t, steps=14_040, sampling="poisson") < 1.0
    assert spent(1.1, t, steps=14_040, adjacency="zero_out") == ours
    assert ours < spent(1.1, t, steps=14_040, adjacency="replace_one") < 2.5 * ours


def test_what_an_attack_certainly_reaches_is_said_where_it_does():
    said = {
        name: "at_least" in risk("prv", SubsampledGaussian(1.0, 0.5, sampling=name), steps=2, delta=1e-5)
        for name in ("one_pass", "shuffled", "balls_and_bins")
    }
    assert said == {"one_pass": True, "shuffled": False, "balls_and_bins": False}


def test_a_risk_and_what_is_not_proved():
    step = SubsampledGaussian(1.0, 1 / 20, sampling="balls_and_bins")
    found = risk("prv", step, steps=20, delta=1e-5)
    losses = simulated(1.0, 20, 1, False, 100_000, seed=1)
    advantage = -np.expm1(-np.maximum(losses, 0.0)).mean()
    assert advantage == pytest.approx(found["advantage"], rel=0.02) and "at_least" not in found
    other = SubsampledGaussian(2.0, 1 / 20, sampling="balls_and_bins")
    mixed = compose("prv", [(step, 7), (other, 13)]).guarantee(delta=1e-5)  # one epoch
    assert mixed.epsilon == spent(1.0, 20)
    mixed = compose("prv", [(step, 20), (other, 20)]).guarantee(delta=1e-5)
    assert mixed.epsilon == load_accountant("prv").epsilon(step, steps=40, delta=1e-5)
    assert mixed.detail["bound"] == "as if all steps had the least noise"
    with pytest.raises(NoAnswer, match="drawn in different ways"):
        compose("prv", [(step, 7), (SubsampledGaussian(1.0, 0.1), 13)]).guarantee(delta=1e-5)
    with pytest.raises(NoAnswer, match="no bound for a group of records"):
        spent(1.0, 20, group_size=2)
