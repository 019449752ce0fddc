"""The search for the largest batch, on memory models of our own making."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.trials import ConfirmTrial, PeakTrial
from dpbench.trials.max_batch import MaxBatch, Probe, probes_of

MIB = 2**20
BUDGET = 16 * 2**30


def search(**changes) -> MaxBatch:
    probe = PeakTrial(model="cnn", backend="ghost", batch_size=1, simulated=True, memory_budget=BUDGET)
    return MaxBatch(**({"probe": probe} | changes))


def carry_out(search: MaxBatch, memory, *, tells_peak_on_failure: bool = True, baseline=None) -> tuple[int, list[int]]:
    """(answer, batch sizes probed), where a batch fits if `memory(batch)` is within the budget."""
    seen: dict[int, Probe] = {}
    while (size := search.next_batch_size(seen)) is not None:
        assert size not in seen, f"{size} is probed twice: {list(seen)}"
        assert 1 <= size <= search.max_batch_size
        assert len(seen) < 60, "the search does not end"
        peak = int(memory(size))
        fits = peak <= BUDGET
        told = fits or tells_peak_on_failure
        seen[size] = Probe(fits, peak if told else None, baseline if told else None)
    return search.answer(seen), list(seen)


def largest(memory, limit: int = 16384) -> int:
    return max((size for size in range(1, limit + 1) if memory(size) <= BUDGET), default=0)


def within_tolerance(answer: int, truth: int, tolerance: float = 0.02) -> bool:
    return answer <= truth <= answer + max(1, tolerance * answer)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(("offset", "slope"), [(0, 13), (700, 13), (4000, 1.1), (15_000, 40), (100, 500)])
def test_linear_memory_takes_few_probes(offset, slope, tells):
    def memory(size):
        return (offset + slope * size) * MIB

    answer, probed = carry_out(search(), memory, tells_peak_on_failure=tells)
    assert within_tolerance(answer, largest(memory))
    assert len(probed) <= 5


@pytest.mark.parametrize("tells", [True, False])
@given(data=st.data())
def test_any_rising_memory_is_bracketed_to_the_tolerance(tells, data):
    offset = data.draw(st.floats(0, 15_000), "offset")
    slope = data.draw(st.floats(0.5, 5_000), "slope")
    bend = data.draw(st.floats(0.5, 2), "bend")
    stair = data.draw(st.integers(1, 200), "stair")
    start = data.draw(st.integers(1, 2000), "start")

    def memory(size):
        return (offset + slope * (-(-size // stair) * stair) ** bend) * MIB

    answer, probed = carry_out(search(start=start), memory, tells_peak_on_failure=tells)
    truth = largest(memory)
    assert within_tolerance(answer, truth)
    assert len(probed) <= 6 + 15 + 6  # the patience, doubling to the limit, bisection of the last octave


@given(seed=st.integers(0, 10_000))
def test_noise_neither_repeats_a_probe_nor_goes_on_for_ever(seed):
    noise = random.Random(seed)
    answer, probed = carry_out(search(), lambda size: (500 + 13 * size) * MIB * noise.uniform(0.9, 1.1))
    assert 0.85 * 1222 <= answer <= 1.15 * 1222
    assert len(probed) <= 20


def test_a_start_that_does_not_fit_goes_down():
    answer, probed = carry_out(search(start=64), lambda size: size * 5000 * MIB, tells_peak_on_failure=False)
    assert answer == 3 and probed[:2] == [64, 32]


@pytest.mark.parametrize("tells", [True, False])
def test_nothing_fits(tells):
    answer, probed = carry_out(search(), lambda size: BUDGET + size, tells_peak_on_failure=tells)
    assert answer == 0 and probed[-1] == 1


@pytest.mark.parametrize("memory", [lambda size: MIB, lambda size: (10 + size / 10) * MIB])
def test_memory_that_does_not_limit_ends_at_the_limit(memory):
    answer, probed = carry_out(search(max_batch_size=256), memory)
    assert answer == 256
    assert len(probed) <= 4


def test_a_start_beyond_the_limit_is_the_limit():
    assert carry_out(search(start=64, max_batch_size=10), lambda size: MIB) == (10, [10])


def test_without_a_budget_it_doubles_and_bisects():
    probe = search().probe.replace(memory_budget=None)
    answer, probed = carry_out(search(probe=probe), lambda size: 100 * MIB * size, tells_peak_on_failure=False)
    assert within_tolerance(answer, 163)
    assert probed[:6] == [8, 16, 32, 64, 128, 256]


def test_what_fits_above_what_did_not_does_not_count():
    seen = {8: Probe(True), 16: Probe(False), 32: Probe(True)}
    assert search().answer(seen) == 8


def test_a_whole_search_in_one_trial_tells_all_its_probes():
    one = {"outcome": "over_budget", "trial": {"batch_size": 7}, "result": {"memory": {"peak_bytes": 5}}}
    assert probes_of(one) == {7: Probe(False, 5)}
    told = [{"batch_size": size, "peak_bytes": size * MIB, "fits": size < 20} for size in (10, 20)]
    whole = {"outcome": "ok", "trial": {"batch_size": 7}, "result": {"probes": told}}
    assert probes_of(whole) == {10: Probe(True, 10 * MIB), 20: Probe(False, 20 * MIB)}


@pytest.mark.parametrize(
    ("size", "fits", "second"),
    [(2970, True, 3029), (2970, False, 2912), (309, False, 303), (10, True, 11), (1, False, None), (16384, True, None)],
)
def test_what_confirms_it_is_a_step_of_the_search_to_the_side_that_tells(size, fits, second):
    trial = ConfirmTrial(model="cnn", backend="ghost", batch_size=size, max_batch_size=16384)
    assert trial.second(fits=fits) == second
    if second is not None:  # the two end a search
        seen = {size: Probe(fits), second: Probe(not fits)}
        assert search().next_batch_size(seen) is None
