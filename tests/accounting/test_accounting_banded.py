"""Banded noise: its matrix against the definition, its sensitivity by brute force, its accounting by Monte Carlo."""

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.special import logsumexp

from accounting import SubsampledGaussian, load_accountant
from accounting.banded import coefficients, error
from accounting.reductions import as_poisson


def matrix(c, steps):
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


@pytest.mark.parametrize(("bands", "steps"), [(1, 40), (4, 40), (16, 40), (40, 40), (8, 3)])
def test_the_error_is_that_of_the_definition(bands, steps):
    c = coefficients(bands, steps)
    assert len(c) == bands and math.isclose(sum(x * x for x in c), 1, rel_tol=1e-12)
    sums = np.tril(np.ones((steps, steps))) @ np.linalg.inv(matrix(c, steps))
    assert error(c, steps) == pytest.approx(np.linalg.norm(sums) / math.sqrt(steps), rel=1e-9)
    if bands == 1:
        assert error(c, steps) == pytest.approx(math.sqrt((steps + 1) / 2))


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
