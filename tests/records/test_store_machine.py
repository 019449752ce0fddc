"""Store and schedule under any order of work, kills, torn lines, clock steps and power losses, by one or two runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest
from bodies import Act
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpbench.execution.loop import make_record
from dpbench.execution.schedule import History, Run, Schedule
from dpbench.process.parent import Answer
from dpbench.records import store
from dpbench.records.store import Store, read_records
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Outcome

TRIALS = [Act(action="sleep", number=number) for number in range(6)]
FEW = TRIALS[:2]
ENVIRONMENT = {"host": "here", "device": "cpu", "device_name": "a CPU"}


def record_of(run: Run) -> dict:
    answer = Answer(1, Outcome.OK, None, {"n": run.trial.number}, 0.1)
    return make_record("machine", run, "f", answer, {})


class Clock(datetime):
    """The machine's clock, which somebody may set."""

    now_is = datetime(2026, 1, 1, tzinfo=UTC)

    @classmethod
    def now(cls, tz=None):  # type: ignore[override]
        cls.now_is += timedelta(microseconds=1)
        return cls.now_is


class Writer:
    """A run: what it knows from the disk when it begins, and from its own trials since."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder, ENVIRONMENT)
        history = History(read_records(folder, lambda _: None), lambda _: "f", ())
        self.schedule = Schedule("machine", FEW, 2, history)
        self.running: Run | None = None


class Machine(RuleBasedStateMachine):
    """Two people's runs on one folder. (The lock that keeps them apart is not in it.)"""

    @initialize()
    def begin(self) -> None:
        self.stack = contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "e"
        self.stack.enter_context(mock.patch.object(store, "datetime", Clock))
        Clock.now_is = datetime(2026, 1, 1, tzinfo=UTC)
        self.writers: list[Writer | None] = [None, None]
        self.recorded: Counter[tuple[int, int]] = Counter()
        self.beside = False

    def teardown(self) -> None:
        for writer in self.writers:
            if writer is not None:
                writer.store.close()
        self.stack.close()

    @rule(who=st.integers(0, 1))
    def start(self, who: int) -> None:
        if self.writers[who] is None:
            self.writers[who] = Writer(self.folder)
            self.beside = self.beside or None not in self.writers

    @rule(who=st.integers(0, 1))
    def work(self, who: int) -> None:
        """Begin a trial, or end and record the one that runs."""
        writer = self.writers[who]
        if writer is None:
            return
        if writer.running is None:
            writer.running = writer.schedule.next()
            return
        record = record_of(writer.running)
        writer.store.append(record)
        writer.schedule.history.add(record)
        self.recorded[writer.running.trial.number, writer.running.round] += 1
        writer.running = None

    @precondition(lambda self: any(self.writers))
    @rule(who=st.integers(0, 1), torn=st.floats(0, 1, exclude_max=True))
    def kill(self, who: int, torn: float) -> None:
        """At any moment: what it was writing is there in part, or not at all."""
        writer, self.writers[who] = self.writers[who], None
        if writer is None:
            return
        if writer.running is not None and writer.store._file is not None:
            line = to_json({"type": "trial", "schema": store.SCHEMA} | record_of(writer.running)).encode()
            os.write(writer.store._file, line[: int(torn * len(line))])
        writer.store.close()

    @rule(who=st.integers(0, 1))
    def end(self, who: int) -> None:
        writer, self.writers[who] = self.writers[who], None
        if writer is not None:
            writer.store.close()

    @rule(seconds=st.integers(-7200, 7200))
    def set_the_clock(self, seconds: int) -> None:
        Clock.now_is += timedelta(seconds=seconds)

    @invariant()
    def what_was_recorded_is_read_once_and_nothing_else(self) -> None:
        found = Counter((r["trial"]["number"], r["round"]) for r in read_records(self.folder, lambda _: None))
        assert found == self.recorded

    @invariant()
    def nothing_is_done_twice_by_runs_one_after_the_other(self) -> None:
        assert self.beside or not [key for key, count in self.recorded.items() if count > 1]

    @invariant()
    def the_next_run_does_what_is_missing_and_no_more(self) -> None:
        history = History(read_records(self.folder, lambda _: None), lambda _: "f", ())
        schedule, done = Schedule("machine", FEW, 2, history), []
        while (run := schedule.next()) is not None:
            done.append((run.trial.number, run.round))
            history.add(record_of(run))
        wanted = {(trial.number, each) for trial in FEW for each in range(2)}
        assert sorted(done) == sorted(wanted - set(self.recorded))


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


class Disk:
    """What a file system has promised: the bytes of each file that were synced, and names whose folder was.

    A power loss leaves all of that; of what was written since, as much as it likes.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bytes]] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write, sync = os.write, os.fsync

        def noted_write(file: int, data: bytes) -> int:
            few = bytes(data)[: max(1, len(data) * 2 // 3)]  # a disk may take less than it is given
            self.calls.append(("write", os.readlink(f"/proc/self/fd/{file}"), few))
            return write(file, few)

        def noted_sync(file: int) -> None:
            self.calls.append(("sync", os.readlink(f"/proc/self/fd/{file}"), b""))
            sync(file)

        monkeypatch.setattr(store.os, "write", noted_write)
        monkeypatch.setattr(store.os, "fsync", noted_sync)

    def after(self, calls: int, share: float) -> dict[str, bytes]:
        """Files as they are found when the power goes after so many calls; of what was not synced a share is there."""
        content: dict[str, bytes] = {}
        synced: dict[str, int] = {}
        named: set[str] = set()
        for kind, path, data in self.calls[:calls]:
            if kind == "write":
                content[path] = content.get(path, b"") + data
            elif path in content:
                synced[path] = len(content[path])
            else:  # a folder
                named |= {name for name in content if os.path.dirname(name) == path}
        found = {}
        for path, data in content.items():
            safe = synced.get(path, 0) if path in named else 0
            kept = safe + int(share * (len(data) - safe))
            if path in named or kept:
                found[path] = data[:kept]
        return found


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
def test_no_power_loss_takes_a_record_that_was_said_to_be_there(tmp_path, monkeypatch, capsys, share):
    """At every call of two runs that writes or syncs, and with every file system between the laziest and the best."""
    disk, folder = Disk(), tmp_path / "e"
    promised: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        disk.watch(patch)
        number = 0
        for _ in range(2):
            runs = Store(folder, ENVIRONMENT)
            for _ in range(3):
                runs.append(record_of(Run(TRIALS[number], 0)))
                promised.append((len(disk.calls), number))
                number += 1
            runs.close()
    lost = 0
    for calls in range(len(disk.calls) + 1):
        left = tmp_path / f"left-{calls}"
        left.mkdir()
        for path, data in disk.after(calls, share).items():
            (left / Path(path).name).write_bytes(data)
        found = [r["trial"]["number"] for r in read_records(left, lambda _: None)]
        assert len(found) == len(set(found))
        lost += sum(number not in found for when, number in promised if when <= calls)
    with capsys.disabled():
        print(f"\npower lost at each of {len(disk.calls)} calls, {share:.0%} of the rest kept: {lost} records lost")
    assert lost == 0 and len(disk.calls) > 12
