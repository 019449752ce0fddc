"""Reserve CPUs for a trial on a shared node: a cluster counts CPUs, but most do not bind processes to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path


@contextlib.contextmanager
def own_cpus(count: int | None) -> Iterator[Collection[int] | None]:
    """Reserve CPUs that no other caller has; None if all of the machine's are requested.

    Each is held by a lock on a file, which ends with its process.

    Args:
        count: how many; None for all.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if count is None or count >= len(allowed):
        yield None
        return
    folder = _folder()
    for first in range(0, len(allowed) - count + 1, count):
        if folder is None:
            break
        name = folder / f"{count}-from-{allowed[first]}"
        try:
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:  # a link, or another user's
            continue
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
    yield allowed[:count]  # the cluster over-allocated, or there are no locks


def _folder() -> Path | None:
    """The folder of this user's locks among temporary files; None if it is not private.

    Anyone could create a folder or link of that name there, to hold every lock or redirect files.
    """
    folder = Path(tempfile.gettempdir()) / f"dpbench-cpus-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return folder
    return None
