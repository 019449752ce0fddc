"""``dpbench plan EXPERIMENT --cluster FILE``: predict wall time, cost and efficiency on a cluster from records.

Functions take:
    request: what to run.
    plan: of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from dpbench.cli.columns import aligned
from dpbench.execution.cluster import (
    PUBLISHED,
    PUBLISHED_RATIO,
    Cluster,
    Job,
    Measured,
    bill,
    communication_for,
    load_cluster,
    published_check,
)
from dpbench.execution.progress import duration
from dpbench.execution.runner import Plan, Request
from dpbench.execution.schedule import TYPICAL_PROBES, Clock
from dpbench.records.reader import Record, read
from dpbench.trials import Trial
from dpbench.trials.json_text import to_json

BASELINE = "nonprivate"
_TOLERANCE = 0.002


def show(request: Request, plan: Plan, file: Path, form: str) -> None:
    """Print the prediction.

    Args:
        file: of the cluster's description.
        form: "table" or "json".

    Raises:
        UsageError: for the description, or a trial that needs more GPUs than there are.
    """
    cluster = load_cluster(file)
    records = [record for record in read(request.folder) if record.experiment] if request.folder.is_dir() else []
    answer = _predict(request, plan, cluster, records)
    print(to_json(answer) if form == "json" else "\n".join(_table(answer)))


def _predict(request: Request, plan: Plan, cluster: Cluster, records: Sequence[Record]) -> dict[str, Any]:
    """{"cluster", "sweep", "efficiency", "published"}; "sweep" is None if no record has a time."""
    jobs, likened = _jobs(request, plan, records)
    only = request.only
    steps = [
        step
        for step in _measured(records)
        if all(str(getattr(step, field)) in map(str, only[field]) for field in only if hasattr(step, field))
    ]
    return {
        "experiment": request.experiment.name,
        "cluster": {**asdict(cluster), "gpus": cluster.gpus},
        "sweep": None if jobs is None else {**asdict(bill(jobs, cluster)), "likened": likened},
        "efficiency": [_efficiency(step, cluster) for step in steps],
        "published": published_check(),
        "devices": sorted({record.device for record in records}),
    }


def _efficiency(step: Measured, cluster: Cluster) -> dict[str, Any]:
    at = {str(gpus): cluster.efficiency(step, gpus) for gpus in cluster.counts()}
    return {**asdict(step), "efficiency": at}


def _jobs(request: Request, plan: Plan, records: Sequence[Record]) -> tuple[list[Job] | None, int]:
    """The whole sweep, even if done here: records of another device do not count there.

    The second number is of runs estimated from similar recorded runs.
    """
    own: dict[str, list[float]] = {}
    for record in records:
        own.setdefault(record.id, []).append(record.seconds)
    clock = Clock({"trial": dict(record.trial), "seconds": record.seconds} for record in records)
    likened = 0

    def seconds(trial: Trial) -> float | None:
        nonlocal likened
        if trial.id in own:
            return sum(own[trial.id]) / len(own[trial.id])
        likened += 1
        return clock.left([(trial, 1)])

    jobs: list[Job] = []
    rounds = plan.schedule.rounds
    for cell in request.cells(plan.device):
        trial = cell if isinstance(cell, Trial) else cell.probe
        one = seconds(trial)
        if one is None:
            return None, 0
        gpus = int(getattr(trial, "processes", 1))
        if isinstance(cell, Trial):
            jobs += [Job(one, gpus)] * rounds
        else:
            timed = None if cell.then is None else seconds(cell.then)
            jobs.append(Job(one * TYPICAL_PROBES, gpus, () if timed is None else (timed,) * rounds))
    return jobs, likened


def _measured(records: Iterable[Record]) -> list[Measured]:
    """Ordinary and private steps of the same model, batch and round, on one device; the newest of each."""
    found: dict[tuple[Any, ...], dict[str, dict[Any, float]]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for record in sorted(records, key=lambda record: record.utc):
        for name, rounds in _steps(record).items():
            trial = record.trial
            key = (trial["model"], trial["batch_size"], trial["precision"], trial.get("image_size"), record.device)
            found.setdefault(key, {}).setdefault(name, {}).update(rounds)
            sizes[key] = 4 * int(record.result["parameters"])
    steps = []
    for key, by_name in found.items():
        base = by_name.get(BASELINE, {})
        for name, own in by_name.items():
            ratios = [own[number] / base[number] for number in own if number in base]
            if name != BASELINE and ratios:
                seconds = median(base.values())
                steps.append(Measured(key[0], name, key[1], seconds, median(ratios), sizes[key], key[4], len(ratios)))
    return sorted(steps, key=lambda step: (step.model, step.batch_size, step.ratio))


def _steps(record: Record) -> dict[str, dict[Any, float]]:
    """Backend -> round -> seconds of a step, from any kind of trial without communication."""
    result = record.result
    if record.outcome != "ok" or "parameters" not in result:
        return {}
    if record.kind == "step":
        return {record.trial["backend"]: {record.round: median(result["step_seconds"])}}
    if record.kind == "overhead":
        return _turns(result["backends"])
    if record.kind == "distributed" and record.trial["processes"] == 1 and record.trial["spread"] == "ddp":
        return _turns(result["backends"])
    return {}


def _turns(entries: Mapping[str, Any]) -> dict[str, dict[Any, float]]:
    return {
        name: {turn["round"]: median(turn["step_seconds"]) for turn in entry["turns"]}
        for name, entry in entries.items()
        if entry.get("turns")
    }


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
    if answer["efficiency"]:
        counts = list(answer["efficiency"][0]["efficiency"])
        lines += ["", "throughput of private beside ordinary data-parallel training, predicted, by number of GPUs:"]
        rows = [["model", "backend", "batch", *counts]]
        for row in answer["efficiency"]:
            numbers = [f"{row['efficiency'][n]:.3f}" for n in counts]
            rows.append([row["model"], row["backend"], str(row["batch_size"]), *numbers])
        lines += aligned(rows, range(2, len(rows[0])))
    else:
        lines.append("efficiency: no record has ordinary and private steps of one model (memory_speed, overhead do)")
    return [*lines, "", _published(answer["published"])]


def _published(rows: Sequence[Mapping[str, float]]) -> str:
    least, greatest = PUBLISHED
    within = all(least - _TOLERANCE <= row["predicted"] <= greatest + _TOLERANCE for row in rows)
    points = ", ".join(f"{row['predicted']:.3f} at {row['gpus']:.0f}" for row in rows)
    return (
        f"the model beside published points: {points} GPUs, published {least} to {greatest}: "
        f"{'within' if within else 'OUTSIDE'} (of a private step {PUBLISHED_RATIO:.3f} times as long on one GPU; "
        f"communication of {rows[0]['communication']:.2f} computing times at {rows[0]['gpus']:.0f} GPUs, which gives "
        f"{least} there; {greatest} would take {communication_for(greatest):.2f})"
    )
