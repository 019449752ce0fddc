"""Reads a torch.profiler trace of some steps: operations, kernels, launches, and host waits.

The trace is Kineto's, in the Chrome format. The categories read are:

    kernel, gpu_memcpy, gpu_memset    work on the device, with its time there
    cuda_runtime, cuda_driver         calls by the host: launches, copies, waits
    cpu_op                            operations of the host, nested: those that asked for a kernel
    user_annotation                   marks of ours

The profiler slows a step down: take counts and shares from the trace, never the time of a step.
"""

import gzip
import json
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpbench.trials.not_here import NotHere

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_OF_HOST = ("cuda_runtime", "cuda_driver")
#: cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx, cudaGraphLaunch, ...
_LAUNCH = re.compile(r"cu(da)?(\w*LaunchKernel\w*|GraphLaunch\w*)$")
_WAIT = re.compile(r"cu(da)?\w*Synchronize\w*$")
_LONGEST = 160

Event = dict[str, Any]


class Operation(NamedTuple):
    """All calls of one name: kernels by their device time, or operations of a CPU by their own time, in seconds.

    For a kernel, `asked_by` is the torch operation that launched it most often.
    """

    name: str
    calls: int
    seconds: float
    asked_by: str = ""


@dataclass(frozen=True)
class Trace:
    """The recorded events, the compressed file, and the operations of the host by their own time."""

    events: Sequence[Event]
    compressed: bytes
    of_host: Sequence[Operation] = ()

    def operations(self) -> list[Operation]:
        """Kernels, or operations of a CPU, the largest first."""
        found = self._kernels() or self.of_host
        return sorted(found, key=lambda operation: (-operation.seconds, operation.name))

    @property
    def saw_the_device(self) -> bool:
        """True if the profiler saw work on a GPU."""
        return any(event.get("cat") in _ON_DEVICE for event in self.events)

    def _times_of(self, pattern: re.Pattern[str]) -> list[float]:
        """When the host called operations that match, in the trace's microseconds."""
        return sorted(e["ts"] for e in self.events if e.get("cat") in _OF_HOST and pattern.match(e["name"]))

    def launches(self) -> list[float]:
        """When the host launched each kernel (or graph of kernels)."""
        return self._times_of(_LAUNCH)

    def waits(self) -> list[float]:
        """When the host began to wait for the device."""
        return self._times_of(_WAIT)

    def marks(self, prefix: str) -> list[tuple[float, str]]:
        """(time, rest of the name) of our own annotations that begin with `prefix`.

        Args:
            prefix: of the annotation's name.
        """
        found = (e for e in self.events if e.get("cat") == "user_annotation" and e["name"].startswith(prefix))
        return sorted((e["ts"], e["name"].removeprefix(prefix)) for e in found)

    def _kernels(self) -> list[Operation]:
        asked = {
            event["args"]["External id"]: event["name"]
            for event in self.events
            if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
        }
        seconds: dict[str, float] = defaultdict(float)
        askers: dict[str, Counter[str]] = defaultdict(Counter)
        for event in self.events:
            if event.get("cat") in _ON_DEVICE:
                name = event["name"][:_LONGEST]
                seconds[name] += event["dur"] / 1e6
                askers[name][asked.get(event.get("args", {}).get("External id"), "")] += 1
        return [Operation(n, askers[n].total(), s, askers[n].most_common(1)[0][0]) for n, s in seconds.items()]


def traced(step: Callable[[], object], device: torch.device, steps: int) -> Trace:
    """Trace `steps` steps and all their kernels; on CUDA, an untraced step first starts the profiler.

    Raises:
        NotHere: on CUDA, if the profiler saw nothing of the device.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps it off standard error, which is a trial's evidence
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True):
            step()
            torch.cuda.synchronize(device)
    # acc_events: with a single cycle, torch 2.11 would warn that it clears the events of others
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        data = path.read_bytes()
    events = [event for event in json.loads(data)["traceEvents"] if event.get("ph") == "X"]
    named = [event for event in profiler.key_averages() if not event.is_user_annotation]
    host = [Operation(each.key[:_LONGEST], each.count, each.self_cpu_time_total / 1e6) for each in named]
    trace = Trace(events, gzip.compress(data, mtime=0), host)
    if device.type == "cuda" and not trace.saw_the_device:
        raise NotHere(
            "expected kernels in the profiler's trace, got none: CUPTI may not be permitted to this user "
            "(NVreg_RestrictProfilingToAdminUsers), or another profiler is attached"
        )
    return trace
