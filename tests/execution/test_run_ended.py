"""What ends a run that goes on, and what does not: signals, a killed server, a full disk, a folder that moved."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from fake_run import Fake, finish, sleepers, waiters
from waiting import until

from dpbench.process.linux import kill
from dpbench.records.store import Store, read_records


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM"])
def test_a_signal_that_a_run_was_started_to_ignore_is_ignored_from_start_to_end(tmp_path, name):
    """As `nohup dpbench run` has it, or a script that starts one in the background."""
    fake = Fake(tmp_path, waiters(3), in_order=True)
    process = fake.halfway(shell=f"trap '' {name}")
    os.kill(process.pid, signal.Signals[f"SIG{name}"])
    fake.go(1)
    fake.wait_for(3, "begun")  # it has gone on to the next trial
    os.kill(process.pid, signal.Signals[f"SIG{name}"])
    fake.go()
    _, err = finish(process)
    assert process.returncode == 0, err
    assert fake.numbers == dict.fromkeys(range(3), 1) and fake.left_over() == []


def test_one_that_it_was_not_ends_it_in_good_order(tmp_path):
    fake = Fake(tmp_path, waiters(3), in_order=True)
    process = fake.halfway()
    os.kill(process.pid, signal.SIGHUP)
    _, err = finish(process)
    assert process.returncode == 128 + signal.SIGHUP and "the same command continues from there" in err
    assert fake.numbers == {0: 1} and fake.left_over() == []


def test_a_server_that_is_killed_before_the_first_trial_is_no_mistake_of_a_person(tmp_path):
    fake = Fake(tmp_path, "[bodies.WithTorch()]")
    process = fake.start()
    until(lambda: fake.processes("dpbench.process.server"), "a server")
    for pid in fake.processes("dpbench.process.server"):
        kill(pid)
    _, err = finish(process)
    last = err.strip().splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "the process that forks the trials went away (signal SIGKILL)" in last and "expected a torch" not in last
    assert fake.records == []


def test_a_limit_on_the_size_of_files_ends_a_run_and_keeps_what_ended(tmp_path):
    fake = Fake(tmp_path, waiters(40), in_order=True)
    fake.go()
    process = fake.start(shell="ulimit -f 8")  # KiB; the records of some trials
    _, err = finish(process)
    last = err.strip().splitlines()[-1]
    (file,) = [path for path in (fake.output / "fake").glob("*.jsonl") if "saved" not in path.name]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "File too large" in last and str(file) in last and "what it held is saved in" in last
    done = [r["trial"]["number"] for r in read_records(fake.output / "fake", lambda _: None)]
    assert sorted(done) == sorted(set(done)) and len(done) == len(fake.trace("ended")) > 1
    assert fake.run().returncode == 0
    found = [r["trial"]["number"] for r in read_records(fake.output / "fake", lambda _: None)]
    assert sorted(found) == list(range(40))


def test_a_folder_that_moves_before_the_first_record_ends_a_run_and_keeps_it(tmp_path):
    fake = Fake(tmp_path, waiters(3), in_order=True)
    process = fake.halfway(done=0)
    fake.output.rename(tmp_path / "moved")
    fake.go()
    _, err = finish(process)
    last = err.strip().splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "No such file or directory" in last and str(fake.output / "fake") in last
    assert fake.numbers == {0: 1}
    assert fake.run().returncode == 0 and fake.numbers == dict.fromkeys(range(3), 1)


def test_a_full_disk_loses_no_record_and_its_files_alone(tmp_path, monkeypatch):
    """The disk is full from the first write on; what is saved elsewhere has the numbers."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    folder, write = tmp_path / "full", os.write
    store = Store(folder, {"device": "cpu"})

    def full(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    record = {"id": "a", "round": 0, "outcome": "ok", "result": {"n": 1, "files": {"trace": "dHJhY2U="}}}
    with pytest.raises(OSError, match=f"No space left on device: '{folder}/"):
        store.append(record)
    said = store.save_again()
    assert said.startswith(f"what it held is saved in {tmp_path / 'elsewhere'}") and not list(folder.glob("*saved*"))
    text = Path(said.rpartition(" ")[2]).read_text()
    assert '"result": {"n": 1, "files": {}}' in text and text.count("\n") == 2


def test_a_page_that_cannot_be_written_leaves_the_old_one_whole(tmp_path):
    fake = Fake(tmp_path, sleepers(2))
    assert fake.run().returncode == 0
    assert fake.run(command="report").returncode == 0
    page = fake.output / "fake" / "report.html"
    before = {path: path.read_bytes() for path in fake.output.rglob("*") if path.is_file()}
    process = fake.start(command="report", shell="ulimit -f 1")
    _, err = finish(process)
    assert process.returncode != 0 and "File too large" in err and str(fake.output) in err, err
    assert page in before and {path: path.read_bytes() for path in fake.output.rglob("*") if path.is_file()} == before
