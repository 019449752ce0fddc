"""Optimal composition against its theorem, term by term, and against what it must not exceed."""

import math

import mpmath
import pytest

from accounting import SubsampledGaussian, load_accountant
from accounting.optimal_composition import _explicit, composed_epsilon


def theorem(each, steps, i):
    """δ_i of Kairouz, Oh and Viswanath 2015, Theorem 3.3, at ε = (T − 2i)ε', as it is printed."""
    e = mpmath.e ** mpmath.mpf(each)
    terms = (
        mpmath.binomial(steps, ell) * (e ** (steps - ell) - e ** (steps - 2 * i + ell)) / (1 + e) ** steps
        for ell in range(i)
    )
    return mpmath.fsum(terms)


@pytest.mark.parametrize(("each", "steps"), [(0.1, 20), (1.0, 7), (0.02, 100), (3.0, 12)])
def test_at_the_points_of_the_theorem(each, steps):
    with mpmath.workdps(60):
        for i in range(1, steps // 2):
            log_slack = float(mpmath.log(theorem(each, steps, i)))
            assert composed_epsilon(each, steps, log_slack) == pytest.approx(
                (steps - 2 * i) * each, rel=1e-9, abs=1e-11
            )


@pytest.mark.parametrize("log_slack", [-2.0, -12.0, -500.0])
def test_many_steps_are_quick_and_below_the_explicit_form(log_slack):
    for each, steps in ((0.01, 10**4), (1e-3, 10**6), (0.5, 10**5)):
        found = composed_epsilon(each, steps, log_slack)
        assert 0 < found <= _explicit(each, steps, log_slack)
        if log_slack < -100:  # both are drift and spread, the same in the limit
            assert found > 0.9 * _explicit(each, steps, log_slack)


def test_of_small_losses_it_is_nearly_gaussian():
    """A randomised response of small ε' is a Gaussian step of μ = ε' in the limit (Dong, Roth and Su 2022)."""
    from accounting.gaussian import exact_epsilon

    mu = 1e-3 * math.sqrt(10**6)
    assert composed_epsilon(1e-3, 10**6, math.log(1e-5)) == pytest.approx(
        exact_epsilon(1 / mu, math.log(1e-5)), rel=2e-3
    )


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [
        (4.0, 0.01, 10_000, 1e-5),
        (1.0, 0.01, 10_000, 1e-5),
        (0.5, 0.1, 1000, 1e-5),
        (20.0, 1.0, 50, 1e-3),
        (1, 1, 1, 1e-5),
    ],
)
def test_never_above_simple_or_strong_composition(sigma, q, steps, delta):
    def epsilon(name):
        return load_accountant(name).epsilon(SubsampledGaussian(sigma, q), steps=steps, delta=delta)

    kov = epsilon("strong:kov")
    assert kov <= min(epsilon("simple"), epsilon("strong:exact"), epsilon("strong")) * (1 + 1e-9)
    assert kov >= epsilon("prv:lower")


def test_strong_says_where_simple_is_smaller():
    for sigma, smaller in ((4.0, False), (0.5, True)):
        step = SubsampledGaussian(sigma, 0.01)
        found = load_accountant("strong").guarantee(step, steps=10_000, delta=1e-5)
        simple = load_accountant("simple").epsilon(step, steps=10_000, delta=1e-5)
        assert found.detail["simple_is_smaller"] == (simple < found.epsilon) == smaller
