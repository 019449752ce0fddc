"""The worker on a node of a cluster: runs trials in its own `Isolation`, and reports the node's environment.

A Ray task calls `run_trial`. Ray keeps the process for the next task, and with it the server that has imported torch,
so a trial costs a fork, not an ``import torch``.
"""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dpbench.errors import RunEnded, UsageError
from dpbench.process.parent import Answer, Isolation, Place, our_path
from dpbench.process.variables import server_variables
from dpbench.records import environment
from dpbench.records.host import host_name
from dpbench.trials.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trial as sent to a node, with what the node must know.

    `trial`: its `Trial.to_wire`. `sources` and `libraries` are the trial's, `all_libraries` the experiment's. `cpus`:
    the CPUs of a trial that must run `alone`; None for all. `executor` is copied to the environment.
    """

    trial: Mapping[str, Any]
    sources: Mapping[str, str]
    libraries: tuple[str, ...]
    all_libraries: tuple[str, ...]
    device: str
    with_torch: bool
    cpus: int | None
    alone: bool
    folder: str
    executor: Mapping[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def own_cpus(count: int | None) -> Iterator[Collection[int] | None]:
    """Reserve CPUs that no other caller on this machine has, for a cluster counts CPUs and may not bind to them.

    Each reservation is an abstract socket's name, which ends with its process and is no file.

    Args:
        count: how many; None, or as many as there are, for all of them.

    Yields:
        The CPUs; None for all. Those that others have, if the cluster allotted more than there are.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if count is None or count >= len(allowed):
        yield None
        return
    with socket.socket(socket.AF_UNIX) as held:
        for first in range(0, len(allowed) - count + 1, count):
            with contextlib.suppress(OSError):
                held.bind(f"\0dpbench-{count}-cpus-from-{allowed[first]}")
                break
        else:
            first = 0
        yield allowed[first : first + count]


class _Node:
    """The isolation of this process, the environment of its trials, and why none can run, if so."""

    def __init__(self, job: Job, visible: str | None) -> None:
        self.visible, self.trouble = visible, ""
        if os.path.isdir(job.folder):
            os.chdir(job.folder)  # a model's path may be relative to the folder where the run started
        self.isolation, all_cpus = Isolation(server_variables(job.device)), os.sched_getaffinity(0)
        with own_cpus(job.cpus) as cpus:
            self.isolation.pin(cpus)
            os.sched_setaffinity(0, cpus or all_cpus)  # the device is named by the CPUs of a trial
            try:
                self.facts = environment.gather(job.device, self.isolation, with_torch=job.with_torch)
            except (UsageError, RunEnded) as error:
                self.trouble, self.facts = str(error), environment.host_facts(job.device)
            finally:
                os.sched_setaffinity(0, all_cpus)
        libraries = {name: environment.version_of(name) for name in job.all_libraries}
        self.facts |= {"libraries": libraries, "executor": dict(job.executor)}


_node: _Node | None = None


def run_trial(job: Job, node: str = "") -> Answer:
    """Run the trial of `job`.

    If the trial's sources differ from those where the run started, the answer is an error that says so.

    Args:
        job: sent by the driver.
        node: its name in the cluster.
    """
    global _node
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _node is None or _node.visible != visible:
        if _node is not None:
            _node.isolation.close()
        _node = _Node(job, visible)
    if trouble := _node.trouble or different(job.sources):
        answer = Answer(0, Outcome.ERROR, f"node {host_name()}: {trouble}", None, 0.0)
    else:
        with own_cpus(job.cpus if job.alone else None) as cpus:
            _node.isolation.pin(cpus)
            answer = _node.isolation.run(job.trial)
    versions = {name: environment.version_of(name) for name in job.libraries}
    facts = _node.facts
    fingerprint = environment.seal(job.sources, versions, facts["device_name"], facts["host"])
    return replace(answer, place=Place(f"{node} {visible}", facts | {"node": node}, fingerprint, os.getloadavg()[0]))


def different(sources: Mapping[str, str]) -> str | None:
    """How the sources here differ from those where the run started; None if they do not.

    Args:
        sources: glob or path -> its hash where the run started.
    """
    for name, digest in sources.items():
        try:
            here = environment.hash_of(name)
        except OSError as error:
            return (
                f"cannot read {name}, which this trial needs ({error.strerror}): "
                "put it where every node finds it under that path, as a shared folder does"
            )
        if here != digest:
            what = f"another {name}" if os.path.isabs(name) else f"other sources ({name} of {our_path().split(':')[0]})"
            return f"{what} than where the run was started: every node needs the same"
    return None
