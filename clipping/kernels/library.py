"""The kernels in C as shared libraries: compiled once on a machine, and checked before each use. Imports no torch.

A library lies in the folder of `clipping.cache`, in a file that is named after all that it was made of. Behind what the
compiler wrote come a line that says by which compiler, and the SHA-256 of all before it, so that a file that is empty,
cut off or changed is known as such, and compiled anew. It is written aside, synced, and renamed: whoever is killed, or
compiles the same at the same time, leaves a whole file or none.

**Whom it trusts.** Code that is loaded may do anything. A library is refused if its file or folder belongs to somebody
else or may be written by others, or if a folder above is such that others may put another one in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipping import cache

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
REALS: Mapping[str, int] = {"float": 4, "double": 8}
"""The types of C that libraries are made for -> bytes."""
SECONDS = 60
"""A compiler that takes longer is not waited for."""
_MARK = b"\ndpbench "
_DIGITS = 64
_ASIDE = ".compile-"


class NoLibrary(Exception):
    """There is none, and why, in a line.

    `expected`: a machine that simply has no compiler, or was told to keep nothing; anything else is worth a warning.
    """

    def __init__(self, reason: str, expected: bool = False) -> None:
        super().__init__(reason)
        self.expected = expected


@dataclass(frozen=True)
class Library:
    """One that is loaded: the SHA-256 of what the compiler wrote, and the compiler that wrote it."""

    kernels: ctypes.CDLL
    digest: str
    compiler: str


def load(real: str) -> Library:
    """The kernels for a type of `REALS`, compiled if need be. Found once in a process.

    Args:
        real: the name of the numbers' type in C, out of `REALS`.

    Raises:
        NoLibrary: there is no compiler that makes it, or no folder to keep it that others may not change.
    """
    found = _load(real)
    if isinstance(found, NoLibrary):
        raise found
    return found


def describe() -> dict[str, dict[str, str]]:
    """What is loaded here: type of C -> its "compiler" and "digest", or the "reason" why there is none."""
    found = {real: _load(real) for real in REALS}
    return {
        real: {"reason": str(each)}
        if isinstance(each, NoLibrary)
        else {"compiler": each.compiler, "digest": each.digest[:16]}
        for real, each in found.items()
    }


def version() -> str | None:
    """By which compiler the libraries here were made; None if there are none. Two versions are not measured alike."""
    made = [each.get("compiler", "none") for each in describe().values()]
    return None if set(made) == {"none"} else " / ".join(dict.fromkeys(made))


def trouble() -> str | None:
    """Why there are no libraries although a person may expect them, in a line; None if all is as it should be."""
    missing = [each for each in map(_load, REALS) if isinstance(each, NoLibrary) and not each.expected]
    return f"no kernels in C, torch's own operations remain: {missing[0]}" if missing else None


@functools.cache
def _load(real: str) -> Library | NoLibrary:
    try:
        return _find(real)
    except NoLibrary as missing:
        return missing


def _find(real: str) -> Library:
    folder = _folder()
    if folder is None:
        raise NoLibrary("DPBENCH_CACHE says off, or there is no home to keep them in", expected=True)
    compiler = _compiler()
    machine = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = ["-O3", machine, "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC"]
    flags += [f"-DREAL={real}", f"-DSIZE={REALS[real]}"]
    known = "\n".join([*compiler, *flags, *(file.read_text() for file in SOURCES), platform.node(), _processor()])
    name = f"kernels-{real}-{hashlib.sha256(known.encode(errors='surrogateescape')).hexdigest()[:16]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()  # where a link leads is looked at once; and a bare name is no path to dlopen
        path = folder / name
        if (why := _others_may_change(folder)) is not None:
            raise NoLibrary(why)
        whole = _whole(path)
        if whole is None:
            _compile(compiler, [*flags, *(str(file) for file in SOURCES if file.suffix == ".c")], path)
            whole = _whole(path)
        if whole is None:
            raise NoLibrary(f"{path} was compiled, and is not whole")
        return Library(ctypes.CDLL(str(path)), *whole)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"]
        raise NoLibrary(f"{shlex.join(compiler)} does not compile them: {said[0][:200]}") from error
    except subprocess.TimeoutExpired as error:
        raise NoLibrary(f"{shlex.join(compiler)} takes longer than {SECONDS} s") from error
    except OSError as error:
        raise NoLibrary(" ".join(str(error).split())) from error


def _folder() -> Path | None:
    return cache.folder()


def _compiler() -> list[str]:
    """The command of $CC, or cc.

    Raises:
        NoLibrary: it cannot be read as words of a shell, or there is no such program.
    """
    named = os.environ.get("CC")
    try:
        words = shlex.split("cc" if named is None else named)
    except ValueError as error:
        raise NoLibrary(f"expected a compiler's command in CC, got {named!r} ({error})") from error
    if not words:
        raise NoLibrary(f"expected a compiler's command in CC, got {named!r} (unset it for cc)")
    if not shutil.which(words[0]):
        if named is None:
            raise NoLibrary("there is no C compiler cc", expected=True)
        raise NoLibrary(f"expected a compiler's command in CC, got {named!r}, which is not found")
    return words


def _whole(path: Path) -> tuple[str, str] | None:
    """(digest, compiler) of a library that is as it was written; None if it is not, or there is none.

    Raises:
        NoLibrary: somebody else could have written it.
        OSError: it cannot be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise NoLibrary(f"{path} is not this user's own file, or others may write to it: delete it")
        data = opened.read()
    body, mark, label = data[:-_DIGITS].rpartition(_MARK)
    if not mark or hashlib.sha256(data[:-_DIGITS]).hexdigest().encode() != data[-_DIGITS:]:
        return None
    try:
        return hashlib.sha256(body).hexdigest(), str(json.loads(label))
    except ValueError:
        return None


def _compile(compiler: list[str], arguments: list[str], path: Path) -> None:
    """Whole or not at all, whoever else compiles it at the same time."""
    quietly: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": SECONDS}
    version = subprocess.run([*compiler, "--version"], **quietly).stdout
    said = version.decode(errors="replace").strip().splitlines() or compiler
    label = " ".join([said[0], *compiler[1:]])  # a flag in CC makes another library
    for left in path.parent.glob(f"{_ASIDE}*"):  # by somebody who was killed
        with contextlib.suppress(FileNotFoundError):  # or who has just ended
            if time.time() - left.lstat().st_mtime > 3 * SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_ASIDE) as aside:
        partial = Path(aside) / path.name
        subprocess.run([*compiler, *arguments, "-o", str(partial)], check=True, **quietly)
        data = partial.read_bytes() + _MARK + json.dumps(label).encode()
        partial.unlink()
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data + hashlib.sha256(data).hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system that syncs no folders
        os.fsync(descriptor)
    os.close(descriptor)


def _others_may_change(folder: Path) -> str | None:
    """Who but this user and root could put a library into a folder whose path has no links, in words; None: nobody."""
    own = folder.stat()
    if own.st_uid != os.geteuid():
        return f"{folder} belongs to another user; name a folder of your own by DPBENCH_CACHE"
    if own.st_mode & 0o022:
        return f"others may write to {folder}: chmod go-w, or name another folder by DPBENCH_CACHE"
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}
    for above in reversed(folder.parents):
        found = above.stat()
        if found.st_uid not in trusted or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
            return f"others may write to {above}, above {folder}: name a folder by DPBENCH_CACHE where they may not"
        if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return None  # nobody else comes further
    return None


def _processor() -> str:
    """What it can do: a home may be shared by machines of one name and other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
