"""Certified bounds: against independent arithmetic, closed forms, and both libraries."""

import math

import mpmath
import numpy as np
import pytest
from spent import answer, by_dp_accounting

from accounting import SubsampledGaussian, load_accountant
from accounting.convolution import epsilon_of
from accounting.discretised import Step, worse
from accounting.gaussian import exact_epsilon
from accounting.optimistic_grid import better
from accounting.prv import ACCURACY, LEAST, bracket

POINTS = [  # σ, q, T, δ
    *[(1.0, 0.01, 10_000, 1e-5), (4.0, 0.01, 10_000, 1e-5), (1.1, 256 / 60000, 3000, 1e-5), (3.0, 0.1, 512, 1e-6)],
    *[(0.6, 1e-4, 100, 1e-6), (2.0, 0.5, 20, 1e-3), (0.5, 0.1, 100, 1e-5), (0.8, 0.05, 100, 1e-5), (1.0, 0.9, 7, 0.2)],
]


def two_steps(epsilon, sigma, q):
    """δ(ε) of two steps on removing a record: the closed form of one, averaged over the loss of the other."""
    s, p = mpmath.mpf(sigma), mpmath.mpf(q)

    def loss(z):
        return mpmath.log(1 - p + p * mpmath.exp(z / s - 1 / (2 * s * s)))

    def one(eps):
        if eps <= mpmath.log(1 - p):
            return 1 - mpmath.exp(eps)
        z = s * mpmath.log1p(mpmath.expm1(eps) / p) + 1 / (2 * s)
        return (1 - p) * mpmath.ncdf(-z) + p * mpmath.ncdf(1 / s - z) - mpmath.exp(eps) * mpmath.ncdf(-z)

    def density(z):
        return (1 - p) * mpmath.npdf(z) + p * mpmath.npdf(z, 1 / s, 1)

    return mpmath.quad(lambda z: density(z) * one(epsilon - loss(z)), np.linspace(-12, 12 + 1 / sigma, 25).tolist())


@pytest.mark.parametrize(
    ("sigma", "q", "delta"),
    [
        *((1.0, 0.3, 1e-5), (1.0, 1e-3, 1e-12)),
        *(pytest.param(*point, marks=pytest.mark.slow) for point in ((0.5, 0.01, 1e-6), (3.0, 0.9, 1e-2))),
    ],
)
def test_two_steps_by_an_integral(sigma, q, delta):
    found = bracket(sigma, q, 2.0, delta)
    assert 0 < found.upper - found.lower <= max(ACCURACY * found.upper, LEAST)
    with mpmath.workdps(25):
        assert two_steps(mpmath.mpf(found.upper), sigma, q) <= delta <= two_steps(mpmath.mpf(found.lower), sigma, q)


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(1.0, 2, 1e-5), (30.0, 1000, 1e-9), (5.0, 100, 1e-200)])
def test_gaussians_have_a_closed_form(sigma, steps, delta):
    """At q = 1 the answer is the closed form; here the grids are put to the same test (at a q next to it)."""
    exact = exact_epsilon(sigma / math.sqrt(steps), math.log(delta))
    assert bracket(sigma, 1.0, float(steps), delta).upper == pytest.approx(exact, rel=1e-12)
    found = bracket(sigma, 1 - 1e-13, float(steps), delta)
    assert found.lower * (1 - 1e-9) <= exact <= found.upper * (1 + 1e-9)
    assert found.interval > 0 and found.upper - found.lower <= 1e-4 * exact


@pytest.mark.parametrize("q", [0.01, 0.5])
def test_one_step_has_a_closed_form(q):
    step = Step(1.0, q, math.log(1e-15))
    exact = bracket(1.0, q, 1.0, 1e-5)
    assert exact.lower == pytest.approx(exact.upper, rel=1e-11)
    upper, theta = epsilon_of(worse(step, 1e-3), 1.0, 1e-5)
    lower, _ = epsilon_of(better(step, 1e-3, theta, 1e-9), 1.0, 1e-5, upper=False)
    assert lower <= exact.upper <= upper
    assert upper - lower < 1e-4


