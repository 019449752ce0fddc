"""Standard streams that may be closed, full, or without a reader.

Progress on standard error may be lost without harm, and the work continues. Output on standard output is the purpose of
the command, so a failure to write it is an error. Both show control characters as escapes, since much of the text comes
from files of others.

Functions take:
    text: any.
"""

import contextlib
import io
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TextIO, cast

from dpbench.errors import printable

#: Seconds before a command shows its progress on a terminal.
PATIENCE = 3.0


class _Waiting:
    """A terminal's last line while a command works: the elapsed time and the task. Wiped before any output.

    A timer in the main thread paints it once a second: a thread of its own would be half copied into a fork.
    """

    def __init__(self) -> None:
        self.words = ""
        self._descriptor = 2
        self._shown = False

    @contextlib.contextmanager
    def shown(self, words: str) -> Iterator[None]:
        """Paint the line during the block, from `PATIENCE` seconds on, if standard error is a terminal."""
        if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.words, self._descriptor, begin = words, sys.stderr.fileno(), time.monotonic()
        before = signal.signal(signal.SIGALRM, lambda *_: self._paint(time.monotonic() - begin))
        timer = signal.setitimer(signal.ITIMER_REAL, PATIENCE, 1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *timer)
            self.wipe()

    def wipe(self) -> None:
        """Remove the line, if it is there."""
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")

    def _paint(self, seconds: float) -> None:
        self._shown = True
        line = f"{seconds:.0f} s: {printable(self.words)}"
        self._write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # not by the stream: the timer may interrupt a write to it
            os.write(self._descriptor, text.encode(errors="replace"))


waiting = _Waiting()


def tell(words: str) -> None:
    """Show the current task on the terminal's last line."""
    waiting.words = words


def say(line: str) -> None:
    """Write a line for the person to standard error."""
    print(f"dpbench: {line}", file=sys.stderr, flush=True)


class _Shown:
    """A standard stream that shows control characters as escapes.

    If `patient`, it drops what it cannot write, because it is closed, full, or a pipe without a reader.
    """

    def __init__(self, stream: TextIO, patient: bool, *, escapes: bool = True) -> None:
        self._stream, self._patient, self._escapes = stream, patient, escapes

    @property
    def terminal(self) -> Self:
        """The same without escapes, for code that moves the cursor."""
        return type(self)(self._stream, self._patient, escapes=False)

    def write(self, text: str) -> int:
        """Write all of it."""
        waiting.wipe()
        self._tried(lambda: self._stream.write(printable(text) if self._escapes else text))
        return len(text)

    def flush(self) -> None:
        """Flush as far as possible."""
        self._tried(self._stream.flush)

    def isatty(self) -> bool:
        """False if closed, which an experiment's file may do."""
        return not self._stream.closed and self._stream.isatty()

    def _tried(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError):
            if not self._patient:
                raise
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Discard further output, or the interpreter would report an error at exit."""
    try:
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
        stream.flush()
    except (OSError, ValueError):
        pass


def prepare() -> None:
    """Give each closed standard stream a descriptor, or the next opened file would take its place.

    Writing to the substitute for standard output raises an error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # opening takes the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):  # a path may have invalid bytes, and a record lone surrogates
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stdout, _Shown):
        sys.stdout = cast(TextIO, _Shown(sys.stdout, patient=False))
    if not isinstance(sys.stderr, _Shown):
        sys.stderr = cast(TextIO, _Shown(sys.stderr, patient=True))
