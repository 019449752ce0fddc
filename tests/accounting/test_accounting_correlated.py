"""Correlated noise, banded and BLT: the matrix against the definition, its sensitivity by brute force, Monte Carlo."""

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.special import logsumexp
from scipy.stats import norm

from accounting import SubsampledGaussian, load_accountant
from accounting.banded import coefficients, error
from accounting.blt import Blt, best
from accounting.gaussian import epsilon_of_shift
from accounting.reductions import as_poisson


def matrix(c, steps):
    """C [T, T] of these coefficients."""
    column = np.zeros(steps)
    column[: min(len(c), steps)] = c[:steps]
    return toeplitz(column, np.zeros(steps))


def movements(steps, apart):
    """The steps that a record may be in, at least so many apart."""
    for count in range(1, steps + 1):
        for chosen in itertools.combinations(range(steps), count):
            if all(later - earlier >= apart for earlier, later in itertools.pairwise(chosen)):
                yield chosen


@pytest.mark.parametrize("bands", [1, 2, 3, 5])
def test_the_sensitivity_is_the_root_of_the_number_of_steps(bands):
    """Of unit gradients of any directions: the squared movement is aᵀ(CᵀC)a at most with |a| = 1 where a record is."""
    steps = 9
    gram = np.abs(matrix(coefficients(bands, steps), steps).T @ matrix(coefficients(bands, steps), steps))
    found = {chosen: math.sqrt(gram[np.ix_(chosen, chosen)].sum()) for chosen in movements(steps, bands)}
    assert all(moved <= math.sqrt(len(chosen)) + 1e-12 for chosen, moved in found.items())
    whole = [moved for chosen, moved in found.items() if len(chosen) == 2 and chosen[-1] + bands <= steps]
    assert whole == pytest.approx([math.sqrt(2)] * len(whole), abs=1e-12) and (whole or bands == 5)
    if bands > 1:  # less far apart it is more
        nearer = [math.sqrt(gram[np.ix_(chosen, chosen)].sum() / len(chosen)) for chosen in movements(steps, bands - 1)]
        assert max(nearer) > 1.05


def test_coefficients_are_a_minimum_and_more_bands_are_better():
    c, rng = np.array(coefficients(6, 200)), np.random.default_rng(0)
    assert all(error(tuple(c + 0.01 * rng.standard_normal(6)), 200) > error(tuple(c), 200) for _ in range(50))
    errors = [error(coefficients(bands, 200), 200) for bands in (1, 2, 4, 8, 16, 32, 64)]
    assert errors == sorted(errors, reverse=True)
    root = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, 200))])
    assert error(coefficients(200, 200), 200) <= error(tuple(root), 200) * (1 + 1e-9)


def test_steps_are_poisson_steps_of_a_group():
    assert as_poisson(0.01, 1000, 1) == (0.01, 1000)
    assert as_poisson(0.01, 1001, 8) == pytest.approx((0.08, 126))
    assert as_poisson(1 / 3, 10, 3) == (1.0, 4)
    with pytest.raises(ValueError, match="expected bands of at most 3, 1/sample_rate, got 4"):
        as_poisson(0.3, 10, 4)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_bound_holds_for_the_whole_mechanism(first):
    """δ of all T rows of CG + Z as they are, by Monte Carlo over a mixture of every outcome of the coins."""
    bands, steps, sigma, q, eps, draws = 3, 9, 1.2, 0.4, 1.0, 400_000
    c, rng = matrix(coefficients(bands, steps), steps), np.random.default_rng(first)
    turns = range(first, steps, bands)
    coins = list(itertools.product([0, 1], repeat=len(turns)))
    centres = np.array([c[:, list(turns)] @ np.array(coin) for coin in coins])
    weights = np.array([q ** sum(coin) * (1 - q) ** (len(coin) - sum(coin)) for coin in coins])
    there = centres[rng.choice(len(coins), draws, p=weights)] + sigma * rng.standard_normal((draws, steps))

    def loss(y):
        exponents = (y @ centres.T - 0.5 * np.square(centres).sum(1)) / sigma**2
        return logsumexp(exponents, axis=1, b=weights)

    removed = np.maximum(0, -np.expm1(eps - loss(there)))
    added = np.maximum(0, -np.expm1(eps + loss(sigma * rng.standard_normal((draws, steps)))))
    delta, deviation = max((each.mean(), each.std() / math.sqrt(draws)) for each in (removed, added))
    rate, count = as_poisson(q / bands, steps, bands)
    assert rate == pytest.approx(q) and count == 3

    def stated(at):
        return load_accountant("prv").epsilon(SubsampledGaussian(sigma, rate), steps=count, delta=at)

    assert stated(delta - 4 * deviation) >= eps  # it holds
    if first == 0:  # and is no looser than that where no column is cut off
        assert stated(delta + 4 * deviation) <= eps * 1.001
    cut = c[:, turns[-1]] @ c[:, turns[-1]]
    assert cut == pytest.approx(1.0) if first == 0 else cut < 1.0


