"""Join an existing Ray cluster within time limits, and read the resources of its nodes.

Functions take:
    device, asked: "cpu" or "cuda"; or also "auto".
    nodes: the resources of each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from dpbench.errors import UsageError, one_of
from dpbench.execution.executors import Cluster
from dpbench.process.parent import our_path
from dpbench.trials.packages import to_be_installed

#: Seconds for a cluster to answer, and then to let this process join.
ANSWERS_WITHIN, JOINS_WITHIN = 3.0, 30.0


def connect(address: str | None) -> Any:
    """The module ray, joined to a cluster; without an address, to a new one on this machine.

    Args:
        address: HOST:PORT, or None.

    Raises:
        UsageError: ray is not installed, or no Ray cluster answers in time.
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
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UsageError(expected, said[-1] if said else f"exit code {done.returncode}")


def _must_listen(address: str, expected: str) -> None:
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError("--address as host:port, or auto", address)
    try:
        socket.create_connection((host, int(port)), ANSWERS_WITHIN).close()
    except OSError as error:
        raise UsageError(expected, error.strerror or str(error)) from None


def device_of(asked: str, nodes: list[dict[str, float]]) -> str:
    """The device that "auto" stands for, by the nodes' GPUs, not this machine's.

    Raises:
        UsageError: cuda is requested, and no node has a GPU.
    """
    found = any(resources.get("GPU", 0) >= 1 for resources in nodes)
    if asked == "cuda" and not found:
        raise UsageError("a node with a GPU in the Ray cluster for --device cuda", "none")
    return "cuda" if found and asked != "cpu" else "cpu"


def cpus_of(cluster: Cluster, device: str, nodes: list[dict[str, float]], say: Callable[[str], None]) -> int:
    """CPUs of a bundle: a whole node's without GPU, else a GPU's share of its node.

    Raises:
        UsageError: no node has the requested resources.
    """
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
