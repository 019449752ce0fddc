"""The loop of a run: schedule, process, record, and again, until nothing is left or somebody asks for an end."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from dpbench import environment
from dpbench.conditions import Watch
from dpbench.errors import UsageError
from dpbench.experiment import Cell, Experiment
from dpbench.forked import available_cpus
from dpbench.isolation import Answer, Isolation
from dpbench.progress import Progress
from dpbench.schedule import Clock, History, Run, Schedule
from dpbench.selection import Only, select
from dpbench.store import Store, read_records, utc_now
from dpbench.trials import Trial

#: More trials than this beside each other gain little: what may run so is bound by memory traffic and the interpreter.
MAX_WORKERS = 8
#: How often the loop looks up while a trial runs (seconds): for a signal, and to renew the line that is shown.
_TICK = 0.2


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a person asks for. `device` is "auto", "cpu" or "cuda"; `results` the folder of all experiments."""

    experiment: Experiment
    results: Path
    device: str = "auto"
    only: Only = field(default_factory=dict)
    rounds: int | None = None
    retry: Collection[str] = ()
    smoke: bool = False

    @property
    def folder(self) -> Path:
        """Where the records lie."""
        return self.results / (self.experiment.name + ("-smoke" if self.smoke else ""))

    def cells(self, device: str) -> Sequence[Cell]:
        declared = self.experiment.smoke if self.smoke else self.experiment.cells
        return select(declared(device), self.only)


@dataclass(frozen=True)
class Plan:
    """A request on a device, beside what has been recorded."""

    device: str
    schedule: Schedule
    clock: Clock
    fingerprint: Callable[[Trial], str]
    workers: int


def make_plan(request: Request, device: str) -> Plan:
    """What is done and what remains, on `device` ("cpu" or "cuda"). Runs nothing."""
    fingerprint = functools.cache(lambda trial: environment.fingerprint(trial, device))
    records = read_records(request.folder)
    rounds = request.rounds or (1 if request.smoke else request.experiment.rounds)
    history = History(records, fingerprint, request.retry)
    schedule = Schedule(request.experiment.name, request.cells(device), rounds, history)
    workers = min(available_cpus(), MAX_WORKERS)
    alike = (r for r in records if r["trial"].get("device", device) == device)
    return Plan(device, schedule, Clock(alike, workers), fingerprint, workers)


@dataclass
class Report:
    """What a run came to: how many trials ended how, the file they are in, the signal that ended it early, where."""

    outcomes: Counter[str]
    path: Path | None = None
    signum: int | None = None
    device: str = "cpu"


def run(request: Request, progress: Progress) -> Report:
    """Run what remains. Every trial is recorded before the next one starts.

    Raises:
        UsageError: before anything is measured: the device, the selection.
        OSError: the results folder cannot be written to.
    """
    plan = make_plan(request, environment.resolve_device(request.device))
    if plan.schedule.next() is None:
        return Report(Counter(), device=plan.device)
    Store(request.folder, {}).close()  # a folder that cannot be written to is told of before torch is imported
    variables = dict(environment.SERVER_VARIABLES)
    if plan.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    with_torch = any("torch" in trial.modules() for trial, _ in plan.schedule.remaining())
    with Isolation(variables) as isolation:
        try:
            where = environment.gather(plan.device, isolation, with_torch=with_torch)
        except UsageError as error:
            if plan.device == "cpu" or request.device == "cuda":
                raise
            progress.say(f"dpbench: {error}; measuring on the CPU")
            plan = make_plan(request, "cpu")
            where = environment.gather("cpu", isolation)
        return _Loop(request, plan, isolation, Store(request.folder, where), progress, where).run()


class _Loop:
    """Start what can be started, wait for an end, record it."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        isolation: Isolation,
        store: Store,
        progress: Progress,
        where: Mapping[str, Any],
    ) -> None:
        self._experiment = request.experiment.name
        self._plan = plan
        self._isolation = isolation
        self._store = store
        self._progress = progress
        self._watch = Watch(where, lambda warning: progress.say(f"dpbench: {warning}"))
        self._running: dict[int, Run] = {}
        self._outcomes: Counter[str] = Counter()

    def run(self) -> Report:
        try:
            if any(trial.alone for trial, _ in self._plan.schedule.remaining()):
                self._watch.begin()
            with Interruption() as interruption:
                while interruption.signum is None and self._start():
                    self._wait(interruption)
            self._watch.end()
            path = self._store.path if self._outcomes else None
            return Report(self._outcomes, path, interruption.signum, self._plan.device)
        finally:
            self._progress.close()
            self._store.close()

    def _start(self) -> bool:
        """Start all that may run now; False if nothing runs."""
        while len(self._running) < self._plan.workers:
            run = self._plan.schedule.next(self._running.values())
            if run is None:
                break
            self._running[self._isolation.submit(run.trial)] = run
        return bool(self._running)

    def _wait(self, interruption: Interruption) -> None:
        """Until a trial ends. What is shown is computed here, once: while a trial is timed, this process is idle."""
        state = self._state()
        while interruption.signum is None:
            self._progress.now(self._running.values(), *state)
            answers = self._isolation.wait(_TICK)
            for answer in answers:
                self._record(answer)
            if answers:
                return

    def _record(self, answer: Answer) -> None:
        run = self._running.pop(answer.key)
        record = make_record(self._experiment, run, self._plan.fingerprint(run.trial), answer)
        self._store.append(record)
        self._plan.schedule.history.add(record)
        self._plan.clock.add(record)
        self._outcomes[answer.outcome] += 1
        self._progress.ended(run, record, *self._state())
        if run.trial.alone:
            self._watch.ended(record, run.trial.label())

    def _state(self) -> tuple[int, float, float | None]:
        """(trials ended in this run, trials left, seconds left)."""
        remaining = self._plan.schedule.remaining()
        return self._outcomes.total(), sum(count for _, count in remaining), self._plan.clock.left(remaining)


def make_record(experiment: str, run: Run, fingerprint: str, answer: Answer) -> dict[str, Any]:
    """The line that is stored of a trial that ended."""
    return {
        "experiment": experiment,
        "id": run.trial.id,
        "round": run.round,
        "fingerprint": fingerprint,
        "trial": run.trial.describe(),
        "outcome": str(answer.outcome),
        "evidence": answer.evidence,
        "seconds": answer.seconds,
        "utc": utc_now(),
        "load": os.getloadavg()[0],
        "result": answer.result,
    }


class Interruption:
    """While it is entered, SIGINT, SIGTERM and SIGHUP are noted in `signum` instead of striking where they will.

    So a record is never cut off half-way, and the processes are ended in good order.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set them
            self._before = {signum: signal.signal(signum, self._note) for signum in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