def prefix_sums(c):
    """‖AC⁻¹‖_F/√T."""
    steps = len(c)
    return np.linalg.norm(np.tril(np.ones((steps, steps))) @ np.linalg.inv(c)) / math.sqrt(steps)


@pytest.mark.parametrize(("bands", "steps"), [(1, 40), (4, 40), (16, 40), (40, 40), (8, 3)])
def test_the_error_of_bands_is_that_of_the_definition(bands, steps):
    c = coefficients(bands, steps)
    assert len(c) == bands and math.isclose(sum(x * x for x in c), 1, rel_tol=1e-12)
    assert error(c, steps) == pytest.approx(prefix_sums(matrix(c, steps)), rel=1e-9)
    if bands == 1:
        assert error(c, steps) == pytest.approx(math.sqrt((steps + 1) / 2))


@pytest.mark.parametrize(("buffers", "steps", "apart"), [(1, 50, 10), (2, 50, 50), (3, 200, 200), (2, 2, 1)])
def test_the_error_of_a_blt_is_that_of_the_definition(buffers, steps, apart):
    blt = best(buffers, steps, apart)
    c = matrix(blt.coefficients(steps), steps)
    assert blt.error(steps) == pytest.approx(np.linalg.norm(c[:, ::apart].sum(1)) * prefix_sums(c), rel=1e-9)


def drawn(seed, buffers=2, apart=3):
    """A BLT of random numbers, not of the search."""
    rng = np.random.default_rng(seed)
    omega = rng.dirichlet(np.ones(buffers + 1))[:buffers]
    return Blt(tuple(omega), tuple(rng.uniform(0, 1, buffers)), apart)


@pytest.mark.parametrize("blt", [best(3, 60, 60), best(2, 60, 7), drawn(0), drawn(1, 5)])
def test_coefficients_are_those_of_the_definition_positive_and_falling(blt):
    c = blt.coefficients(60)
    expected = [1.0] + [sum(w * x ** (t - 1) for w, x in zip(blt.omega, blt.theta, strict=True)) for t in range(1, 60)]
    np.testing.assert_allclose(c, expected, rtol=1e-13)
    assert (c > 0).all() and (np.diff(c) <= 0).all() and c[1] < 1


def test_the_sensitivity_of_a_blt_is_the_most_of_all_patterns():
    """Of unit gradients of any directions the most is that of equal ones, as no product of columns is negative."""
    for apart in [1, 2, 3, 5, 11]:
        for seed in range(3):
            steps, blt = 11, drawn(seed, apart=apart)
            c = matrix(blt.coefficients(steps), steps)
            assert (c.T @ c >= 0).all()
            moved = {places: np.linalg.norm(c[:, places].sum(1)) for places in movements(steps, apart)}
            assert blt.sensitivity(steps) == pytest.approx(max(moved.values()), rel=1e-12)
            assert max(moved, key=moved.get) == tuple(range(0, steps, apart))
            assert blt.sensitivity(0) == 0
            if apart > 1:  # less far apart it is more
                nearer = max(np.linalg.norm(c[:, places].sum(1)) for places in movements(steps, apart - 1))
                assert nearer > max(moved.values())


