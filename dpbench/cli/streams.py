"""Standard streams as they are found: closed, full, or read by somebody who has gone.

What a command says of its progress, on standard error, is lost without harm: nobody can read it any more, and the work
goes on. What it prints on standard output is what it was asked for: not to be able to is an error. Both show control
characters as escapes: much of what is printed stood in somebody's file.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

from dpbench.errors import printable

#: Seconds before a command says on a terminal that it is at work.
PATIENCE = 3.0


class Waiting:
    """The last line of a terminal while a command works: for how long, and at what. Wiped before anything is printed.

    It is painted once a second by a timer, in the main thread: a thread of its own would be copied half into a fork.
    """

    def __init__(self) -> None:
        self.words = ""
        self._descriptor = 2
        self._shown = False

    @contextlib.contextmanager
    def shown(self, words: str) -> Iterator[None]:
        """Paint the line during the block, from `PATIENCE` seconds on, if standard error is a terminal.

        Args:
            words: what is being done, until `tell` says more.
        """
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
        """Take the line away, if it is there."""
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")

    def _paint(self, seconds: float) -> None:
        self._shown = True
        line = f"{seconds:.0f} s: {printable(self.words)}"
        self._write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # not by the stream: the timer may strike while that is being written to
            os.write(self._descriptor, text.encode(errors="replace"))


waiting = Waiting()


def tell(words: str) -> None:
    """Say on the terminal's last line what is being done now.

    Args:
        words: a few.
    """
    waiting.words = words


class Shown:
    """A stream for people: control characters are shown as escapes.

    Args:
        terminal: the stream underneath, for whoever moves its cursor.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        """All of it.

        Args:
            text: any.
        """
        waiting.wipe()
        self.terminal.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


class Patient:
    """Standard error that may be closed, full or a pipe without a reader: what cannot be written is left out.

    Args:
        stream: the one underneath.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """All of it, as far as whoever calls is concerned.

        Args:
            text: any.
        """
        self._quietly(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written, as far as it can be."""
        self._quietly(self._stream.flush)

    def isatty(self) -> bool:
        """Not where it is closed: an experiment's file can do that."""
        return not self._stream.closed and self._stream.isatty()

    def _quietly(self, action: Any) -> None:
        try:
            action()
        except (OSError, ValueError):
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """What is still to be written goes nowhere: or the interpreter would complain of it when it ends.

    Args:
        stream: that nobody reads any more.
    """
    try:
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
        stream.flush()
    except (OSError, ValueError):
        pass


def prepare() -> None:
    """Give each standard stream that was closed a descriptor, or the next file that is opened would be taken for it.

    Nothing can be written to what stands in for standard output: whoever prints there is told so.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is the one that is opened
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):  # a path may have bytes, and a record halves of a pair, that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stdout, Shown):
        sys.stdout = cast(TextIO, Shown(sys.stdout))
    if not isinstance(sys.stderr, Shown):
        sys.stderr = cast(TextIO, Shown(cast(TextIO, Patient(sys.stderr))))
