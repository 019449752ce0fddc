"""The contract at the edges, for every accountant: no negative, NaN or wait, never less for more; errors that name."""

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spent import answer

from accounting import (
    ACCOUNTANTS,
    VARIANTS,
    Accountant,
    ArgumentError,
    NoAnswer,
    SubsampledGaussian,
    audit,
    calibrate,
    compose,
    load_accountant,
)
from accounting.blt import Blt
from accounting.moments import Moments
from accounting.rdp import Rdp
from accounting.strong import Strong
from accounting.tuned import Tuned
from accounting.varying import guarantee_of_parts

NAMES = [*ACCOUNTANTS, *VARIANTS]
#: What composes numerically: it may have no answer, and is monotone up to what its grid adds.
NUMERICAL = ["prv", "pld", "best", "prv:lower", "prv:estimate"]
CLOSED = [name for name in NAMES if name not in NUMERICAL]
#: By how much an ε may be too large for a search's sake.
SEARCHED = {"rdp": 1e-7, "rdp:classic": 1e-7, "strong:kov": 1e-5}
every_accountant = pytest.mark.parametrize("name", NAMES)
every_closed_form = pytest.mark.parametrize("name", CLOSED)


def powers(low, high):
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


sigmas = st.one_of(powers(-3, 6), st.sampled_from([0.0, 5e-324, 1e-300, 1e-3, 0.5, 1e6, 1e300, math.inf]))
rates = st.one_of(powers(-12, 0), st.sampled_from([0.0, 5e-324, 1e-12, 1 - 2**-53, 1.0]))
counts = st.one_of(st.integers(0, 10**9), powers(0, 9).map(int), st.sampled_from([0, 1, 10**9, 10**300, 10**400]))
deltas = st.one_of(powers(-300, 0), st.sampled_from([0.0, 5e-324, 1e-300, 1e-5, 0.5, 1 - 2**-53, 1.0]))


def worse_than(sigma, q, steps, delta, more, which):
    return {
        "steps": (sigma, q, int(steps * Fraction(more)) + 1, delta),
        "noise": (sigma / more, q, steps, delta),
        "delta": (sigma, q, steps, delta / more),
        "rate": (sigma, min(1.0, q * more), steps, delta),
    }[which]


ways = st.sampled_from(["steps", "noise", "delta", "rate"])


@every_closed_form
@settings(max_examples=40)
@given(sigma=sigmas, q=rates, steps=counts, delta=deltas, more=st.floats(1, 100), which=ways)
def test_more_steps_more_sampling_less_noise_less_delta(name, sigma, q, steps, delta, more, which):
    base = answer(name, sigma, q, steps, delta).epsilon
    worse = answer(name, *worse_than(sigma, q, steps, delta, more, which)).epsilon
    assert worse >= base * (1 - SEARCHED.get(name, 1e-12)) - 2e-13  # below it floats lose digits


@cache
def composed(name, *point):
    return answer(name, *point).epsilon


@pytest.mark.parametrize("which", ["steps", "noise", "delta", "rate"])
@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [
        (1.0, 0.01, 10_000, 1e-5),
        pytest.param(0.5, 1e-4, 300, 1e-8, marks=pytest.mark.slow),
        pytest.param(3.0, 0.4, 50, 1e-2, marks=pytest.mark.slow),
        pytest.param(0.8, 0.02, 2000, 1e-10, marks=pytest.mark.slow),
    ],
)
def test_numerical_composition_is_monotone_as_closely_as_it_is_accurate(sigma, q, steps, delta, which):
    """The lower bound of less never exceeds the upper one of more, and no value falls by more than the grid's share."""
    for more in (1.0001, 1.5):
        point = worse_than(sigma, q, steps, delta, more, which)
        assert composed("prv:lower", sigma, q, steps, delta) <= composed("prv", *point)
        for name in NUMERICAL:
            base, accuracy = composed(name, sigma, q, steps, delta), 3e-4 if name == "pld" else 1e-4
            assert composed(name, *point) >= base * (1 - accuracy) - 1e-7


EDGES = [  # σ, q, T, δ and ε
    (4.0, 0.0, 10, 1e-5, 0.0),
    (4.0, 0.01, 0, 1e-5, 0.0),
    (0.0, 0.0, 10, 0.0, 0.0),
    (4.0, 0.01, 0, 0.0, 0.0),
    (math.inf, 0.01, 10, 0.0, 0.0),
    (4.0, 0.01, 10, 1.0, 0.0),
    (0.0, 0.01, 10, 1.0, 0.0),
    (0.0, 0.01, 10, 1e-5, math.inf),
    (4.0, 0.01, 10, 0.0, math.inf),
    (4.0, 0.01, 10**400, 1e-5, math.inf),
]


@every_accountant
def test_edges_say_why(name):
    for *point, epsilon in EDGES:
        got = answer(name, *point)
        assert got.epsilon == epsilon, point
        assert got.detail["reason"], point
        assert (got.detail["sampling"], got.detail["adjacency"]) == ("poisson", "add_remove")


def test_numbers_of_any_make():
    plain = answer("moments", 4.0, 0.5, 100, 1e-5).epsilon
    assert answer("moments", np.float64(4), np.float32(0.5), np.int64(100), np.float64(1e-5)).epsilon == plain
    assert answer("moments", 4, Fraction(1, 2), 100.0, 1e-5).epsilon == plain


@pytest.mark.parametrize("wrong", [math.nan, -4.33])
def test_what_is_no_epsilon_is_not_given_out(wrong):
    class Broken(Accountant):
        def _inside(self, mechanism, steps, delta):
            return wrong, {}

    with pytest.raises(NoAnswer, match=rf"^no ε in \[0, inf\] but {wrong} at SubsampledGaussian.*$"):
        Broken().epsilon(SubsampledGaussian(4.0, 0.01), steps=10, delta=1e-5)


