"""Accountants against published values and high-precision arithmetic."""

import itertools
import math
import subprocess
import sys

import mpmath
import pytest
from spent import answer, epsilon

from accounting import ACCOUNTANTS, VARIANTS, SubsampledGaussian, load_accountant
from accounting.base import rounded
from accounting.moments import Moments
from accounting.series import log_moments

ABADI = SubsampledGaussian(noise_multiplier=4.0, sample_rate=0.01)


def log_moment(order, sigma, q):
    """α(λ) at the whole order λ."""
    return log_moments([order], sigma, q)[0]


@pytest.mark.parametrize(
    ("name", "epochs", "published", "off"),
    [
        ("moments", 100, 1.26, 0.005),  # Abadi et al. 2016, section 3.2
        ("moments", 400, 2.55, 0.03),
        ("strong:published", 100, 9.34, 0.005),
        ("strong", 100, 26.39, 0.005),  # the same with exact amplification
        ("strong:exact", 100, 16.8444, 0.0001),  # and with the exact Gaussian step
    ],
)
def test_deep_learning_with_differential_privacy(name, epochs, published, off):
    assert load_accountant(name).epsilon(ABADI, steps=100 * epochs, delta=1e-5) == pytest.approx(published, abs=off)


def spent_in_one_step(sigma, q, eps):
    """δ of the mixture P = (1-q)N(0,σ²) + qN(1,σ²) against Q = N(0,σ²), by the point where their ratio is e^ε."""
    threshold = mpmath.mpf(sigma) ** 2 * mpmath.log((mpmath.e**eps - 1 + q) / q) + 0.5
    one, other = (mpmath.ncdf((mean - threshold) / sigma) for mean in (0, 1))
    return (1 - q) * one + q * other - mpmath.e**eps * one


@pytest.mark.parametrize("q", [0.001, 0.3, 1.0])
def test_one_step_of_simple_is_exact(q):
    for sigma, delta in itertools.product([0.3, 1.0, 5.0], [1e-12, 1e-5, 0.01]):
        ours = epsilon("simple", sigma, q, 1, delta)
        with mpmath.workdps(40):
            if ours == 0:
                assert spent_in_one_step(sigma, q, mpmath.mpf("1e-30")) <= delta
            else:
                assert float(spent_in_one_step(sigma, q, mpmath.mpf(ours)) / delta) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(("order", "sigma", "q"), [(1, 0.5, 0.5), (7, 1.0, 1e-9), (32, 4.0, 0.01), (5, 2.0, 1.0)])
def test_log_moment_is_the_integral_that_defines_it(order, sigma, q):
    """The larger of the two expectations of Abadi et al. 2016, equations 3 and 4, by quadrature."""
    with mpmath.workdps(40):

        def ratio(z):  # of the mixture to N(0, σ²)
            return 1 - q + q * mpmath.exp((2 * z - 1) / (2 * mpmath.mpf(sigma) ** 2))

        def moment(power):  # E_{N(0, σ²)}[ratio^power] − 1: the 1 is taken off before anything is lost to it
            cuts = [-20 * sigma, 0, order / 2, order + 1, order + 1 + 15 * sigma]
            return mpmath.quad(lambda z: mpmath.npdf(z, 0, sigma) * (ratio(z) ** power - 1), cuts)

        true = float(mpmath.log1p(max(moment(order + 1), moment(-order))))
    assert log_moment(order, sigma, q) == pytest.approx(true, rel=1e-12)


def test_moments_takes_the_best_order_and_says_which():
    found = load_accountant("moments").guarantee(ABADI, steps=10_000, delta=1e-5)
    each = {k: (10_000 * log_moment(k, 4.0, 0.01) - math.log(1e-5)) / k for k in range(1, 33)}
    assert found.epsilon == pytest.approx(min(each.values()), rel=1e-14)
    assert min(each.values()) == each[found.detail["order"]]
    assert not found.detail["largest_order_is_best"]
    assert load_accountant("moments").guarantee(ABADI, steps=1, delta=1e-5).detail["largest_order_is_best"]
    assert Moments(orders=range(1, 200)).epsilon(ABADI, steps=1, delta=1e-5) < each[32]


