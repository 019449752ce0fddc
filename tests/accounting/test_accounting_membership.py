"""What ε means for an attack on membership: closed forms, dp-accounting, the best attack itself, and calibration."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from accounting import NoAnswer, SubsampledGaussian, calibrate, compose, risk
from accounting.membership import TradeOff, line, trade_off, trade_off_or_line

MNIST = SubsampledGaussian(1.1, 256 / 60_000)


def flat(found):
    return {"advantage": found["advantage"], **found["tpr_at_fpr"]}


def closed(mu):
    rates = {name: norm.cdf(norm.ppf(float(name)) + mu) for name in ("0.01", "0.001")}
    return {"advantage": 2 * norm.cdf(mu / 2) - 1, **rates}


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (7.3, 40), (0.6, 1)])
@pytest.mark.parametrize("rate", [1.0, 1 - 1e-9])
def test_without_sampling_it_meets_the_closed_form(sigma, steps, rate):
    """1 − 1e-9 goes by the grids, 1 by the closed form itself."""
    found = risk("pld", SubsampledGaussian(sigma, rate), steps=steps, delta=1e-5)
    assert flat(found) == pytest.approx(closed(math.sqrt(steps) / sigma), rel=2e-3)


def test_the_published_setting():
    found = risk("pld", MNIST, steps=14_040, delta=1e-5)
    assert found["advantage"] == pytest.approx(0.224, abs=5e-4)
    assert found["tpr_at_fpr"]["0.01"] == pytest.approx(0.040, abs=5e-4)
    alone = TradeOff((line(2.38, 1e-5),))  # of (ε, δ) alone
    assert alone.advantage == pytest.approx(0.83, abs=0.005)
    assert alone.true_positives(0.01) == pytest.approx(1e-5 + 0.01 * math.exp(2.38))


@pytest.mark.parametrize("sigma, q, steps", [(0.8, 0.05, 30), pytest.param(2.5, 0.3, 200, marks=pytest.mark.slow)])
def test_it_encloses_what_dp_accounting_says(sigma, q, steps):
    from dp_accounting.pld import privacy_loss_distribution as pld

    theirs = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-4).self_compose(steps)
    eps = np.linspace(-12, 12, 4001)
    deltas = [np.array(pmf.get_delta_for_epsilon(list(eps))) for pmf in (theirs._pmf_remove, theirs._pmf_add)]
    found = risk("prv", SubsampledGaussian(sigma, q), steps=steps, delta=1e-5)
    assert found["advantage"] == pytest.approx(theirs.get_delta_for_epsilon(0.0), rel=3e-3)
    for rate, least in found["at_least"]["tpr_at_fpr"].items():
        truth = max(float(np.min(delta + np.exp(eps) * float(rate))) for delta in deltas)
        assert least <= truth * (1 + 1e-6)
        assert least <= found["tpr_at_fpr"][rate] <= 1.003 * truth
    assert found["at_least"]["advantage"] <= found["advantage"]


def test_the_best_attack_lies_between_the_bounds():
    """The likelihood ratio of five steps, on 400,000 runs with the record and without."""
    sigma, q, steps, runs = 1.0, 0.3, 5, 400_000
    draw = np.random.default_rng(0)
    out = draw.normal(0, sigma, (runs, steps))
    inside = draw.normal(0, sigma, (runs, steps)) + (draw.random((runs, steps)) < q)

    def loss(x):
        return np.log1p(q * np.expm1((x - 0.5) / sigma**2)).sum(1)

    found = risk("prv", SubsampledGaussian(sigma, q), steps=steps, delta=1e-5)
    for rate in (0.01, 0.001):
        threshold = np.quantile(loss(out), 1 - rate)
        seen = float((loss(inside) > threshold).mean())
        slack = 5 * math.sqrt(seen / runs) + 5 * seen / math.sqrt(rate * runs)
        assert found["at_least"]["tpr_at_fpr"][f"{rate:g}"] - slack < seen < found["tpr_at_fpr"][f"{rate:g}"] + slack
    both = np.concatenate([loss(out), loss(inside)])
    order = np.argsort(both)
    seen = np.abs(np.cumsum(np.where(order < runs, 1, -1))).max() / runs
    assert found["at_least"]["advantage"] - 0.005 < seen < found["advantage"] + 0.005


def test_more_of_anything_is_no_less():
    found = [flat(risk("prv", SubsampledGaussian(1.5, 0.01), steps=steps, delta=1e-5)) for steps in (0, 1, 30, 900)]
    for less, more in itertools.pairwise(found):
        assert all(less[name] < more[name] for name in less)
    assert found[0] == {"advantage": 0.0, "0.01": pytest.approx(0.01), "0.001": pytest.approx(0.001)}
    none = flat(risk("prv", SubsampledGaussian(0.0, 0.01), steps=1, delta=1e-5))
    assert set(none.values()) == {1.0}


def test_an_estimate_has_none_and_rdp_has_the_mechanism_s():
    with pytest.raises(NoAnswer, match=r"^no bound on a risk from an ε of kind estimate: .*$"):
        risk("gdp", MNIST, steps=10, delta=1e-5)
    assert risk("rdp", MNIST, steps=100, delta=1e-5) == risk("prv", MNIST, steps=100, delta=1e-5)
    assert trade_off([(MNIST, 100)]).advantage == risk("rdp", MNIST, steps=100, delta=1e-5)["advantage"]


def test_phases_have_one_too():
    other = SubsampledGaussian(2.0, 0.01)
    found = flat(compose("pld", [(MNIST, 2000), (other, 500)]).risk(delta=1e-5))
    for alone in (risk("pld", MNIST, steps=2000, delta=1e-5), risk("pld", other, steps=500, delta=1e-5)):
        assert all(found[name] > value for name, value in flat(alone).items())


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({"target_advantage": 0.15}, "advantage"),
        ({"target_tpr": 0.03}, "0.01"),
        ({"target_tpr": 0.02, "fpr": 1e-3}, "0.001"),
    ],
)
def test_calibration_to_a_risk_is_safe_and_tight(target, name):
    found = calibrate("prv", "noise_multiplier", sample_rate=0.02, steps=50, delta=1e-5, **target)
    reached = flat(risk("prv", found.mechanism, steps=50, delta=1e-5))[name]
    wanted = next(iter(target.values()))
    assert wanted * (1 - 2e-3) < reached <= wanted
    assert found.guarantee.kind == "upper_bound" and found.guarantee.epsilon > 0
    assert found.guarantee.detail["advantage" if name == "advantage" else "tpr"] == reached
    steps = calibrate("prv", "steps", sample_rate=0.02, noise_multiplier=found.value, delta=1e-5, **target).steps
    assert 48 <= steps <= 51


@pytest.mark.parametrize(("sigma", "q"), [(2.0, 1e-4), (1.0, 0.1), (0.7, 1e-3)])
def test_of_one_step_the_bounds_enclose_the_closed_form(sigma, q):
    """A test of the best set {x > t}: with the record a share 1 - q of batches is as without it."""
    found = risk("prv", SubsampledGaussian(sigma, q), steps=1, delta=1e-5)
    for name, upper in found["tpr_at_fpr"].items():
        rate = float(name)
        truth = (1 - q) * rate + q * norm.cdf(norm.ppf(rate) + 1 / sigma)
        slack = 1e-15
        assert found["at_least"]["tpr_at_fpr"][name] - slack <= truth <= upper + slack
        assert upper - rate == pytest.approx(truth - rate, rel=2e-3)


def test_with_hardly_any_privacy_some_attack_certainly_succeeds():
    """All losses are above the ε of the best test, and so is the grid."""
    found = risk("prv", SubsampledGaussian(1.0, 0.9), steps=1000, delta=1e-5)
    assert all(value > 0.999 for value in flat(found["at_least"]).values())


@pytest.mark.parametrize("steps", [10**400, 10**15])
def test_more_steps_than_a_float_can_count(steps):
    found = risk("rdp", SubsampledGaussian(0.5, 0.5), steps=steps, delta=1e-5)
    assert set(flat(found).values()) == {1.0}
    assert compose("pld", [(MNIST, 10**400), (SubsampledGaussian(2.0, 0.01), 3)]).epsilon(delta=1e-5) == math.inf


def test_an_infinite_epsilon_bounds_no_risk():
    """No grid holds such losses, and what (∞, δ) alone gives is nothing."""
    step = SubsampledGaussian(1e-200, 0.1)
    assert set(flat(risk("rdp", step, steps=10, delta=1e-5)).values()) == {1.0}
    assert trade_off_or_line([(step, 10)], math.inf, 1e-5).advantage == 1.0
