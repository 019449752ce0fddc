"""The Gaussian limit, dp-accounting behind its adapter, and the best of all."""

import itertools
import math

import pytest
from spent import answer as guarantee

from accounting import ACCOUNTANTS, NoAnswer, SubsampledGaussian
from accounting.pld import _by_library
from accounting.prv import bracket


def test_the_gaussian_limit_is_an_estimate_and_says_so():
    found = guarantee("gdp", 1.0, 0.01, 10_000, 1e-5)
    assert found.kind == "estimate" and not found.detail["exact"] and "central limit" in found.detail["reason"]
    assert found.detail["mu"] == pytest.approx(0.01 * math.sqrt(10_000 * math.expm1(1.0)), rel=1e-12)
    assert found.epsilon < bracket(1.0, 0.01, 10_000.0, 1e-5).lower  # as it often is


@pytest.mark.parametrize(("sigma", "steps", "epsilon"), [(1.0, 1, 4.377178), (10.0, 100, 4.377178)])
def test_without_sampling_it_is_exact(sigma, steps, epsilon):
    found = guarantee("gdp", sigma, 1.0, steps, 1e-5)
    assert found.kind == "upper_bound" and found.detail["exact"]
    assert found.epsilon == pytest.approx(epsilon, abs=5e-7)


def test_the_limit_is_reached_with_many_steps():
    """q√T fixed: its distance to the truth falls."""
    gaps = []
    for q, steps in ((0.1, 100), (0.01, 10_000)):
        truth = bracket(1.0, q, float(steps), 1e-5)
        gaps.append(abs(guarantee("gdp", 1.0, q, steps, 1e-5).epsilon / truth.estimate - 1))
    assert gaps[1] < 0.25 * gaps[0]


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta", "published", "off"),
    [
        (3.0, 0.1, 512, 1e-6, 3.77, 0.005),  # jax_privacy's documentation
        (1.0, 1.0, 1, 1e-5, 4.377178, 0.0005),
        (4.0, 0.01, 10_000, 1e-5, 0.94687, 0.0003),
    ],
)
def test_pld_published(sigma, q, steps, delta, published, off):
    found = guarantee("pld", sigma, q, steps, delta)
    assert found.kind == "upper_bound"
    assert found.epsilon == pytest.approx(published, abs=off)


def test_pld_says_its_discretization_and_what_that_costs():
    """The error that is said is about the one that is made, of which the certified bounds tell."""
    found = guarantee("pld", 1.0, 0.01, 10_000, 1e-5)
    excess = found.epsilon - bracket(1.0, 0.01, 10_000.0, 1e-5).estimate
    assert 0.5 * excess < found.detail["discretization_error"] < 2.0 * excess
    assert found.detail["accurate"] and 1e-5 < found.detail["discretization"] < 1e-3


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [
        (1.0, 0.01, 1000, 1e-14),  # δ is less than the library's rounding
        (3.0, 0.02, 4000, 1.1e-10),
        (2.3, 4e-6, 70_000, 3e-8),  # rare losses, of which its grid is loose
        (1.1, 3e-6, 300_000, 6e-4),
        (1.4, 0.3, 3_000_000, 8e-7),  # more losses than it can hold
        (2.0, 1e-4, 10**8, 1e-6),  # more steps
    ],
)
def test_pld_answers_where_the_library_cannot_or_is_loose(sigma, q, steps, delta):
    found, truth = guarantee("pld", sigma, q, steps, delta), bracket(sigma, q, float(steps), delta)
    assert found.kind == "upper_bound" and found.detail["composed_by"] == "tilted transform"
    assert truth.lower < truth.upper <= found.epsilon <= truth.upper * (1 + 3e-4)


def test_pld_rises_in_the_steps_where_one_composition_takes_over_from_the_other():
    steps = [round(1000 * 1.002**place) for place in range(0, 550, 40)]
    steps = sorted({*steps, *(count + 1 for count in steps)})
    found = [guarantee("pld", 4.0, 0.01, count, 1e-9) for count in steps]
    assert {each.detail["composed_by"] for each in found} == {"dp-accounting", "tilted transform"}
    assert all(one.epsilon < other.epsilon for one, other in itertools.pairwise(found))


@pytest.mark.parametrize("name", ["prv", "pld"])
@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta", "message"),
    [
        (1e-3, 0.01, 10_000, 1e-5, r"^noise_multiplier=0\.001 is below 0\.004, .*; rdp has a bound here$"),
        (1.0, 0.01, 10**14, 1e-5, r"^steps=1e\+14 is above 1e\+13, .*; rdp has a bound here$"),
        (1.0, 0.01, 1000, 1e-260, r"^delta=1e-260 is below 1e-250, .*; rdp has a bound here$"),
    ],
)
def test_where_arithmetic_cannot_give_an_answer_it_says_who_can(name, sigma, q, steps, delta, message):
    with pytest.raises(NoAnswer, match=message):
        guarantee(name, sigma, q, steps, delta)
    assert 0 < guarantee("rdp", sigma, q, steps, delta).epsilon < math.inf


def test_pld_allows_for_its_rounding():
    """Without it the library's ε is here 6.10087, below what is certainly needed."""
    epsilon, detail = _by_library(SubsampledGaussian(0.4, 1e-5), 10_000, 1e-10)
    assert detail["rounding"] == pytest.approx(2.02e-11)
    assert epsilon > bracket(0.4, 1e-5, 10_000.0, 1e-10).lower > 6.1015


def test_an_error_of_the_library_leaves_the_other_composition(monkeypatch):
    from dp_accounting.pld import privacy_loss_distribution as library

    def broken(*args, **options):
        raise ValueError("a must be\n greater than b")

    monkeypatch.setattr(library, "from_gaussian_mechanism", broken)
    assert guarantee("pld", 1.0, 0.01, 100, 1e-5).detail["composed_by"] == "tilted transform"


def test_best_is_the_smallest_upper_bound_and_names_it():
    found = guarantee("best", 1.0, 0.01, 10_000, 1e-5)
    others = {name: guarantee(name, 1.0, 0.01, 10_000, 1e-5) for name in ACCOUNTANTS if name != "best"}
    valid = {name: other.epsilon for name, other in others.items() if other.kind == "upper_bound"}
    assert found.epsilon == min(valid.values()) == valid[found.detail["accountant"]]
    assert others["gdp"].epsilon < found.epsilon  # an estimate is no candidate
    assert found.detail["lower"] == bracket(1.0, 0.01, 10_000.0, 1e-5).lower
    assert found.detail["gap"] == found.epsilon - found.detail["lower"] > 0
    assert "no_answer" not in found.detail


def test_best_without_numerical_composition():
    """With next to no noise prv and pld have no answer; it says so, and the others are there."""
    found = guarantee("best", 1e-3, 0.01, 10_000, 1e-5)
    assert found.detail["accountant"] == "rdp" and found.detail["no_answer"] == "prv, pld"
    assert "lower" not in found.detail
