"""Stores records as append-only JSON lines, one file a run.

The file is ``RESULTS/<experiment>/<utc>-<host>-<pid>.jsonl``. Its first line is the environment, each further line one
trial. A line is on the disk (fsync) before the next trial starts, so that a run can be killed at any instant. The first
trial creates the file, and nothing rewrites it. It has raw samples in order, and no derived numbers.

Content too large for a line is in files beside it, with the same stem: a result's ``files``, name -> base64 of the
content, becomes name -> the file's name in this folder.
"""

import base64
import codecs
import contextlib
import errno
import gc
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dpbench.errors import RunEnded, printable
from dpbench.process.child import write_all
from dpbench.records.host import host_name
from dpbench.trials.json_text import to_json
from dpbench.trials.line_shapes import LINES, flaw_of_line
from dpbench.trials.precision import with_profile
from dpbench.trials.shapes import DEPTH, too_deep
from dpbench.trials.steps import with_way

# The schema of a line, and its history:
#   1  environment line {type, schema, run, utc, environment}; trial line {type, schema, experiment, id, round,
#      fingerprint, trial, outcome, evidence, seconds, utc, result}. Infinities and NaN are strings.
#   2  a trial line has `load`: the machine's load average over a minute when the trial ended; null if not known.
#   3  a trial line has `version`: the hash of its sources and libraries, which is the same on every machine (the
#      fingerprint is not); null if not known. The environment of a run on a cluster has `executor`.
#   4  a trial line has `stolen`: the share of busy CPU time that went to other guests of the same host while it ran;
#      null if not known.
#   5  a line of type `cut` {id, round, fingerprint, trial, seconds, utc}: how long a trial had run when its run's time
#      was over. It is no record of the trial, which runs again.
#   6  the trial of a kind in `STEPS` has `precision`, a profile, in place of `dtype` (`dpbench.trials.precision`).
#   7  the trial of several backends in turns has `way`, how their steps ran (`dpbench.trials.steps`).
# The docstring of a trial's body gives the form of `result`: a new kind of trial is no new schema.
SCHEMA = 7

Line = dict[str, Any]
#: The most invalid lines of a file to name; the rest is counted.
_NAMED = 10
#: The longest part of a file's name, which may have 255 bytes.
_LONGEST_NAME = 80
#: Schema n -> a function that upgrades one line to n + 1. Old files are upgraded when read, never on the disk.
UPGRADES: dict[int, Callable[[Line], Line]] = {
    1: lambda line: line | {"load": None} if line["type"] == "trial" else line,
    2: lambda line: line | {"version": None} if line["type"] == "trial" else line,
    3: lambda line: line | {"stolen": None} if line["type"] == "trial" else line,
    4: lambda line: line,
    5: lambda line: line if line["type"] == "environment" else line | {"trial": with_profile(line["trial"])},
    6: lambda line: line if line["type"] == "environment" else line | {"trial": with_way(line["trial"])},
}


def utc_now() -> str:
    """The time in a record's format: ISO 8601, microseconds, Z."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def slug(text: str) -> str:
    """`text` as part of a file's name: lower case, with hyphens, without path separators, and short."""
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"
    return name or "unnamed"


