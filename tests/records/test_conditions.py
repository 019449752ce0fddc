"""Load, drift and environments: every warning says what is wrong, by how much, and what to do."""

import os
from pathlib import Path

import pytest
from report_records import CPU, RunFile

from dpbench.records.conditions import Watch, differences, warnings
from dpbench.records.reader import read
from dpbench.trials import StepTrial

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCHEMA_4 = {"schema": 4, "load": 0.5, "version": None, "stolen": None}


def test_stolen_time_is_told_of_with_how_much_and_what_to_do(tmp_path):
    file = RunFile(tmp_path / "a.jsonl")
    for number, stolen in enumerate((0.4, 0.1, 0.0, None)):
        file.more = SCHEMA_4 | {"stolen": stolen}
        file.step("cnn", "ghost", [1.0] * 3, round=number)
    (warning,) = warnings(read(file.path))
    assert "up to 40% of CPU time at 2 of 4 trials (a)" in warning and "another machine" in warning


def steps(path, factors, environment=CPU):
    file = RunFile(path, environment=environment)
    for number, factor in enumerate(factors):
        for backend, seconds in (("nonprivate", 1.0), ("ghost", 3.0)):
            file.step("cnn", backend, [seconds * factor] * 3, round=number)
    return path


def test_quiet_records_are_warned_of_in_no_way(tmp_path):
    assert warnings(read(steps(tmp_path / "a.jsonl", [1.0, 1.02, 0.98]))) == []


def test_rounds_that_drift_are_told_of_with_the_slowest(tmp_path):
    (said,) = warnings(read(steps(tmp_path / "a.jsonl", [1.0, 1.0, 1.3])))
    assert "drifted by 30% between rounds in the run (round 3 of a)" in said and "add rounds" in said


def test_of_several_trials_of_a_run_the_one_with_the_slowest_round_is_named(tmp_path):
    file = RunFile(tmp_path / "a.jsonl")
    for number, last in enumerate((1.0, 1.4)):
        file.overhead("cnn", {"nonprivate": [1.0, 1.0, last], "ghost": [2.0, 2.0, 2 * last]}, round=number)
    (said,) = warnings(read(tmp_path))
    assert "(round 3 of trial 2 of a)" in said


def named(number, host="vm"):
    return f"20261122T2326{number:02d}Z-{host}-{13207 + number}.jsonl"


def test_runs_that_began_in_the_same_second_go_by_their_whole_names(tmp_path):
    for host, factor in (("node-1", 1.2), ("node-2", 1.5)):
        steps(tmp_path / named(0, host), [1.0, factor, 1.0])
    (said,) = warnings(read(tmp_path))
    assert "in all 2 runs (round 2 of 20261122T232600Z-node-2-13207)" in said


def disturbed(path, environment, load, stolen, factor):
    """A run that met every kind of trouble."""
    file = RunFile(path, environment, more=SCHEMA_4 | {"load": load, "stolen": stolen})
    for number, seconds in enumerate((1.0, factor, 1.0)):
        for backend in ("nonprivate", "ghost"):
            file.step("cnn", backend, [seconds] * 3 + [factor * seconds] * 3, round=number)


@pytest.mark.parametrize("runs", [1, 13])
def test_each_kind_of_trouble_is_one_line_of_a_caption(tmp_path, runs):
    facts = CPU | {"cpus_available": 64, "gpu_state": {GPU: "0x4"}}
    for number in range(runs):
        environment = facts | {"gpu_processes": ["12", "400"] * (number + 1)}
        path = tmp_path / named(number, "ip-172-31-22-118")
        disturbed(path, environment, 120.0 + number, 0.3 + number / 100, 1.2 + number / 100)
    quiet = tmp_path / named(runs, "ip-172-31-22-118")
    steps(quiet, [1.0, 1.0])
    said = warnings(read(tmp_path))
    assert len(said) == 6 and all(text.startswith("Warning: ") for text in said)
    assert max(map(len, said)) <= 152, max(said, key=len)
    count = f"{runs} of {runs + 1} runs"
    load, theft, hot, shared, rounds, turns = said
    worst = f"20261122T2326{runs - 1:02d}Z"
    assert f"reached {119 + runs:.1f} on 64 CPUs ({worst}), too high around {6 * runs} of {6 * runs + 4} trials" in load
    assert f"{29 + runs}% of CPU time at {6 * runs} of {6 * runs + 4} trials ({worst})" in theft
    assert f"throttled as {count} began, power cap (20261122T232600Z)" in hot and "lock its clocks" in hot
    assert f"{runs} other process" in shared and f"as {count} began ({worst})" in shared
    assert f"{19 + runs}% between rounds in {count} (round 2 of {worst})" in rounds
    assert f"+{19 + runs}% within {6 * runs} of {6 * runs + 4} turns (round 1 of {worst})" in turns


def test_one_method_that_gets_slower_is_no_drift_of_the_machine(tmp_path):
    RunFile(tmp_path / "a.jsonl").overhead(
        "cnn", {"nonprivate": [1.0] * 3, "vmap": [1.0] * 3, "ghost": [1.0, 2.0, 3.0]}
    )
    assert warnings(read(tmp_path)) == []


