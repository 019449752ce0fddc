"""Seconds of processors: to wait for what else runs on the machine does not count."""

from __future__ import annotations

import os
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