@pytest.mark.parametrize("restarts", [(4,), (3, 7), (1, 2, 9)])
def test_a_stream_that_starts_anew_is_no_less_private(restarts):
    """In all coordinates, or in one group of them alone; and after a row that is left out."""
    steps, blt = 11, drawn(3)
    part = np.searchsorted(restarts, np.arange(steps), side="right")
    c = matrix(blt.coefficients(steps), steps)
    cut = np.where(part[:, None] == part, c, 0.0)
    for places in movements(steps, 3):
        assert np.linalg.norm(cut[:, places].sum(1)) <= blt.sensitivity(steps) + 1e-12
        share = 0.5 * np.square(c[:, places].sum(1)).sum() + 0.5 * np.square(cut[:, places].sum(1)).sum()
        assert math.sqrt(share) <= blt.sensitivity(steps) + 1e-12
    assert np.linalg.norm(np.delete(cut, restarts[0], axis=0)[:, ::3].sum(1)) <= blt.sensitivity(steps)


def test_the_search_finds_a_minimum_and_reaches_what_is_known():
    rng = np.random.default_rng(0)
    for steps, apart in ((300, 300), (300, 30)):
        found = best(3, steps, apart)
        for _ in range(50):
            omega = np.array(found.omega) * np.exp(0.02 * rng.standard_normal(len(found.omega)))
            theta = 1 - (1 - np.array(found.theta)) * np.exp(0.02 * rng.standard_normal(len(found.theta)))
            theta = np.maximum(theta, 0)
            assert Blt(tuple(omega), tuple(theta), apart).error(steps) > found.error(steps) * (1 - 1e-5)
    errors = [best(buffers, 300, 300).error(300) for buffers in (1, 2, 3, 4)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 1.05 * errors[2]
    assert errors[2] == pytest.approx(error(coefficients(300, 300), 300), rel=5e-3)  # of all Toeplitz matrices
    assert best(4, 300, 300) == best(3, 300, 300)  # one more gains nothing
    independent = math.sqrt(10 * 301 / 2)
    assert best(2, 300, 30).error(300) < 0.4 * independent


def test_epsilon_of_a_blt_is_that_of_one_gaussian():
    blt = best(2, 80, 8)
    for steps in (8, 80, 83):
        mechanism = blt.mechanism(3.0, steps)
        mu = blt.sensitivity(steps) / 3.0
        exact = epsilon_of_shift(math.log(mu), math.log(1e-5))
        at = -exact / mu + mu / 2  # the closed form of Balle and Wang (2018)
        assert norm.cdf(at) - math.exp(exact) * norm.cdf(at - mu) == pytest.approx(1e-5, rel=1e-6)
        for name, slack in (("gdp", 1e-9), ("prv", 1e-3), ("pld", 1e-3), ("rdp", 0.1)):
            found = load_accountant(name).guarantee(mechanism, steps=1, delta=1e-5)
            assert found.kind == "upper_bound" and exact * (1 - 1e-9) <= found.epsilon <= exact * (1 + slack)


def test_it_holds_for_the_whole_blt_with_adaptive_gradients():
    """δ of all T rows of CG + Z, by Monte Carlo, where the record's gradients turn by what earlier rows were."""
    blt, steps, sigma, eps, draws = drawn(4, apart=3), 9, 2.5, 1.0, 400_000
    c, rng = matrix(blt.coefficients(steps), steps), np.random.default_rng(0)
    rows, gradients = np.zeros((steps, draws, 2)), np.zeros((steps, draws, 2))
    loss = np.zeros(draws)
    for t in range(steps):
        if t % 3 == 0:
            angle = rows[t - 1, :, 0] if t else np.zeros(draws)
            gradients[t] = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        centre, z = np.tensordot(c[t], gradients, axes=1), sigma * rng.standard_normal((draws, 2))
        rows[t] = centre + z
        loss += ((centre * rows[t]).sum(-1) - 0.5 * np.square(centre).sum(-1)) / sigma**2
    delta = np.maximum(0, -np.expm1(eps - loss))
    least = delta.mean() - 4 * delta.std() / math.sqrt(draws)
    mu = blt.sensitivity(steps) / sigma
    claimed = norm.cdf(-eps / mu + mu / 2) - math.exp(eps) * norm.cdf(-eps / mu - mu / 2)
    assert 0.1 * claimed < least <= claimed
    straight = c[:, ::3].sum(1) / sigma  # and gradients that do not turn attain it
    assert np.linalg.norm(straight) == pytest.approx(mu)
