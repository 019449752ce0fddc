"""Where the trials of a run go: to processes of this machine, to the tasks of a Ray cluster, to a SLURM job array.

Plan, records and resume are the same on all. What schedules, queues and moves is Ray's or SLURM's; a trial is run by
the node's own `dpbench.process.parent`, as it would be on one machine. `ray` and `submitit` are imported by their
executor alone, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.errors import UsageError, one_of

EXECUTORS = ("local", "ray", "slurm")
#: An option of a cluster -> the executors that take it.
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
    """A cluster as a person names it, and what is asked of it for each trial or job.

    Args:
        name: "ray" or "slurm".
        address: of a Ray cluster, host:port or "auto"; None starts Ray on this machine.
        cpus: a trial that must run alone asks for so many CPUs; None: every CPU of a node.
        gpu_type: on CUDA, of which type the GPU must be, as the cluster calls it ("A100").
        partition, time: of SLURM; `time` in minutes bounds a job, which ends then and is submitted again.
        jobs: SLURM runs at most so many at once.
        cluster: "slurm", or "local", where submitit runs the jobs on this machine.
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
        one_of("an executor", self.name, EXECUTORS[1:])
        refuse_options_of_others(self.name, vars(self))
        for option in ("cpus", "time", "jobs"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"at least 1 for --{option}", value)
        for option in ("address", "gpu_type", "partition", "cluster"):
            if getattr(self, option) == "":
                raise UsageError(f"a name after --{option.replace('_', '-')}", "")
        if self.cluster is not None:
            one_of("a --cluster of --executor slurm", self.cluster, ("slurm", "local"))


def refuse_options_of_others(name: str, options: dict[str, object]) -> None:
    """See that an executor takes the options that were given.

    Args:
        name: of the executor.
        options: option -> value; None for one that was not given.

    Raises:
        UsageError: an option is given that this executor does not take.
    """
    for option, takers in _TAKEN_BY.items():
        if options.get(option) is not None and name not in takers:
            flag = option.replace("_", "-")
            raise UsageError(f"--{flag} with --executor {' or '.join(takers)}", f"--executor {name}")
