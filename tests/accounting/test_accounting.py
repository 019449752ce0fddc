"""Accountants against published values, high-precision arithmetic, and a certified lower bound."""

import itertools
import math
import subprocess
import sys

import mpmath
import pytest

from accounting import ACCOUNTANTS, VARIANTS, ArgumentError, SubsampledGaussian, load_accountant
from accounting.moments import Moments
from accounting.series import log_moments

ABADI = SubsampledGaussian(noise_multiplier=4.0, sample_rate=0.01)
UPPER = [name for name in [*ACCOUNTANTS, *VARIANTS] if load_accountant(name).kind == "upper_bound"]


def log_moment(order, sigma, q):
    """α(λ) at the whole order λ."""
    return log_moments([order], sigma, q)[0]


def epsilon(name, sigma, q, steps, delta):
    mechanism = SubsampledGaussian(noise_multiplier=sigma, sample_rate=q)
    return load_accountant(name).epsilon(mechanism, steps=steps, delta=delta)


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


@pytest.mark.parametrize(
    ("batch", "sigma", "epochs", "published"),
    [
        *[(256, 1.3, 15, 1.19), (256, 1.1, 60, 3.01)],  # TF Privacy's tutorials
        *[(240, 1.3, 15, 1.16), (240, 1.1, 60, 2.91)],  # Opacus' MNIST example
    ],
)
def test_tutorials_with_the_same_conversion(batch, sigma, epochs, published):
    # Theirs may also take fractional orders, which here changes the second decimal by one at most.
    ours = epsilon("moments", sigma, batch / 60000, epochs * 60000 // batch, 1e-5)
    assert ours == pytest.approx(published, abs=0.01)


def test_noise_where_the_best_order_is_fractional():
    ours = epsilon("moments", 0.7, 256 / 60000, 45 * 60000 // 256, 1e-5)
    assert 7.10 <= ours <= 7.13  # TF Privacy, with fractional orders: 7.10


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


def test_one_gaussian_step_at_mu_1():
    assert epsilon("simple", 1.0, 1.0, 1, 1e-5) == pytest.approx(4.377178, abs=5e-7)


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


def test_log_moment_to_fifty_digits():
    for q in [1e-12, 1e-4, 0.2, 0.999, 1.0]:
        for sigma in [0.2, 1.0, 1e4]:
            for order in (1, 5, 31, 255):
                a = order + 1
                with mpmath.workdps(60):
                    p, twice = mpmath.mpf(q), 2 * mpmath.mpf(sigma) ** 2
                    terms = (
                        mpmath.binomial(a, k) * p**k * (1 - p) ** (a - k) * mpmath.exp((k * k - k) / twice)
                        for k in range(a + 1)
                    )
                    true = float(mpmath.log(mpmath.fsum(terms)))
                assert log_moment(order, sigma, q) == pytest.approx(true, rel=1e-12)


def test_moments_takes_the_best_order_and_says_which():
    answer = load_accountant("moments").guarantee(ABADI, steps=10_000, delta=1e-5)
    each = {k: (10_000 * log_moment(k, 4.0, 0.01) - math.log(1e-5)) / k for k in range(1, 33)}
    assert answer.epsilon == pytest.approx(min(each.values()), rel=1e-14)
    assert min(each.values()) == each[answer.detail["order"]]
    assert not answer.detail["largest_order_is_best"]
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

    answer = load_accountant(name).guarantee(
        SubsampledGaussian(noise_multiplier=sigma, sample_rate=q), steps=steps, delta=delta
    )
    share = answer.detail["composition_delta"] / delta
    with mpmath.workdps(40):
        assert answer.epsilon == pytest.approx(float(total(mpmath.mpf(share))), rel=1e-9)
        others = [float(total(mpmath.mpf(other))) for other in (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)]
    assert answer.epsilon <= min(others) * (1 + 1e-12)
    assert answer.detail["step"] == step


def test_strong_does_not_rely_on_a_false_claim():
    """At σ = 0.05 the classical ε, 97 at δ = 1e-5, is less than half of what is needed."""
    answer = load_accountant("strong").guarantee(SubsampledGaussian(0.05, 1.0), steps=1, delta=1e-5)
    assert answer.detail["step"] == "exact"
    assert answer.epsilon == load_accountant("strong:exact").epsilon(SubsampledGaussian(0.05, 1.0), steps=1, delta=1e-5)


POINTS = {  # (q, σ, steps, δ): the discretisation at which its lower bound is close, in a fraction of a second
    (256 / 60000, 1.1, 3000, 1e-5): 1e-4,
    (0.1, 3.0, 512, 1e-6): 5e-5,
    (0.5, 2.0, 20, 1e-3): 3e-4,
    (1.0, 5.0, 25, 1e-5): 1e-4,
    (0.2, 0.6, 1, 1e-5): 1e-3,
}


@pytest.fixture(scope="module")
def lower_bounds():
    """ε that is certainly needed: the optimistic estimate of dp-accounting's privacy loss distributions."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    return {
        (q, sigma, steps, delta): pld.from_gaussian_mechanism(
            sigma,
            sampling_prob=q,
            pessimistic_estimate=False,
            use_connect_dots=False,
            value_discretization_interval=interval,
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for (q, sigma, steps, delta), interval in POINTS.items()
    }


@pytest.mark.parametrize("name", UPPER)
def test_no_upper_bound_is_below_what_is_needed(name, lower_bounds):
    for (q, sigma, steps, delta), needed in lower_bounds.items():
        assert epsilon(name, sigma, q, steps, delta) >= needed > 0


def test_the_lower_bounds_are_worth_comparing_with(lower_bounds):
    assert lower_bounds[0.1, 3.0, 512, 1e-6] == pytest.approx(3.77, abs=0.02)  # jax_privacy's documentation
    assert lower_bounds[1.0, 5.0, 25, 1e-5] == pytest.approx(4.377178, abs=0.002)
    assert lower_bounds[0.2, 0.6, 1, 1e-5] == pytest.approx(epsilon("simple", 0.6, 0.2, 1, 1e-5), abs=0.001)


def test_what_each_is_worth():
    kinds = {
        name: load_accountant(name).guarantee(ABADI, steps=1, delta=1e-5).kind for name in [*ACCOUNTANTS, *VARIANTS]
    }
    others = {
        "strong:published": "heuristic",
        "gdp": "estimate",
        "prv:estimate": "estimate",
        "prv:lower": "lower_bound",
    }
    assert {name: kind for name, kind in kinds.items() if kind != "upper_bound"} == others


def test_the_published_curve_lies_below_what_is_needed():
    """Why it is a heuristic: of one step we know the truth."""
    assert epsilon("strong:published", 0.3, 0.01, 1, 1e-5) < 0.5 * epsilon("simple", 0.3, 0.01, 1, 1e-5)


def test_names():
    assert list(ACCOUNTANTS) == ["simple", "strong", "moments", "rdp", "gdp", "prv", "pld", "best"]
    with pytest.raises(ValueError, match=r"^expected accountant to be one of simple, strong, .*, got 'nope'$"):
        load_accountant("nope")
    with pytest.raises(ArgumentError, match=r"to be 'moments', or another one of .*, got 'momets'$"):
        load_accountant("momets")


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (["simple", "strong", "strong:exact", "strong:published", "gdp"], []),
        (["moments", "moments:extended", "rdp", "rdp:classic", "strong:kov", "prv", "prv:lower"], ["numpy"]),
    ],
)
def test_nothing_heavy_is_imported(names, allowed):
    code = (
        "import sys; from accounting import *\n"
        f"for name in {names}:\n"
        "    load_accountant(name).epsilon(SubsampledGaussian(4.0, 0.01), steps=10, delta=1e-5)\n"
        "print(*sorted({'torch', 'numpy', 'scipy', 'dp_accounting', 'pandas', 'dpbench'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == allowed