@pytest.mark.parametrize("interval", [1.0, 0.1, 0.01, 1e-3])
@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (0.4, 1e-4), (3.0, 0.9)])
def test_every_grid_encloses_the_finest(sigma, q, interval):
    """Also grids far coarser than the losses, which are as certain, only further apart."""
    found = bracket(sigma, q, 100.0, 1e-6)
    step = Step(sigma, q, math.log(1e-6) - math.log(100) - 20)
    upper, theta = epsilon_of(worse(step, interval), 100.0, 1e-6)
    lower, _ = epsilon_of(better(step, interval, theta, 1e-9), 100.0, 1e-6, upper=False)
    assert lower <= found.upper and found.lower <= upper


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), POINTS)
def test_dp_accounting_does_not_disagree(sigma, q, steps, delta):
    """Its pessimistic ε is no smaller than our lower bound, its optimistic one no larger than our upper bound."""
    found = bracket(sigma, q, float(steps), delta)
    assert 0 < found.lower < found.estimate < found.upper <= found.lower + max(ACCURACY * found.upper, LEAST)
    assert found.lower <= by_dp_accounting(sigma, q, steps, delta, 5e-4) <= found.upper * 1.02
    assert by_dp_accounting(sigma, q, steps, delta, 2e-3, pessimistic=False) <= found.upper


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), [POINTS[0], POINTS[3], POINTS[5], POINTS[7]])
def test_opacus_does_not_disagree(sigma, q, steps, delta):
    """Both enclose the truth, so they overlap; ours is the narrower."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, q, steps)]
    composed = accountant._get_dprv(eps_error=0.01, delta_error=delta / 1000)
    low, _, high = composed.compute_epsilon(delta, delta / 1000, 0.01)
    found = bracket(sigma, q, float(steps), delta)
    assert low <= found.upper and found.lower <= high
    assert found.upper - found.lower < high - low


def test_the_bounds_and_what_they_are_worth():
    names = ("prv:lower", "prv:estimate", "prv")
    lower, between, upper = (answer(name, 1.0, 0.01, 10_000, 1e-5) for name in names)
    assert (lower.kind, between.kind, upper.kind) == ("lower_bound", "estimate", "upper_bound")
    assert lower.epsilon < between.epsilon < upper.epsilon
    detail = upper.detail
    assert [detail["lower"], detail["estimate"], detail["upper"]] == [lower.epsilon, between.epsilon, upper.epsilon]
    assert detail["accurate"] and 0 < detail["discretization"] < 1e-2


def test_a_delta_far_below_the_digits_of_a_float_is_resolved():
    """The weights are tilted, so 1e-200 is a number like any other: the bounds lie close, and below Rényi's."""
    found = bracket(1.0, 0.01, 1000.0, 1e-200)
    rdp = load_accountant("rdp").epsilon(SubsampledGaussian(1.0, 0.01), steps=1000, delta=1e-200)
    assert 0.98 * rdp < found.lower < found.upper < rdp
    assert found.upper - found.lower < 1e-4 * found.upper


def test_nothing_to_find_is_0():
    assert bracket(1.0, 1e-9, 100.0, 1e-5).upper == 0
    assert bracket(1e6, 0.01, 100.0, 1e-3).upper == 0


def test_on_adding_a_record_less_is_lost_here_and_that_is_looked_at():
    """The reversed losses are those of the other direction: of a pair that is symmetric, the same."""
    gaussian = worse(Step(2.0, 1.0 - 1e-15, math.log(1e-15)), 1e-3)
    assert epsilon_of(gaussian.reversed(), 4.0, 1e-5)[0] == pytest.approx(epsilon_of(gaussian, 4.0, 1e-5)[0], rel=1e-6)
    rare = worse(Step(0.5, 0.01, math.log(1e-15)), 1e-3)
    assert epsilon_of(rare.reversed(), 4.0, 1e-5)[0] < 0.1 * epsilon_of(rare, 4.0, 1e-5)[0]
