"""Compile the C kernels to shared libraries once on a machine, and check them before each use. Imports no torch.

A library lies in the folder of `clipping.cache`, in a file named after everything that it was made from. A line with
the compiler and the SHA-256 of all bytes before it follow the compiler's output, so that an empty, truncated or
changed file is detected and compiled again. It is written to a temporary file and renamed: a killed or concurrent
compilation leaves a whole file or none. A file that other users could have written is refused.
"""

import ctypes
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipping import cache

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
REALS: Mapping[str, int] = {"float": 4, "double": 8}
"""C types that libraries are compiled for -> bytes."""
SECONDS = 60
"""Seconds after which to stop waiting for the compiler."""
_MARK = b"\ndpbench "
_DIGITS = 64


class NoLibrary(Exception):
    """Raised without a library, with the reason in one line.

    `expected` is True if the machine has no compiler, or was told to keep no files; anything else deserves a warning.
    """

    def __init__(self, reason: str, expected: bool = False) -> None:
        super().__init__(reason)
        self.expected = expected


@dataclass(frozen=True)
class Library:
    """A loaded library: the SHA-256 of the compiler's output, and the compiler."""

    kernels: ctypes.CDLL
    digest: str
    compiler: str


def load(real: str) -> Library:
    """Load the kernels for a type of `REALS`, compiling them if necessary. Cached for the process.

    Args:
        real: C type of the numbers, a key of `REALS`.

    Raises:
        NoLibrary: no compiler makes it, or there is no folder that other users cannot change.
    """
    found = _load(real)
    if isinstance(found, NoLibrary):
        raise found
    return found


def describe() -> dict[str, dict[str, str]]:
    """Return C type -> "compiler" and "digest" of the loaded library, or the "reason" why there is none."""
    found = {real: _load(real) for real in REALS}
    return {
        real: {"reason": str(each)}
        if isinstance(each, NoLibrary)
        else {"compiler": each.compiler, "digest": each.digest[:16]}
        for real, each in found.items()
    }


def version() -> str | None:
    """Return the compiler of the libraries, or None; measurements with different compilers are not comparable."""
    made = [each.get("compiler", "none") for each in describe().values()]
    return None if set(made) == {"none"} else " / ".join(dict.fromkeys(made))


def trouble() -> str | None:
    """Return in one line why an expected library is missing, or None."""
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
        path = cache.own_folder(folder) / name  # absolute: a bare name is no path to dlopen
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
    """Return the command in $CC, or cc.

    Raises:
        NoLibrary: it is not valid shell syntax, or there is no such program.
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
    """Return (digest, compiler) of an intact library; None if it is damaged or missing.

    Raises:
        OSError: it cannot be read, or another user could have written it.
    """
    try:
        data = cache.read(path)
    except FileNotFoundError:
        return None
    body, mark, label = data[:-_DIGITS].rpartition(_MARK)
    if not mark or hashlib.sha256(data[:-_DIGITS]).hexdigest().encode() != data[-_DIGITS:]:
        return None
    try:
        return hashlib.sha256(body).hexdigest(), str(json.loads(label))
    except ValueError:
        return None


def _compile(compiler: list[str], arguments: list[str], path: Path) -> None:
    """Compile atomically, also if other processes compile at the same time."""
    quietly: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": SECONDS}
    version = subprocess.run([*compiler, "--version"], **quietly).stdout
    said = version.decode(errors="replace").strip().splitlines() or compiler
    label = " ".join([said[0], *compiler[1:]])  # a flag in CC makes another library
    with tempfile.TemporaryDirectory() as aside:
        partial = Path(aside) / path.name
        subprocess.run([*compiler, *arguments, "-o", str(partial)], check=True, **quietly)
        data = partial.read_bytes() + _MARK + json.dumps(label).encode()
    cache.replace(path, data + hashlib.sha256(data).hexdigest().encode(), sync=True)


def _processor() -> str:
    """Return the processor's features: machines with other processors may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
