"""Plan and run a request: what remains of it, and where it is measured."""

import contextlib
import importlib
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpbench.errors import RunEnded, UsageError, one_of
from dpbench.execution.allowance import Allowance
from dpbench.execution.executors import Cluster
from dpbench.execution.lock import held
from dpbench.execution.loop import Here, Loop, Report, Shards
from dpbench.execution.machines import Machines, folder_name, machines_of, name_folder
from dpbench.execution.progress import Progress
from dpbench.execution.schedule import Block, Clock, History, Schedule, key_of
from dpbench.execution.selection import Only, select
from dpbench.experiment import Cell, Experiment, MaxBatch, check_rounds
from dpbench.process.linux import available_cpus
from dpbench.process.parent import Isolation
from dpbench.process.variables import server_variables
from dpbench.records import environment
from dpbench.records.store import Store, read_runs
from dpbench.trials import Trial
from dpbench.trials.outcome import RETRYABLE

__all__ = ["Plan", "Report", "Request", "make_plan", "run"]

#: More parallel trials than this gain little: they are bound by memory traffic and the interpreter.
MAX_WORKERS = 8
#: Executors other than this machine; each module has run(request, progress).
_CLUSTERS = {"ray": "dpbench.execution.executors.on_ray", "slurm": "dpbench.execution.executors.on_slurm"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a run. `device` is "auto", "cpu" or "cuda"; `results` is the folder of all experiments.

    `cluster`: where to measure, if not on this machine. `blocks`: a part of the experiment, by the keys of
    `dpbench.execution.schedule`, for a job of a cluster; `sweep`: the sweep that its records belong to.
    `reference`: the name by which another process finds the experiment. `retry_before`: `retry` applies only to records
    before this time. `minutes`: do not start trials that would end later.

    Raises:
        UsageError: rounds, outcomes or minutes that cannot be, or minutes on a cluster.
    """

    experiment: Experiment
    results: Path
    device: str = "auto"
    only: Only = field(default_factory=dict)
    rounds: int | None = None
    retry: Collection[str] = ()
    smoke: bool = False
    cluster: Cluster | None = None
    blocks: Collection[str] | None = None
    sweep: Mapping[str, Any] | None = None
    reference: str | None = None
    retry_before: str | None = None
    minutes: float | None = None
    wait: bool = False

    def __post_init__(self) -> None:
        if self.rounds is not None:
            check_rounds(self.rounds, "--rounds")
        for name in self.retry:
            one_of("an outcome for --retry", name, sorted(map(str, RETRYABLE)))
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UsageError("a positive number for --minutes", self.minutes)
        if self.minutes is not None and self.cluster is not None:  # the cluster decides when a trial starts
            raise UsageError("--minutes with --executor local", f"--executor {self.cluster.name}")

    @property
    def folder(self) -> Path:
        """The folder of the records."""
        return self.results / (self.experiment.name + ("-smoke" if self.smoke else ""))

    def cells(self, device: str) -> Sequence[Cell]:
        """The selected cells, on a device."""
        chosen = select(self.experiment.declared(device, smoke=self.smoke), self.only)
        return chosen if self.blocks is None else [cell for cell in chosen if key_of(cell)[0] in self.blocks]


@dataclass(frozen=True)
class Plan:
    """A request on a device, with what has been recorded."""

    device: str
    schedule: Schedule
    clock: Clock
    workers: int
    machines: Machines
    cuts: Sequence[Mapping[str, Any]] = ()


def trials_of(cells: Sequence[Cell]) -> list[Trial]:
    """Every kind of trial that the cells may run, including the probe and the follow-up of a search."""
    found: list[Trial] = []
    for cell in cells:
        found += [cell.probe, *([cell.then] if cell.then else [])] if isinstance(cell, MaxBatch) else [cell]
    return found


def make_plan(request: Request, device: str) -> Plan:
    """What is done and what remains. Runs nothing."""
    runs = read_runs(request.folder)
    records = [record for run in runs for record in run.records]
    cells = request.cells(device)
    rounds = request.rounds or (1 if request.smoke else request.experiment.rounds)
    name = folder_name(request.results)
    machines = machines_of(runs, device, trials_of(cells), request.sweep, name)
    retry = request.retry
    if request.retry_before is not None:
        records = [r for r in records if r["outcome"] not in retry or r["utc"] >= request.retry_before]
        retry = ()
    history = History(records, machines.accepted, retry)
    experiment = request.experiment
    schedule = Schedule(experiment.name, cells, rounds, history, in_order=experiment.in_order)
    workers = min(available_cpus(), MAX_WORKERS)
    alike = (r for r in records if r["trial"].get("device", device) == device)
    cuts = [line for run in runs for line in run.cuts]
    return Plan(device, schedule, Clock(alike, workers), workers, machines, cuts)


def run(request: Request, progress: Progress) -> Report:
    """Run what remains. Every trial is recorded before another one replaces it.

    Raises:
        UsageError: before anything is measured: the device, the selection, the cluster, another run.
        OSError: before anything is measured: the results folder cannot be written to.
        RunEnded: it cannot go on.
    """
    begun = time.monotonic()
    if request.cluster is not None:
        report: Report = importlib.import_module(_CLUSTERS[request.cluster.name]).run(request, progress)
        return report
    plan = make_plan(request, environment.resolve_device(request.device))
    if plan.schedule.next() is None:
        return Report(Counter(), device=plan.device)
    Store(request.folder, {}).close()  # fail before importing torch if the folder is not writable
    if request.sweep is not None:  # a job of a sweep
        return _run(request, plan.device, progress, begun)
    with held(request.folder, wait=request.wait, say=progress.say):
        name_folder(request.results)
        return _run(request, plan.device, progress, begun)


def _run(request: Request, device: str, progress: Progress, begun: float) -> Report:
    """Run on this machine, with the folder's lock held."""
    plan = make_plan(request, device)
    if plan.schedule.next() is None:
        return Report(Counter(), device=plan.device)
    with_torch = any("torch" in trial.modules() for trial, _ in plan.schedule.remaining())
    with Isolation(server_variables(plan.device)) as isolation:
        try:
            where = environment.gather(plan.device, isolation, with_torch=with_torch)
        except (UsageError, RunEnded) as error:
            if plan.device == "cpu" or request.device == "cuda":
                raise
            progress.say(f"dpbench: {error}; measuring on the CPU")
            plan = make_plan(request, "cpu")
            where = environment.gather("cpu", isolation)
        return _run_here(request, plan, isolation, progress, where, begun)


def _run_here(
    request: Request, plan: Plan, isolation: Isolation, progress: Progress, where: dict[str, Any], begun: float
) -> Report:
    executor = Here(isolation, plan.workers)
    allowance = None
    if request.minutes is not None:
        allowance = Allowance(request.minutes, begun, plan.schedule, plan.clock, plan.machines.fingerprint, plan.cuts)
        executor.until = allowance.until
    where["results_folder"] = folder_name(request.results)
    if request.sweep is not None:
        libraries = {name: environment.version_of(name) for name in request.sweep["versions"]}
        where |= {"executor": dict(request.sweep), "libraries": libraries}
    shards = Shards(request.folder, progress.say, lambda: where)
    remaining = [trial for trial, _ in plan.schedule.remaining()]
    if (line := environment.kernels_missing(plan.device, remaining)) is not None:
        progress.say(f"dpbench: {line}")
    if any(trial.alone for trial in remaining):
        shards.of().watch.begin()
    blocks = [Block("", plan.schedule, together=True)]
    loop = Loop(plan.schedule, blocks, executor, shards, progress, plan.machines.fingerprint, plan.clock, allowance)
    try:
        report = loop.run()
    except RunEnded:  # the folder may have been removed with its name; restore the name
        with contextlib.suppress(OSError):
            name_folder(request.results, where["results_folder"])
        raise
    report.device = plan.device
    return report