@pytest.mark.parametrize(("name", "step"), [("strong", "classical"), ("strong:exact", "exact")])
@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [(4.0, 0.01, 10_000, 1e-5), (1.0, 0.001, 1000, 1e-6), (50.0, 1.0, 100, 1e-8), (0.8, 1e-6, 10**6, 1e-10)],
)
def test_strong_composition_with_every_digit(name, step, sigma, q, steps, delta):
    """The theorem in 40 digits, its split searched on a fine grid; near the minimum it is flat."""

    def spent(eps):  # by one Gaussian step
        return mpmath.ncdf(0.5 / sigma - eps * sigma) - mpmath.e**eps * mpmath.ncdf(-0.5 / sigma - eps * sigma)

    def total(share):
        slack, each = mpmath.mpf(delta) * share, mpmath.mpf(delta) * (1 - share) / (q * steps)
        eps = mpmath.sqrt(2 * mpmath.log(mpmath.mpf(1.25) / each)) / sigma
        if step == "exact":
            eps = mpmath.findroot(lambda x: mpmath.log(spent(x) / each), (eps / 2, eps), solver="anderson", tol=1e-25)
        else:
            assert spent(eps) <= each  # where it is used, it is true
        eps = mpmath.log1p(q * mpmath.expm1(eps))
        return eps * mpmath.sqrt(2 * steps * mpmath.log(1 / slack)) + steps * eps * mpmath.expm1(eps)

    found = answer(name, sigma, q, steps, delta)
    share = found.detail["composition_delta"] / delta
    with mpmath.workdps(40):
        assert found.epsilon == pytest.approx(float(total(mpmath.mpf(share))), rel=1e-9)
        others = [float(total(mpmath.mpf(other))) for other in (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)]
    assert found.epsilon <= min(others) * (1 + 1e-12)
    assert found.detail["step"] == step


def test_strong_does_not_rely_on_a_false_claim():
    """At σ = 0.05 the classical ε, 97 at δ = 1e-5, is less than half of what is needed."""
    found = answer("strong", 0.05, 1.0, 1, 1e-5)
    assert found.detail["step"] == "exact" and found.epsilon == epsilon("strong:exact", 0.05, 1.0, 1, 1e-5)


def test_what_each_is_worth():
    kinds = {name: answer(name, 4.0, 0.01, 1, 1e-5).kind for name in [*ACCOUNTANTS, *VARIANTS]}
    others = {
        "strong:published": "heuristic",
        "gdp": "estimate",
        "prv:estimate": "estimate",
        "prv:lower": "lower_bound",
    }
    assert {name: kind for name, kind in kinds.items() if kind != "upper_bound"} == others


def test_strong_says_where_simple_is_smaller():
    for sigma, smaller in ((4.0, False), (0.5, True)):
        found, simple = (answer(name, sigma, 0.01, 10_000, 1e-5) for name in ("strong", "simple"))
        assert found.detail["simple_is_smaller"] == (simple.epsilon < found.epsilon) == smaller


def test_the_published_curve_lies_below_what_is_needed():
    """Why it is a heuristic: of one step we know the truth."""
    assert epsilon("strong:published", 0.3, 0.01, 1, 1e-5) < 0.5 * epsilon("simple", 0.3, 0.01, 1, 1e-5)


HEAVY = {"torch", "numpy", "scipy", "dp_accounting", "opacus", "jax", "pandas", "dpbench"}


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (["simple", "strong", "strong:exact", "strong:published", "gdp"], set()),
        (["moments", "rdp", "rdp:classic", "strong:kov", "prv", "prv:lower"], {"numpy"}),
        (["pld", "best"], {"numpy", "scipy", "dp_accounting"}),
    ],
)
def test_nothing_heavy_is_imported(names, allowed):
    code = (
        "import sys; from accounting import *\n"
        f"for name in {names}:\n"
        "    load_accountant(name).epsilon(SubsampledGaussian(4.0, 0.01), steps=10, delta=1e-5)\n"
        f"print(*sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == allowed


def test_bounds_are_rounded_to_the_safe_side():
    kinds = ("upper_bound", "lower_bound", "estimate")
    assert [rounded(1.25961, kind) for kind in kinds] == ["1.260", "1.259", "1.260"]
    exact = {math.inf: "inf", 0.0: "0", 0.1: "0.1", 2.0: "2", 1e-9: "1e-9"}
    assert all(rounded(value, kind) == text for value, text in exact.items() for kind in kinds)
