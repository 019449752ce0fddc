"""One Gaussian step in floats against 60 digits."""

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.gaussian import (
    amplified,
    classical_epsilon,
    classical_holds,
    exact_epsilon,
    log_delta,
    mills_ratio,
)

exponents = st.floats(-15, 4)


def upper_tail(x):
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


@given(st.floats(0, 1000))
def test_mills_ratio(x):
    with mpmath.workdps(60):
        true = upper_tail(mpmath.mpf(x)) / mpmath.npdf(mpmath.mpf(x))
        assert abs(mills_ratio(x) / true - 1) < 1e-14


@given(exponents, st.floats(0, 1), st.booleans())
def test_log_delta(exponent, place, beyond):
    """Over the range that is used, u up to h + 55: δ down to e^-1500."""
    h = 10.0**exponent
    u = h + 55 * place if beyond else h * place
    with mpmath.workdps(900 if h > 100 else 100):
        b, half = mpmath.mpf(u), mpmath.mpf(h)
        true = mpmath.log(upper_tail(b - half) - mpmath.exp(2 * b * half) * upper_tail(b + half))
        assert abs(log_delta(u, h) - true) < 1e-11


@given(st.floats(-4, 5), st.floats(-700, -1e-6))
def test_exact_epsilon_is_the_smallest(exponent, target):
    sigma = 10.0**exponent
    u = sigma * exact_epsilon(sigma, target)
    assert log_delta(u, 0.5 / sigma) <= target + 1e-9
    assert u == 0 or log_delta(u * (1 - 1e-9), 0.5 / sigma) >= target - 1e-9


def test_the_classical_claim_is_false_by_epsilon_10():
    sigma = classical_epsilon(10.0, math.log(1e-5))  # σ and ε change places in it
    assert classical_epsilon(sigma, math.log(1e-5)) == pytest.approx(10.0)
    assert not classical_holds(sigma, math.log(1e-5))
    assert exact_epsilon(sigma, math.log(1e-5)) > 10.0
    assert all(classical_holds(10.0**exponent, math.log(1e-5)) for exponent in range(1, 9))  # ε < 1


def test_amplified():
    for q in [1e-300, 1e-12, 0.01, 0.5, 1.0]:
        for epsilon in [0.0, 1e-20, 1.0, 699.0, 701.0, 1000.0, 1e9]:
            with mpmath.workdps(400):
                if epsilon < 1e6:
                    true = float(mpmath.log1p(mpmath.mpf(q) * mpmath.expm1(epsilon)))
                else:
                    true = epsilon + math.log(q)
            assert amplified(epsilon, q) == pytest.approx(true, rel=1e-12, abs=1e-320)
