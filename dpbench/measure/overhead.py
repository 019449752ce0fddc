"""Run an `OverheadTrial`: one model, many backends, interleaved, so that ratios share one time and place.

A ratio between two processes includes all that differs between them: frequency, neighbours, the allocator's state.
Here every backend, ordinary training among them, takes a turn in every round, in a fresh order:

1. Open each backend on the one model, verify it, and warm it up until it settles. The first step pays for kernels, the
   second may calibrate a planner.
2. Run rounds of turns. A turn is one step, or as many as fill a fifth of a second. Reference cycles are collected
   between turns, untimed. Caches are not emptied: training does not empty them either.
3. Measure the memory of one more step of each backend, then close it. State that a backend keeps from step to step
   counts towards its own peak only (see `Entry.take_memory`).

The result is ``{"parameters", "precision", "backends": {name: entry}}``; ``precision`` has torch's switches
(`dpbench.measure.precision.facts`). An entry has ``outcome`` and ``evidence``, and, as far as the backend came,
``verification``, ``coverage``, ``warmup_seconds``, ``way`` (see `clipping.program.graphs`), ``turns``, ``loss`` and
``memory``. A turn is ``{"round", "position", "step_seconds"}``; on CUDA also ``gpu`` (`dpbench.measure.counters`). A
backend that is refused, wrong, out of memory or broken stops; the others continue. An outcome that is not final becomes
the record's too (`PartlyFailed`), so that ``--retry`` finds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import random
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from clipping import Flat, UnsupportedModel
from clipping.core.types import Problem
from clipping.program.graphs import BEFORE, Graphs
from clipping.program.step import Way
from dpbench.measure import counters, verify
from dpbench.measure.bench import Memory, Step, device_of, open_workload, parameter_count
from dpbench.measure.flops import model_flops
from dpbench.measure.memory import free_in_pools, peak_of
from dpbench.measure.precision import arithmetic, facts
from dpbench.measure.timing import WINDOW, Stopwatch, stopwatch_for, warm_up
from dpbench.models.workload import Workload
from dpbench.trials import OverheadTrial
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.outcome import Outcome, noted, refuse_failed

FEWEST_ROUNDS = 3
#: A turn of short steps lasts TURN_SECONDS, with at most MOST_IN_A_TURN steps.
TURN_SECONDS = 0.2
MOST_IN_A_TURN = 20
#: Steps after which a backend has compiled, and compared its graph with the eager step.
TO_A_GRAPH = BEFORE + 4
#: The share of free memory that a trial on a CPU leaves to other processes.
SPARED = 0.05


def run(trial: OverheadTrial) -> dict[str, Any]:
    """See the module's docstring.

    Raises:
        PartlyFailed: an entry is a `mismatch` or an `error`; with the whole result.
        NotHere: the device lacks this precision.
    """
    device = device_of(trial.device)
    return compared(trial, device, [Entry(name, trial, device) for name in trial.backends])


def compared(trial: OverheadTrial, device: torch.device, entries: Sequence[Entry]) -> dict[str, Any]:
    """Run all entries on one batch: open them, run rounds of turns, and measure the memory of each.

    Raises:
        PartlyFailed: see `run`.
    """
    with arithmetic(trial.precision, device), allocations_that_fail(device):
        workload = open_workload(trial)
        batch = workload.batch(trial.batch_size)
        for entry in entries:
            entry.open(workload, *batch)
        for number in range(trial.rounds):
            due = [entry for entry in order(entries, trial.seed, number) if number in entry.rounds]
            for position, entry in enumerate(due):
                entry.turn(number, position)
        for entry in entries:
            entry.take_memory()
        told = facts(trial.precision, workload, *batch)
        flops = model_flops(workload, *batch, trial.batch_size) if device.type == "cuda" else None
    for entry in entries:
        if flops is not None and entry.record["outcome"] == Outcome.OK:
            entry.record["model_flops"] = flops
    result: dict[str, Any] = {
        "parameters": parameter_count(workload.model),
        "precision": told,
        "backends": {entry.name: entry.record for entry in entries},
    }
    refuse_failed(result["backends"], result)
    return result


def order(entries: Sequence[Any], seed: int, number: int) -> list[Any]:
    """A permutation of the entries, determined by seed and round."""
    return random.Random(f"{seed}/{number}").sample(entries, len(entries))


def rounds_for(turn_seconds: float, rounds: int, max_seconds: float) -> list[int]:
    """The rounds, evenly spread, in which a backend takes a turn: as many as fit in `max_seconds`, at least three.

    Args:
        turn_seconds: the time of a turn.
        rounds: of the trial.
        max_seconds: the limit on the time of its turns.
    """
    count = min(rounds, max(FEWEST_ROUNDS, int(max_seconds / turn_seconds) if turn_seconds > 0 else rounds))
    return [0] if count == 1 else [round(i * (rounds - 1) / (count - 1)) for i in range(count)]


@dataclass
class Entry:
    """One backend, from opening to record.

    `fewest`: least number of steps before timing; `lead`: untimed steps at the beginning of each turn; `verified`:
    whether to compare with the oracle first.
    """

    name: str
    trial: OverheadTrial
    device: torch.device
    record: dict[str, Any] = field(default_factory=lambda: {"outcome": Outcome.OK, "evidence": None})
    rounds: Sequence[int] = ()
    steps: int = 1
    fewest: int = WINDOW
    verified: bool = True
    private: bool = True
    lead: int = 0
    _step: Step | None = None

    def open(self, workload: Workload, inputs: Any, targets: Any) -> None:
        """Verify it, and warm it up."""
        with self._guarded():
            self._opened(workload, inputs, targets)
            assert self._step is not None
            gc.collect()
            stopwatch = self._stopwatch()
            seconds = warm_up(self._step, stopwatch=stopwatch, max_seconds=self.trial.max_seconds / 2)
            fewest = max(self.fewest, TO_A_GRAPH if self.trial.compiled else 0)
            if len(seconds) < fewest:
                seconds += stopwatch(self._step, fewest - len(seconds), math.inf)
            expected = min(seconds)  # the first step pays for kernels, the second may time a planner's routes
            self.steps = max(1, min(MOST_IN_A_TURN, math.ceil(TURN_SECONDS / expected))) if expected > 0 else 1
            self.rounds = range(self.trial.rounds)
            if self.private:  # each ratio needs a turn of ordinary training in its round
                turn = (self.lead + self.steps) * expected
                self.rounds = rounds_for(turn, self.trial.rounds, self.trial.max_seconds)
            self.record |= {"warmup_seconds": seconds, "turns": [], "way": self._way()}
            if self.trial.way not in ("best", self._way()):
                raise _NoGraph(self.name, self.trial.way)

    def _stopwatch(self) -> Stopwatch:
        """The clock of its steps."""
        return stopwatch_for(self.device)

    def _opened(self, workload: Workload, inputs: Any, targets: Any) -> None:
        """Create its step."""
        clip = Flat(max_grad_norm=self.trial.max_grad_norm)
        cls = backend_class(self.name)
        if self.trial.compiled and not cls.compilable:
            raise _NoGraph(self.name, self.trial.way)
        backend = cls(workload.model, workload.loss_fn, clip=clip, verify=False, compile=self.trial.compiled)
        keep_to(self.trial.way, backend.graphs)
        self._step, self.private = Step(backend, inputs, targets), backend.private
        if self.verified:
            verify.verified(backend, inputs, targets, self.trial.precision, self.record)

    def turn(self, number: int, position: int) -> None:
        """Time its steps of one round."""
        if self._step is None:
            return
        gc.collect()
        with self._guarded():
            for _ in range(self.lead):
                self._step()
            seconds = self._stopwatch()(self._step, self.steps, math.inf)
            told = {"gpu": counters.sample(self.device)} if self.device.type == "cuda" else {}
            self.record["turns"].append({"round": number, "position": position, "step_seconds": seconds} | told)

    def take_memory(self) -> None:
        """Measure the peak of one more step, then close the backend.

        On a CPU, memory of other backends is not seen: the peak is the baseline of model and batch, plus allocations
        during the step. On CUDA the allocator's peak includes everything; memory that remains after this backend
        closes, beyond the baseline, belongs to the others (and to libraries' workspaces).
        """
        if self._step is None:
            return
        with self._guarded():
            assert self._step.losses is not None
            self.record["loss"] = float(self._step.losses.double().mean())
            memory = self._peak()
            self._close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # frees the pools of its graphs
                memory = without(self._left_by_others(memory) + free_in_pools(self.device), memory)
            self.record["memory"] = memory.as_record()

    def _way(self) -> str:
        assert self._step is not None
        return "eager" if self._step.graphs is None else self._step.graphs.way

    def _peak(self) -> Memory:
        assert self._step is not None
        self.record["coverage"] = dict(self._step.backend.coverage)
        fresh = dataclasses.replace(self._step, losses=None)  # frees nothing of an earlier step
        return peak_of(fresh, self.device)

    def _left_by_others(self, memory: Memory) -> int:
        """Bytes of a CUDA device after this backend closes, without the shared baseline."""
        return torch.cuda.memory_allocated(self.device) - memory.baseline_bytes

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Record an error as this entry's outcome, and end this entry."""
        with noted(self.record):
            yield
        if self.record["outcome"] != Outcome.OK:
            self.rounds = ()
            self._close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _close(self) -> None:
        if self._step is not None:
            self._step.close()
        self._step = None
        gc.collect()


def keep_to(way: str, graphs: Graphs | None) -> None:
    """Run graphs in one way of `WAYS`, the same for each backend.

    Args:
        way: of the trial.
        graphs: not run yet; None if steps run eagerly.
    """
    if graphs is not None and way != "best":
        graphs.only = cast(Way, way)


class _NoGraph(UnsupportedModel):
    """A step is no program, or does not run in this way here.

    Args:
        name: of the backend or engine.
        way: that was asked for.
    """

    def __init__(self, name: str, way: str) -> None:
        super().__init__(name, [Problem("step", f"is no graph that runs {way} here", "way='eager'")])


def without(others: int, memory: Memory) -> Memory:
    """Subtract the others' bytes from a peak on a CUDA device, where the allocator counts everything.

    Args:
        others: bytes that are allocated, or free in the pools of CUDA graphs.
        memory: as the device's allocator has it.
    """
    assert memory.reserved_bytes is not None
    return dataclasses.replace(
        memory, peak_bytes=memory.peak_bytes - others, reserved_bytes=memory.reserved_bytes - others
    )


@contextlib.contextmanager
def allocations_that_fail(device: torch.device) -> Iterator[None]:
    """On a CPU: make allocations beyond the free memory fail, rather than have the kernel kill the process.

    So one backend that needs too much is `oom`, and the others are not lost.
    """
    if device.type != "cpu":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _status_bytes("/proc/self/status", "VmData") + int((1 - SPARED) * _available_bytes())
    ends = [end for end in (soft, hard) if end != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *ends]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _available_bytes() -> int:
    """Free memory of the machine, or of the control group if it has a limit."""
    available = _status_bytes("/proc/meminfo", "MemAvailable")
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:  # no such control group
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def _status_bytes(path: str, name: str) -> int:
    """Bytes of a line "name:  123 kB" in a file of /proc."""
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
