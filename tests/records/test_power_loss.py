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

from dpbench.errors import UsageError
from dpbench.execution import lock
from dpbench.execution.lock import held
from dpbench.execution.loop import make_record
from dpbench.execution.machines import FolderName
from dpbench.execution.schedule import History, Run, Schedule
from dpbench.process.parent import Answer
from dpbench.records import store
from dpbench.records.reader import LeftOut, from_line, newest
from dpbench.records.store import Store, read_records
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Outcome

TRIALS = [Act(action="sleep", number=number) for number in range(6)]
FEW = TRIALS[:2]
OUTCOMES = st.sampled_from([Outcome.OK, Outcome.ERROR])
ENVIRONMENT = {"host": "here", "device": "cpu", "device_name": "a CPU"}


def record_of(run: Run, outcome: Outcome = Outcome.OK) -> dict:
    answer = Answer(1, outcome, None, {"n": run.trial.number}, 0.1)
    return make_record("machine", run, "f", answer, {})


class Clock(datetime):
    """The machine's clock, which somebody may set."""

    now_is = datetime(2026, 1, 1, tzinfo=UTC)

    @classmethod
    def now(cls, tz=None):  # type: ignore[override]
        cls.now_is += timedelta(microseconds=1)
        return cls.now_is


class Writer:
    """A run: what it knows from the disk when it begins, and from its own trials since.

    Raises:
        UsageError: if it takes the lock, and somebody else has it.
    """

    def __init__(self, folder: Path, locked: bool) -> None:
        self.store = Store(folder, ENVIRONMENT)
        self.stack = contextlib.ExitStack()
        if locked:
            self.stack.enter_context(held(folder, wait=False, say=lambda _: None))
        history = History(read_records(folder, lambda _: None), lambda _: "f", (Outcome.ERROR,))
        self.schedule = Schedule("machine", FEW, 2, history)
        self.running = self.schedule.next()

    def close(self) -> None:
        self.store.close()
        self.stack.close()


class Machine(RuleBasedStateMachine):
    """Two people's runs on one folder, with the lock that keeps them apart, and (on some file systems) without."""

    @initialize(locked=st.booleans())
    def begin(self, locked: bool) -> None:
        self.stack = contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "e"
        self.stack.enter_context(mock.patch.object(store, "datetime", Clock))
        self.stack.enter_context(mock.patch.object(os, "fsync"))  # what was written outlives a kill without
        Clock.now_is = datetime(2026, 1, 1, tzinfo=UTC)
        self.writers: list[Writer | None] = [None, None]
        self.recorded: Counter[tuple[int, int]] = Counter()
        self.well: Counter[tuple[int, int]] = Counter()
        self.locked, self.beside = locked, False

    def teardown(self) -> None:
        for writer in self.writers:
            if writer is not None:
                writer.close()
        self.stack.close()

    @rule(who=st.integers(0, 1))
    def start(self, who: int) -> None:
        if self.writers[who] is not None:
            return
        other = self.writers[1 - who]
        try:
            self.writers[who] = Writer(self.folder, self.locked)
        except UsageError:
            assert self.locked and other is not None
            return
        assert not self.locked or other is None
        self.beside = self.beside or None not in self.writers

    @rule(
        who=st.integers(0, 1), outcomes=st.lists(st.sampled_from([Outcome.OK, Outcome.ERROR]), min_size=1, max_size=3)
    )
    def work(self, who: int, outcomes: list[Outcome]) -> None:
        """End and record the trial that runs, and begin the next one; and again."""
        writer = self.writers[who]
        for outcome in outcomes:
            if writer is None or writer.running is None:
                return
            record = record_of(writer.running, outcome)
            writer.store.append(record)
            writer.schedule.history.add(record)
            key = writer.running.trial.number, writer.running.round
            self.recorded[key] += 1
            self.well[key] += outcome is Outcome.OK
            writer.running = writer.schedule.next()

    @precondition(lambda self: any(self.writers))
    @rule(who=st.integers(0, 1), torn=st.none() | st.floats(0, 1, exclude_max=True))
    def end(self, who: int, torn: float | None) -> None:
        """In good order, or by a kill: what it was writing is there in part, or not at all."""
        writer, self.writers[who] = self.writers[who], None
        if writer is None:
            return
        if torn is not None and writer.running is not None and writer.store._file is not None:
            line = to_json({"type": "trial", "schema": store.SCHEMA} | record_of(writer.running)).encode()
            os.write(writer.store._file, line[: int(torn * len(line))])
        writer.close()

    @rule(seconds=st.sampled_from([-7200, -1, 3600]))
    def set_the_clock(self, seconds: int) -> None:
        Clock.now_is += timedelta(seconds=seconds)

    @rule()
    def remove_the_lock_s_file(self) -> None:
        """As somebody does who thinks that it was left."""
        (self.folder / lock.NAME).unlink(missing_ok=True)

    @invariant()
    def nothing_that_ended_well_is_done_twice_by_runs_one_after_the_other(self) -> None:
        assert self.beside or not [key for key, count in self.well.items() if count > 1]

    @invariant()
    def what_was_recorded_is_read_once_and_the_next_run_does_what_is_missing_or_failed(self) -> None:
        lines = read_records(self.folder, lambda _: None)
        assert Counter((line["trial"]["number"], line["round"]) for line in lines) == self.recorded
        for retry, counts in (((), self.recorded), ((Outcome.ERROR,), self.well)):
            history = History(lines, lambda _: "f", retry)
            schedule, done = Schedule("machine", FEW, 2, history), []
            while (run := schedule.next()) is not None:
                done.append((run.trial.number, run.round))
                history.add(record_of(run))
            wanted = {(trial.number, each) for trial in FEW for each in range(2)}
            assert sorted(done) == sorted(wanted - set(+counts))
        shown = newest([from_line(line, ENVIRONMENT, "r") for line in lines], LeftOut())
        assert {(each.trial["number"], each.round) for each in shown if each.outcome == "ok"} == set(+self.well)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