class Store:
    """The file of one run.

    Args:
        folder: for the records of the experiment; created if missing.
        environment: of this run, written as the first line; its `host` names the file.

    Raises:
        OSError: if the folder cannot be created or written to. Checked before anything is measured.
    """

    def __init__(self, folder: Path, environment: Mapping[str, Any]) -> None:
        make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"[Errno 13] Permission denied: {str(folder)!r}")
        self._environment = environment
        self._file: int | None = None
        self._lines: list[bytes] = []
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = folder / f"{stamp}-{slug(environment.get('host') or host_name())}-{os.getpid()}.jsonl"

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one trial's record, or a line with its own `type`; returns when it is on the disk.

        Args:
            record: of today's schema.

        Raises:
            OSError: it cannot be written, with the file's name; `save_again` writes it elsewhere.
            RunEnded: the file has moved; see `require_there`.
        """
        if self._file is None:
            stem, number = self.path.stem, 1
            while self.path.exists():  # a process may start two runs within a second
                number += 1
                self.path = self.path.with_name(f"{stem}-{number}.jsonl")
            head = {"type": "environment", "schema": SCHEMA, "run": self.path.stem, "utc": utc_now()}
            self._lines = [_text(head | {"environment": self._environment})]
        line: Line = {"type": "trial", "schema": SCHEMA, **record}
        try:
            detached = self._detached(line)
        except OSError:  # a file of the result failed; the numbers can still be saved
            self._lines.append(_text(line | {"result": line["result"] | {"files": {}}}))
            raise
        self._lines.append(_text(detached))
        try:
            self._write()
        except OSError as error:
            error.filename = str(self.path)  # errors of a descriptor lack the name
            raise
        self.require_there()

    def require_there(self) -> None:
        """Check that the whole file is still under its name.

        Raises:
            RunEnded: the file was removed, moved, replaced or cut. Lost lines are written to another file.
        """
        if self._file is None:
            return
        mine, what = os.fstat(self._file), "it is gone"
        with contextlib.suppress(OSError):
            there = os.stat(self.path)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                if mine.st_size >= sum(map(len, self._lines)):
                    return
                what = "it has been cut"
        moved = mine.st_nlink and what == "it is gone"
        told = "who moved it has what it held" if moved else self.save_again()
        raise RunEnded(f"expected {self.path} to stay where it is while it is written to, and {what}; {told}")

    def save_again(self) -> str:
        """Write the missing lines to another file, beside it or in a temporary folder; returns where, in words."""
        left: list[bytes] = []
        if self._file is not None and (found := os.fstat(self._file)).st_nlink:
            left = os.pread(self._file, found.st_size, 0).splitlines(keepends=True)
        content = b"".join([self._lines[0], *(line for line in self._lines[1:] if line not in left)])
        for folder in (self.path.parent, Path(tempfile.gettempdir())):
            path = folder / f"{self.path.stem}-saved.jsonl"
            try:
                make_folder(folder)
                write_file(path, content, os.O_EXCL)
                sync_folder(folder)
            except FileExistsError:
                continue
            except OSError:
                path.unlink(missing_ok=True)
                continue
            return f"what it held is saved in {path}"
        return "what it held could not be saved again"

    def _detached(self, record: Mapping[str, Any]) -> Line:
        """Write the record's files to the disk, and replace their content by their names."""
        files = (record.get("result") or {}).get("files")
        if not files:
            return dict(record)
        stem = f"{self.path.stem}-{record['id']}-{record['round']}"
        names: dict[str, str] = {}
        for number, (name, content) in enumerate(files.items()):
            part = slug(name).replace(".jsonl", "-jsonl")  # must not look like a file of records
            alike = f"{stem}-{part}" in names.values()  # two names may have one slug
            names[name] = f"{stem}-{number}-{part}" if alike else f"{stem}-{part}"
            write_file(self.path.with_name(names[name]), base64.b64decode(content))
        sync_folder(self.path.parent)
        return dict(record) | {"result": record["result"] | {"files": names}}

    def _write(self) -> None:
        """Write the last line, after the first one in a new file."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            _write_synced(self._file, self._lines[0])
            sync_folder(self.path.parent)
        _write_synced(self._file, self._lines[-1])

    def close(self) -> None:
        """Close the file, if open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _text(line: Mapping[str, Any]) -> bytes:
    return (to_json(line) + "\n").encode()


def _write_synced(file: int, data: bytes) -> None:
    write_all(file, data)
    os.fsync(file)


