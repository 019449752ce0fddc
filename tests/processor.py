"""Seconds of processors: what else runs on the machine makes them dearer, but does not count as waiting."""

from __future__ import annotations

import os
from collections.abc import Callable


def work(done: Callable[[], object]) -> float:
    """Seconds that calling `done` takes of all processors, those of ended child processes too."""
    start = os.times()
    done()
    end = os.times()
    return sum(end[:4]) - sum(start[:4])  # user, system, children's user, children's system
