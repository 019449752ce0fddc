"""Verdicts: how often they err, on times as machines give them, and what they make of the edges."""

import numpy as np
import pytest

from dpbench.records.statistics import compare, compare_exact, compare_paired, level, outliers, shared_drift, trend

ROUNDS, STEPS = 7, 5


def drifting(generator, cases, correlation=0.8, size=0.03):
    """Logarithms of a machine's speed, an autoregression over rounds: stationary, with standard deviation `size`."""
    state = generator.normal(0, size, cases)
    path = []
    for _ in range(ROUNDS):
        path.append(state)
        state = correlation * state + generator.normal(0, size * np.sqrt(1 - correlation**2), cases)
    return np.exp(np.stack(path, axis=1))[:, :, None]


def measured(generator, seconds, noise, drift):
    """Series of `drift`'s cases and rounds: `seconds` times drift times lognormal noise on every step."""
    values = seconds * drift * generator.lognormal(0, noise, (*drift.shape[:2], STEPS))
    return [dict(enumerate(rounds.tolist())) for rounds in values]


def verdicts(noise, ratio=1.0, cases=1000, seed=0, size=0.03, paired=True, correlation=0.8, **options):
    """Of `cases` pairs of runs, b's time `ratio` times a's; the drift of a run is shared by all that a round holds."""
    generator = np.random.default_rng(seed)
    runs = []
    for seconds in (1.0, ratio):
        drift = drifting(generator, cases, size=size, correlation=correlation)
        runs += [measured(generator, seconds, noise, drift), measured(generator, 0.4, noise, drift)]
    if paired:
        return [compare_paired(*case, **options).verdict for case in zip(*runs, strict=True)]
    return [compare(a, b).verdict for a, b in zip(runs[0], runs[2], strict=True)]


def share(found, *words):
    return sum(word in words for word in found) / len(found)


@pytest.mark.parametrize("noise", [0.02, pytest.param(0.03, marks=pytest.mark.slow), 0.05])
@pytest.mark.parametrize("paired", [True, False], ids=["paired", "alone"])
def test_of_two_runs_of_the_same_code_one_in_a_hundred_at_most_is_called_different(noise, paired):
    assert share(verdicts(noise, paired=paired, cases=500), "slower", "faster") <= 0.01


@pytest.mark.parametrize(("correlation", "size"), [(0.0, 0.05), (0.5, 0.05), (0.8, 0.02), (0.9, 0.02)])
def test_a_drift_that_nothing_of_the_same_round_corrects_is_not_called_a_difference(correlation, size):
    found = verdicts(0.02, paired=False, correlation=correlation, size=size, cases=500, seed=1)
    assert share(found, "slower", "faster") <= 0.01


@pytest.mark.parametrize(("noise", "power"), [(0.02, 0.99), (0.03, 0.99), (0.05, 0.8)])
def test_ten_percent_slower_is_found_with_seven_rounds(noise, power):
    found = verdicts(noise, ratio=1.1, cases=200)
    assert share(found, "slower") >= power and share(found, "same", "faster") == 0


@pytest.mark.parametrize(("noise", "power"), [(0.01, 1.0), (0.02, 0.97), (0.03, 0.75)])
def test_ten_percent_is_found_on_a_machine_that_does_not_drift_even_with_nothing_beside_it(noise, power):
    assert share(verdicts(noise, ratio=1.1, paired=False, size=0.0, cases=200), "slower") >= power


def test_equal_times_are_called_the_same_where_they_scatter_little():
    assert share(verdicts(0.005, cases=200), "same") >= 0.95
    assert share(verdicts(0.005, ratio=1.1, cases=100), "slower") == 1
    assert share(verdicts(0.005, ratio=1 / 1.1, cases=100), "faster") == 1


def test_a_difference_below_the_smallest_effect_is_never_called_one():
    found = verdicts(0.001, ratio=1.015, size=0.0, cases=100)
    assert share(found, "slower") == 0 and share(found, "same") > 0.9


