"""Seconds of processors: to wait for what else runs on the machine does not count."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import pytest

#: Seconds that `_yardstick` takes where nobody else computes, on the machine for which the limits in tests are written.
_USUAL = 0.15


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

    Seconds of a slow or busy machine say nothing of our own code, and a library's import is its own. All of them find
    their modules compiled, as on a second call: an installer has compiled the library's, and only then are both alike.
    """

    def plain() -> None:
        subprocess.run([sys.executable, "-c", f"import {libraries}"], check=True)

    with tempfile.TemporaryDirectory() as compiled, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPYCACHEPREFIX", compiled)
        environment.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        done()
        plain()
        return any(work(done)[1] <= times * work(plain)[1] for _ in range(tries))


def quick(seconds: float, limit: float) -> bool:
    """Whether `seconds` of a processor are fewer than `limit`, or would be if the machine were as fast as usual.

    Where other virtual machines have the same processor, the same work takes several times its usual seconds of it.
    """
    return seconds < limit or seconds < limit * max(work(_yardstick)[0] for _ in range(3)) / _USUAL


def _yardstick() -> None:
    """As accountants and reports do: a transform that no cache holds, functions of its elements, and plain Python."""
    values = np.fft.irfft(np.fft.rfft(np.linspace(0.0, 1.0, 2**20)))
    np.log1p(np.exp(values)).sum()
    sum(number % 7 for number in range(500_000))
