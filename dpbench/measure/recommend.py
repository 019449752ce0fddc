"""Body of a `RecommendTrial`: every backend beside ordinary training in one process, done within a time.

1. How many threads: the CPUs that other programs leave free now. Times of one thread on a CPU are the process's CPU
   time, which does not count what others take; all other times are a person's.
2. A batch for the race: the one that was asked for, or fewer samples if a step is long.
3. Each backend is opened: verified (`dpbench.measure.verify`), and run three times. The likely ones come first.
4. The race (`dpbench.measure.race`): heats of all, finals of the fast ones, at the batch that was asked for if the time
   allows, and a few turns of the rest. What cannot be believed is measured again, by one thread.
5. The memory of a step of each that still stands at the batch that was asked for.

Whatever is known by now lies in `trial.notes`, so that a process that is ended, or goes away, loses nothing else.
What a backend comes to is its entry's outcome, never the trial's. Ordinary training clips nothing and is not verified.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dpbench.errors import UsageError
from dpbench.execution.recommend.findings import LEFT_OUT, ORDINARY, ROUNDS
from dpbench.measure.bench import device_of, open_workload, parameter_count, tensors_in
from dpbench.measure.contestant import Contestant
from dpbench.measure.explain import sizes
from dpbench.measure.overhead import allocations_that_fail
from dpbench.measure.precision import arithmetic, facts
from dpbench.measure.race import KEPT, KNOWN, TURNS, Race, doubtful, finalists
from dpbench.models.workload import ModelError, Workload
from dpbench.process.linux import available_cpus, busy_cpus
from dpbench.trials import RecommendTrial
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Outcome

#: So much of a CPU that other programs take is nothing.
SPARE = 0.2
#: A step by all threads that takes so many times as long as by one waits for CPUs that others have.
DISTURBED = 1.5
#: An ordinary step of the race takes less than this (seconds), or has FEWEST samples.
RACE_STEP = 0.15
FEWEST = 2
#: To verify and compare the likely backends takes so many ordinary steps of one sample; a backend, so many of the race.
WORTH, OPENING = 120, 15
#: Shares of the time that is left: after which no more are opened, that finals may take if they are to be of more
#: samples than the heats, and after which they have no more than ROUNDS rounds.
OPEN_SHARE, MOVE_SHARE, FINAL_SHARE = 0.5, 0.7, 0.6
#: Backends that are opened in any case: the likely winner, and what people know.
FIRST = 3
#: By how much the costs of the rest are underrated at worst.
UNSURE = 1.5
#: A first step so many times as long as ordinary training's is out of the race, if it is long in itself (seconds).
HOPELESS, LONG = 8.0, 1.0
#: After a first step of ordinary training that takes longer there is no second one (seconds).
LONGEST = 3.0
#: A step that is watched for its memory takes so many times as long, and some seconds.
WATCHED, WATCHING = 3.0, 1.0
#: Seconds for all of it where nobody says.
WITHIN = 60.0


def run(trial: RecommendTrial) -> dict[str, Any]:
    """{"parameters", "precision", "inputs", "threads", "busy", "backends", "slow"}; of each backend an entry.

    An entry is as an `OverheadTrial`'s, with "ratios" to ordinary training, "batch_size" and "step_seconds" in place of
    turns. "busy" is how many CPUs others use. "slow" is None, or {"samples", "seconds"} of an ordinary step too long
    for anything to be compared (seconds None: it did not end). Of a model that cannot be trained: {"usage": line}.

    Args:
        trial: which model, under which backends.
    """
    device = device_of(trial.device)
    with arithmetic(trial.precision, device), allocations_that_fail(device):
        comparison = Comparison(trial, device)
        try:
            image_size, num_classes = sizes(trial)
            comparison.open(trial.replace(image_size=image_size, num_classes=num_classes))
            comparison.carry_out()
        except UsageError as error:
            return {"usage": str(error)}
        comparison.found["precision"] = facts(trial.precision, comparison.workload, *comparison.batch(trial.batch_size))
        return comparison.result()


class Comparison:
    """One trial on its way to its result.

    Args:
        trial: which model, under which backends.
        device: of it.
    """

    workload: Workload

    def __init__(self, trial: RecommendTrial, device: torch.device) -> None:
        self.trial, self.device, self.begin = trial, device, time.monotonic()
        self.until = self.begin + WITHIN if trial.until is None else trial.until
        self.race = Race(tell=self.note, seed=trial.seed)
        self.entries = {name: Contestant(name, trial, device, verified=name != ORDINARY) for name in trial.backends}
        for name, entry in self.entries.items():
            if name != ORDINARY:
                entry.record |= {"outcome": Outcome.TIMEOUT, "evidence": LEFT_OUT}
        self.found: dict[str, Any] = {"parameters": None, "inputs": [], "threads": None, "busy": None, "slow": None}
        self.opening: str | None = None

    def batch(self, samples: int) -> tuple[Any, Any]:
        """Inputs and targets.

        Args:
            samples: how many.
        """
        return self.workload.batch(samples)

    def open(self, trial: RecommendTrial) -> None:
        """Build the model.

        Args:
            trial: with its sizes.

        Raises:
            UsageError: it cannot be built, or there is nothing to train.
        """
        self.note("building the model")
        self.workload = open_workload(trial)
        count = parameter_count(self.workload.model)
        if not count:
            raise ModelError("a model with parameters to train", trial.model)
        shapes = [list(tensor.shape) for tensor in tensors_in(self.batch(trial.batch_size)[0])]
        self.found |= {"parameters": count, "inputs": shapes}

    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def carry_out(self) -> None:
        """Measure what the time allows.

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
        """Whether an ordinary step by all threads takes much longer than by one."""
        ordinary, threads = self.entries[ORDINARY], torch.get_num_threads()
        if self.device.type != "cpu" or threads == 1:
            return False
        (together,) = ordinary.timed(1) or [0.0]
        torch.set_num_threads(1)
        (alone,) = ordinary.timed(1) or [math.inf]
        torch.set_num_threads(threads)
        return together > DISTURBED * alone

    def _one_thread(self) -> bool:
        """Go on with one thread, whose CPU time other programs hardly disturb; False if there is only one."""
        if self.device.type != "cpu" or torch.get_num_threads() == 1:
            return False
        torch.set_num_threads(1)
        return True

    def _race_samples(self, ordinary: Contestant) -> int:
        """Samples of the race; and whether there is any sense in one."""
        samples = 1
        self.found["slow"] = {"samples": samples, "seconds": None}
        self.note("ordinary training")
        ordinary.enter(self.workload, self.batch(samples), LONGEST)
        if WORTH * ordinary.seconds > self.left() and ordinary.setup and self._one_thread():
            ordinary.move(self.batch(samples))
        if WORTH * ordinary.seconds > self.left():
            self.found["slow"] = {"samples": samples, "seconds": ordinary.seconds}
            return samples
        self.found["slow"] = None
        while samples < self.trial.batch_size and (samples < FEWEST or 0 < 2 * ordinary.seconds < RACE_STEP):
            samples = min(2 * samples, self.trial.batch_size)
            ordinary.move(self.batch(samples))
        return samples

    def _opened(self, ordinary: Contestant, samples: int) -> list[Contestant]:
        """Those that are exact, and have run, ordinary training among them."""
        batch, longest = self.batch(samples), 0.0
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
        """Rounds of the fast ones at the batch that was asked for, or at what the time allows: of how many samples."""
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
                entry.move(self.batch(full))
        self._compare(racing)
        return full

    def _rest(self, samples: int) -> None:
        """A few turns at the batch of the finals for those that are not in it, Opacus first, as the time allows."""
        ordinary = self.entries[ORDINARY]
        rest = [e for e in self.entries.values() if e.setup and e.stands and e.samples != samples]
        for entry in sorted(rest, key=lambda e: (not e.name.startswith(KNOWN), e.seconds)):
            costs = entry.setup + (1 + TURNS) * entry.seconds
            if UNSURE * (costs * samples / entry.samples + TURNS * ordinary.seconds) < FINAL_SHARE * self.left():
                entry.move(self.batch(samples))
                self._keep(self.race.heats([ordinary, entry], self.until))

    def _again(self) -> None:
        """New rounds in place of those that cannot be believed, by one thread."""
        ratios = {name: entry.record.get("ratios", ()) for name, entry in self.entries.items()}
        names = doubtful(ratios)
        if names and self._one_thread():  # all rounds of the finals, or they would not be of one kind
            names += [name for name, rounds in ratios.items() if len(rounds) >= ROUNDS and name not in names]
        ordinary = self.entries[ORDINARY]
        for samples in sorted({self.entries[name].samples for name in names}, reverse=True):
            if ordinary.samples != samples:
                ordinary.move(self.batch(samples))
            again = [self.entries[name] for name in names if self.entries[name].samples == samples]
            self._compare([ordinary, *(entry for entry in again if entry is not ordinary)])

    def _compare(self, racing: Sequence[Contestant]) -> None:
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
        """Of each that stands at the batch that was asked for, as the time allows."""
        for entry in self.entries.values():
            if entry.samples == samples == self.trial.batch_size and WATCHING + WATCHED * entry.seconds < self.left():
                self.note(f"the memory of {entry.name}")
                entry.take_memory()

    def note(self, words: str) -> None:
        """Write down what goes on, and what is known by now.

        Args:
            words: what begins now; "" for nothing new.
        """
        if not self.trial.notes:
            return
        notes = Path(self.trial.notes)
        new = notes.with_suffix(".new")
        new.write_text(to_json({"doing": words, "opening": self.opening, "result": self.result()}))
        os.replace(new, notes)

    def result(self) -> dict[str, Any]:
        """What is known by now."""
        return self.found | {"backends": {name: entry.record for name, entry in self.entries.items()}}
