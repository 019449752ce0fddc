"""One backend in a race: verified once, then steps of one batch or another, in seconds of the race's clock."""

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
    """An entry that runs steps of one batch or another.

    `seconds` a step takes of a person's time, `latest` of the clock that ratios are taken from; `setup`: the first two
    steps of a person's time, 0 if there was but one; `samples` of the batch.
    """

    seconds = 0.0
    latest = 0.0
    setup = 0.0
    samples = 0

    def enter(self, workload: Workload, batch: tuple[Any, Any], longest: float = math.inf) -> None:
        """Make its step, verify it, and run it: once if that takes `longest`, else three times.

        Args:
            workload: model, loss and data.
            batch: inputs and targets.
            longest: seconds.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for a few samples that is as fast, and nobody disturbs it
        with self._guarded():
            self._opened(workload, *batch)
        torch.set_num_threads(threads)
        self.move(batch, longest)

    def move(self, batch: tuple[Any, Any], longest: float = math.inf) -> None:
        """Go on with another batch: a first step pays for kernels, a second one may time a planner's routes.

        Args:
            batch: inputs and targets.
            longest: seconds; a first step that takes longer is the only one.
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
        """Whether nothing has gone wrong."""
        return self._step is not None

    def timed(self, count: int) -> list[float]:
        """The seconds of each step; [] if one failed.

        Args:
            count: how many.
        """
        if self._step is None:
            return []
        begin, taken = time.perf_counter(), list[float]()
        with self._guarded():
            taken = clock_of(self.device)(self._step, count)
            self.seconds, self.latest = (time.perf_counter() - begin) / count, taken[-1]
        return taken if self._step is not None else []


def clock_of(device: torch.device) -> Callable[[Step, int], list[float]]:
    """The seconds of each of some steps: CPU time where one thread runs them on a CPU, else a person's time.

    Args:
        device: of the trial.
    """
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
