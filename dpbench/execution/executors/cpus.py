"""CPUs that a trial has for itself on a node that it shares: a cluster counts CPUs, and most do not bind to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from clipping import cache


@contextlib.contextmanager
def own_cpus(count: int | None) -> Iterator[Collection[int] | None]:
    """So many CPUs that no other trial has that asked in this way; None if all of the machine's are meant.

    Held by a lock on a file, which goes with the process that has it, however it ends.

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
        except OSError:  # a link, or somebody else's
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
    yield allowed[:count]  # the cluster gave out more than there are, or nothing tells which are taken


def _folder() -> Path | None:
    """Where this user's locks lie: with temporary files, or with what is cached; None if neither is this user's own.

    Anybody may have made a folder or a link of that name where all keep their temporary files. Whoever has it could
    hold every lock, or have files made elsewhere.
    """
    kept = cache.folder()
    named = f"dpbench-cpus-{os.getuid()}"
    for folder in (Path(tempfile.gettempdir()) / named, *([kept / named] if kept is not None else [])):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
                return folder
    return None
