"""``dpbench compare``: verdicts of records as runs write them, what is never compared, exit codes, and mistakes."""

import json
import random

import pytest
from report_records import CPU, CUDA, RunFile

from dpbench.cli import main
from dpbench.trials import StepTrial
from dpbench.trials.whole_step import TrainingStepTrial

BACKENDS = {"nonprivate": 0.1, "ghost": 0.25, "bk_mixed": 0.12}


def times(generator, seconds, noise):
    return [seconds * generator.lognormvariate(0, noise) for _ in range(5)]


def write_steps(path, seed, factors=None, rounds=7, noise=0.02, drift=0.03, environment=CPU, **fields):
    """A run of step trials: every backend in every round; a round's drift is shared."""
    generator = random.Random(seed)
    file = RunFile(path, environment=environment)
    for number in range(rounds):
        machine = generator.lognormvariate(0, drift)
        for name, seconds in BACKENDS.items():
            own = seconds * machine * (factors or {}).get(name, 1.0)
            file.step("cnn", name, times(generator, own, noise), round=number, **fields)
    return file


def write_overhead(path, seed, factors=None, **options):
    generator = random.Random(seed)
    machine = [generator.lognormvariate(0, 0.03) for _ in range(7)]
    series = {
        name: [seconds * f * (factors or {}).get(name, 1.0) * generator.lognormvariate(0, 0.01) for f in machine]
        for name, seconds in BACKENDS.items()
    }
    return RunFile(path).overhead("cnn", series, **options)


@pytest.fixture
def compare(tmp_path, dpbench):
    def run(*options, a="a.jsonl", b="b.jsonl"):
        code, out, err = dpbench("compare", tmp_path / a, tmp_path / b, "--format", "json", *options)
        found = json.loads(out) if out else None
        cells = {(row["backend"], row["quantity"]): row for row in found["cells"]} if found else {}
        return code, cells, err, found

    return run


@pytest.mark.parametrize("write", [write_steps, write_overhead])
def test_two_runs_of_the_same_code_differ_in_no_cell(tmp_path, compare, write):
    write(tmp_path / "a.jsonl", seed=1)
    write(tmp_path / "b.jsonl", seed=2)
    code, cells, _, _ = compare("--fail-on", "slower", "--fail-on", "faster:1%", "--fail-on", "larger")
    assert code == 0 and {row["verdict"] for row in cells.values()} <= {"same", "inconclusive"}
    assert {key for key, row in cells.items() if row["verdict"] == "same"} >= {(name, "peak") for name in BACKENDS}
    quantities = {"nonprivate": {"time", "peak"}, "ghost": {"time", "time ratio", "peak"}}
    assert {name: {q for b, q in cells if b == name} for name in quantities} == quantities


@pytest.mark.parametrize("write", [write_steps, write_overhead])
def test_a_seeded_slow_down_of_ten_percent_is_found_beside_ordinary_training(tmp_path, compare, write):
    write(tmp_path / "a.jsonl", seed=1)
    write(tmp_path / "b.jsonl", seed=2, factors={"ghost": 1.1})
    code, cells, _, found = compare("--fail-on", "slower:5%")
    row = cells["ghost", "time ratio"]
    assert (code, row["verdict"], row["interval"], row["rounds"]) == (1, "slower", "bootstrap", [7, 7])
    assert row["ratio"] == pytest.approx(1.1, abs=0.04) and row["low"] < 1.1 < row["high"]
    assert cells["bk_mixed", "time ratio"]["verdict"] in ("same", "inconclusive")
    assert found["failed"] >= 1
    code, _, _, found = compare("--fail-on", "slower:30%")
    assert (code, found["failed"]) == (0, 0)
    code, cells, _, _ = compare("--fail-on", "faster:5%", a="b.jsonl", b="a.jsonl")
    assert code == 1 and cells["ghost", "time ratio"]["verdict"] == "faster"


