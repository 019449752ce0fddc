"""Show a run's progress on standard error: what was found, what runs now, how long it will take."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TextIO

from dpbench.errors import printable, telling_line
from dpbench.execution.schedule import Record, Run

if TYPE_CHECKING:
    from tqdm import tqdm


def duration(seconds: float) -> str:
    """ "8 s", "3 min 20 s", "2 h 5 min".

    Args:
        seconds: at least 0.
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress:
    """Writes one line for each finished trial; on a terminal, also a bar below them.

    Args:
        stream: standard error by default.

    Methods take:
        run: the trial and its round.
        done, left: the trials that have ended, and the expected number to come.
        seconds: that those to come will take; None if unknown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._stream = getattr(stream, "terminal", stream)  # a bar moves the cursor; lines are escaped here
        # imported now: when the bar is first shown a trial is timed, and an import would disturb it
        self._open = _opener(self._stream) if self._stream.isatty() else None
        self._bar: tqdm | None = None
        self._started: dict[Run, float] = {}

    def say(self, line: str) -> None:
        """Write one permanent line."""
        line = printable(line)
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
            return
        self._stream.write(line + "\n")
        self._stream.flush()

    def ended(self, run: Run, record: Record, done: int, left: float, seconds: float | None) -> None:
        """Report a finished trial."""
        self._started.pop(run, None)
        self._set(done, left, seconds)
        remaining = f"; {_about(seconds)}" if left else ""
        line = (
            f"[{done}/{round(done + left)}] {_words(run)}: {record['outcome']} in {record['seconds']:.1f} s{remaining}"
        )
        if record["evidence"]:
            line += f"\n    {telling_line(record['outcome'], record['evidence'])[:600]}"
        self.say(line)

    def cut(self, run: Run, seconds: float) -> None:
        """Report a trial that was ended after `seconds`, because the time of the run was over."""
        self._started.pop(run, None)
        self.say(f"{_words(run)}: cut off after {seconds:.1f} s, for the time is over; it is run again")

    def now(self, running: Collection[Run], done: int, left: float, seconds: float | None) -> None:
        """Show the trials that run at this moment."""
        clock = time.monotonic()
        for run in running:
            self._started.setdefault(run, clock)
        if self._open is None:
            return
        if self._bar is None:
            self._bar = self._open()
        self._set(done, left, seconds)
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _set(self, done: int, left: float, seconds: float | None) -> None:
        """Set the bar's text for its next refresh."""
        if self._bar is None:
            return
        clock = time.monotonic()
        shown = ", ".join(f"{_words(run)} ({duration(clock - since)})" for run, since in self._started.items())
        self._bar.n, self._bar.total = done, round(done + left)
        self._bar.set_description_str(
            printable(f"{_about(seconds)}: {shown}" if shown else _about(seconds)), refresh=False
        )


def _opener(stream: TextIO) -> Callable[[], tqdm]:
    """Import tqdm; return a function that opens a bar as the last line of `stream`, painted only on request."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread: this process is idle while trials are timed
        _lock = threading.RLock()  # tqdm's own lock uses multiprocessing, which is not used here

        def __init__(self) -> None:
            # delayed, so that it is not painted before its text is set; but close() does not wipe a delayed bar
            super().__init__(file=stream, total=0, leave=False, position=0, nrows=20, mininterval=0, delay=1)
            self.delay = 0

        @staticmethod
        def status_printer(file: Any) -> Callable[[str], None]:
            def paint(text: str) -> None:
                # tqdm overwrites longer text with spaces, which wrap on a terminal that became narrower
                file.write(f"\r{text}\x1b[K")
                file.flush()

            return paint

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            # dynamic_ncols shows nothing on a terminal of unknown size
            columns = _columns(stream)
            self.ncols = max(1, columns - 1)
            # an eighth of the line, because long texts would leave the bar a width of 1
            self.bar_format = f"[{{n_fmt}}/{{total_fmt}}] {{percentage:3.0f}}%|{{bar:{columns // 8}}}| {{desc}}"
            super().display(msg, pos)

    return Bar


def _columns(stream: TextIO) -> int:
    """The width of the terminal behind `stream`."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no file, or closed
        columns = 0
    return columns or shutil.get_terminal_size().columns


def _words(run: Run) -> str:
    return f"{run.trial.label()}, round {run.round + 1}"


def _about(seconds: float | None) -> str:
    return "time left not known yet" if seconds is None else f"about {duration(seconds)} left"
