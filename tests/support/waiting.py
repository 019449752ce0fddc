"""Waits for other processes, with a limit; files of an ended process read as empty."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Seconds before a test calls a process hung: more than any process takes on the slowest machine.
PATIENCE = 900.0


def python(*words: object, cwd: Path = ROOT, executable: object = sys.executable, **variables: str) -> str:
    """Run a Python process in `cwd`, by default the repository, and return its standard output."""
    command, environment = list(map(str, (executable, *words))), {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


def soon(condition: Callable[[], Any]) -> bool:
    """True if the condition becomes true within `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition is true; else fail the test with `what`."""
    assert soon(condition), f"expected within {PATIENCE:g} s: {what}"


def read(path: Path) -> bytes:
    """A file's content; empty if the file is missing or its process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def lines(path: Path) -> list[str]:
    """The lines of a file; none if it is missing."""
    return read(path).decode().splitlines()


def of_process(pid: int, name: str) -> bytes:
    """The content of /proc/PID/NAME; empty if the process has ended."""
    return read(Path(f"/proc/{pid}/{name}"))


def state(pid: int) -> str:
    """The process state in /proc (R, S, T, Z, ...); empty if it has ended and was reaped."""
    return of_process(pid, "stat").rpartition(b")")[2].decode().strip()[:1]


def alive(pid: int) -> bool:
    """True if the process still runs; a zombie has ended."""
    return state(pid) not in ("", "Z")


def all_gone(pids: Any) -> bool:
    """True if all these processes end within `PATIENCE`."""
    return soon(lambda: not any(map(alive, pids)))
