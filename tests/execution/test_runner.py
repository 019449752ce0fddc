"""A run as a person sees it: records, interruptions of every kind, continuation; and no process left over."""

import os
import random
import shutil
import signal
import time
from collections import Counter

import pytest
from fake_run import Fake, ended, finish, sleepers, waiters
from waiting import until

from dpbench.process.linux import available_cpus
from dpbench.records.store import read_runs


def test_every_trial_is_recorded_in_every_round_with_its_environment(tmp_path):
    fake = Fake(tmp_path, sleepers(3), rounds=2)
    done = fake.run_apart()
    assert (done.returncode, done.stdout) == (0, "")
    assert "recorded 6 trials (6 ok)" in done.stderr
    (run,) = read_runs(fake.output / "fake")
    assert run.environment["host"] and run.environment["device"] == "cpu" and run.environment["cpu_count"]
    assert Counter((r["trial"]["number"], r["round"]) for r in run.records) == {
        (number, round): 1 for number in range(3) for round in range(2)
    }
    assert all(r["experiment"] == "fake" and r["seconds"] > 0 and r["trial"]["kind"] == "act" for r in run.records)
    assert fake.left_over() == []


def test_what_may_run_beside_others_does(tmp_path):
    fake = Fake(tmp_path, waiters(4, "bodies.Beside"))
    process = fake.start()
    fake.wait_for(min(2, available_cpus()), "begun")
    fake.go()
    finish(process)
    assert sorted(fake.trace("begun")) == [0, 1, 2, 3] and len(fake.records) == 4


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_ends_in_good_order_and_the_run_continues(tmp_path, signum):
    fake = Fake(tmp_path, waiters(4), in_order=True)
    process = fake.halfway()
    os.killpg(process.pid, signum)  # as a terminal does: to all of the group
    out, err = finish(process)
    assert process.returncode == 128 + signum
    assert out == "" and "Traceback" not in err
    assert err.strip().splitlines()[-1].endswith("the same command continues from there")
    assert fake.left_over() == []
    assert fake.numbers == {0: 1}
    fake.go()
    fake.run()
    assert fake.numbers == dict.fromkeys(range(4), 1)
    assert fake.trace("begun").count(0) == 1


def test_ctrl_c_while_it_starts_is_quiet(tmp_path):
    fake = Fake(tmp_path, waiters(1))
    process = fake.start()
    until(lambda: fake.processes("dpbench.process.server"), "a server")
    os.killpg(process.pid, signal.SIGINT)
    ended(process, 130)
    assert fake.left_over() == []


def test_killed_at_any_point_nothing_is_lost_nothing_repeated_and_no_process_left(tmp_path):
    chance = random.Random(20)
    fake = Fake(tmp_path, waiters(12), in_order=True)
    for last in range(1, 10, 2):
        fake.go(*range(last + 1))  # and no further, however late it is killed
        before = fake.records
        begun_before = Counter(fake.trace("begun"))
        process = fake.start()
        fake.wait_for(begun_before.total() + 1, "begun")
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        finish(process)
        assert fake.left_over() == []
        records = fake.records
        assert records[: len(before)] == before
        begun = Counter(fake.trace("begun")) - begun_before
        assert not [r["trial"]["number"] for r in before if r["trial"]["number"] in begun], "a recorded trial ran again"
        # at most the trial in flight ran without being recorded
        assert begun.total() - (len(records) - len(before)) <= 1
    fake.go()
    fake.run()
    assert fake.numbers == dict.fromkeys(range(12), 1)
    assert fake.left_over() == []


def test_plan_says_what_is_done_and_what_remains(tmp_path):
    fake = Fake(tmp_path, "grid(bodies.Act, action=['raise', 'sleep', 'mismatch'])", rounds=2)
    assert "done 0, remaining 6" in fake.run(command="plan").stdout
    assert fake.run("--minutes", "9", command="plan").stdout.endswith("time left not known yet\n")
    fake.run("--only", "action=raise,sleep", "--rounds", "1")
    last = fake.run(command="plan").stdout.splitlines()[-1]
    assert last.startswith("done 2, remaining 4, pruned 0, failed 1; about")
    assert fake.run("--minutes", "9", command="plan").stdout.endswith(" left, 1 or more runs of --minutes 9\n")
    assert "nothing is left" in fake.run("--only", "action=sleep", "--rounds", "1", command="plan").stdout


def test_whoever_clones_a_folder_of_results_measures_anew(tmp_path):
    """Also on a machine of the same name and device, as machines of one image are."""
    fake = Fake(tmp_path, sleepers(2))
    fake.run()
    clone = tmp_path / "clone" / "fake"
    clone.mkdir(parents=True)
    for records in (fake.output / "fake").glob("*.jsonl"):
        shutil.copy(records, clone)
    fake.output = clone.parent
    again = fake.run()
    assert "recorded 2 trials (2 ok)" in again.stderr and len(read_runs(clone)) == 2
    assert "nothing is left to run" in fake.run().stderr


def test_machines_of_one_name_go_on_with_each_other_s_records(tmp_path, monkeypatch):
    """The second has another name in the network, and a copy of the records alone: neither git nor results/.folder."""
    fake = Fake(tmp_path, sleepers(3))
    monkeypatch.setenv("DPBENCH_HOST", "Pool of H100")
    monkeypatch.setenv("DPBENCH_COMMIT", "abc123-dirty")
    fake.run_apart("--only", "number=0")
    other = tmp_path / "sitecustomize.py"
    other.write_text("import socket\nsocket.gethostname = lambda: 'elsewhere'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    copy = tmp_path / "copy" / "fake"
    copy.mkdir(parents=True)
    (records,) = (fake.output / "fake").glob("*.jsonl")
    assert "-pool-of-h100-" in records.name
    shutil.copy(records, copy)
    fake.output = copy.parent
    assert "recorded 2 trials (2 ok)" in fake.run_apart().stderr
    assert sorted(fake.trace("begun")) == [0, 1, 2] and "nothing is left to run" in fake.run_apart().stderr
    assert {run.environment["host"] for run in read_runs(copy)} == {"Pool of H100"}
    monkeypatch.delenv("DPBENCH_HOST")
    assert "recorded 3 trials (3 ok)" in fake.run_apart().stderr
    assert {run.environment["host"] for run in read_runs(copy)} == {"Pool of H100", "elsewhere"}
