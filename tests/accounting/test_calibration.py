"""Calibration: safe, tight, by every accountant, in few evaluations; one line where the target cannot be met."""

import math
import random

import numpy as np
import pytest
from processor import quick, work
from spent import epsilon

from accounting import (
    ACCOUNTANTS,
    VARIANTS,
    Accountant,
    NoAnswer,
    SubsampledGaussian,
    calibrate,
    calibrate_noise_multiplier,
)

NAMES = [*ACCOUNTANTS, *VARIANTS]
QUICK = ["simple", "strong", "moments", "rdp", "gdp", "prv"]
RUN = {"sample_rate": 0.01, "steps": 10_000, "delta": 1e-5}
PRICE = {"target_epsilon": 1.26, "noise_multiplier": 4.0, "sample_rate": 0.01, "delta": 1e-5}


@pytest.mark.parametrize("name", NAMES)
def test_noise_of_every_accountant_is_safe_and_tight(name):
    sigma = calibrate_noise_multiplier(name, target_epsilon=2.0, **RUN)
    reached = epsilon(name, sigma, 0.01, 10_000, 1e-5)
    assert 2.0 * (1 - 1e-3) <= reached <= 2.0
    assert epsilon(name, sigma * (1 - 1e-3), 0.01, 10_000, 1e-5) > 2.0


@pytest.mark.parametrize("name", ["moments", "rdp", "gdp", "simple"])
def test_anywhere_it_is_safe_and_tight(name):
    draw = random.Random(0)
    solved = 0
    for _ in range(60):
        q, steps = 10 ** draw.uniform(-4, 0), int(10 ** draw.uniform(0, 6))
        target, delta = 10 ** draw.uniform(-1, 2), 10 ** draw.uniform(-12, -2)
        try:
            found = calibrate(name, "noise_multiplier", target_epsilon=target, sample_rate=q, steps=steps, delta=delta)
        except NoAnswer as error:
            assert name == "moments" and "it is still" in str(error)  # -ln δ/32 is its least
            continue
        solved += 1
        sigma = found.mechanism.noise_multiplier
        assert found.guarantee.epsilon == epsilon(name, sigma, q, steps, delta) <= target
        if found.guarantee.epsilon < target * (1 - 1e-3):  # where ε jumps
            assert epsilon(name, sigma * (1 - 1e-3), q, steps, delta) > target
        assert found.evaluations < 40
    assert solved > 30


@pytest.mark.parametrize("name", QUICK)
def test_steps_are_the_last_that_fit(name):
    steps = calibrate(name, "steps", **PRICE, tolerance=0).steps
    assert isinstance(steps, int)
    assert epsilon(name, 4.0, 0.01, steps, 1e-5) <= 1.26 < epsilon(name, 4.0, 0.01, steps + 1, 1e-5)
    assert steps * (1 - 1e-3) - 1 <= calibrate(name, "steps", **PRICE).value <= steps


def test_the_price_of_an_accountant():
    assert calibrate("moments", "steps", **PRICE, tolerance=0).value == 10_021
    assert calibrate("pld", "steps", **PRICE, tolerance=0).value == pytest.approx(16_841, abs=4)
    assert calibrate("moments", "epochs", **PRICE, tolerance=0).value == pytest.approx(100.21)


@pytest.mark.parametrize("name", QUICK)
def test_sample_rate(name):
    at = {"target_epsilon": 3.0, "noise_multiplier": 2.0, "steps": 1000, "delta": 1e-6}
    q = calibrate(name, "sample_rate", **at).value
    assert epsilon(name, 2.0, q, 1000, 1e-6) <= 3.0 < epsilon(name, 2.0, q * (1 + 1e-3), 1000, 1e-6)


def test_the_most_generous_value_is_taken_where_it_meets_the_target():
    at = {"target_epsilon": 50.0, "noise_multiplier": 20.0, "steps": 10, "delta": 1e-5}
    assert calibrate("rdp", "sample_rate", **at).value == 1.0
    for change in ({"sample_rate": 0.0}, {"steps": 0}, {"delta": 1.0}):
        assert calibrate_noise_multiplier("rdp", target_epsilon=1.0, **RUN | change) == 0.0


@pytest.mark.parametrize(
    ("unknown", "settings", "message"),
    [
        ("noise_multiplier", RUN, "no noise multiplier meets ε = 0.3: at 1e.09 it is still 0.3598"),
        (
            "steps",
            {"noise_multiplier": 0.5, "sample_rate": 0.5, "delta": 1e-5},
            r"no number of steps meets ε = 0.3: at 1 it is still \d+\.\d+",
        ),
        (
            "steps",
            {"noise_multiplier": math.inf, "sample_rate": 0.1, "delta": 1e-5},
            "ε is 0 whatever the number of steps",
        ),
    ],
)
def test_a_target_out_of_reach_is_one_line(unknown, settings, message):
    with pytest.raises(NoAnswer, match=f"^{message}") as error:
        calibrate("moments", unknown, target_epsilon=0.3, **settings)
    assert "\n" not in str(error.value)


def test_steps_without_end_are_said_to_be():
    with pytest.raises(NoAnswer, match=r"^1e\+15 steps and more meet ε = 1: ε is \S+ there$"):
        calibrate("gdp", "steps", target_epsilon=1.0, noise_multiplier=1e6, sample_rate=1e-6, delta=1e-5)