STEP = SubsampledGaussian(4.0, 0.01)
RUN = {"delta": 1e-5, "sample_rate": 0.02, "steps": 50}


def calibrated(unknown="noise_multiplier", name="rdp", **changes):
    return calibrate(name, unknown, **RUN | changes)


#: How an argument is given -> what is said of it.
WRONG = [
    (lambda: SubsampledGaussian(4.0, math.nan), r"sample_rate in \[0, 1\], got nan"),
    (lambda: SubsampledGaussian("4", 0.1), "noise_multiplier to be a number >= 0, got '4'"),
    (lambda: SubsampledGaussian(True, 0.1), "noise_multiplier to be a number >= 0, got True"),
    (lambda: SubsampledGaussian(1.0, 0.1, group_size=None), "group_size to be a whole number >= 1, got None"),
    (lambda: SubsampledGaussian(1.0, 0.1, group_size=1e20), r"group_size to be at most 2\*\*53, got 1e\+20"),
    (lambda: SubsampledGaussian(1.0, 0.1, dataset_size=2.5), "dataset_size to be a whole number >= 1, got 2.5"),
    (lambda: answer("moments", 4.0, 0.01, math.inf, 1e-5), "steps to be a whole number >= 0, got inf"),
    (lambda: answer("moments", 4.0, 0.01, 10, 1.1), r"delta in \[0, 1\], got 1.1"),
    (lambda: answer("moments", 4.0, 0.01, 10, 2**1024), rf"delta in \[0, 1\], got {2**1024}"),
    (lambda: load_accountant("nope"), "accountant to be one of simple, strong, .*, got 'nope'"),
    (lambda: load_accountant("momets"), "accountant to be 'moments', or another one of .*, got 'momets'"),
    (lambda: Moments([-1, 2]), r"orders to be finite numbers > 0, at least one, got \[-1.0, 2.0\]"),
    (lambda: Moments([]), r"orders to be finite numbers > 0, at least one, got \[\]"),
    (lambda: Rdp(orders=[1.0, 2.0]), "orders to be finite numbers > 1, at least one, got .*"),
    (lambda: Rdp(orders=["2"]), "orders .* got '2'"),
    (lambda: Rdp("classical"), "conversion to be one of improved, classic, got 'classical'"),
    (lambda: Strong("exactt"), "step to be one of classical, exact, got 'exactt'"),
    (lambda: Tuned(math.inf), "runs to be a finite number >= 1, got inf"),
    (lambda: Tuned(True), "runs to be a finite number >= 1, got True"),
    (lambda: Tuned(3, "fixed"), "distribution to be one of .*, got 'fixed'"),
    (lambda: Blt((0.6, 0.5), (0.1, 0.2), 1), "omega to be numbers >= 0 with a sum <= 1, got .*"),
    (lambda: Blt((math.nan,), (0.1,), 1), "omega to be numbers >= 0 .*"),
    (lambda: Blt((0.5,), (1.0,), 1), r"theta to be 1 numbers in \[0, 1\), got .*"),
    (lambda: Blt((0.5,), (0.1,), 0), "separation to be a whole number >= 1, got 0"),
    (lambda: compose("pld", []), r"parts to be at least one, got \(\)"),
    (lambda: compose("pld", [(STEP, 2.5)]), "steps to be a whole number >= 0, got 2.5"),
    (lambda: compose("pld", [STEP]), "parts to be pairs of a mechanism and its number of steps, got .*"),
    (lambda: guarantee_of_parts(Rdp(), [], delta=1e-5), r"parts to be at least one, got \[\]"),
    (lambda: calibrated(target_epsilon=1, tolerance=-1), r"tolerance in \[0, 1\), got -1"),
    (lambda: calibrated("sigma", target_epsilon=1), "unknown to be one of noise_multiplier, .*, got 'sigma'"),
    (calibrated, "one target out of target_epsilon, target_advantage, target_tpr, got .*"),
    (lambda: calibrated(target_epsilon=1, target_tpr=0.5), "one target out of .*"),
    (lambda: calibrated(target_tpr=0.01), "target_tpr to be above the false positive rate 0.01, got 0.01"),
    (lambda: calibrated(target_tpr=0.1, fpr=0), r"false_positives in \(0, 1\), got 0"),
    (lambda: calibrated(target_advantage=1), r"target_advantage in \(0, 1\), got 1.*"),
    (lambda: audit.epsilon_lower_bound(10, 5, 5, -1), r"delta in \[0, 1\], got -1"),
    (lambda: audit.epsilon_lower_bound(10, 5, 5, 1e-5, 2), r"confidence in \(0, 1\), got 2"),
    (lambda: audit.epsilon_lower_bound(10, 5, 2.5, 1e-5), "correct to be a whole number >= 0, got 2.5"),
    (lambda: audit.p_value(10, 5, 5, -1.0, 1e-5), r"epsilon in \[0, inf\], got -1.0"),
    (lambda: audit.rate_upper_bound(1, 2, 1.0), r"confidence in \(0, 1\), got 1.0"),
    (lambda: audit.epsilon_of_mu(math.nan, 0.1), "mu .*"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_errors_name_the_argument_in_one_line(given, said):
    with pytest.raises(ArgumentError, match=f"^expected {said}$") as error:
        given()
    assert said.startswith(error.value.argument)


def test_counts_that_do_not_fit_each_other():
    with pytest.raises(ValueError, match=r"^expected 0 <= correct <= guesses <= canaries, got 6, 5, 10$"):
        audit.p_value(10, 5, 6, 1.0, 1e-5)
