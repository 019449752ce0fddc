"""Log moments against high-precision arithmetic; Rényi orders, conversions, and what libraries drop."""

import math
import time

import mpmath
import numpy as np
import pytest
from processor import quick

from accounting import SubsampledGaussian, load_accountant
from accounting.rdp import Rdp, to_epsilon
from accounting.series import log_moments

#: The orders that dp-accounting and Opacus try.
STANDARD = [*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 128, 256, 512]


def fifty_digits(order, sigma, q):
    """ln A_a by the binomial sum as it is published, with every digit that its cancellation costs."""
    with mpmath.workdps(100):
        p, twice = mpmath.mpf(q), 2 * mpmath.mpf(sigma) ** 2
        if q == 1:
            return mpmath.mpf(order * order - order) / twice
        term, total = (1 - p) ** order, mpmath.mpf(0)
        for k in range(order + 1):
            total += term * mpmath.exp((k * k - k) / twice)
            term *= mpmath.mpf(order - k) / (k + 1) * p / (1 - p)
        return mpmath.log(total)


def test_whole_orders_to_fifty_digits():
    for sigma in [0.2, 0.7, 3.0, 100.0, 1e4]:
        for q in [1e-12, 1e-9, 1e-5, 0.01, 0.5, 0.999, 1.0]:
            for order in (2, 3, 17, 64, 513, 1024):
                ours = log_moments([order - 1], sigma, q)[0]
                assert abs(ours / fifty_digits(order, sigma, q) - 1) < 1e-11


@pytest.mark.parametrize(
    ("order", "sigma", "q"),
    [(1.1, 0.5, 0.1), (1.5, 0.2, 0.01), (2.5, 1.0, 1e-6), (1.01, 0.05, 0.3), (7.3, 4.0, 0.99), (33.7, 30.0, 0.5)],
)
def test_orders_between_by_quadrature(order, sigma, q):
    with mpmath.workdps(30):
        p, s, a = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.mpf(order)

        def excess(t):
            w = p * mpmath.expm1(t / s - 1 / (2 * s * s))
            return mpmath.npdf(t) * ((1 + w) ** a - 1 - a * w)

        edge = float((s * s * mpmath.log(1 / p - 1) + 0.5) / s)  # where both parts of the mixture are equal
        cuts = sorted({c for c in (-20, -8, 0, 8, edge, a / s - 14, a / s, a / s + 14) if -20 <= c <= a / s + 14})
        true = mpmath.log1p(mpmath.quad(excess, cuts, maxdegree=8))
        assert abs(log_moments([order - 1], sigma, q)[0] / true - 1) < 1e-11


@pytest.mark.parametrize("sigma", [1e-300, 1e-5, 1e-3])
def test_with_next_to_no_noise_it_is_still_an_upper_bound(sigma):
    """By Minkowski's inequality, which is sharp there; for whole orders the sum is there to compare with."""
    for lam in (1.0, 7.0):
        between = log_moments([lam + 1e-9], sigma, 0.1)[0]
        assert between >= log_moments([lam], sigma, 0.1)[0]


def test_sixty_four_orders_in_ten_milliseconds():
    def seconds(lambdas):
        start = time.process_time()
        log_moments(lambdas, 1.0, 0.01)
        return time.process_time() - start

    assert quick(min(seconds(np.arange(1.0, 65.0)) for _ in range(5)), 0.01)
    assert quick(min(seconds(np.linspace(0.1, 63.7, 64)) for _ in range(5)), 0.01)


def test_published():
    """The tutorials of TF Privacy (256), its tests (150), Opacus' MNIST example (240); n = 60000, δ = 1e-5."""
    for accountant, batch, sigma, epochs, published, off in [
        *[("rdp:classic", 256, 1.3, 15, 1.19, 0.005), ("rdp:classic", 256, 1.1, 60, 3.01, 0.005)],
        *[("rdp:classic", 256, 0.7, 45, 7.10, 0.005), ("rdp:classic", 240, 1.3, 1, 0.71, 0.005)],
        *[("rdp:classic", 240, 1.3, 15, 1.16, 0.005), ("rdp:classic", 240, 1.1, 60, 2.91, 0.006)],
        *[("rdp:classic", 240, 0.7, 45, 6.86, 0.005), ("rdp", 150, 1.3, 15, 0.72422, 0.0002)],
    ]:
        step = SubsampledGaussian(sigma, batch / 60000)
        ours = load_accountant(accountant).epsilon(step, steps=epochs * 60000 // batch, delta=1e-5)
        assert ours == pytest.approx(published, abs=off)


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "published"),
    [(1.5, 0.04, 2250, 7.3291), (1.3, 150 / 60000, 6000, 0.72422), (0.5, 0.1, 1000, 136.054)],
)
def test_published_with_the_orders_of_the_libraries(sigma, q, steps, published):
    """To the last digit; the last one with the orders that dp-accounting drops as its series does not converge."""
    step, best = SubsampledGaussian(sigma, q), load_accountant("rdp")
    with_theirs = Rdp(orders=STANDARD).epsilon(step, steps=steps, delta=1e-5)
    assert with_theirs == pytest.approx(published, abs=6e-4 if steps == 1000 else 6e-5 * published / 7)
    assert 0.98 * with_theirs < best.epsilon(step, steps=steps, delta=1e-5) <= with_theirs


def test_the_best_order_is_found():
    for conversion in ["improved", "classic"]:
        for sigma, q, steps, delta in [
            (1.0, 0.01, 10_000, 1e-5),
            (0.3, 0.5, 10**6, 1e-9),
            (1e3, 1e-3, 10, 1e-12),
            (2.0, 1.0, 50, 1e-5),
        ]:
            answer = Rdp(conversion).guarantee(SubsampledGaussian(sigma, q), steps=steps, delta=delta)
            lambdas = np.geomspace(2.0**-30, 2.0**30, 900)
            tried = to_epsilon(lambdas, steps * log_moments(lambdas, sigma, q), math.log(delta), conversion)
            assert answer.epsilon <= tried.min() * (1 + 1e-7)
            assert answer.detail["conversion"] == conversion and not answer.detail["order_at_edge"]
            best = lambdas[tried.argmin()] + 1
            assert answer.detail["order"] - 1 == pytest.approx(best - 1, rel=0.06)


def test_an_order_at_the_edge_is_said_to_be():
    step = SubsampledGaussian(4.0, 0.01)
    assert Rdp(orders=[2, 3, 4]).guarantee(step, steps=10_000, delta=1e-5).detail["order_at_edge"]
    assert not Rdp(orders=[2, 17, 64]).guarantee(step, steps=10_000, delta=1e-5).detail["order_at_edge"]


@pytest.mark.parametrize("conversion", ["improved", "classic"])
def test_conversions_are_those_of_the_papers(conversion):
    """Of one Gaussian: never below what is exact; the improved one closer."""
    order, divergence, delta = 5.0, 2.5, 1e-5
    ours = to_epsilon(np.array([4.0]), np.array([4.0 * divergence]), math.log(delta), conversion)[0]
    paper = {
        "classic": divergence + math.log(1 / delta) / (order - 1),
        "improved": divergence + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1),
    }[conversion]
    assert ours == pytest.approx(paper, rel=1e-14)
