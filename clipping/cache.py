"""Where what was timed or compiled once is kept for the next run, and whom that folder is trusted to.

Code that is loaded may do anything, and costs decide what a step runs. So a folder or a file is refused if it belongs
to somebody else or others may write to it, or if a folder above is such that others may put another one in its place.

Functions take:
    path: of the folder or file.
"""

import os
import secrets
import stat
from pathlib import Path


class Untrusted(OSError):
    """Somebody else could have written what lies there: who, in a line, with what to do."""


def folder() -> Path | None:
    """DPBENCH_CACHE, else dpbench in $XDG_CACHE_HOME or ~/.cache; None if it says "off", or without a home."""
    named, home = os.environ.get("DPBENCH_CACHE"), os.path.expanduser("~/.cache")
    if named == "off" or (not named and home.startswith("~")):
        return None
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or home) / "dpbench"


def own_folder(path: Path) -> Path:
    """Make a folder if it is missing; return its path without links.

    Raises:
        Untrusted: others could put something there.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve()  # where a link leads is looked at once
    own = path.stat()
    if own.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to another user; name a folder of your own by DPBENCH_CACHE")
    if own.st_mode & 0o022:
        raise Untrusted(f"others may write to {path}: chmod go-w, or name another folder by DPBENCH_CACHE")
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}
    for above in reversed(path.parents):
        found = above.stat()
        if found.st_uid not in trusted or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
            raise Untrusted(
                f"others may write to {above}, above {path}: name a folder by DPBENCH_CACHE where they may not"
            )
        if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            break  # nobody else comes further
    return path


def read(path: Path) -> bytes:
    """The content of a file of one's own; a link is not followed.

    Raises:
        Untrusted: somebody else could have written it.
        OSError: it is not there, or cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise Untrusted(f"{path} is not this user's own file, or others may write to it: delete it")
        return file.read()


def replace(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = False) -> None:
    """Write a file whole or not at all: beside `path`, under a name that nobody can guess, then renamed.

    Args:
        path: of the file; what is there is replaced, a link and not what it leads to.
        data: what it is to hold.
        mode: its permissions, of which the umask takes some.
        sync: wait until it is on the disk, so that a power loss leaves it whole, too.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    aside = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        aside.unlink(missing_ok=True)