def test_a_step_that_costs_nothing_and_ones_that_cost_too_much():
    given = {"target_epsilon": 0.02, "noise_multiplier": 4.0, "sample_rate": 1e-4, "delta": 1e-5, "tolerance": 1e-2}
    found = [calibrate(name, "steps", **given) for name in ("prv", "pld")]
    assert epsilon("prv", 4.0, 1e-4, 1, 1e-5) == 0.0
    for each in found:
        assert 0.98 * 0.02 < each.guarantee.epsilon <= 0.02 and "not_known" not in each.guarantee.detail
    assert found[1].steps == pytest.approx(found[0].steps, rel=0.02)


def test_a_flat_curve_is_searched_to_its_end():
    """ε of one step by the moments is 0.41519, and of 453 steps 0.41550."""
    given = {"target_epsilon": 0.4155, "noise_multiplier": 4.3, "sample_rate": 9e-4, "delta": 1.7e-6, "tolerance": 0}
    steps = calibrate("moments", "steps", **given).steps
    assert epsilon("moments", 4.3, 9e-4, steps, 1.7e-6) <= 0.4155 < epsilon("moments", 4.3, 9e-4, steps + 1, 1.7e-6)
    assert steps > 400


class Forgetful(Accountant):
    """Has no answer beyond 100 steps."""

    def _inside(self, mechanism, steps, delta):
        if steps > 100:
            raise NoAnswer("too many steps")
        return 0.01 * steps, {}


def test_no_answer_is_not_taken_for_too_much():
    found = calibrate(Forgetful(), "steps", target_epsilon=5.0, noise_multiplier=1.0, sample_rate=0.1, delta=1e-5)
    assert found.steps == 100
    assert found.guarantee.detail["not_known"] == "whether number of steps 101 meets it, too: too many steps"
    found = calibrate(Forgetful(), "steps", target_epsilon=0.5, noise_multiplier=1.0, sample_rate=0.1, delta=1e-5)
    assert found.steps == 50 and "not_known" not in found.guarantee.detail


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy(kind):
    assert calibrate("rdp", "noise_multiplier", target_epsilon=kind(2), tolerance=np.float32(1e-3), **RUN).value > 1


@pytest.mark.parametrize("name", ["prv", "rdp", "without_replacement"])
def test_under_another_scheme(name):
    scheme = {"sampling": "without_replacement", "adjacency": "replace_one"}
    sigma = calibrate_noise_multiplier(name, target_epsilon=3.0, sample_rate=0.01, steps=1000, delta=1e-5, **scheme)
    reached = [epsilon(name, s, 0.01, 1000, 1e-5, **scheme) for s in (sigma, 0.998 * sigma)]
    assert 2.99 < reached[0] <= 3.0 < reached[1]
    with pytest.raises(NoAnswer, match="no valid bound by this accountant under batches of fixed size"):
        calibrate_noise_multiplier("gdp", target_epsilon=3.0, sample_rate=0.01, steps=1000, delta=1e-5, **scheme)


class Stairs(Accountant):
    """ε in steps of a tenth, which no σ puts near a target between two of them; and none at all at little noise."""

    def _inside(self, mechanism, steps, delta):
        if mechanism.noise_multiplier < 0.5:
            raise NoAnswer("too little noise")
        return math.ceil(10.0 * math.sqrt(steps) * mechanism.sample_rate / mechanism.noise_multiplier) / 10.0, {}


class Rough(Accountant):
    """Rises and falls by a percent."""

    def _inside(self, mechanism, steps, delta):
        sigma = mechanism.noise_multiplier
        return math.sqrt(steps) / sigma * (1.0 + 0.01 * math.sin(500.0 * sigma)), {}


def test_jumps_and_gaps_do_not_mislead():
    found = calibrate(Stairs(), "noise_multiplier", target_epsilon=0.55, **RUN)
    assert found.guarantee.epsilon == 0.5
    assert Stairs().epsilon(SubsampledGaussian(found.value * (1 - 1e-3), 0.01), steps=10_000, delta=1e-5) == 0.6
    with pytest.raises(NoAnswer, match="too little noise"):
        calibrate(Stairs(), "steps", target_epsilon=1e-3, noise_multiplier=0.1, sample_rate=0.5, delta=1e-5)


def test_what_is_returned_was_evaluated_however_rough():
    for target in (0.7, 1.0, 1.3, 2.0, 10.0):
        found = calibrate(Rough(), "noise_multiplier", target_epsilon=target, **RUN)
        again = Rough().epsilon(found.mechanism, steps=found.steps, delta=1e-5)
        assert again == found.guarantee.epsilon <= target and again > 0.95 * target


@pytest.mark.parametrize(("name", "limit"), [("rdp", 0.1), ("prv", 2.0)])
def test_quick(name, limit):
    seconds = []
    for target in (0.5, 1.0, 4.0):
        near = [target * (1 + 1e-4 * turn) for turn in range(3)]  # nothing is remembered from one to the next
        own, _ = work(lambda near=near: [calibrate_noise_multiplier(name, target_epsilon=e, **RUN) for e in near])
        seconds.append(own / len(near))
    assert quick(max(seconds), limit)
