"""Executors run trials: in processes of this machine, as tasks of a Ray cluster, or in a SLURM job array.

Plan, records and resume are the same on all. Ray or SLURM schedules, queues and moves; the node's own
`dpbench.process.parent` runs a trial as on a single machine. Only their executors import `ray` and `submitit`.
"""

from dataclasses import dataclass

from dpbench.errors import UsageError, one_of

EXECUTORS = ("local", "ray", "slurm")
#: Option of a cluster -> the executors that take it.
_TAKEN_BY = {
    "address": ("ray",),
    "cpus": ("ray", "slurm"),
    "gpu_type": ("ray", "slurm"),
    "partition": ("slurm",),
    "time": ("slurm",),
    "jobs": ("slurm",),
    "cluster": ("slurm",),
}
OPTIONS = tuple(_TAKEN_BY)


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
        for option, takers in _TAKEN_BY.items():
            if getattr(self, option) is not None and self.name not in takers:
                flag = option.replace("_", "-")
                raise UsageError(f"--{flag} with --executor {' or '.join(takers)}", f"--executor {self.name}")
        for option in ("cpus", "time", "jobs"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"at least 1 for --{option}", value)
        for option in ("address", "gpu_type", "partition", "cluster"):
            if getattr(self, option) == "":
                raise UsageError(f"a name after --{option.replace('_', '-')}", "")
        if self.cluster is not None:
            one_of("a --cluster of --executor slurm", self.cluster, ("slurm", "local"))