def write_file(path: Path, data: bytes, flags: int = 0) -> None:
    """Write a file, or replace it, to the disk; its name is there once its folder is synced.

    Args:
        flags: for `os.open`, in addition to those for writing.

    Raises:
        OSError: it cannot be written, or exists although `flags` has `os.O_EXCL`.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o644)
    try:
        _write_synced(file, data)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Create the folder and its parents, and sync them, or a power loss would remove their content.

    Raises:
        OSError: it cannot be created.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder to put a new file's name on the disk; ignores file systems that cannot sync folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@dataclass
class Run:
    """The content of one file."""

    path: Path
    environment: Line
    records: list[Line] = field(default_factory=list)
    cuts: list[Line] = field(default_factory=list)


def _say(warning: str) -> None:
    print(f"dpbench: {warning}", file=sys.stderr)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the cyclic garbage collector: it would visit all records again and again, and they have no cycles."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@uncollected()
def read_runs(source: Path, warn: Callable[[str], None] = _say) -> list[Run]:
    """All runs of a folder, in the order of their files' names (which begin with the time); or of one file.

    Skips a torn last line, which a killed run leaves. Also skips any other invalid line, with a warning that names file
    and line.
    """
    runs = []
    trials: dict[str, Any] = {}
    for path in [source] if source.is_file() else sorted(source.glob("*.jsonl")):
        run, homeless = None, 0
        for number, line in _lines(path, trials, warn):
            if line["type"] == "environment" and run is None:
                run = Run(path, line["environment"])
                runs.append(run)
            elif line["type"] == "environment":
                warn(f"{path}:{number}: an 'environment' line where none is expected; passed over")
            elif run is None:
                homeless += 1
            else:
                (run.records if line["type"] == "trial" else run.cuts).append(line)
        if homeless:
            warn(f"{path}: {homeless} lines with no whole 'environment' line before them; passed over")
    return runs


def read_records(folder: Path, warn: Callable[[str], None] = _say) -> list[Line]:
    """The trial lines of all runs in `folder`, oldest file first."""
    return [record for run in read_runs(folder, warn) for record in run.records]


def _lines(path: Path, trials: dict[str, Any], warn: Callable[[str], None]) -> Iterator[tuple[int, Line]]:
    try:
        raw = content_of(path).removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        warn(f"{path}: not a file of records ({error.strerror}); passed over")
        return
    bad = 0
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        try:
            line = _whole(text, trials)
        except (ValueError, RecursionError) as error:
            if number < len(raw):  # a last piece without newline was torn by a kill, as expected
                bad += 1
                if bad <= _NAMED:
                    warn(f"{path}:{number}: not a record ({error}); passed over")
            continue
        yield number, line
    if bad > 1:
        warn(f"{path}: {bad} of {len(raw) - 1} lines are no records")


def content_of(path: Path) -> bytes:
    """The content of an ordinary file. Rejects pipes, which would block, and folders.

    Raises:
        OSError: it is no ordinary file, or cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "a pipe or a device")
        return file.read()


def _whole(text: bytes, trials: dict[str, Any]) -> Line:
    """Upgrade a line of any known schema to today's.

    Args:
        trials: identity -> its trial so far; a trial of many lines is checked once, and one object.

    Raises:
        ValueError: it is no complete record; with the reason.
        RecursionError: endlessly nested brackets.
    """
    if b"\\ud" in text.lower():  # perhaps half of a pair, which msgspec refuses
        text = to_json(json.loads(text, parse_constant=_refuse)).encode()
    line = msgspec.json.decode(text)
    if text.count(b"[") + text.count(b"{") > DEPTH and too_deep(line):
        raise ValueError("nested too deeply")
    if b"\\u" in text or not text.isascii():
        line = _shown(line)
    upgraded = _upgrade(line)
    if (why := flaw_of_line(upgraded, trials)) is not None:
        raise ValueError(why)
    if "trial" in upgraded:
        trial, known = upgraded["trial"], trials.get(upgraded["id"])
        trials[upgraded["id"]] = upgraded["trial"] = known if known == trial else trial
    return upgraded


def _shown(value: Any) -> Any:
    """The same with control characters as escapes: they are invalid in a figure's XML, and commands to a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return list(map(_shown, value))
    if isinstance(value, dict):
        return {printable(name): _shown(each) for name, each in value.items()}
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _upgrade(line: Any) -> Line:
    if not isinstance(line, dict) or line.get("type") not in tuple(LINES):
        raise ValueError(f"type {line.get('type')!r:.40}" if isinstance(line, dict) else "no object")
    while (schema := line.get("schema")) != SCHEMA:
        if isinstance(schema, bool) or not isinstance(schema, int) or schema not in UPGRADES:
            raise ValueError(f"schema {schema!r:.40}, and this dpbench reads up to {SCHEMA}")
        try:
            line = UPGRADES[schema](line) | {"schema": schema + 1}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no whole line of schema {schema}: {type(error).__name__} {error}") from error
    return line
