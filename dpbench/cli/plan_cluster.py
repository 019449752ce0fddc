"""``dpbench plan EXPERIMENT --cluster FILE``: predict wall time, cost and efficiency on a cluster from records.

Functions take:
    request: what to run.
    plan: of one device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from dpbench.cli.columns import aligned
from dpbench.execution.cluster import Job, Measured, bill, load_cluster
from dpbench.execution.progress import duration
from dpbench.execution.runner import Plan, Request
from dpbench.execution.schedule import TYPICAL_PROBES, Clock
from dpbench.records.reader import Record, read
from dpbench.trials import Trial
from dpbench.trials.json_text import to_json

BASELINE = "nonprivate"


def show(request: Request, plan: Plan, file: Path, form: str) -> None:
    """Print the prediction.

    Args:
        file: of the cluster's description.
        form: "table" or "json".
    """
    cluster = load_cluster(file)
    records = [record for record in read(request.folder) if record.experiment] if request.folder.is_dir() else []
    jobs, likened = _jobs(plan, records)
    steps = [
        step
        for step in _measured(records)
        if all(str(getattr(step, field)) in values for field, values in request.only.items() if hasattr(step, field))
    ]
    answer = {
        "experiment": request.experiment.name,
        "cluster": asdict(cluster) | {"gpus": cluster.gpus},
        "sweep": None if jobs is None else bill(jobs, cluster) | {"likened": likened},
        "efficiency": [
            asdict(step) | {"efficiency": {str(n): cluster.efficiency(step, n) for n in cluster.counts()}}
            for step in steps
        ],
        "devices": sorted({record.device for record in records}),
    }
    print(to_json(answer) if form == "json" else "\n".join(_table(answer)))


def _jobs(plan: Plan, records: Sequence[Record]) -> tuple[list[Job] | None, int]:
    """The whole sweep, even if done here: records of another device do not count there. None without any record.

    The second number is of runs estimated from similar recorded runs.
    """
    own: dict[str, list[float]] = {}
    for record in records:
        own.setdefault(record.id, []).append(record.seconds)
    clock = Clock({"trial": dict(record.trial), "seconds": record.seconds} for record in records)
    likened = 0

    def seconds(trial: Trial) -> float:
        nonlocal likened
        if trial.id in own:
            return mean(own[trial.id])
        likened += 1
        return clock.of(trial) or 0.0

    jobs: list[Job] = []
    rounds = plan.schedule.rounds
    for cell in plan.schedule.cells if records else ():
        trial = cell if isinstance(cell, Trial) else cell.probe
        gpus = int(getattr(trial, "processes", 1))
        if isinstance(cell, Trial):
            jobs += [Job(seconds(trial), gpus)] * rounds
        else:
            then = () if cell.then is None else (seconds(cell.then),) * rounds
            jobs.append(Job(seconds(trial) * TYPICAL_PROBES, gpus, then))
    return jobs or None, likened


def _measured(records: Iterable[Record]) -> list[Measured]:
    """Ordinary and private steps of the same model, batch and round, on one device; the newest of each."""
    found: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for record in sorted(records, key=lambda record: record.utc):
        for backend, number, samples in _steps(record):
            shape = [record.trial.get(name) for name in ("model", "batch_size", "precision", "image_size")]
            key = (*shape, record.device, 4 * int(record.result["parameters"]))
            found.setdefault(key, {}).setdefault(backend, {})[number] = median(samples)
    steps = []
    for (model, batch_size, _, _, device, size), by_backend in found.items():
        base = by_backend.pop(BASELINE, {})
        for backend, own in by_backend.items():
            if ratios := [own[number] / base[number] for number in own if number in base]:
                times = median(base.values()), median(ratios)
                steps.append(Measured(model, backend, batch_size, *times, size, device, len(ratios)))
    return sorted(steps, key=lambda step: (step.model, step.batch_size, step.ratio))


def _steps(record: Record) -> Iterator[tuple[str, int, Sequence[float]]]:
    """(backend, round, seconds) of the steps of a trial in one process."""
    result = record.result
    if record.outcome != "ok" or "parameters" not in result:
        return
    if record.kind == "step":
        yield record.trial["backend"], record.round, result["step_seconds"]
    elif record.kind == "overhead" or [record.trial.get(name) for name in ("processes", "spread")] == [1, "ddp"]:
        for backend, entry in result["backends"].items():
            for turn in entry.get("turns") or ():
                yield backend, turn["round"], turn["step_seconds"]


def _table(answer: Mapping[str, Any]) -> list[str]:
    cluster, sweep = answer["cluster"], answer["sweep"]
    lines = [
        f"{answer['experiment']} on {cluster['name']}: {cluster['nodes']} nodes of {cluster['gpus_per_node']} GPUs, "
        f"{cluster['bandwidth'] / 1e9:g} GB/s, {cluster['latency'] * 1e6:g} µs, {cluster['price_per_gpu_hour']:g} a "
        f"GPU hour; each {cluster['speed']:g} times as fast as {', '.join(answer['devices']) or 'nothing recorded'}"
    ]
    if sweep is None:
        lines.append("the sweep: not known; no record says how long anything takes (run some of it, with --only)")
    else:
        lines.append(
            f"the sweep, predicted: {sweep['jobs']} runs in {duration(sweep['wall_seconds'])}, "
            f"{sweep['gpu_hours']:.3g} GPU hours of computing, cost {sweep['cost']:.4g} "
            f"({100 * sweep['busy']:.0f} % busy; {sweep['least_cost']:.4g} if idle GPUs are given back)"
            + (f"; {sweep['likened']} trials judged by their like" if sweep["likened"] else "")
        )
    if not answer["efficiency"]:
        said = "efficiency: no record has ordinary and private steps of one model (memory_speed, overhead do)"
        return [*lines, said]
    rows = [["model", "backend", "batch", *answer["efficiency"][0]["efficiency"]]]
    for row in answer["efficiency"]:
        rows.append([row["model"], row["backend"], str(row["batch_size"])])
        rows[-1] += [f"{value:.3f}" for value in row["efficiency"].values()]
    said = "throughput of private beside ordinary data-parallel training, predicted, by number of GPUs:"
    return [*lines, "", said, *aligned(rows, range(2, len(rows[0])))]
