"""CPUs that a trial has for itself on a node that it shares: a cluster counts CPUs, and most do not bind to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path


@contextlib.contextmanager
def own_cpus(count: int | None) -> Iterator[Collection[int] | None]:
    """So many CPUs that no other trial has that asked in this way; None if all of the machine's are meant.

    Held by a lock on a file, which goes with the process that has it, however it ends.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if count is None or count >= len(allowed):
        yield None
        return
    folder = Path(tempfile.gettempdir()) / f"dpbench-cpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for first in range(0, len(allowed) - count + 1, count):
        file = os.open(folder / f"{count}-from-{allowed[first]}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        try:
            yield allowed[first : first + count]
        finally:
            os.close(file)
        return
    yield allowed[:count]  # the cluster gave out more than there are
