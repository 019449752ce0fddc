"""Allow one run at a time in a folder: two would repeat each other's work and disturb each other's times.

The lock is the operating system's (flock), so it ends with the process. It is on a file in the folder, whose text is
for people, and on the folder itself, because people may remove the file. Jobs of one sweep on a cluster run side by
side and take no lock.
"""

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
"""Seconds between two attempts to take the lock."""
_WITHOUT = (errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems without locks; the run goes on without one."""


@contextmanager
def held(folder: Path, *, wait: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `folder`, so that no other run measures for it.

    Args:
        wait: wait for the other run to end; else raise.

    Raises:
        UsageError: another run holds the lock; says which, and since when.
        OSError: the lock file cannot be opened; links are refused.
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
    """The holder in words; the line may be missing or foreign."""
    try:
        found = json.loads(os.pread(file, 1000, 0))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