def test_whole_steps_are_compared_engine_by_engine(tmp_path, compare, dpbench):
    for name, seed, slower in (("a", 1, 1.0), ("b", 2, 1.3)):
        file = write_overhead(tmp_path / f"{name}.jsonl", seed, {"ghost": slower}, kind=TrainingStepTrial)
        write = random.Random(seed)
        series = {"nonprivate": [0.1] * 7, "ghost": [0.2 * write.lognormvariate(0, 0.005) for _ in range(7)]}
        file.overhead("cnn", series, kind=TrainingStepTrial, optimizer="AdamW")
    code, _, _, found = compare("--fail-on", "slower:10%")
    rows = {(row["backend"], row["setting"]["optimizer"], row["quantity"]): row for row in found["cells"]}
    hit = rows["ghost", "SGD", "time ratio"]
    assert (code, hit["kind"], hit["verdict"], hit["rounds"]) == (1, "training_step", "slower", [7, 7])
    assert hit["low"] < 1.3 < hit["high"] and rows["ghost", "AdamW", "time ratio"]["verdict"] == "same"
    _, out, _ = dpbench("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert "time ratio, SGD" in out and "time ratio, AdamW" in out  # or the rows could not be told apart


def test_what_slows_everything_shows_in_the_times_and_not_in_the_ratios(tmp_path, compare, dpbench):
    write_steps(tmp_path / "a.jsonl", seed=1, drift=0.002, noise=0.005)
    write_steps(tmp_path / "b.jsonl", seed=2, drift=0.002, noise=0.005, factors=dict.fromkeys(BACKENDS, 1.3))
    _, cells, _, _ = compare()
    assert {cells[name, "time"]["verdict"] for name in BACKENDS} == {"slower"}
    assert cells["ghost", "time ratio"]["verdict"] == "same"
    _, out, _ = dpbench("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert "the machine or a library that all share, not a backend" in out


def test_memory_is_smaller_or_larger_with_one_round(tmp_path, compare):
    for name, peak in (("a", 100), ("b", 112)):
        RunFile(tmp_path / f"{name}.jsonl").step("cnn", "ghost", [1.0, 1.0], peak=peak * 2**20)
    code, cells, _, _ = compare("--fail-on", "larger:10%")
    row = cells["ghost", "peak"]
    assert (code, row["verdict"], row["interval"], row["ratio"]) == (1, "larger", "exact", pytest.approx(1.12))
    assert cells["ghost", "time"]["verdict"] == "inconclusive"  # one round shows nothing of a time
    assert compare("--fail-on", "larger:15%")[0] == 0
    assert compare(a="b.jsonl", b="a.jsonl")[1]["ghost", "peak"]["verdict"] == "smaller"


def test_the_probes_of_a_search_are_one_cell(tmp_path, compare):
    RunFile(tmp_path / "a.jsonl").search("cnn", "ghost", fits=[8, 16, 32], fails=[64])
    RunFile(tmp_path / "b.jsonl").search("cnn", "ghost", fits=[8, 16, 24], fails=[32])
    code, cells, _, _ = compare("--fail-on", "slower")
    peak, outcome = cells["ghost", "peak"], cells["ghost", "outcome"]
    assert (peak["verdict"], peak["batch_size"], peak["setting"]["sizes"]) == ("same", 16, 2)
    assert (outcome["verdict"], outcome["batch_size"]) == ("failed", 32)
    assert (outcome["a"], outcome["b"]) == ("ok", "over_budget")
    assert code == 1  # what no longer fits passes no gate


def test_a_cell_that_fails_now_passes_no_gate(tmp_path, compare):
    trial = StepTrial(model="cnn", backend="ghost", batch_size=8)
    RunFile(tmp_path / "a.jsonl").step("cnn", "ghost", [1.0, 1.0])
    RunFile(tmp_path / "b.jsonl").add(trial, outcome="crash", evidence="signal 9")
    code, cells, _, _ = compare("--fail-on", "slower:50%")
    assert code == 1 and [(row["a"], row["b"], row["verdict"]) for row in cells.values()] == [("ok", "crash", "failed")]
    assert compare()[0] == 0
    assert compare(a="b.jsonl", b="a.jsonl")[1]["ghost", "outcome"]["verdict"] == "fixed"


def test_a_backend_that_was_wrong_once_has_no_time(tmp_path, compare):
    trial = StepTrial(model="cnn", backend="ghost", batch_size=8)
    for name in "ab":
        RunFile(tmp_path / f"{name}.jsonl").step("cnn", "ghost", [1.0, 1.0])
    RunFile(tmp_path / "b.jsonl").step("cnn", "ghost", [0.1]).add(trial, outcome="mismatch", round=1)
    assert compare()[1]["ghost", "outcome"]["b"] == "mismatch"


def test_simulated_memory_never_meets_measured_memory(tmp_path, compare):
    RunFile(tmp_path / "a.jsonl").search("cnn", "ghost", [8], simulated=True)
    RunFile(tmp_path / "b.jsonl").search("cnn", "ghost", [8], simulated=False)
    code, _, err, _ = compare()
    assert code == 2 and err.count("\n") == 1 and "cells that both measured" in err


def test_of_two_machines_only_ratios_to_ordinary_training_are_compared(tmp_path, compare):
    """Twice as slow a machine is no slower; a ratio of 1.5 that becomes 3 is."""
    mib = 2**20
    a = RunFile(tmp_path / "a.jsonl", experiment="overhead")
    a.overhead("cnn", {"nonprivate": [1.0] * 7, "ghost": [1.5] * 7}, peaks={"nonprivate": mib, "ghost": 2 * mib})
    b = RunFile(tmp_path / "b.jsonl", CUDA, experiment="overhead")
    peaks = {"nonprivate": 10 * mib, "ghost": 30 * mib}
    b.overhead("cnn", {"nonprivate": [2.0] * 7, "ghost": [6.0] * 7}, peaks=peaks, device="cuda")
    code, rows, err, _ = compare()
    assert code == 0 and "two machines" in err
    assert set(rows) == {("ghost", "time ratio"), ("ghost", "memory ratio")}
    row = rows["ghost", "time ratio"]
    assert (row["a"], row["b"], row["verdict"]) == (pytest.approx(1.5), pytest.approx(3.0), "slower")
    row = rows["ghost", "memory ratio"]
    assert (row["a"], row["b"], row["verdict"]) == (2.0, 3.0, "larger")
    assert row["device"] == "cpu Test CPU, 2 CPUs → cuda Test GPU"


def test_a_side_of_several_machines_is_compared_with_none_of_another(tmp_path, compare):
    for name, where in (("1", CPU), ("2", CPU | {"device_name": "Other CPU", "cpu_model": "Other CPU"})):
        write_steps(tmp_path / "a" / f"{name}.jsonl", 1, rounds=2, environment=where)
    write_steps(tmp_path / "b" / "1.jsonl", 1, rounds=2, environment=CUDA)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2


def test_other_numbers_of_threads_are_other_cells(tmp_path, compare):
    write_steps(tmp_path / "a.jsonl", 1, rounds=2)
    write_steps(tmp_path / "b.jsonl", 1, rounds=2, environment=CPU | {"threads": 1})
    assert compare()[0] == 2


def test_environments_that_differ_are_told_and_cells_of_one_side_named(tmp_path, compare):
    write_steps(tmp_path / "a.jsonl", 1, rounds=2, environment=CPU | {"packages": {"opacus": "1.6"}, "utc": "1"})
    write_steps(tmp_path / "b.jsonl", 1, rounds=2, environment=CPU | {"packages": {"opacus": "1.7"}, "utc": "2"}).step(
        "vgg11", "vmap", [1.0]
    )
    _, _, err, found = compare()
    assert found["differences"] == [{"fact": "opacus", "a": "1.6", "b": "1.7"}]
    assert "the environments differ in opacus: A 1.6; B 1.7" in err
    assert found["only_in_b"] == ["step vgg11 vmap 8"] and "only in B, and so not compared: step vgg11 vmap 8" in err


def test_runs_that_are_pooled_on_one_side_are_told_of_where_they_differ(tmp_path, compare):
    for name, sha in (("one", "aaa"), ("two", "bbb")):
        file = RunFile(tmp_path / "a" / f"{name}.jsonl", environment=CPU | {"git_sha": sha})
        file.step("cnn", "ghost", [1.0, 1.0], round=int(name == "two"))
    write_steps(tmp_path / "b.jsonl", 1, rounds=2, environment=CPU | {"git_sha": "bbb"})
    _, cells, err, found = compare(a="a")
    assert cells["ghost", "time"]["rounds"] == [2, 2]
    assert found["warnings"] == ["A pools runs that differ in git_sha: aaa, bbb"] and found["warnings"][0] in err


def test_rounds_of_an_older_version_are_left_out_and_counted(tmp_path, compare):
    file = write_steps(tmp_path / "a.jsonl", 1, rounds=3)
    file.step("cnn", "ghost", [9.0, 9.0], round=7, fingerprint="v2")
    write_steps(tmp_path / "b.jsonl", 1, rounds=3)
    _, cells, err, found = compare()
    assert cells["ghost", "time"]["rounds"] == [1, 3]
    assert found["left_out"]["of an older version of the same cell"] == 3 and "3 of an older version" in err


def test_the_table_is_for_people(tmp_path, dpbench):
    for name in "ab":
        write_steps(tmp_path / f"{name}.jsonl", 1 + (name == "b"), factors={"ghost": 1.4} if name == "b" else None)
    code, out, _ = dpbench("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--fail-on", "slower:5%")
    assert code == 1
    for words in ("time ratio", "slower", "bootstrap from 5 rounds", "Least effect: 2%", "FAILED: ", "cnn ghost B=8"):
        assert words in out


def test_an_experiment_names_its_records_in_results(tmp_path, monkeypatch, dpbench):
    monkeypatch.chdir(tmp_path)
    write_steps(tmp_path / "results" / "memory_speed" / "a.jsonl", 1, rounds=3)
    code, out, _ = dpbench("compare", "memory_speed", "results/memory_speed/a.jsonl", "--fail-on", "slower")
    assert code == 0 and "A: results/memory_speed" in out
