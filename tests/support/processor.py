"""Measures processor seconds, which do not include waiting for other programs on the machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import pytest

#: Seconds that `_yardstick` takes on an idle machine of the kind that the tests' limits are written for.
_USUAL = 0.15


def work(done: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds of calling `done`: (this process's own, those of its children that ended)."""
    start = os.times()
    done()
    end = os.times()
    user, system, childrens_user, childrens_system = (
        after - before for after, before in zip(end[:4], start[:4], strict=True)
    )
    return user + system, childrens_user + childrens_system


def as_quick_as_imports(done: Callable[[], object], libraries: str, times: float) -> bool:
    """True if processes that `done` starts take at most `times` as long as a fresh Python that imports `libraries`.

    The ratio cancels a slow or busy machine, and the libraries' own import. Both sides run once before, so that all
    modules are compiled: an installer compiled only the libraries'.
    """

    def plain() -> None:
        subprocess.run([sys.executable, "-c", f"import {libraries}"], check=True)

    with tempfile.TemporaryDirectory() as compiled, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPYCACHEPREFIX", compiled)
        environment.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        done()
        plain()
        return any(work(done)[1] <= times * work(plain)[1] for _ in range(3))


def quick(seconds: float, limit: float) -> bool:
    """True if `seconds` of a processor are below `limit`, or would be on a machine as fast as usual.

    If other virtual machines share the processor, the same work takes several times its usual processor seconds.
    """
    return seconds < limit or seconds < limit * max(work(_yardstick)[0] for _ in range(3)) / _USUAL


def _yardstick() -> None:
    """Work like accountants and reports: a transform larger than the caches, elementwise functions, plain Python."""
    values = np.fft.irfft(np.fft.rfft(np.linspace(0.0, 1.0, 2**20)))
    np.log1p(np.exp(values)).sum()
    sum(number % 7 for number in range(500_000))
