"""One backend in a race: verified once, then timed on batches of different sizes by the race's clock."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from clipping.core.batches import leading_dimension
from dpbench.measure.bench import Step
from dpbench.measure.overhead import Entry
from dpbench.measure.timing import cuda_stopwatch
from dpbench.models.workload import Workload


class Contestant(Entry):
    """An entry that can change its batch.

    `seconds`: wall time of a step; `latest`: time of a step by the clock that gives the ratios; `setup`: wall time of
    the first two steps, 0 after a single step; `samples`: the size of the batch.
    """

    seconds = 0.0
    latest = 0.0
    setup = 0.0
    samples = 0

    def enter(self, workload: Workload, batch: tuple[Any, Any], longest: float = math.inf) -> None:
        """Open its step, verify it, and run it: once if that takes `longest`, else three times.

        Args:
            longest: seconds.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as fast for a few samples, and undisturbed by other programs
        with self._guarded():
            self._opened(workload, *batch)
            self.record["way"] = self._way()
        torch.set_num_threads(threads)
        self.move(batch, longest)

    def move(self, batch: tuple[Any, Any], longest: float = math.inf) -> None:
        """Change the batch. The first step pays for kernels; a second may time a planner's routes.

        Args:
            longest: seconds; if the first step takes longer, no second follows.
        """
        if self._step is None:
            return
        self._step = Step(self._step.backend, *batch)
        self.samples = leading_dimension(*batch)
        begin = time.perf_counter()
        self.timed(1)
        if self.stands and self.seconds < longest:
            self.timed(1)
            self.setup = time.perf_counter() - begin
            self.timed(1)

    @property
    def stands(self) -> bool:
        """True unless something has gone wrong."""
        return self._step is not None

    def timed(self, count: int) -> list[float]:
        """The seconds of each step; [] if one failed."""
        if self._step is None:
            return []
        begin, taken = time.perf_counter(), list[float]()
        with self._guarded():
            taken = _clock_of(self.device)(self._step, count)
            self.seconds, self.latest = (time.perf_counter() - begin) / count, taken[-1]
        return taken if self._step is not None else []


def _clock_of(device: torch.device) -> Callable[[Step, int], list[float]]:
    """Times each of several steps: by CPU time for a single thread on a CPU, else by wall time."""
    if device.type == "cuda":
        return lambda step, count: cuda_stopwatch(step, count, math.inf)
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def per_step(step: Step, count: int) -> list[float]:
        marks = [now()]
        for _ in range(count):
            step()
            marks.append(now())
        return [after - before for before, after in itertools.pairwise(marks)]

    return per_step
