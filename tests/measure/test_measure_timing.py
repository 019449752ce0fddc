"""Warm-up and per-step times, by a clock that says what the test wants."""

import math
import time

import pytest
import torch

from dpbench.measure.timing import FEWEST, MAX_WINDOWS, MOST, WINDOW, stopwatch_for, time_steps, warm_up


class Script:
    """A stopwatch for steps whose seconds are written down; the last goes on for ever."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.ran = list(seconds), 0

    def __call__(self, step, count, max_seconds):
        taken = []
        for _ in range(count):
            step()
            taken.append(self.seconds[min(self.ran, len(self.seconds) - 1)])
            self.ran += 1
            if len(taken) >= FEWEST and sum(taken) >= max_seconds:
                break
        return taken


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("seconds", "most", "warmup"),
    [
        ([9, 1, 1, 1, 1], math.inf, 1 + 2 * WINDOW),  # settled at once: the first step, and two windows that agree
        ([9, 5, 5, 3, 3, 1, 1, 1, 1], math.inf, 1 + 4 * WINDOW),
        ([9, 1, 1.05], math.inf, 1 + 2 * WINDOW),  # 10 % apart is agreement
        ([9, *[2**i for i in range(40, 0, -1)]], math.inf, 1 + MAX_WINDOWS * WINDOW),  # never: bounded
        ([30], 10, 1),
        ([4], 10, 1 + WINDOW),
    ],
)
def test_warm_up_ends_when_two_windows_agree_or_at_its_bound(seconds, most, warmup):
    assert len(warm_up(nothing, stopwatch=Script(*seconds), max_seconds=most)) == warmup


def test_steps_are_recorded_in_the_order_in_which_they_ran_and_none_is_dropped():
    script = Script(9, 1, 1, 1, 1, 1, 50, 1, 1.5, 1)
    timing = time_steps(nothing, stopwatch=script, steps=5, max_seconds=100)
    assert timing.warmup_seconds == [9, 1, 1, 1, 1] and timing.step_seconds == [1, 50, 1, 1.5, 1]


def test_two_steps_are_timed_however_slow_they_are():
    timing = time_steps(nothing, stopwatch=Script(60), steps=5, max_seconds=20)
    assert timing == ([60], [60, 60])


def test_short_steps_are_timed_more_often_within_reason():
    assert len(time_steps(nothing, stopwatch=Script(0.05), steps=5, max_seconds=20).step_seconds) == 10
    assert len(time_steps(nothing, stopwatch=Script(1e-6), steps=5, max_seconds=20).step_seconds) == MOST
    assert len(time_steps(nothing, stopwatch=Script(0.0), steps=5, max_seconds=20).step_seconds) == 5


def test_the_clock_of_the_cpu_measures_each_step(monkeypatch):
    clock, naps, now = stopwatch_for(torch.device("cpu")), iter([0.03, 0.01, 0.02]), 0.0
    (slept,) = clock(lambda: time.sleep(0.02), 1, math.inf)
    assert slept >= 0.02  # how much later it wakes is the machine's business

    def step():
        nonlocal now
        now += next(naps)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert clock(step, 3, math.inf) == pytest.approx([0.03, 0.01, 0.02])


def test_the_clock_of_the_cpu_stops_after_its_time_but_not_before_two_steps():
    calls = []
    clock = stopwatch_for(torch.device("cpu"))
    clock(lambda: (calls.append(1), time.sleep(0.01)), 10, 0.0)
    assert len(calls) == FEWEST
    assert len(clock(nothing, 1, 0.0)) == 1


@pytest.mark.gpu
@pytest.mark.alone
def test_the_clock_of_cuda_waits_for_the_device():
    x = torch.randn(4096, 4096, device="cuda")
    clock = stopwatch_for(torch.device("cuda"))
    clock(lambda: x @ x, 3, math.inf)
    one = clock(lambda: x @ x, 10, math.inf)
    eight = clock(lambda: [x @ x for _ in range(8)], 10, math.inf)
    assert len(one) == 10 and 4 < sum(eight) / sum(one) < 16
