"""What a person sees of a run, on standard error: what was found, what runs now, how long it will take."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection
from typing import TextIO

from dpbench.outcome import Outcome
from dpbench.schedule import Record, Run


def duration(seconds: float) -> str:
    """ "8 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress:
    """One line for each trial that ended; on a terminal, also a last line that changes.

    Args:
        stream: standard error if not given.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._started: dict[Run, float] = {}

    def say(self, line: str) -> None:
        """One line that stays."""
        self._write(("\r\x1b[K" if self._terminal else "") + line + "\n")

    def ended(self, run: Run, record: Record, done: int, left: float, seconds: float | None) -> None:
        """A trial has ended; about `left` more are to come, taking about `seconds` (None: not known)."""
        self._started.pop(run, None)
        remaining = f"; {_about(seconds)}" if left else ""
        line = (
            f"[{done}/{round(done + left)}] {_words(run)}: {record['outcome']} in {record['seconds']:.1f} s{remaining}"
        )
        evidence = (record["evidence"] or "").strip().splitlines()
        if evidence:
            # the last line of a traceback says what was raised; what else we write says it in the first
            told = evidence[-1] if record["outcome"] == Outcome.ERROR else evidence[0]
            line += f"\n    {told[:300]}"
        self.say(line)

    def now(self, running: Collection[Run], done: int, left: float, seconds: float | None) -> None:
        """What runs at this moment."""
        clock = time.monotonic()
        for run in running:
            self._started.setdefault(run, clock)
        if not self._terminal:
            return
        shown = ", ".join(f"{_words(run)} ({duration(clock - self._started[run])})" for run in running)
        line = f"[{done}/{round(done + left)}] {_about(seconds)}: {shown}"
        self._write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])

    def close(self) -> None:
        if self._terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _words(run: Run) -> str:
    return f"{run.trial.label()}, round {run.round + 1}"


def _about(seconds: float | None) -> str:
    return "time left not known yet" if seconds is None else f"about {duration(seconds)} left"
