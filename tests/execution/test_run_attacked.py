"""A run that is signalled, or whose folder, disk, streams or engine are taken away: nothing is lost or pretended."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_run import ROOT, Fake, ended, finish, sleepers, waiters
from waiting import PATIENCE, until

from dpbench.process.linux import kill
from dpbench.records.store import Store, read_records


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("removed", "and it is gone; what it held is saved in"),
        ("moved", "and it is gone; who moved it has what it held"),
        ("replaced", "and it is gone; what it held is saved in"),
        ("cut", "and it has been cut; what it held is saved in"),
        ("emptied", "and it has been cut; what it held is saved in"),
    ],
)
def test_records_that_are_taken_away_end_a_run_and_are_kept(tmp_path, how, said):
    fake = Fake(tmp_path, waiters(4), in_order=True)
    process = fake.halfway(done=2)
    (file,) = (fake.output / "fake").glob("*.jsonl")
    kept = tmp_path / "kept.jsonl"
    if how == "removed":
        shutil.rmtree(fake.output)
    elif how == "moved":
        file.rename(kept)
    elif how == "replaced":
        shutil.copy(file, kept)
        os.replace(kept, file)
    else:  # of an empty one the environment, too, is gone
        os.truncate(file, file.read_bytes().index(b"\n") + 1 if how == "cut" else 0)
    fake.go()
    last = ended(process, 1).strip().splitlines()[-1]
    assert said in last and "recorded" not in last
    if how == "moved":
        kept.rename(file)
    assert fake.run().returncode == 0 and fake.left_over() == []
    found = Counter(r["trial"]["number"] for r in read_records(fake.output / "fake", lambda _: None))
    assert set(found) == set(range(4)) and (how == "replaced" or set(found.values()) == {1})


SHELL = '{python} -m dpbench run {file} --output {output} {redirections}; echo "code $?" >&3'


@pytest.mark.parametrize("redirections", ["2>&1 | head -2", "2>/dev/full", "2>&-", ">&- 2>&-", "<&- 2>&1 | true"])
def test_progress_that_nobody_reads_is_no_end_of_the_run(tmp_path, redirections):
    fake = Fake(tmp_path, sleepers(8, 0.05))
    line = SHELL.format(python=sys.executable, file=fake.file, output=fake.output, redirections=redirections)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"exec 3>&1; {line}"], cwd=ROOT, capture_output=True, timeout=PATIENCE
    )
    assert fake.numbers == dict.fromkeys(range(8), 1), done
    assert {record["outcome"] for record in fake.records} == {"ok"}
    assert done.stdout.endswith(b"code 0\n"), "no figures are to be printed, so that there was nothing to print"


@pytest.mark.parametrize(("redirection", "code"), [(">&-", 2), (">/dev/full", 2), ("| true", 141)])
def test_what_cannot_be_printed_is_no_success(redirection, code):
    line = f"{sys.executable} -m dpbench list {redirection}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.stderr.startswith("dpbench: ") if code == 2 else done.stderr == ""


def test_a_second_run_on_a_folder_is_told_who_measures_there(tmp_path):
    fake = Fake(tmp_path, waiters(4), in_order=True)
    first = fake.halfway()
    second = fake.run()
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    assert f"process {first.pid} on " in second.stderr and " since 20" in second.stderr and "--wait" in second.stderr
    (fake.output / "fake" / ".lock").unlink()
    assert "nobody else to measure for" in fake.run().stderr, "whoever removes the file is told, too"
    waiting = fake.start("--wait")
    assert "waiting for " in waiting.stderr.readline()
    fake.go()
    ended(first)
    assert "nothing is left to run" in ended(waiting)
    assert fake.numbers == dict.fromkeys(range(4), 1)


def test_what_was_run_again_counts_though_the_clock_was_set_back_since(tmp_path):
    fake = Fake(tmp_path, "[bodies.Beside(action='once', folder=FOLDER)]")
    assert fake.run().returncode == 0
    assert [record["outcome"] for record in fake.records] == ["error"]
    (path,) = (fake.output / "fake").glob("*.jsonl")
    path.write_text(path.read_text().replace(fake.records[0]["utc"], "2099-01-01T00:00:00.000000Z"))
    assert "recorded 1 trials (1 ok)" in fake.run("--retry", "error").stderr
    assert "nothing is left to run" in fake.run("--retry", "error").stderr
    assert "done 1, remaining 0" in fake.run(command="plan").stdout


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    fake = Fake(tmp_path, sleepers(1))
    (fake.output / "fake").mkdir(parents=True)
    (tmp_path / "precious").write_text("kept")
    (fake.output / "fake" / ".lock").symlink_to(tmp_path / "precious")
    done = fake.run()
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (tmp_path / "precious").read_text() == "kept"


def test_whatever_a_trial_sends_back_becomes_one_record_that_is_read(tmp_path):
    """Else the run would end in a traceback at each call, or do the trial again without end."""
    some = "[bodies.Beside(action='files', number=n) for n in range(5)]"
    fake = Fake(tmp_path, f"{some} + [bodies.Beside(action=name) for name in ('twins', 'forge', 'long', 'sleep')]")
    done = fake.run()
    assert done.returncode == 0 and "recorded 9 trials (7 error, 2 ok)" in done.stderr
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    found = {(r["trial"]["action"], r["trial"]["number"]): r for r in fake.records}
    assert len(found) == len(fake.records) == 9 and "nothing is left to run" in fake.run().stderr
    assert "what came back (ok) is no record: result" in found["forge", 0]["evidence"]
    files = found["twins", 0]["result"]["files"]
    assert [(fake.output / "fake" / name).read_bytes() for name in files.values()] == [b"1", b"2", b"3", b"4"]
    assert len(list((fake.output / "fake").glob("*.jsonl"))) == 1


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
    ended(process)
    assert fake.numbers == dict.fromkeys(range(3), 1) and fake.left_over() == []


def test_a_server_that_is_killed_before_the_first_trial_is_no_mistake_of_a_person(tmp_path):
    fake = Fake(tmp_path, "[bodies.WithTorch()]")
    process = fake.start()
    until(lambda: fake.processes("dpbench.process.server"), "a server")
    for pid in fake.processes("dpbench.process.server"):
        kill(pid)
    last = ended(process, 1).strip().splitlines()[-1]
    assert "the process that forks the trials went away (signal SIGKILL)" in last and "expected a torch" not in last
    assert fake.records == []


def test_a_limit_on_the_size_of_files_ends_a_run_and_keeps_what_ended(tmp_path):
    fake = Fake(tmp_path, waiters(40), in_order=True)
    fake.go()
    process = fake.start(shell="ulimit -f 8")  # KiB; the records of some trials
    last = ended(process, 1).strip().splitlines()[-1]
    (file,) = [path for path in (fake.output / "fake").glob("*.jsonl") if "saved" not in path.name]
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
    last = ended(process, 1).strip().splitlines()[-1]
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


KILLER = """
import os, signal, sys
left, me = int(sys.argv.pop(1)), os.getpid()

