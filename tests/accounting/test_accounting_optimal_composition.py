"""Optimal composition against its theorem, term by term, and against what it must not exceed."""

import mpmath
import pytest
from spent import epsilon

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
            found = composed_epsilon(each, steps, log_slack)
            assert found == pytest.approx((steps - 2 * i) * each, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("log_slack", [-2.0, -12.0, -500.0])
def test_many_steps_are_quick_and_below_the_explicit_form(log_slack):
    for each, steps in ((0.01, 10**4), (1e-3, 10**6), (0.5, 10**5)):
        found = composed_epsilon(each, steps, log_slack)
        assert 0 < found <= _explicit(each, steps, log_slack)
        if log_slack < -100:  # both are drift and spread, the same in the limit
            assert found > 0.9 * _explicit(each, steps, log_slack)


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
    names = ("strong:kov", "simple", "strong:exact", "strong", "prv:lower")
    kov, *others, lower = (epsilon(name, sigma, q, steps, delta) for name in names)
    assert lower <= kov <= min(others) * (1 + 1e-9)
