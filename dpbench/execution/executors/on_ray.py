"""``run --executor ray``: each trial is a Ray task that requests its resources; Ray queues and places it.

A block that must stay on one node (`Block`) has a placement group of one bundle; Ray
reserves it on a node, and on another one if the node is lost. A trial that runs alone requests the whole bundle: one
GPU, or every CPU of a node. The driver keeps the records, so nodes need no shared folder.

Functions take:
    device, asked: "cpu" or "cuda"; or also "auto".
    nodes: the resources of each.
"""

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dpbench.errors import RunEnded, UsageError, last_line, one_of
from dpbench.execution.executors import Cluster
from dpbench.execution.executors.worker import Job, run_trial
from dpbench.execution.lock import held
from dpbench.execution.loop import Executor, Loop, Report
from dpbench.execution.machines import begin_sweep
from dpbench.execution.progress import Progress
from dpbench.execution.runner import Plan, Request, make_plan, trials_of
from dpbench.execution.schedule import Block
from dpbench.execution.shards import Shards
from dpbench.process.parent import Answer, our_path
from dpbench.records import environment
from dpbench.records.host import host_name
from dpbench.records.store import Store
from dpbench.trials import Trial
from dpbench.trials.outcome import Outcome
from dpbench.trials.packages import to_be_installed

#: How often a trial is sent again after the loss of its node or worker.
RETRIES = 2
#: Blocks submitted for every CPU of the cluster, so that Ray always has one to place.
_BLOCKS_FOR_A_CPU = 2
#: Seconds for a cluster to answer, and then to let this process join.
ANSWERS_WITHIN, JOINS_WITHIN = 3.0, 30.0


