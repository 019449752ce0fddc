"""The time limit of a run (``--minutes``): which trials may still start, and which were cut off.

A trial starts if it is expected to end in time: by its own earlier rounds, else by similar trials, else by a modest
guess. A wrong guess does no harm: when the time is over, the trials that still run are killed. This is not an outcome
of the trial. A line of type "cut" records how long it ran. The next run then starts it only with more time than that,
or reports that it does not fit, and continues with the others.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from dpbench.execution.progress import duration
from dpbench.execution.schedule import Clock, Record, Run, Schedule
from dpbench.process.parent import Answer
from dpbench.records.store import utc_now
from dpbench.trials import Trial
from dpbench.trials.outcome import Outcome

#: Expected seconds of a trial without any record of its kind; at most a tenth of the time.
GUESS = 20.0
#: A trial that is known only from similar ones counts as at most this share of the time, so that a fresh run tries it.
LIKENESS = 0.5
#: A trial that was cut off is expected to take this many times as long as it had.
LONGER = 1.1


@dataclass
class Allowance:
    """The minutes of a run that began at `begun`, by `time.monotonic`, a clock that a machine's processes share.

    Args:
        minutes: the limit.
        begun: when the run began.
        schedule: of the run.
        clock: estimates how long a trial takes.
        cuts: the lines of trials that were cut off in earlier runs.
    """

    minutes: float
    begun: float
    schedule: Schedule
    clock: Clock
    fingerprint: Callable[[Trial], str]
    cuts: InitVar[Iterable[Record]] = ()
    _had: dict[tuple[str, str], float] = field(default_factory=dict)
    _whole: float = 0.0

    def __post_init__(self, cuts: Iterable[Record]) -> None:
        for line in cuts:
            self._note(line)
        self._whole = self.left()

    @property
    def until(self) -> float:
        """The end of the time."""
        return self.begun + 60 * self.minutes

    def left(self) -> float:
        """The seconds left."""
        return self.until - time.monotonic()

    def admits(self, trial: Trial) -> bool:
        """Whether the trial may start now."""
        known = self._known(trial)
        seconds = self._guess(trial) if known is None else known
        return min(seconds, trial.timeout) <= self.left()

    def _too_long(self, trial: Trial) -> bool:
        """Whether this trial is known not to fit, even as the first of a run."""
        known = self._known(trial)
        return known is not None and known > self._whole

    def _known(self, trial: Trial) -> float | None:
        """The seconds of this trial by its other rounds, and more than it had when it was cut off."""
        records = (self.schedule.history.of(Run(trial, number)) for number in range(self.schedule.rounds))
        own = [record["seconds"] for record in records if record is not None]
        known = max(sum(own) / max(len(own), 1), LONGER * self._had.get((trial.id, self.fingerprint(trial)), 0.0))
        return min(known, trial.timeout) or None

    def _guess(self, trial: Trial) -> float:
        """The seconds of a trial that has not run, low enough that a run of its own would try it."""
        like = self.clock.of(trial)
        return min(GUESS, self._whole / 10) if like is None else min(like, LIKENESS * self._whole)

    def cut(self, run: Run, answer: Answer) -> dict[str, Any] | None:
        """The line to store for a trial that was ended by the limit; None if it ended by itself."""
        if answer.outcome is not Outcome.TIMEOUT or answer.seconds >= run.trial.timeout:
            return None
        line = {
            "type": "cut",
            "id": run.trial.id,
            "round": run.round,
            "fingerprint": self.fingerprint(run.trial),
            "trial": run.trial.describe(),
            "seconds": answer.seconds,
            "utc": utc_now(),
        }
        self._note(line)
        return line

    def _note(self, line: Mapping[str, Any]) -> None:
        key = line["id"], line["fingerprint"]
        self._had[key] = max(line["seconds"], self._had.get(key, 0.0))

    def farewell(self) -> list[str]:
        """The final message: what is left, and which trials do not fit. Empty if nothing is left."""
        waiting, remaining = self.schedule.waiting(), self.schedule.remaining()
        if not remaining:
            return []
        stuck = [run for run in waiting if self._too_long(run.trial)]
        said = []
        if len(stuck) < len(waiting):
            count, seconds = round(sum(number for _, number in remaining)), self.clock.left(remaining)
            about = "" if seconds is None else f" (about {duration(seconds)})"
            left = "1 trial is" if count == 1 else f"{count} trials are"
            said = [f"the time is over (--minutes {self.minutes:g}); {left} left{about}, and the same line goes on"]
        if stuck:
            needs = {run.trial.label(): duration(self._known(run.trial) or 0.0) for run in stuck}
            named = ", ".join(f"{label} ({needed} or more)" for label, needed in needs.items())
            said.append(f"--minutes {self.minutes:g} is too little for what is passed over: {named}")
        return said
