"""Measures seconds per step: warms up until times settle, then records each step, raw and in order.

The first step pays for one-time work and stands alone. Then follow windows of two steps, until the means of two
successive windows agree within 10 %, or half of `max_seconds` is spent.

On a CPU: `time.perf_counter` around each step; the caller sets the number of threads. On CUDA: an event before the
first step and after each one, and one synchronisation at either end, so that the host runs ahead as in training.

Functions take:
    stopwatch: of the device.
    max_seconds: no step begins later.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import torch

WINDOW = 2
AGREE = 0.1
MAX_WINDOWS = 6
FEWEST = 2
#: Short steps are cheap and noisy: time enough of them to fill FILL_SECONDS, at most MOST.
FILL_SECONDS = 0.5
MOST = 50

#: (step, count, max_seconds) -> the seconds of up to `count` steps, at least FEWEST, stopped after `max_seconds`.
Stopwatch = Callable[[Callable[[], object], int, float], list[float]]


class Timing(NamedTuple):
    """Seconds of each step, in order."""

    warmup_seconds: list[float]
    step_seconds: list[float]


def time_steps(step: Callable[[], object], *, stopwatch: Stopwatch, steps: int, max_seconds: float) -> Timing:
    """Warm up, then time `step` at least `steps` times.

    No step begins after `max_seconds` of timing, but at least two are timed. Steps so short that `steps` of them take
    less than half a second are timed more often.

    Args:
        steps: how many, at least.
    """
    warmup = warm_up(step, stopwatch=stopwatch, max_seconds=max_seconds / 2)
    gc.collect()
    expected = fmean(warmup[-WINDOW:])
    count = max(steps, min(MOST, math.ceil(FILL_SECONDS / expected))) if expected > 0 else steps
    return Timing(warmup, stopwatch(step, max(count, FEWEST), max_seconds))


def warm_up(step: Callable[[], object], *, stopwatch: Stopwatch, max_seconds: float) -> list[float]:
    """Run steps until two windows agree, or `max_seconds` or MAX_WINDOWS are spent; returns the seconds of each."""
    seconds = stopwatch(step, 1, math.inf)
    previous = math.inf
    for _ in range(MAX_WINDOWS):
        if sum(seconds) >= max_seconds:
            break
        seconds += stopwatch(step, WINDOW, math.inf)
        mean = fmean(seconds[-WINDOW:])
        if abs(mean - previous) <= AGREE * mean:
            break
        previous = mean
    return seconds


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The clock of a device."""
    return cuda_stopwatch if device.type == "cuda" else cpu_stopwatch


def cpu_stopwatch(
    step: Callable[[], object], count: int, max_seconds: float, now: Callable[[], float] | None = None
) -> list[float]:
    """Seconds of each step.

    Args:
        now: reads the clock; None for the host's.
    """
    now = now or time.perf_counter
    seconds: list[float] = []
    begin = now()
    for _ in range(count):
        before = now()
        step()
        after = now()
        seconds.append(after - before)
        if len(seconds) >= FEWEST and after - begin >= max_seconds:
            break
    return seconds


def cuda_stopwatch(step: Callable[[], object], count: int, max_seconds: float) -> list[float]:
    """Seconds on the device, from the end of one step to the end of the next."""
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    begin = time.perf_counter()
    for _ in range(count):
        step()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        if len(events) > FEWEST and time.perf_counter() - begin >= max_seconds:
            break  # the host is at most one launch queue ahead of the device
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(events)]
