"""The loop of a run, on any executor: start what can start, wait for a trial to end, record it, repeat."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from dpbench.errors import going_on
from dpbench.execution.allowance import Allowance
from dpbench.execution.machines import version_hash
from dpbench.execution.progress import Progress
from dpbench.execution.schedule import Block, Run, Schedule
from dpbench.execution.shards import Shards
from dpbench.process.parent import Answer, Isolation
from dpbench.records.store import utc_now
from dpbench.trials import Trial, canonical_json
from dpbench.trials.line_shapes import flaw_of_record
from dpbench.trials.outcome import Outcome

#: Seconds between two checks for a signal, and refreshes of the progress line, while a trial runs.
_TICK = 0.2


class Executor(Protocol):
    """Runs each trial in a process of its own. Every submitted trial is answered, once."""

    #: How many blocks may be open at once, and how many trials of a block, if they may run beside each other.
    blocks: int
    workers: int

    def submit(self, trial: Trial, block: Block) -> int:
        """Start a trial; returns the key of its answer."""

    def wait(self, timeout: float | None = None) -> list[Answer]:
        """The answers that come within `timeout` seconds."""

    def release(self, block: Block) -> None:
        """Close a block: nothing more of it will be submitted."""


@dataclass
class Here(Executor):
    """Runs trials in processes of this machine, and ends them all at `until`, by `time.monotonic`."""

    isolation: Isolation
    workers: int
    until: float | None = None
    blocks: int = 1

    def submit(self, trial: Trial, block: Block) -> int:
        return self.isolation.submit(trial, self.until)

    def wait(self, timeout: float | None = None) -> list[Answer]:
        return self.isolation.wait(timeout)

    def release(self, block: Block) -> None:
        """Do nothing: blocks do not matter here."""


@dataclass
class Report:
    """The result of a run: the outcomes of trials, the files of records, the signal that ended it early, the device.

    `unrecorded` counts trials that jobs of a cluster could not record; the next run repeats them. `left` says what
    remains because the time was over.
    """

    outcomes: Counter[str]
    paths: Sequence[Path] = ()
    signum: int | None = None
    device: str = "cpu"
    unrecorded: int = 0
    left: Sequence[str] = ()


class Interruption:
    """Inside, SIGINT, SIGTERM and SIGHUP only set `signum`, so that records stay whole and processes end in order.

    Signals that this process was started to ignore (`nohup`, or in the background of a script) stay ignored.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only the main thread can set handlers
            heard = [signum for signum in self._SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
            self._before = {signum: signal.signal(signum, self._note) for signum in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum


@dataclass
class Loop:
    """Runs what remains of `schedule`, in its `blocks`, on `executor`, within `allowance`."""

    schedule: Schedule
    blocks: Sequence[Block]
    executor: Executor
    shards: Shards
    progress: Progress
    fingerprint: Callable[[Trial], str]
    clock: Any
    allowance: Allowance | None = None

    def __post_init__(self) -> None:
        self._waiting = list(reversed(self.blocks))
        self._open: dict[str, Block] = {}
        self._running: dict[int, tuple[Run, Block]] = {}
        self._outcomes: Counter[str] = Counter()

    def run(self) -> Report:
        """Run until nothing is left, a signal comes or the time is over, and report what was recorded.

        Raises:
            RunEnded: it cannot go on.
        """
        try:
            with going_on():
                with Interruption() as interruption:
                    self._fill()
                    while interruption.signum is None and self._running:
                        self._wait(interruption)
                self.shards.end()
            paths = self.shards.paths() if self._outcomes else []
            given = self.allowance if interruption.signum is None else None
            left = given.farewell() if given is not None else []
            return Report(self._outcomes, paths, interruption.signum, left=left)
        finally:
            self.progress.close()
            self.shards.close()

    def _fill(self, blocks: Sequence[Block] = ()) -> None:
        """Start all that may run now: of these blocks, and of new ones while more may be open."""
        todo = list(blocks)
        may = self.allowance.admits if self.allowance is not None else (lambda _: True)
        while todo or (self._waiting and len(self._open) < self.executor.blocks):
            block = todo.pop() if todo else self._waiting.pop()
            self._open[block.key] = block
            while len(block.running) < self.executor.workers:
                run = block.schedule.next(block.running, may)
                if run is None:
                    break
                block.running.append(run)
                self._running[self.executor.submit(run.trial, block)] = run, block
            if not block.running:
                del self._open[block.key]
                self.executor.release(block)

    def _wait(self, interruption: Interruption) -> None:
        """Wait until a trial ends. The progress is computed once: this process is idle while a trial is timed."""
        state = self._state()
        while interruption.signum is None:
            self.progress.now([run for run, _ in self._running.values()], *state)
            answers = self.executor.wait(_TICK)
            touched = {block.key: block for block in map(self._record, answers)}
            if answers:
                self._fill(list(touched.values()))
                return

    def _record(self, answer: Answer) -> Block:
        run, block = self._running.pop(answer.key)
        block.running.remove(run)
        shard = self.shards.of(answer)
        if self.allowance is not None and (line := self.allowance.cut(run, answer)) is not None:
            self.shards.append(line, answer)
            self.progress.cut(run, answer.seconds)
            return block
        record = make_record(self.schedule.name, run, self.fingerprint(run.trial), answer, shard.libraries)
        self.shards.append(record, answer)
        self.schedule.history.add(record)
        self.clock.add(record)
        self._outcomes[record["outcome"]] += 1
        self.progress.ended(run, record, *self._state())
        if run.trial.alone:
            shard.watch.ended(record, run.trial.label())
        return block

    def _state(self) -> tuple[int, float, float | None]:
        """(trials ended in this run, trials left, seconds left)."""
        remaining = self.schedule.remaining()
        return self._outcomes.total(), sum(count for _, count in remaining), self.clock.left(remaining)


def make_record(
    experiment: str, run: Run, fingerprint: str, answer: Answer, libraries: Mapping[str, str | None]
) -> dict[str, Any]:
    """The line to store for a finished trial; always readable, whatever the trial returned."""
    place = answer.place
    record = {
        "experiment": experiment,
        "id": run.trial.id,
        "round": run.round,
        "fingerprint": fingerprint if place is None else place.fingerprint,
        "version": version_hash(run.trial, libraries),
        "trial": run.trial.describe(),
        "outcome": str(answer.outcome),
        "evidence": answer.evidence,
        "seconds": answer.seconds,
        "utc": utc_now(),
        "load": os.getloadavg()[0] if place is None else place.load,
        "stolen": answer.stolen,
        "result": answer.result,
    }
    as_read = record | {"trial": json.loads(canonical_json(record["trial"]))}
    if (why := flaw_of_record(as_read)) is not None:  # a reader would skip it, and the trial would be repeated forever
        said = f"what came back ({answer.outcome}) is no record: {why}"
        record |= {"outcome": str(Outcome.ERROR), "evidence": said, "result": None}
    return record
