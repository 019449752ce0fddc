"""Waiting for what other processes do: one that is gone is an answer, and no wait is without an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds for which a test waits before it calls a process hung: however slow the machine, no other takes that long.
PATIENCE = 900.0


def soon(condition: Callable[[], Any]) -> bool:
    """Whether it comes true while a test has patience."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until it is true; else the test fails, and says `what` did not happen."""
    assert soon(condition), f"expected within {PATIENCE:g} s: {what}"


def read(path: Path) -> bytes:
    """A file's content; nothing of one that is not there yet, or of a process that has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def lines(path: Path) -> list[str]:
    """The lines of a file, as far as it is there."""
    return read(path).decode().splitlines()


def of_process(pid: int, name: str) -> bytes:
    """What /proc says of a process under a name; nothing if it has ended."""
    return read(Path(f"/proc/{pid}/{name}"))


def state(pid: int) -> str:
    """The letter that /proc has for it (R, S, T, Z ...); none if it has ended and was reaped."""
    return of_process(pid, "stat").rpartition(b")")[2].decode().strip()[:1]


def alive(pid: int) -> bool:
    """Whether it still runs: a zombie has ended."""
    return state(pid) not in ("", "Z")


def all_gone(pids: Any) -> bool:
    """Whether all of these end while a test has patience."""
    return soon(lambda: not any(map(alive, pids)))