def test_a_run_in_one_process_needs_a_larger_difference():
    """A ratio that one process holds for all its rounds may be the process's own."""
    apart = verdicts(0.005, ratio=1.035, cases=100)
    together = verdicts(0.005, ratio=1.035, cases=100, processes=(1, 1))
    assert share(apart, "slower") > 0.9 and share(together, "slower") == 0
    assert share(verdicts(0.02, ratio=1.1, cases=100, processes=(1, 1)), "slower") > 0.95


def rounds(*medians):
    return {number: [value * 0.99, value, value * 1.01] for number, value in enumerate(medians)}


def test_the_interval_is_a_bootstrap_from_five_rounds_on_and_else_the_range():
    few = compare(rounds(1.0, 1.1, 1.2), rounds(2.0, 2.1, 2.3))
    assert (few.interval, few.rounds_a, few.rounds_b) == ("range", 3, 3)
    assert (few.low, few.high, few.ratio) == pytest.approx((2.0 / 1.2, 2.3, 2.1 / 1.1))
    assert few.verdict == "slower"  # twice the time is plain with three rounds, if they agree so well
    many = compare(rounds(*[1.0] * 5), rounds(*[2.0] * 5))
    assert many.interval == "bootstrap" and many.low < many.ratio == 2 < many.high < 2.05


def test_three_rounds_that_overlap_are_inconclusive_and_one_round_shows_nothing():
    assert compare(rounds(1.0, 1.1, 1.2), rounds(1.05, 1.3, 1.4)).verdict == "inconclusive"
    one = compare(rounds(1.0), rounds(1.0))
    assert (one.verdict, one.ratio, one.interval) == ("inconclusive", 1.0, "range")


def test_an_outlier_is_counted_and_does_not_decide():
    quiet = {number: [1.0, 1.01, 0.99, 1.0, 1.02] for number in range(7)}
    struck = {**quiet, 3: [1.0, 1.01, 9.0, 1.0, 1.02]}
    assert (outliers(quiet), outliers(struck)) == (0, 1)
    assert level(struck) == level(quiet) and compare(quiet, struck).verdict == "same"


def test_a_whole_round_that_was_disturbed_widens_the_verdict_to_inconclusive():
    a, b = rounds(*[1.0] * 7), rounds(*[1.1] * 6, 9.0)
    assert compare(a, b).verdict == "inconclusive"


def test_a_ratio_is_taken_in_the_rounds_that_both_have():
    base = rounds(*[1.0, 2.0, 4.0])
    found = compare_paired(rounds(3.0, 6.0), base, rounds(3.0, 6.0, 12.0), base)
    assert (found.a, found.b, found.ratio, found.rounds_a, found.rounds_b) == pytest.approx((3, 3, 1, 2, 3))
    with pytest.raises(ValueError, match="rounds in common"):
        compare_paired({7: [1.0]}, base, base, base)


def test_what_does_not_scatter_needs_one_round():
    assert compare_exact([100], [100]).verdict == "same" and compare_exact([100], [100]).interval == "exact"
    assert compare_exact([100], [103]).verdict == "slower"
    assert compare_exact([100, 104], [103, 103]).verdict == "inconclusive"


def test_the_same_series_give_the_same_numbers_each_time():
    generator = np.random.default_rng(0)
    a, b = (measured(generator, 1.0, 0.03, drifting(generator, 1))[0] for _ in range(2))
    assert compare(a, b) == compare(a, b)


def test_drift_is_what_all_cells_have_in_common():
    factors = [1.0, 1.1, 0.9]
    cells = [{r: [seconds * f] * 3 for r, f in enumerate(factors)} for seconds in (0.1, 1.0, 5.0)]
    assert shared_drift(cells) == pytest.approx({0: 1.0, 1: 1.1, 2: 0.9})
    assert shared_drift([{0: [1.0]}]) == {}
    assert trend([1.0, 1.0, 1.0, 1.2, 1.2, 1.2]) == pytest.approx(0.2) and trend([1.0, 2.0]) == 0
