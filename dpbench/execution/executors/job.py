"""The job of a SLURM array: an ordinary run of a part of the plan, on its node, to a file of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbench.errors import RunEnded, UsageError
from dpbench.execution.executors.cpus import own_cpus
from dpbench.execution.executors.worker import different
from dpbench.execution.progress import Progress
from dpbench.execution.runner import Request, run
from dpbench.experiment import load_experiment
from dpbench.records.environment import take_sources
from dpbench.records.host import host_name


def run_blocks(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run what remains of the blocks that `spec` names.

    Args:
        spec: written by the driver for this job.

    Returns:
        `error`: in one line, why the job ended early; None if it finished, or was told to end.
    """
    if os.path.isdir(spec["folder"]):
        os.chdir(spec["folder"])
    take_sources(spec["sources"])
    given = os.environ.get("SLURM_CPUS_ON_NODE")
    with own_cpus(int(given) if given else None) as cpus:  # SLURM counts CPUs, and may not bind to them
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        return _run(spec)


def _run(spec: Mapping[str, Any]) -> dict[str, Any]:
    if (trouble := different(spec["sources"])) is not None:
        return {"error": f"node {host_name()}: {trouble}"}
    try:
        request = Request(
            experiment=load_experiment(spec["experiment"]),
            results=Path(spec["results"]),
            device=spec["device"],
            only=spec["only"],
            rounds=spec["rounds"],
            retry=spec["retry"],
            smoke=spec["smoke"],
            blocks=frozenset(spec["blocks"]),
            sweep=spec["sweep"],
            retry_before=spec["retry_before"],
        )
        done = run(request, Progress())
    except (UsageError, RunEnded, OSError) as error:
        return {"error": f"node {host_name()}, {spec['results']}: " + " ".join(str(error).split())}
    return {"error": None, "signum": done.signum}
