"""Executors run trials: in processes of this machine, as tasks of a Ray cluster, or in a SLURM job array.

Plan, records and resume are the same on all. Ray or SLURM schedules, queues and moves; the node's own
`dpbench.process.parent` runs a trial as on a single machine. Only their executors import `ray` and `submitit`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from dpbench.errors import UsageError, one_of

EXECUTORS = ("local", "ray", "slurm")


class Option(NamedTuple):
    """An option of a cluster: the executors that take it, a name for its value, help, and the type of its value."""

    executors: tuple[str, ...]
    metavar: str
    help: str
    kind: type = str


OPTIONS = {
    "address": Option(("ray",), "HOST:PORT", "ray: the cluster to join, or auto (default: start one here)"),
    "cpus": Option(("ray", "slurm"), "N", "CPUs of a trial that runs alone (default: all of a node)", int),
    "gpu_type": Option(
        ("ray", "slurm"),
        "TYPE",
        "on CUDA: the cluster's name for the GPU type (A100); with slurm, --device auto is then cuda",
    ),
    "partition": Option(("slurm",), "NAME", "slurm: the partition"),
    "time": Option(("slurm",), "MINUTES", "slurm: time limit of a job, which is then submitted again", int),
    "jobs": Option(("slurm",), "N", "slurm: number of jobs at once (16)", int),
    "cluster": Option(("slurm",), "NAME", "slurm: `local` runs the jobs on this machine, by submitit"),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster, and the resources to request for each trial or job.

    Args:
        name: one of `EXECUTORS`; "local" takes no options.
        address: of a Ray cluster, host:port or "auto"; None starts Ray on this machine.
        cpus: CPUs of a trial that must run alone; None for every CPU of a node.
        gpu_type: on CUDA, the type of GPU, as the cluster calls it ("A100").
        partition, time: of SLURM; `time` is the limit of a job in minutes, after which it is submitted again.
        jobs: the most SLURM jobs at once.
        cluster: "slurm", or "local" for submitit's jobs on this machine.
    """

    name: str
    address: str | None = None
    cpus: int | None = None
    gpu_type: str | None = None
    partition: str | None = None
    time: int | None = None
    jobs: int | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        one_of("an executor", self.name, EXECUTORS)
        for name, option in OPTIONS.items():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and self.name not in option.executors:
                raise UsageError(f"{flag} with --executor {' or '.join(option.executors)}", f"--executor {self.name}")
            if isinstance(value, int) and value < 1:
                raise UsageError(f"at least 1 for {flag}", value)
            if value == "":
                raise UsageError(f"a name after {flag}", "")
        if self.cluster is not None:
            one_of("a --cluster of --executor slurm", self.cluster, ("slurm", "local"))