def loaded(path, load):
    file = RunFile(path, CPU | {"cpus_available": 2, "load_average": 1.0})
    for number in range(4):
        file.more = {"schema": 2, "load": load if number == 0 else None}
        file.step("cnn", "ghost", [1.0] * 3, round=number)
    return path


def test_a_load_above_the_cpus_is_told_of_in_captions(tmp_path, dpbench):
    (said,) = warnings(read(loaded(tmp_path / "a.jsonl", 6.5)))
    assert "reached 6.5 on 2 CPUs (a)" in said and "1 of 4 trials" in said and "run again when idle" in said
    assert dpbench("report", tmp_path)[0] == 0
    (caption,) = [path.read_text() for path in tmp_path.rglob("memory_speed_table.md")]
    assert said in caption
    assert "reached" not in "".join(warnings(read(loaded(tmp_path / "a.jsonl", 2.1))))


def line(number, seconds=1.0, load=0.5, last=None, stolen=None):
    trial = StepTrial(model="cnn", backend="ghost", batch_size=8)
    samples = [seconds] * 3 + [last or seconds] * 3
    return {
        **{"experiment": "e", "id": trial.id, "round": number, "fingerprint": "f", "trial": trial.describe()},
        **{"outcome": "ok", "evidence": None, "utc": "u", "load": load, "stolen": stolen},
        "result": {"step_seconds": samples},
    }


def watched(lines, facts=CPU, load=0.5):
    said: list[str] = []
    watch = Watch(CPU | facts | {"cpus_available": 2, "load_average": load}, said.append)
    watch.begin()
    for one in lines:
        watch.ended(one, "step cnn ghost 8")
    watch.end()
    return said


GPU = "clocks_throttle_reasons.active"


@pytest.mark.parametrize("state", ["0x0000000000000000", "0x0000000000000001", "[N/A]", "0x0000000000000002"])
def test_a_gpu_that_idles_or_has_chosen_clocks_is_not_throttled(state):
    assert watched([], {"gpu_state": {GPU: state}, "gpu_processes": []}) == [] == watched([])


def test_a_gpu_that_is_throttled_or_shared_is_told_of(tmp_path):
    facts = CPU | {"gpu_state": {GPU: "0x0000000000000044"}, "gpu_processes": ["12", "400", "13", "70"]}
    told = warnings(read(steps(tmp_path / "a.jsonl", [1.0], facts)))
    assert "throttled as the run began, power cap, thermal by hardware (a)" in told[0]
    assert "had 2 other processes as the run began (a)" in told[1] and len(told) == 2
    hot, shared = watched([], facts)
    assert "the GPU was throttled as the run began, power cap" in hot and "had 2 other processes" in shared


def test_a_run_tells_of_the_load_that_it_finds_and_nothing_of_a_quiet_machine():
    assert watched([line(n) for n in range(3)]) == watched([], load=2.5) == []
    assert "the load is 4.0 on 2 CPUs before the first trial" in watched([], load=4.0)[0]


def test_a_run_tells_of_the_load_that_it_finds_and_of_each_kind_of_trouble_once():
    lines = [line(0, load=2.1, stolen=0.3), line(1, seconds=1.5, load=5.0, last=3.0), line(2, last=3.0, stolen=0.2)]
    host, load, drift, *rest = watched(lines)
    trial = "Warning: step cnn ghost 8: "
    assert host.startswith(f"{trial}the host gave others 30% of CPU time")
    assert load.startswith(f"{trial}the load reached 5.0 on 2 CPUs, too high around the trial")
    assert drift.startswith(f"{trial}times drifted by +100% within the turn (round 2)")
    assert "up to 30% of CPU time at 2 of 3 trials" in rest[0] and "+200% within 2 of 3 turns" in rest[1]
    assert "drifted by 125% between rounds in the run (round 2)" in rest[2] and len(rest) == 3


def test_a_run_on_a_loaded_machine_warns_on_standard_error(tmp_path, dpbench, monkeypatch):
    bodies = str(SUPPORT / "bodies.py")
    (tmp_path / "mine.py").write_text(
        "from dpbench.experiment import Experiment\nfrom dpbench.trials.reference import load_module\n"
        f"def cells(device): return [load_module({bodies!r}).Act(action='sleep')]\n"
        "EXPERIMENT = Experiment(name='mine', doc='d', cells=cells, smoke=cells, rounds=1)\n"
    )
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    code, out, err = dpbench("run", tmp_path / "mine.py", "--device", "cpu", "--output", tmp_path)
    assert (code, out) == (0, "") and "Warning: the load is 99.0 on " in err and "before the first trial" in err
    assert "Warning: act: the load reached 99.0 on " in err
    (record,) = read(tmp_path / "mine")
    assert record.load == 99.0


def test_environments_differ_in_what_matters(tmp_path):
    facts = {"packages": {"opacus": "1.6"}, "git_sha": "a", "utc": "1", "load_average": 1.0, "driver": None}
    a = read(steps(tmp_path / "a.jsonl", [1.0], CPU | facts))
    b = read(steps(tmp_path / "b.jsonl", [1.0], CPU | facts | {"git_sha": "b", "utc": "2", "variables": {"OMP": "1"}}))
    assert differences(a, b) == [("OMP", "none", "1"), ("git_sha", "a", "b")]
    assert differences(a, a) == []
