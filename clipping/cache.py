"""Read and write the cache of timings and compiled kernels, in a folder that only this user can change.

Cached code is executed, and cached timings decide what a step runs. So a folder or a file is refused if another user
owns it or may write to it, or may replace a folder above it.

Functions take:
    path: of the folder or file.
"""

import os
import secrets
import stat
from pathlib import Path


class Untrusted(OSError):
    """Raised for a path that another user could have written; the message says who, and what to do."""


def folder() -> Path | None:
    """$DPBENCH_CACHE, or None if it is "off"; else dpbench in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    named, home = os.environ.get("DPBENCH_CACHE"), os.path.expanduser("~/.cache")
    if named == "off" or (not named and home.startswith("~")):
        return None
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or home) / "dpbench"


def own_folder(path: Path) -> Path:
    """Make a folder if it is missing; return its path with links resolved.

    Raises:
        Untrusted: another user could put a file there.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve()  # follow links only once
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
            break  # other users cannot enter this folder
    return path


def read(path: Path) -> bytes:
    """Return the content of a file that this user owns; links are not followed.

    Raises:
        Untrusted: another user could have written it.
        OSError: it is missing or cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise Untrusted(f"{path} is not this user's own file, or others may write to it: delete it")
        return file.read()


def replace(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = False) -> None:
    """Write a file atomically: to a temporary file with a random name beside `path`, which is then renamed.

    Args:
        path: of the file. An existing file is replaced; so is a link, and not its target.
        data: the content.
        mode: the permissions, before the umask.
        sync: write to the disk before renaming, so that the file also survives a power loss.

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
