"""Seconds per step: warm up until it settles, then measure step by step, raw and in order.

The first step pays for what happens once (allocator pools, oneDNN's and cuDNN's choice of kernels) and stands alone.
Then windows of two steps, until the means of two successive windows agree within 10 %, or half of `max_seconds` is
spent. What is timed after that is recorded as it came: summaries, and what to do with outliers, belong to the report.

On a CPU: `time.perf_counter` around each step; the number of threads is the caller's business. On CUDA: an event before
the first step and after each one, and one synchronisation at either end, so that the host runs ahead of the device as
it does in training.
"""

from __future__ import annotations

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
#: Short steps are cheap and noisy: time so many that they fill this long, within reason.
FILL_SECONDS = 0.5
MOST = 50

#: Run a step up to `count` times, at least FEWEST, and stop after `max_seconds`: the seconds of each.
Stopwatch = Callable[[Callable[[], object], int, float], list[float]]


class Timing(NamedTuple):
    """Seconds of each step, in the order in which they ran."""

    warmup_seconds: list[float]
    step_seconds: list[float]


def time_steps(step: Callable[[], object], *, stopwatch: Stopwatch, steps: int, max_seconds: float) -> Timing:
    """Warm up, then time `step` at least `steps` times.

    After `max_seconds` of timing no further step is begun, but two are always timed. Steps so short that `steps` of
    them take less than half a second are timed more often.

    Args:
        step: runs one step.
        stopwatch: of the device.
        steps: how many, at least.
        max_seconds: of timing.
    """
    warmup = warm_up(step, stopwatch=stopwatch, max_seconds=max_seconds / 2)
    gc.collect()
    expected = fmean(warmup[-WINDOW:])
    count = max(steps, min(MOST, math.ceil(FILL_SECONDS / expected))) if expected > 0 else steps
    return Timing(warmup, stopwatch(step, max(count, FEWEST), max_seconds))


def warm_up(step: Callable[[], object], *, stopwatch: Stopwatch, max_seconds: float) -> list[float]:
    """Seconds of each step run until two windows agree, or `max_seconds` or MAX_WINDOWS are spent.

    Args:
        step: runs one step.
        stopwatch: of the device.
        max_seconds: of warming up.
    """
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
    """The clock of a device.

    Args:
        device: of the trial.
    """
    return cuda_stopwatch if device.type == "cuda" else cpu_stopwatch


def cpu_stopwatch(step: Callable[[], object], count: int, max_seconds: float) -> list[float]:
    """Seconds of each step, on the host's clock.

    Args:
        step: runs one step.
        count: how many steps.
        max_seconds: after which no further one is begun.
    """
    seconds: list[float] = []
    begin = time.perf_counter()
    for _ in range(count):
        before = time.perf_counter()
        step()
        after = time.perf_counter()
        seconds.append(after - before)
        if len(seconds) >= FEWEST and after - begin >= max_seconds:
            break
    return seconds


def cuda_stopwatch(step: Callable[[], object], count: int, max_seconds: float) -> list[float]:
    """As the device saw it: from the end of the step before to the end of this one.

    Args:
        step: runs one step.
        count: how many steps.
        max_seconds: after which no further one is begun.
    """
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
