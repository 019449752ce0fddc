"""What the operating system knows about processes, and no Python module says: who dies with whom, who is left over.

Linux; elsewhere the guarantees shrink to what process groups give, and nothing fails.
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
    """Have the kernel send this process `signum` when the process `parent` ends, however it ends.

    Args:
        parent: its number, taken before the fork.
        signum: a signal.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none escapes `kill_session`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True)
class CpuTime:
    """Ticks of all CPUs of this machine since it started: those that it worked, and those that it was kept from it.

    A virtual machine that was ready to run, and had to wait while its hypervisor let others, is told of it as stolen
    time; the load average is not. Both 0 where the kernel does not say.
    """

    busy: int = 0
    stolen: int = 0

    @classmethod
    def now(cls) -> CpuTime:
        """What all CPUs have had since the machine started; zeros where that is not told."""
        try:
            with open("/proc/stat") as file:
                user, nice, system, _, _, interrupt, soft, stolen = map(int, file.readline().split()[1:9])
        except (OSError, ValueError):
            return cls()
        return cls(user + nice + system + interrupt + soft, stolen)

    def stolen_since(self, before: CpuTime) -> float | None:
        """Of the time that there was something to run, the share that others had; None if there was nothing.

        Args:
            before: an earlier time.
        """
        stolen, busy = self.stolen - before.stolen, self.busy - before.busy
        return round(stolen / (busy + stolen), 4) if busy > 0 else None


def busy_cpus(seconds: float = 1.0) -> float:
    """How many of the CPUs that this process may use work for others now; 0 where the kernel does not say.

    Args:
        seconds: to watch, asleep.
    """
    before = _idle_ticks()
    time.sleep(seconds)
    after = _idle_ticks()
    ticks = [max(0, sum(now) - sum(then)) for now, then in zip(after, before, strict=True)]
    idle = [now[0] - then[0] for now, then in zip(after, before, strict=True)]
    return sum(1 - rested / passed for rested, passed in zip(idle, ticks, strict=True) if passed)


def _idle_ticks() -> list[tuple[int, int]]:
    """Ticks that each CPU of this process was idle, and those that it was not; [] where that is not told."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        found = []
        for name, *ticks in (line.split() for line in lines):
            if name in mine:
                user, nice, system, idle, waiting, interrupt, soft, stolen = map(int, ticks[:8])
                found.append((idle + waiting, user + nice + system + interrupt + soft + stolen))
        return found
    except (OSError, ValueError, AttributeError):  # not Linux
        return []


def offer_to_the_oom_killer() -> None:
    """If the kernel must end a process for want of memory, it should be this one."""
    with contextlib.suppress(OSError):  # not Linux, or not ours to say: a preference, not a promise
        Path("/proc/self/oom_score_adj").write_text("1000")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    session: int
    zombie: bool


def processes() -> list[Process]:
    """Every process that /proc shows; empty where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the second field, the command in parentheses, may itself hold spaces and parentheses
            state, parent, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it ended while we looked
            continue
        found.append(Process(int(entry.parent.name), int(parent), int(session), state == "Z"))
    return found


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process, which may be gone.

    Args:
        pid: its number.
        signum: the signal.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def kill_group(leader: int) -> None:
    """Kill a group of processes, which may be gone.

    Args:
        leader: the number of its first process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_session(leader: int, *, and_adopted_except: set[int] | None = None) -> None:
    """Kill what runs in the session of `leader`, and reap what of it is ours.

    With `and_adopted_except`, also kill every child of this process that is not among those: what began a session of
    its own and lost its parent was adopted by us, and belongs to nobody else.

    Args:
        leader: the number of its first process.
        and_adopted_except: children to leave alone; None to leave all alone.
    """
    kill_group(leader)
    me = os.getpid()
    for _ in range(_SWEEPS):  # what forks while we look is found by the next look
        left = [
            p
            for p in processes()
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


def available_cpus() -> int:
    """CPUs that this process may use at once: its affinity, and what its control group allows."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return allowed
