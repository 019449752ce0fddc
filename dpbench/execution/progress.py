"""Show a run's progress on standard error: what was found, what runs now, how long it will take."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection
from typing import TextIO

from dpbench.errors import printable, telling_line
from dpbench.execution.schedule import Record, Run


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
        self._meter: Callable[..., str] | None = None
        if self._stream.isatty():
            # imported now: when the bar is first shown a trial is timed, and an import would disturb it
            from tqdm import tqdm

            self._meter = tqdm.format_meter
        self._shown = False
        self._state: tuple[int, float, float | None] = 0, 0.0, None
        self._started: dict[Run, float] = {}

    def say(self, line: str) -> None:
        """Write one permanent line."""
        self._write(f"{printable(line)}\n")

    def _write(self, text: str = "") -> None:
        """Write text above the bar, then draw the bar again."""
        self._stream.write((f"\r\x1b[K{text}" if self._shown and text else text) + self._bar())
        self._stream.flush()

    def ended(self, run: Run, record: Record, done: int, left: float, seconds: float | None) -> None:
        """Report a finished trial."""
        self._started.pop(run, None)
        self._state = done, left, seconds
        remaining = f"; {_about(seconds)}" if left else ""
        line = f"[{done}/{round(done + left)}] {_words(run)}: "
        line += f"{record['outcome']} in {record['seconds']:.1f} s{remaining}"
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
        self._shown, self._state = self._meter is not None, (done, left, seconds)
        if self._shown:
            self._write()

    def close(self) -> None:
        """Remove the bar."""
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")

    def _bar(self) -> str:
        """The bar as the last line, cut to the width of the terminal; "" without one."""
        if self._meter is None or not self._shown:
            return ""
        done, left, seconds = self._state
        clock, columns = time.monotonic(), _columns(self._stream)
        running = ", ".join(f"{_words(run)} ({duration(clock - since)})" for run, since in self._started.items())
        line = self._meter(
            done,
            round(done + left),
            elapsed=0,
            ncols=max(1, columns - 1),
            prefix=printable(f"{_about(seconds)}: {running}" if running else _about(seconds)),
            ascii=not (self._stream.encoding or "").lower().startswith("utf"),
            # the bar has an eighth of the line, because long texts would leave it a width of 1
            bar_format=f"[{{n_fmt}}/{{total_fmt}}] {{percentage:3.0f}}%|{{bar:{columns // 8}}}| {{desc}}",
        )
        return f"\r{line}\x1b[K"


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
