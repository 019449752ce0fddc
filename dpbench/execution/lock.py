"""One run at a time measures for a folder: two would do everything twice, each disturbing the other's times.

The lock is the operating system's (flock), so that it ends with the process, however that ends: on a file in the
folder, whose words are for people, and on the folder itself, for people also remove such files. Parts of one sweep,
which a cluster runs side by side, take none.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dpbench.errors import UsageError
from dpbench.records.host import host_name
from dpbench.records.store import utc_now

NAME = ".lock"
_LOOKS = 0.5
"""Seconds between two looks at a lock that is waited for."""
_WITHOUT = (errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Of file systems without such locks: the run goes on without."""


@contextmanager
def held(folder: Path, *, wait: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Nobody else's run measures for `folder` while this is entered.

    Args:
        folder: where the records of an experiment lie.
        wait: until whoever else does has ended; else that is an error.
        say: takes a line for the person who waits.

    Raises:
        UsageError: somebody else does: who, and since when.
        OSError: the file of the lock cannot be opened; it is never a link.
    """
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        told = False
        while not (_taken(place) and _taken(file)):
            who = _owner(file)
            if not wait:
                raise UsageError(f"nobody else to measure for {folder} at the same time (--wait waits for them)", who)
            if not told:
                say(f"dpbench: waiting for {who}, who measures for {folder}")
                told = True
            time.sleep(_LOOKS)
        _write(file, json.dumps({"process": os.getpid(), "host": host_name(), "since": utc_now()}) + "\n")
        yield
        _write(file, "")
    finally:
        os.close(file)
        os.close(place)


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT:
            raise
    return True


def _owner(file: int) -> str:
    """In words; the line may not be there yet, or not be ours."""
    try:
        found = json.loads(os.pread(file, 1000, 0))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
