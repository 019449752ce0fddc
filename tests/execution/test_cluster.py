"""A cluster from five lines: schedules, costs, the communication model, and its check against published points."""

import json

import pytest
from report_records import RunFile

from dpbench.errors import UsageError
from dpbench.execution.cluster import Cluster, Job, Measured, bill, load_cluster

LINES = {"nodes": "2", "gpus_per_node": "2", "price_per_gpu_hour": "3.0", "bandwidth": "1e9", "latency": "0.0"}
FOUR = Cluster(nodes=2, gpus_per_node=2, price_per_gpu_hour=3.0, bandwidth=1e9, latency=1e-3)


def written(tmp_path, **changes):
    lines = {name: value for name, value in {**LINES, **changes}.items() if value is not None}
    path = tmp_path / "toy.toml"
    path.write_text("".join(f"{name} = {value}\n" for name, value in lines.items()))
    return path


def test_five_lines_are_a_cluster(tmp_path):
    cluster = load_cluster(written(tmp_path))
    assert (cluster.gpus, cluster.speed, cluster.name, cluster.counts()) == (4, 1.0, "toy", [1, 2, 4])
    assert load_cluster(written(tmp_path, nodes="3", speed="2.5")).counts() == [1, 2, 4, 6]


def test_what_is_wrong_with_a_description_is_said_in_one_line(tmp_path):
    for changes, said in [
        ({"latency": None}, "expected a line latency = ... in "),
        ({"node": "2"}, "got 'node'; did you mean 'nodes'?"),
        ({"nodes": "1.5"}, "to be a whole number of at least 1, got 1.5"),
        ({"nodes": "true"}, "to be a whole number of at least 1, got True"),
        ({"bandwidth": "0"}, "to be a number above 0, got 0"),
        ({"latency": "-1"}, "to be a number of at least 0, got -1"),
        ({"price_per_gpu_hour": '"two"'}, "to be a number of at least 0, got 'two'"),
        ({"speed": "inf"}, "to be a number above 0, got inf"),
        ({"nodes": "= 3"}, "expected TOML in "),
        ({"nodes": "9" * 400}, "to be from 1e-30 to 1e+30, got 999"),
        ({"nodes": "9" * 5000}, "expected TOML in "),
        ({"speed": "1e-40"}, "to be from 1e-30 to 1e+30, got 1e-40"),
    ]:
        with pytest.raises(UsageError) as caught:
            load_cluster(written(tmp_path, **changes))
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_sweep_takes_as_long_as_its_longest_job_or_all_of_its_work():
    assert bill([Job(3600.0)] * 4 + [Job(7200.0)], FOUR) == {
        **{"jobs": 5, "wall_seconds": 7200.0, "gpu_hours": 6.0, "busy": 0.75},
        **{"cost": 4 * 2 * 3.0, "least_cost": 6 * 3.0},
    }
    assert bill([Job(10.0, 1, (5.0, 5.0, 5.0))], FOUR)["wall_seconds"] == 15.0  # what follows a search waits for it
    assert bill([Job(10.0, 4), Job(8.0)], FOUR)["wall_seconds"] == 12.0
    assert bill([Job(10.0, 4)], Cluster(**{**vars(FOUR), "speed": 2.0}))["wall_seconds"] == 5.0
    with pytest.raises(UsageError, match="expected a cluster of at least 5 GPUs, which a trial takes, got 4"):
        bill([Job(1.0, 5)], FOUR)
    assert bill([], FOUR)["cost"] == 0.0


def test_the_communication_model_by_hand():
    size = 10**9
    assert FOUR.ring(size, 4) == pytest.approx(2 * 0.75 * 1.0 + 6e-3)
    # an ordinary step of 3 s hides 2 s: all of it but the last bucket
    assert FOUR.ordinary(3.0, size, 4) == pytest.approx(3.0 + FOUR.ring(25 * 2**20, 4))
    assert FOUR.ordinary(0.3, size, 4) == pytest.approx(0.3 + 1.506 - 0.2)
    assert FOUR.private(3.6, size, 4) == pytest.approx(3.6 + 2.0 + 6e-3)
    step = Measured("m", "bk_mixed", 8, 3.0, 1.2, size, "gpu", 3)
    assert FOUR.efficiency(step, 1) == pytest.approx(1 / 1.2)
    assert FOUR.efficiency(step, 4) < FOUR.efficiency(step, 1)  # its sums are not hidden


def test_the_model_stays_within_published_throughputs():
    """Of a system that communicates private gradients like ordinary ones: both have the same communication c.

    c, in times of an ordinary step, is such that 16 GPUs have the least published throughput, and grows as a ring's
    does. r is that of one GPU: sequences a second of GPT2-large, non-DP by BK, in Figure 4 of arXiv:2210.00038.
    """
    least, greatest, r = 0.946, 0.963, 71 / 62
    at_16 = (r * least - 1) / (1 - least)
    c = [at_16 * FOUR.ring(1e15, gpus) / FOUR.ring(1e15, 16) for gpus in (16, 32, 64, 128)]  # no latency beside it
    predicted = [(1 + each) / (r + each) for each in c]
    assert predicted == sorted(predicted) and all(least - 1e-9 <= value <= greatest for value in predicted)
    assert least > 1 / r  # of one GPU, without communication: it is what brings the points about


def test_a_sweep_and_its_efficiency_from_records(tmp_path, dpbench):
    run = RunFile(tmp_path / "results" / "memory_speed" / "a.jsonl", more={"seconds": 36.0})
    for number in range(3):
        run.step("cnn", "nonprivate", [1.0] * 3, round=number).step("cnn", "bk_mixed", [1.25] * 3, round=number)
    command = ["plan", "memory_speed", "--output", tmp_path / "results", "--device", "cpu"]
    command += ["--cluster", written(tmp_path), "--only", "model=cnn"]
    code, out, _ = dpbench(*command, "--format", "json")
    answer = json.loads(out)
    assert code == 0
    assert answer["sweep"]["gpu_hours"] == pytest.approx(answer["sweep"]["jobs"] * 36 / 3600)
    assert answer["sweep"]["likened"] > 0 and answer["sweep"]["wall_seconds"] >= 36
    (row,) = answer["efficiency"]
    assert (row["ratio"], row["seconds"], row["size"], row["rounds"]) == (1.25, 1.0, 4, 3)
    assert row["efficiency"]["1"] == pytest.approx(0.8) and set(row["efficiency"]) == {"1", "2", "4"}
    code, shown, _ = dpbench(*command)
    assert code == 0 and "the sweep, predicted:" in shown and "0.800" in shown and "Test CPU, 2 CPUs" in shown


def test_without_records_it_says_that_it_does_not_know(tmp_path, dpbench):
    command = ["plan", "memory_speed", "--output", tmp_path, "--device", "cpu"]
    code, out, _ = dpbench(*command, "--cluster", written(tmp_path))
    assert code == 0 and "the sweep: not known" in out


def test_a_plan_in_json(tmp_path, dpbench):
    code, out, _ = dpbench("plan", "accountants", "--smoke", "--output", tmp_path, "--format", "json")
    answer = json.loads(out)
    assert code == 0 and answer["experiment"] == "accountants" and answer["seconds_left"] is None
    assert sum(row["left"] for row in answer["rows"]) > 0 and {"kind", "model", "backend"} <= set(answer["rows"][0])
