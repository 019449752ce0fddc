"""``run --executor slurm``: the plan as a job array, submitted through submitit; SLURM queues and places it.

Each job takes a part of the plan that belongs together (`dpbench.execution.schedule.Block`), and runs it on its node
as a single machine would, into its own file in the results folder, which all nodes must share. Jobs continue and record
even if the driver is killed; the next run waits for them, then submits the rest. Unfinished work of a job that ended
(time limit, lost node) is submitted again, as long as that brings new records.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpbench.errors import RunEnded, UsageError, going_on, telling_line
from dpbench.execution.executors import Cluster
from dpbench.execution.executors.slurm_queue import JOBS, Queue
from dpbench.execution.executors.worker import different, own_cpus
from dpbench.execution.lock import held
from dpbench.execution.loop import Interruption, Report
from dpbench.execution.machines import begin_sweep
from dpbench.execution.progress import Progress
from dpbench.execution.runner import Plan, Request, make_plan, trials_of
from dpbench.execution.runner import run as run_here
from dpbench.experiment import load_experiment
from dpbench.records import environment
from dpbench.records.host import host_name
from dpbench.records.store import Store, read_runs, utc_now

#: The folder of job specifications and output; below the folder of the records.
HOME = ".slurm"
#: Seconds between two checks of the jobs and their records.
_TICK = 0.5


def run(request: Request, progress: Progress) -> Report:
    """Run what remains of `request` as jobs of a SLURM cluster.

    Raises:
        UsageError: submitit or SLURM is missing or refuses the jobs, or the experiment has no name for another process.
        OSError: before anything is measured: the results folder cannot be written to.
        RunEnded: it cannot go on.
    """
    cluster = request.cluster
    assert cluster is not None
    if request.reference is None:
        raise UsageError("an experiment by its name or file for --executor slurm", request.experiment.name)
    device = _device(request.device, cluster)
    queue = Queue(cluster, device, request.folder.resolve() / HOME, run_blocks)
    sweep = begin_sweep("slurm", queue.cluster, trials_of(request.cells(device)))
    request = replace(request, sweep=sweep)
    report = Report(Counter(), device=device)
    if make_plan(request, device).schedule.next() is None:
        return report
    Store(request.folder, {}).close()
    tail = _Tail(request.folder)
    tail.new()
    tail.paths.clear()
    with held(request.folder, wait=request.wait, say=progress.say), going_on(), Interruption() as interruption:
        left = queue.left_over()
        if left:
            progress.say(
                f"dpbench: {len(left)} jobs of an earlier run still go on ({', '.join(left)}): waiting for them"
            )
        while interruption.signum is None and queue.left_over():
            _show(tail, progress, report)
            time.sleep(queue.patience)
        request = replace(request, retry_before=utc_now())
        plan, recorded = make_plan(request, device), -1
        while interruption.signum is None and plan.schedule.next() is not None:
            if report.outcomes.total() == recorded:
                report.unrecorded = round(sum(count for _, count in plan.schedule.remaining()))
                break
            recorded = report.outcomes.total()
            queue.submit([_spec(request, plan, keys) for keys in _parts(plan, cluster.jobs or JOBS)])
            while interruption.signum is None and queue.busy(progress.say):
                _show(tail, progress, report)
                time.sleep(_TICK)
            queue.end()
            _show(tail, progress, report)
            plan = make_plan(request, device)
    report.signum, report.paths = interruption.signum, list(tail.paths)
    progress.close()
    return report


def _parts(plan: Plan, most: int) -> list[list[str]]:
    """The remaining blocks of each job: a block that stays together has its own; the others share `most`."""
    blocks = plan.schedule.blocks()
    left = [block for block in blocks if block.schedule.next() is not None]
    together = [[block.key] for block in left if block.together]
    loose = [block.key for block in left if not block.together]
    return together + [part for part in (loose[start::most] for start in range(most)) if part]


def _spec(request: Request, plan: Plan, keys: Sequence[str]) -> dict[str, Any]:
    """The specification of a job: plain values, readable by every version of Python."""
    reference = request.reference or ""
    file, colon, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if file.endswith(".py"):
        reference = f"{Path(file).resolve()}{colon}{name}"
    sources: dict[str, str] = {}
    for trial in trials_of(plan.schedule.cells):
        sources |= environment.sources_of(trial)
    return {
        "folder": os.getcwd(),
        "sources": sources,
        "experiment": reference,
        "results": str(request.results.resolve()),
        "options": {
            "device": plan.device,
            "only": {field: list(values) for field, values in request.only.items()},
            "rounds": request.rounds,
            "retry": list(request.retry),
            "retry_before": request.retry_before,
            "smoke": request.smoke,
            "blocks": list(keys),
            "sweep": dict(request.sweep or {}),
        },
    }


def run_blocks(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The job, on its node: an ordinary run of what remains of some blocks, to a file of its own.

    Args:
        spec: written by `_spec`.

    Returns:
        `error`: in one line, why the job ended early; None if it finished, or was told to end.
    """
    if os.path.isdir(spec["folder"]):
        os.chdir(spec["folder"])
    given = os.environ.get("SLURM_CPUS_ON_NODE")
    with own_cpus(int(given) if given else None) as cpus:  # SLURM counts CPUs, and may not bind to them
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        if (trouble := different(spec["sources"])) is not None:
            return {"error": f"node {host_name()}: {trouble}"}
        try:
            experiment, results = load_experiment(spec["experiment"]), Path(spec["results"])
            run_here(Request(experiment=experiment, results=results, **spec["options"]), Progress())
        except (UsageError, RunEnded, OSError) as error:
            return {"error": f"node {host_name()}, {spec['results']}: " + " ".join(str(error).split())}
    return {"error": None}


@dataclass
class _Tail:
    """Follows the records that jobs add to a folder. `counts`: the lines read of each file."""

    folder: Path
    paths: set[Path] = field(default_factory=set)
    counts: dict[Path, int] = field(default_factory=dict)
    _sizes: dict[Path, int] = field(default_factory=dict)

    def new(self) -> list[tuple[str, dict[str, Any]]]:
        """(host, record) of the records since the last call."""
        found = []
        for path in sorted(self.folder.glob("*.jsonl")):
            size = path.stat().st_size
            if size == self._sizes.get(path):
                continue
            self._sizes[path] = size
            for run in read_runs(path, warn=lambda _: None):
                fresh = run.records[self.counts.get(path, 0) :]
                self.counts[path] = len(run.records)
                self.paths.add(path)
                found += [(str(run.environment["host"]), record) for record in fresh]
        return found


def _show(tail: _Tail, progress: Progress, report: Report) -> None:
    for host, record in tail.new():
        report.outcomes[record["outcome"]] += 1
        trial = record["trial"]
        known = (trial.get(name) for name in ("kind", "model", "backend", "accountant", "batch_size"))
        label = " ".join(str(value) for value in known if value is not None)
        ended = f"{label}, round {record['round'] + 1}: {record['outcome']} in {record['seconds']:.1f} s on {host}"
        if record["evidence"]:
            ended += f"\n    {telling_line(record['outcome'], record['evidence'])[:300]}"
        progress.say(f"[{report.outcomes.total()}] {ended}")


def _device(asked: str, cluster: Cluster) -> str:
    """The device of the nodes, which cannot be seen from here: --device cuda or --gpu-type requests a GPU."""
    if cluster.cluster == "local":
        return environment.resolve_device(asked)
    return "cuda" if asked == "cuda" or (asked == "auto" and cluster.gpu_type is not None) else "cpu"
