"""Linux process facilities that Python lacks: parent-death signals, orphans, CPU time, killing sessions.

On other systems only process groups are available, and nothing fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SWEEPS = 20


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send this process `signum` when `parent`, taken before the fork, ends for any reason."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that none escapes `kill_session`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True)
class CpuTime:
    """Ticks of all CPUs of this machine since it started: busy, and stolen by the hypervisor for other guests.

    Stolen time is time in which a virtual machine was ready to run but had to wait; the load average excludes it. Both
    are 0 if the kernel does not report them.
    """

    busy: int = 0
    stolen: int = 0

    @classmethod
    def now(cls) -> CpuTime:
        """The ticks since the machine started; zeros if not reported."""
        user, nice, system, _, _, interrupt, soft, stolen = _ticks().get("cpu", [0] * 8)
        return cls(user + nice + system + interrupt + soft, stolen)

    def stolen_since(self, before: CpuTime) -> float | None:
        """The stolen share of the time in which there was work; None without work.

        Args:
            before: an earlier time.
        """
        stolen, busy = self.stolen - before.stolen, self.busy - before.busy
        return round(stolen / (busy + stolen), 4) if busy > 0 else None


def busy_cpus(seconds: float = 1.0) -> float:
    """How many of this process's CPUs work for others now; 0 if the kernel does not report it.

    Args:
        seconds: to watch, asleep.
    """
    before = _idle_ticks()
    time.sleep(seconds)
    after = _idle_ticks()
    ticks = [max(0, sum(now) - sum(then)) for now, then in zip(after, before, strict=True)]
    idle = [now[0] - then[0] for now, then in zip(after, before, strict=True)]
    return sum(1 - rested / passed for rested, passed in zip(idle, ticks, strict=True) if passed)


def _ticks() -> dict[str, list[int]]:
    """Eight kinds of ticks of "cpu", all CPUs together, and of "cpu0", "cpu1", ...; {} if not reported."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        return {name: list(map(int, ticks[:8])) for name, *ticks in lines}
    except (OSError, ValueError):
        return {}


def _idle_ticks() -> list[tuple[int, int]]:
    """Idle and other ticks of each CPU of this process; [] if not reported."""
    each = _ticks()
    mine = [each[f"cpu{number}"] for number in os.sched_getaffinity(0)] if each else []
    return [(ticks[3] + ticks[4], sum(ticks) - ticks[3] - ticks[4]) for ticks in mine]


def offer_to_the_oom_killer() -> None:
    """Make this process the first that the kernel kills if memory runs out."""
    with contextlib.suppress(OSError):  # not Linux, or not permitted: this is only a preference
        Path("/proc/self/oom_score_adj").write_text("1000")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


@dataclass(frozen=True)
class _Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    session: int
    zombie: bool


def _processes() -> list[_Process]:
    """Every process in /proc; [] without /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the second field, the command in parentheses, may contain spaces and parentheses
            state, parent, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it ended while we looked
            continue
        found.append(_Process(int(entry.parent.name), int(parent), int(session), state == "Z"))
    return found


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def kill_group(leader: int) -> None:
    """Kill a process group, which may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_session(leader: int, *, and_adopted_except: set[int] | None = None) -> None:
    """Kill all processes in the session of `leader`, and reap our children among them.

    With `and_adopted_except`, also kill every other child of this process: orphans that began their own sessions and
    were adopted by us.

    Args:
        leader: the number of its first process.
        and_adopted_except: children to leave alone; None to leave all alone.
    """
    kill_group(leader)
    me = os.getpid()
    for _ in range(_SWEEPS):  # the next sweep finds processes forked during this one
        left = [
            p
            for p in _processes()
            if (p.session == leader and p.pid != leader)
            or (and_adopted_except is not None and p.parent == me and p.pid not in and_adopted_except)
        ]
        for process in left:
            if not process.zombie:
                kill(process.pid)
            if process.parent == me:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)
        if not left:
            return


def memory_total() -> int | None:
    """Bytes of the machine's memory; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def available_cpus() -> int:
    """Number of CPUs that this process may use: its affinity, limited by its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return allowed