class Disk:
    """What a file system has promised: the bytes of each file that were synced, and names whose folder was.

    A power loss leaves all of that; of what was written since, as much as it likes.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bytes]] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write, sync, mkdir, link, unlink = os.write, os.fsync, os.mkdir, os.link, os.unlink

        def path_of(file: int) -> str:
            return os.readlink(f"/proc/self/fd/{file}")

        def noted_write(file: int, data: bytes) -> int:
            few = bytes(data)[: max(1, len(data) * 2 // 3)]  # a disk may take less than it is given
            self.calls.append(("write", path_of(file), few))
            return write(file, few)

        def noted_sync(file: int) -> None:
            self.calls.append(("sync", path_of(file), b""))
            sync(file)

        def noted_mkdir(path: Path, mode: int = 0o777) -> None:
            mkdir(path, mode)
            self.calls.append(("mkdir", str(path), b""))

        def noted_link(source: Path, target: Path) -> None:
            self.calls.append(("link", str(target), str(source).encode()))
            link(source, target)

        def noted_unlink(path: Path) -> None:
            self.calls.append(("unlink", str(path), b""))
            unlink(path)

        noted = (noted_write, noted_sync, noted_mkdir, noted_link, noted_unlink)
        for name, call in zip(("write", "fsync", "mkdir", "link", "unlink"), noted, strict=True):
            monkeypatch.setattr(os, name, call)

    def after(self, calls: int, share: float) -> dict[str, bytes]:
        """Files as they are found when the power goes after so many calls; of what was not synced a share is there."""
        content: dict[str, bytes] = {}
        synced: dict[str, int] = {}
        named: dict[str, bool] = {}
        for kind, path, data in self.calls[:calls]:
            if kind == "unlink":
                content.pop(path)
            elif kind == "sync" and path in content:
                synced[path] = len(content[path])
            elif kind == "sync":  # a folder
                named |= {name: True for name in named if os.path.dirname(name) == path}
            else:
                named.setdefault(path, False)
            if kind == "write":
                content[path] = content.get(path, b"") + data
            elif kind == "link":
                content[path], synced[path] = content[data.decode()], synced.get(data.decode(), 0)
        found = {}
        for path, data in content.items():
            way = [path, *map(str, Path(path).parents)]
            there = all(named.get(each, True) for each in way)
            safe = synced.get(path, 0) if there else 0
            kept = safe + int(share * (len(data) - safe))
            if there or kept:
                found[path] = data[:kept]
        return found


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
def test_no_power_loss_takes_a_record_that_was_said_to_be_there(tmp_path, monkeypatch, capsys, share):
    """At every call of two runs that writes, syncs or names, with every file system between the laziest and the best.

    Nor does it take the name of the folder of results, without which none of them would count, or a record's file.
    """
    disk, folder = Disk(), tmp_path / "deep" / "results" / "e"
    promised: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        disk.watch(patch)
        number = 0
        for _ in range(2):
            runs = Store(folder, ENVIRONMENT)
            FolderName(folder.parent).give()
            for _ in range(3):
                result = {"n": number, "files": {"trace": "dHJhY2U="}}
                runs.append(record_of(Run(TRIALS[number], 0)) | {"result": result})
                promised.append((len(disk.calls), number))
                number += 1
            runs.close()
    lost, name = 0, FolderName(folder.parent).read()
    assert name and not list(folder.parent.glob(f"{FolderName.FILE}-*"))
    for calls in range(len(disk.calls) + 1):
        left = tmp_path / f"left-{calls}"
        for path, data in disk.after(calls, share).items():
            place = left / Path(path).relative_to(folder.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        found = read_records(left / "e", lambda _: None)
        numbers = [record["trial"]["number"] for record in found]
        assert len(numbers) == len(set(numbers))
        assert all(FolderName(left).read() == name for _ in numbers), "no record without the name that it counts under"
        safe = [number for when, number in promised if when <= calls]
        lost += sum(number not in numbers for number in safe)
        for record in found:
            if record["trial"]["number"] in safe:
                (file,) = record["result"]["files"].values()
                assert (left / "e" / file).read_bytes() == b"trace"
    with capsys.disabled():
        print(f"\npower lost at each of {len(disk.calls)} calls, {share:.0%} of the rest kept: {lost} records lost")
    assert lost == 0 and len(disk.calls) > 12
