"""No power loss takes a record that was said to be there."""

import os
from pathlib import Path

import pytest
from bodies import Act

from dpbench.execution.loop import make_record
from dpbench.execution.machines import folder_name, name_folder
from dpbench.execution.schedule import Run
from dpbench.process.parent import Answer
from dpbench.records.store import Store, read_records
from dpbench.trials.outcome import Outcome

TRIALS = [Act(action="sleep", number=number) for number in range(6)]
ENVIRONMENT = {"host": "here", "device": "cpu", "device_name": "a CPU"}


def record_of(run: Run, outcome: Outcome = Outcome.OK) -> dict:
    answer = Answer(1, outcome, None, {"n": run.trial.number}, 0.1)
    return make_record("machine", run, "f", answer, {})


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
            name_folder(folder.parent)
            for _ in range(3):
                result = {"n": number, "files": {"trace": "dHJhY2U="}}
                runs.append(record_of(Run(TRIALS[number], 0)) | {"result": result})
                promised.append((len(disk.calls), number))
                number += 1
            runs.close()
    lost, name = 0, folder_name(folder.parent)
    assert name and not list(folder.parent.glob(".folder-*"))
    for calls in range(len(disk.calls) + 1):
        left = tmp_path / f"left-{calls}"
        for path, data in disk.after(calls, share).items():
            place = left / Path(path).relative_to(folder.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        found = read_records(left / "e", lambda _: None)
        numbers = [record["trial"]["number"] for record in found]
        assert len(numbers) == len(set(numbers))
        assert all(folder_name(left) == name for _ in numbers), "no record without the name that it counts under"
        safe = [number for when, number in promised if when <= calls]
        lost += sum(number not in numbers for number in safe)
        for record in found:
            if record["trial"]["number"] in safe:
                (file,) = record["result"]["files"].values()
                assert (left / "e" / file).read_bytes() == b"trace"
    with capsys.disabled():
        print(f"\npower lost at each of {len(disk.calls)} calls, {share:.0%} of the rest kept: {lost} records lost")
    assert lost == 0 and len(disk.calls) > 12