def counted(name):
    function = getattr(os, name)
    def call(*arguments, **named):
        global left
        if os.getpid() == me and not (name == "open" and not arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)):
            left -= 1
            if left == 0:
                if name == "write":
                    function(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(me, signal.SIGKILL)
        return function(*arguments, **named)
    setattr(os, name, call)

for name in ("write", "pwrite", "fsync", "open", "replace", "rename", "ftruncate", "mkdir", "link", "unlink"):
    counted(name)
from dpbench.cli import main
code = main(["run", *sys.argv[1:]])
print("calls left", left)
sys.exit(code)
"""


def test_a_folder_s_name_that_is_empty_or_a_pipe_is_given_anew(tmp_path):
    fake = Fake(tmp_path, sleepers(2))
    fake.output.mkdir()
    (fake.output / ".folder").touch()
    assert fake.run().returncode == 0 and len((fake.output / ".folder").read_text()) == 17
    (fake.output / ".folder").unlink()
    os.mkfifo(fake.output / ".folder")  # opened for reading, it would be waited for
    assert fake.run(command="plan").returncode == 2


IMPORTING = """
import runpy, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "dpbench.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
runpy.run_module("dpbench", run_name="__main__")
"""


def test_ctrl_c_before_anything_has_begun_is_one_line():
    done = subprocess.run([sys.executable, "-c", IMPORTING], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "dpbench: interrupted\n")


def test_an_experiment_that_closes_standard_error_is_run(tmp_path):
    fake = Fake(tmp_path, sleepers(2))
    fake.file.write_text(fake.file.read_text() + "\nimport sys\nsys.stderr.close()\n")
    assert fake.run_apart().returncode == 0 and len(fake.records) == 2


@pytest.mark.slow
def test_killed_at_every_call_that_writes_nothing_is_lost_and_nothing_done_twice(tmp_path, capsys):
    """The n-th call of the run's own process that writes, syncs, opens to write or renames is its last, for every n.

    A write that is its last writes half. Then the same command goes on.
    """
    tried = lost = twice = 0
    for call in range(1, 200):
        cells = "grid(bodies.Beside, action='sleep', number=[0, 1]) + [bodies.Beside(action='twins', number=2)]"
        fake = Fake(tmp_path / str(call), cells)  # the last with files beside its record
        arguments = [sys.executable, "-c", KILLER, str(call), str(fake.file), "--output", str(fake.output)]
        killed = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert "Traceback" not in killed.stderr, killed.stderr
        before = read_records(fake.output / "fake", lambda _: None)
        done = fake.run()
        assert done.returncode == 0, done.stderr
        found = Counter(r["trial"]["number"] for r in read_records(fake.output / "fake", lambda _: None))
        lost += sum(found[n] == 0 for n in range(3)) + sum(r["trial"]["number"] not in found for r in before)
        twice += sum(found[n] > 1 for n in range(3))
        tried += 1
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL
    with capsys.disabled():
        print(f"\nkilled at each of {tried - 1} calls that write: {lost} records lost, {twice} twice")
    assert tried > 10 and killed.returncode == 0 and lost == twice == 0


@pytest.mark.slow
def test_the_death_of_ray_is_no_trial_s(tmp_path):
    pytest.importorskip("ray")
    fake = Fake(tmp_path, waiters(6), in_order=True)
    process = fake.halfway("--executor", "ray", done=2)
    for pid in fake.processes("raylet/raylet"):
        kill(pid)
    assert "Ray's own processes on this machine have died" in ended(process, 1)
    assert {record["outcome"] for record in fake.records} == {"ok"}
    fake.go()
    assert fake.run().returncode == 0
    assert fake.numbers == dict.fromkeys(range(6), 1)
