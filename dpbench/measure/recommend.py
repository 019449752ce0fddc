"""Run a `RecommendTrial`: compare every backend with ordinary training in one process, within a time limit.

1. Use as many threads as other programs leave CPUs free. With one thread on a CPU, times are the process's CPU time,
   which excludes other programs; all other times are wall times.
2. Choose a batch for the race: the requested one, or fewer samples if a step is long.
3. Open each backend, the likely winners first: verify it (`dpbench.measure.verify`), and run it three times.
4. Race (`dpbench.measure.race`): heats of all, finals of the fast ones, at the requested batch if the time allows, and
   a few turns of the rest. Measure doubtful ratios again with one thread.
5. Measure the memory of a step of each remaining backend at the requested batch.

The results so far are in `trial.notes`, so they survive if the process ends. A backend's failure is its entry's
outcome, never the trial's. Ordinary training clips nothing and is not verified.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clipping.core.batches import leading_dimension, tensors_of
from dpbench.errors import UsageError
from dpbench.execution.recommend.findings import LEFT_OUT, ORDINARY, ROUNDS
from dpbench.measure.bench import Step, device_of, open_workload, parameter_count
from dpbench.measure.explain import sizes
from dpbench.measure.overhead import Entry, allocations_that_fail
from dpbench.measure.precision import arithmetic, facts
from dpbench.measure.race import KEPT, KNOWN, TURNS, Race, doubtful, finalists
from dpbench.measure.timing import cpu_stopwatch, stopwatch_for
from dpbench.models.workload import ModelError, Workload
from dpbench.process.linux import available_cpus, busy_cpus
from dpbench.trials import RecommendTrial
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Outcome

#: Ignore other programs that use less than this share of a CPU.
SPARE = 0.2
#: If a step takes this many times as long by all threads as by one, other programs disturb it.
DISTURBED = 1.5
#: An ordinary step of the race takes less than RACE_STEP seconds, or has FEWEST samples.
RACE_STEP = 0.15
FEWEST = 2
#: Cost of comparing the likely backends, in ordinary steps of one sample; of opening one, in steps of the race.
WORTH, OPENING = 120, 15
#: Shares of the remaining time: for opening backends; for finals with more samples than the heats; and for finals
#: with more than ROUNDS rounds.
OPEN_SHARE, MOVE_SHARE, FINAL_SHARE = 0.5, 0.7, 0.6
#: Backends opened in any case: the likely winner and the well-known ones.
FIRST = 3
#: Safety factor on the estimated costs of the rest.
UNSURE = 1.5
#: Drop a backend with a first step of more than HOPELESS times ordinary training's and more than LONG seconds.
HOPELESS, LONG = 8.0, 1.0
#: Ordinary training runs no second step if the first takes longer than this (seconds).
LONGEST = 3.0
#: Measuring a step's memory takes WATCHED times the step plus WATCHING seconds.
WATCHED, WATCHING = 3.0, 1.0
#: Default time limit, in seconds.
WITHIN = 60.0


def run(trial: RecommendTrial) -> dict[str, Any]:
    """{"parameters", "precision", "inputs", "threads", "busy", "backends", "slow"}; one entry for each backend.

    An entry is as an `OverheadTrial`'s, with "ratios" to ordinary training, "batch_size" and "step_seconds" in place of
    turns. "busy" is how many CPUs others use. "slow" is None, or {"samples", "seconds"} of an ordinary step too long
    for a comparison (seconds None: it did not end). For a model that cannot be trained: {"usage": line}.
    """
    device = device_of(trial.device)
    with arithmetic(trial.precision, device), allocations_that_fail(device):
        comparison = _Comparison(trial, device)
        try:
            image_size, num_classes = sizes(trial)
            comparison.open(trial.replace(image_size=image_size, num_classes=num_classes))
            comparison.carry_out()
        except UsageError as error:
            return {"usage": str(error)}
        comparison.found["precision"] = facts(
            trial.precision, comparison.workload, *comparison.workload.batch(trial.batch_size)
        )
        return comparison.result()


class _Comparison:
    """One trial and its results so far.

    Args:
        trial: models and backends.
        device: of the trial.
    """

    workload: Workload

    def __init__(self, trial: RecommendTrial, device: torch.device) -> None:
        self.trial, self.device, self.begin = trial, device, time.monotonic()
        self.until = self.begin + WITHIN if trial.until is None else trial.until
        self.race = Race(tell=self.note, seed=trial.seed)
        self.entries = {name: _Contestant(name, trial, device, verified=name != ORDINARY) for name in trial.backends}
        for name, entry in self.entries.items():
            if name != ORDINARY:
                entry.record |= {"outcome": Outcome.TIMEOUT, "evidence": LEFT_OUT}
        self.found: dict[str, Any] = {"parameters": None, "inputs": [], "threads": None, "busy": None, "slow": None}
        self.opening: str | None = None

    def open(self, trial: RecommendTrial) -> None:
        """Build the model.

        Raises:
            UsageError: it cannot be built, or has no parameters to train.
        """
        self.note("building the model")
        self.workload = open_workload(trial)
        count = parameter_count(self.workload.model)
        if not count:
            raise ModelError("a model with parameters to train", trial.model)
        shapes = [list(tensor.shape) for tensor in tensors_of(self.workload.batch(trial.batch_size)[0])]
        self.found |= {"parameters": count, "inputs": shapes}

    def left(self) -> float:
        """Remaining seconds."""
        return self.until - time.monotonic()

    def carry_out(self) -> None:
        """Measure as much as the time allows.

        Raises:
            UsageError: the model cannot be trained at all.
        """
        if self.device.type == "cpu":
            self.found["busy"] = busy = busy_cpus()
            torch.set_num_threads(max(1, available_cpus() - math.ceil(busy - SPARE)))
        ordinary = self.entries[ORDINARY]
        samples = self._race_samples(ordinary)
        if ordinary.record["outcome"] in (Outcome.ERROR, Outcome.UNSUPPORTED):
            raise ModelError(f"{self.trial.model} to train", ordinary.record["evidence"].strip().splitlines()[-1])
        if not ordinary.stands or self.found["slow"]:
            return
        standing = self._opened(ordinary, samples)
        ratios = self.race.heats(standing, self.until)
        if doubtful(ratios) and self._one_thread():
            ratios = self.race.heats(standing, self.until)
        self._keep(ratios)
        samples = self._finals(samples)
        self._rest(samples)
        self._again()
        self._memory(samples)

    def _disturbed(self) -> bool:
        """True if an ordinary step takes much longer by all threads than by one."""
        ordinary, threads = self.entries[ORDINARY], torch.get_num_threads()
        if self.device.type != "cpu" or threads == 1:
            return False
        (together,) = ordinary.timed(1) or [0.0]
        torch.set_num_threads(1)
        (alone,) = ordinary.timed(1) or [math.inf]
        torch.set_num_threads(threads)
        return together > DISTURBED * alone

    def _one_thread(self) -> bool:
        """Use one thread from now on, since other programs hardly disturb its CPU time; False if there is only one."""
        if self.device.type != "cpu" or torch.get_num_threads() == 1:
            return False
        torch.set_num_threads(1)
        return True

    def _race_samples(self, ordinary: _Contestant) -> int:
        """The number of samples for the race; sets "slow" if a race makes no sense."""
        samples = 1
        self.found["slow"] = {"samples": samples, "seconds": None}
        self.note("ordinary training")
        ordinary.enter(self.workload, self.workload.batch(samples), LONGEST)
        if WORTH * ordinary.seconds > self.left() and ordinary.setup and self._one_thread():
            ordinary.move(self.workload.batch(samples))
        if WORTH * ordinary.seconds > self.left():
            self.found["slow"] = {"samples": samples, "seconds": ordinary.seconds}
            return samples
        self.found["slow"] = None
        while samples < self.trial.batch_size and (samples < FEWEST or 0 < 2 * ordinary.seconds < RACE_STEP):
            samples = min(2 * samples, self.trial.batch_size)
            ordinary.move(self.workload.batch(samples))
        return samples

    def _opened(self, ordinary: _Contestant, samples: int) -> list[_Contestant]:
        """The entries that are exact and have run, including ordinary training."""
        batch, longest = self.workload.batch(samples), 0.0
        latest = time.monotonic() + OPEN_SHARE * self.left()
        ordinary.move(batch)
        self._keep({ORDINARY: [1.0]})
        for place, (name, entry) in enumerate(self.entries.items()):
            begin = time.monotonic()
            if name == ORDINARY or (place > FIRST and begin + longest > latest):
                continue
            if self._disturbed():
                self._one_thread()
            self.opening = name
            self.note(f"opening {name}")
            entry.record |= {"outcome": Outcome.OK, "evidence": None}
            patience = math.inf if place <= FIRST else max(HOPELESS * ordinary.seconds, LONG)
            entry.enter(self.workload, batch, patience)
            self._keep({name: [entry.latest / ordinary.latest]} if entry.stands else {})
            longest = max(longest, min(time.monotonic() - begin, OPENING * ordinary.seconds))
        self.opening = None
        return [entry for entry in self.entries.values() if entry.setup and entry.stands]

    def _finals(self, samples: int) -> int:
        """Run the finals at the requested batch, or as many samples as the time allows; returns their number."""
        ratios = {name: entry.record.get("ratios", ()) for name, entry in self.entries.items() if entry.setup}
        full, kept, available = self.trial.batch_size, KEPT, MOVE_SHARE * self.left()
        while True:
            racing = [self.entries[name] for name in (ORDINARY, *finalists(ratios, kept))]
            costs = sum(entry.setup * (full != samples) + (1 + ROUNDS) * entry.seconds for entry in racing)
            if costs * full / samples <= available or (full == samples and kept == 1):
                break
            full, kept = (max(samples, full // 2), kept) if full > samples else (full, kept - 1)
        if full != samples:
            for entry in racing:
                self.note(f"{entry.name} with {full} samples")
                entry.move(self.workload.batch(full))
        self._compare(racing)
        return full

    def _rest(self, samples: int) -> None:
        """Run a few turns of the others at the batch of the finals, Opacus first, as the time allows."""
        ordinary = self.entries[ORDINARY]
        rest = [e for e in self.entries.values() if e.setup and e.stands and e.samples != samples]
        for entry in sorted(rest, key=lambda e: (not e.name.startswith(KNOWN), e.seconds)):
            costs = entry.setup + (1 + TURNS) * entry.seconds
            if UNSURE * (costs * samples / entry.samples + TURNS * ordinary.seconds) < FINAL_SHARE * self.left():
                entry.move(self.workload.batch(samples))
                self._keep(self.race.heats([ordinary, entry], self.until))

    def _again(self) -> None:
        """Replace doubtful rounds by new ones with one thread."""
        ratios = {name: entry.record.get("ratios", ()) for name, entry in self.entries.items()}
        names = doubtful(ratios)
        if names and self._one_thread():  # repeat all finals, so that all rounds compare
            names += [name for name, rounds in ratios.items() if len(rounds) >= ROUNDS and name not in names]
        ordinary = self.entries[ORDINARY]
        for samples in sorted({self.entries[name].samples for name in names}, reverse=True):
            if ordinary.samples != samples:
                ordinary.move(self.workload.batch(samples))
            again = [self.entries[name] for name in names if self.entries[name].samples == samples]
            self._compare([ordinary, *(entry for entry in again if entry is not ordinary)])

    def _compare(self, racing: Sequence[_Contestant]) -> None:
        standing = [entry for entry in racing if entry.stands]
        self._keep(self.race.finals(standing, time.monotonic() + FINAL_SHARE * self.left(), self.until))

    def _keep(self, ratios: dict[str, list[float]]) -> None:
        for name, rounds in ratios.items():
            entry = self.entries[name]
            if len(rounds) >= min(ROUNDS, len(entry.record.get("ratios", ()))) > 0 or not entry.record.get("ratios"):
                entry.record |= {"ratios": rounds, "batch_size": entry.samples, "step_seconds": entry.seconds}
        self.found["threads"] = torch.get_num_threads()
        self.note("")

    def _memory(self, samples: int) -> None:
        """Measure the memory of each backend that ran at the requested batch, as the time allows."""
        for entry in self.entries.values():
            if entry.samples == samples == self.trial.batch_size and WATCHING + WATCHED * entry.seconds < self.left():
                self.note(f"the memory of {entry.name}")
                entry.take_memory()

    def note(self, words: str) -> None:
        """Write down the progress and the results so far."""
        if not self.trial.notes:
            return
        notes = Path(self.trial.notes)
        new = notes.with_suffix(".new")
        new.write_text(to_json({"doing": words, "opening": self.opening, "result": self.result()}))
        os.replace(new, notes)

    def result(self) -> dict[str, Any]:
        """The results so far."""
        return self.found | {"backends": {name: entry.record for name, entry in self.entries.items()}}


class _Contestant(Entry):
    """An entry that can change its batch.

    `seconds`: wall time of a step; `latest`: time of a step by the clock that gives the ratios; `setup`: wall time of
    the first two steps, 0 after a single step; `samples`: the size of the batch.
    """

    seconds = 0.0
    latest = 0.0
    setup = 0.0
    samples = 0

    def enter(self, workload: Workload, batch: tuple[Any, Any], longest: float = math.inf) -> None:
        """Open its step, verify it, and run it: once if that takes `longest`, else three times."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as fast for a few samples, and undisturbed by other programs
        with self._guarded():
            self._opened(workload, *batch)
            self.record["way"] = self._way()
        torch.set_num_threads(threads)
        self.move(batch, longest)

    def move(self, batch: tuple[Any, Any], longest: float = math.inf) -> None:
        """Change the batch. The first step pays for kernels; a second may time a planner's routes."""
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
            alone = self.device.type == "cpu" and torch.get_num_threads() == 1  # then CPU time is its time
            clock = partial(cpu_stopwatch, now=time.process_time) if alone else stopwatch_for(self.device)
            taken = clock(self._step, count, math.inf)
            self.seconds, self.latest = (time.perf_counter() - begin) / count, taken[-1]
        return taken if self._step is not None else []
