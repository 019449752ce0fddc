"""Seconds of processors: to wait for what else runs on the machine does not count."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable


def work(done: Callable[[], object]) -> tuple[float, float]:
    """Seconds that calling `done` takes of processors: this process's own, and those of its children that ended."""
    start = os.times()
    done()
    end = os.times()
    user, system, childrens_user, childrens_system = (
        after - before for after, before in zip(end[:4], start[:4], strict=True)
    )
    return user + system, childrens_user + childrens_system


def as_quick_as_imports(done: Callable[[], object], libraries: str, times: float = 3, tries: int = 3) -> bool:
    """Whether the processes `done` starts take at most `times` what a fresh Python takes that imports only `libraries`.

    Seconds of a slow or busy machine say nothing of our own code, and a library's import is its own.
    """

    def plain() -> None:
        subprocess.run([sys.executable, "-c", f"import {libraries}"], check=True)

    return any(work(done)[1] <= times * work(plain)[1] for _ in range(tries))