def run(request: Request, progress: Progress) -> Report:
    """Run what remains of `request` on a Ray cluster.

    Raises:
        UsageError: ray is not installed, or the cluster does not answer or lacks the requested resources.
        OSError: the results folder cannot be written to.
    """
    cluster = request.cluster
    assert cluster is not None
    address = cluster.address or os.environ.get("RAY_ADDRESS") or None
    ray = connect(address)
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        device = device_of(request.device, nodes)
        cpus = cpus_of(cluster, device, nodes, progress.say)
        sweep = begin_sweep("ray", address or host_name(), trials_of(request.cells(device)))
        request = replace(request, sweep=sweep)
        if make_plan(request, device).schedule.next() is None:
            return Report(Counter(), device=device)
        Store(request.folder, {}).close()
        stack.enter_context(held(request.folder, wait=request.wait, say=progress.say))
        plan = make_plan(request, device)
        total = int(sum(resources.get("CPU", 0) for resources in nodes))
        executor = _OnRay(plan, cluster, cpus, sweep, blocks=_BLOCKS_FOR_A_CPU * max(total, 1))
        stack.callback(executor.close)
        here = {"libraries": sweep["versions"], "executor": sweep}
        shards = Shards(
            request.folder, progress.say, here=lambda: environment.host_facts(device) | here, appeared=plan.machines.add
        )
        plan.clock.nodes = max(1, sum(int(resources.get("CPU", 0) // cpus) for resources in nodes))
        fingerprint = plan.machines.fingerprint
        report = Loop(plan.schedule, plan.schedule.blocks(), executor, shards, progress, fingerprint, plan.clock).run()
    report.device = device
    return report


@dataclass
class _Flight:
    """A trial in flight, the resources of its task, and how often it was lost."""

    key: int
    job: Job
    asked: dict[str, Any]
    losses: int = 0


class _OnRay(Executor):
    """An executor whose trials are Ray tasks, until it is closed."""

    def __init__(self, plan: Plan, cluster: Cluster, cpus: int, sweep: Mapping[str, Any], blocks: int) -> None:
        import ray

        self._ray, self._device, self._cpus, self._sweep = ray, plan.device, cpus, sweep
        self._bundle: dict[str, float] = {"CPU": cpus}
        if plan.device == "cuda":
            self._bundle["GPU"] = 1
            if cluster.gpu_type is not None:
                self._bundle[f"accelerator_type:{cluster.gpu_type}"] = 0.001
        self.blocks, self.workers = blocks, cpus
        trials = trials_of(plan.schedule.cells)
        self._all_libraries = tuple(sorted(set().union(*map(environment.libraries_of, trials))))
        self._with_torch = any("torch" in trial.modules() for trial in trials)
        # Ray would retry forever on a node that is out of memory
        self._task = ray.remote(max_retries=0)(_on_node)
        self._flying: dict[Any, _Flight] = {}
        self._groups: dict[str, Any] = {}
        self._keys, self._dead = 0, False

    def submit(self, trial: Trial, block: Block) -> int:
        """Run a trial on the node of its block, or on a new one; returns the key of its answer."""
        job = Job(
            trial=trial.to_wire(),
            sources=environment.sources_of(trial),
            libraries=tuple(sorted(environment.libraries_of(trial))),
            all_libraries=self._all_libraries,
            device=self._device,
            with_torch=self._with_torch,
            cpus=self._cpus if self._device == "cpu" else None,
            alone=trial.alone,
            folder=os.getcwd(),
            executor=self._sweep,
        )
        self._keys += 1
        self._send(_Flight(self._keys, job, self._asked(trial, block)))
        return self._keys

    def _send(self, flight: _Flight) -> None:
        with self._alive():
            self._flying[self._task.options(**flight.asked).remote(flight.job)] = flight

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """End the run if Ray's own processes here (its raylet, its store) have died, which is no trial's fault.

        Raises:
            RunEnded: they have died.
        """
        failures = self._ray.exceptions
        dead = [
            getattr(failures, name) for name in ("LocalRayletDiedError", "RaySystemError") if hasattr(failures, name)
        ]
        try:
            yield
        except (*dead, ConnectionError) as error:
            self._dead = True
            raise RunEnded(
                f"Ray's own processes on this machine have died: {type(error).__name__}: {last_line(str(error))}; what "
                "ended is recorded, and the same command continues from there"
            ) from error

    def _asked(self, trial: Trial, block: Block) -> dict[str, Any]:
        """The resources of a task: a whole bundle for a trial that must run alone, else one of its CPUs."""
        asked: dict[str, Any] = {"num_cpus": 1}
        if trial.alone:
            others = {name: share for name, share in self._bundle.items() if name not in ("CPU", "GPU")}
            asked = {"num_cpus": self._cpus, "num_gpus": self._bundle.get("GPU", 0), "resources": others}
        if block.together:
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            group = self._groups.get(block.key)
            if group is None:
                group = self._groups[block.key] = placement_group([self._bundle], strategy="STRICT_PACK")
            asked["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        return asked

    def wait(self, timeout: float | None = None) -> list[Answer]:
        if not self._flying:
            return []
        with self._alive():
            ready, _ = self._ray.wait(list(self._flying), num_returns=1, timeout=timeout)
            if ready:
                ready, _ = self._ray.wait(list(self._flying), num_returns=len(self._flying), timeout=0)
        answers = [self._answer(self._flying.pop(reference), reference) for reference in ready]
        return [answer for answer in answers if answer is not None]

    def _answer(self, flight: _Flight, reference: Any) -> Answer | None:
        """The answer; None if the trial was lost and has been sent again."""
        failures = self._ray.exceptions
        try:
            with self._alive():
                answer: Answer = self._ray.get(reference)
        except failures.RayTaskError as error:  # the task failed, before or after the trial
            return Answer(flight.key, Outcome.ERROR, f"the Ray task failed: {last_line(str(error))}", None, 0.0)
        except failures.RayError as error:
            flight.losses += 1
            if flight.losses <= RETRIES and not isinstance(error, failures.OutOfMemoryError):
                self._send(flight)
                return None
            times = f"{flight.losses} times" if flight.losses > 1 else "once"
            evidence = f"lost {times} with its worker or node: {type(error).__name__}: {last_line(str(error))}"
            return Answer(flight.key, Outcome.CRASH, evidence, None, 0.0)
        return replace(answer, key=flight.key)

    def release(self, block: Block) -> None:
        group = self._groups.pop(block.key, None)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def close(self) -> None:
        """End what still runs: a node kills the trial with its worker."""
        if self._dead:  # Ray is gone
            return
        for reference in self._flying:
            self._ray.cancel(reference, force=True)
        self._flying.clear()
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)
        self._groups.clear()


def _on_node(job: Job) -> Answer:
    """The task: runs on a node, in a Ray worker."""
    import ray

    return run_trial(job, ray.get_runtime_context().get_node_id())


def connect(address: str | None) -> Any:
    """The module ray, joined to a cluster; without an address, to a new one on this machine.

    Args:
        address: HOST:PORT, or None.
    """
    try:
        import ray
    except ImportError:
        raise UsageError(to_be_installed("ray"), "none") from None
    if not os.getcwd().isprintable():
        raise UsageError("a working folder whose path is text (UTF-8), as Ray needs it", os.getcwd())
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
    options["runtime_env"] = {"env_vars": {"PYTHONPATH": our_path()}}
    if address in (None, "local"):
        ray.init(address="local", include_dashboard=False, **options)
        return ray
    expected = f"a Ray cluster that answers at {address} (`ray start --head` prints its address)"
    if address != "auto":
        _must_listen(str(address), expected)
    _must_answer(str(address), expected)
    ray.init(address=address, **options)
    return ray


def _must_answer(address: str, expected: str) -> None:
    """Join from another process first, because Ray may wait long, hold the interpreter, and end its process."""
    join = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", join, address], capture_output=True, text=True, timeout=JOINS_WITHIN, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(expected, f"no answer in {JOINS_WITHIN:g} s") from None
    if done.returncode:
        raise UsageError(expected, last_line(done.stderr or f"exit code {done.returncode}"))


def _must_listen(address: str, expected: str) -> None:
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError("--address as host:port, or auto", address)
    try:
        socket.create_connection((host, int(port)), ANSWERS_WITHIN).close()
    except OSError as error:
        raise UsageError(expected, error.strerror or str(error)) from None


def device_of(asked: str, nodes: Sequence[Mapping[str, float]]) -> str:
    """The device that "auto" stands for, by the nodes' GPUs, not this machine's."""
    found = any(resources.get("GPU", 0) >= 1 for resources in nodes)
    if asked == "cuda" and not found:
        raise UsageError("a node with a GPU in the Ray cluster for --device cuda", "none")
    return "cuda" if found and asked != "cpu" else "cpu"


def cpus_of(cluster: Cluster, device: str, nodes: Sequence[Mapping[str, float]], say: Callable[[str], None]) -> int:
    """CPUs of a bundle: a whole node's without GPU, else a GPU's share of its node."""
    if device == "cuda":
        with_gpu = [resources for resources in nodes if resources.get("GPU", 0) >= 1]
        kind = "accelerator_type:"
        if cluster.gpu_type is not None:
            types = {name.removeprefix(kind) for resources in with_gpu for name in resources if name.startswith(kind)}
            one_of("a type of GPU that the Ray cluster has", cluster.gpu_type, sorted(types))
            with_gpu = [resources for resources in with_gpu if kind + cluster.gpu_type in resources]
        known = Counter(max(1, int(resources.get("CPU", 0) // resources["GPU"])) for resources in with_gpu)
        return cluster.cpus or min(known)
    known = Counter(int(resources["CPU"]) for resources in nodes if resources.get("CPU", 0) >= 1)
    most = max(known, default=0)
    if most < (cluster.cpus or 1):
        raise UsageError(f"a node with {cluster.cpus or 1} CPUs in the Ray cluster", f"at most {most}")
    if cluster.cpus is None and len(known) > 1:
        smaller = sum(count for cpus, count in known.items() if cpus < most)
        say(
            f"dpbench: {known[most]} nodes of {most} CPUs are used for what is timed, {smaller} smaller ones are not; "
            f"--cpus {min(known)} takes all, with several trials beside each other on the larger ones"
        )
    return cluster.cpus or most
