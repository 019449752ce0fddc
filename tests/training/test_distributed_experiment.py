"""A trial of several processes: what it answers, how it fails, and the figure drawn of it."""

import os

import pytest
from made_records import made
from waiting import PATIENCE

from dpbench.experiment import load_experiment
from dpbench.process import linux
from dpbench.process.parent import Isolation
from dpbench.records.reader import LeftOut
from dpbench.report.figures import distributed
from dpbench.training import DistributedTrial
from dpbench.trials import Trial

FEW = {"model": "cnn", "batch_size": 2, "rounds": 2, "max_seconds": 0.1, "timeout": PATIENCE}


@pytest.fixture(scope="module")
def isolation():
    with Isolation() as open_one:
        yield open_one


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_two_processes_answer_verified(isolation, spread):
    before = children()
    answer = isolation.run(DistributedTrial(processes=2, spread=spread, **FEW))
    assert answer.outcome == "ok", answer.evidence
    result = answer.result
    assert result["communication"] == "gloo" and result["parameters"] == 550_570
    assert result["verification"]["max_grad_error"] < 1e-3 and result["verification"]["samples"] == 4
    assert set(result["backends"]) == {"nonprivate", "bk_mixed"}
    for entry in result["backends"].values():
        assert [turn["round"] for turn in entry["turns"]] == [0, 1]
        assert all(seconds > 0 for turn in entry["turns"] for seconds in turn["step_seconds"])
        assert len(entry["memory"]) == 2 and all(m["peak_bytes"] > 550_570 * 2 for m in entry["memory"])
    assert children() - before <= {isolation._server.pid}


@pytest.mark.slow
def test_mixed_precision_of_a_shard_is_verified_too(isolation):
    answer = isolation.run(DistributedTrial(processes=1, spread="fsdp", precision="mixed", **FEW))
    assert answer.outcome == "ok", answer.evidence
    assert 1e-6 < answer.result["verification"]["max_grad_error"] < 0.1  # bfloat16 it was


def test_a_backend_that_is_refused_ends_with_its_reason(isolation):
    trial = DistributedTrial(processes=2, spread="fsdp", backends=("ghost",), **FEW)
    answer = isolation.run(trial)
    assert answer.outcome == "unsupported" and "use bk_mixed or bk_ghost" in answer.evidence


def children():
    return {process.pid for process in linux._processes() if process.parent == os.getpid()}


def test_the_trial_is_data_and_refuses_what_is_not_known():
    trial = DistributedTrial(processes=2, spread="ddp", backends=["nonprivate", "bk_ghost"], **FEW)
    assert Trial.from_wire(trial.to_wire()) == trial and trial.backends == ("nonprivate", "bk_ghost")
    with pytest.raises(Exception, match="expected a spread, got 'ddq'; did you mean 'ddp'"):
        DistributedTrial(processes=2, spread="ddq", **FEW)
    with pytest.raises(ValueError, match="expected processes, batch_size and rounds of at least 1, got 0, 2, 2"):
        DistributedTrial(processes=0, spread="ddp", **FEW)


def test_the_experiment_has_processes_that_double():
    experiment = load_experiment("distributed")
    cells = experiment.cells("cpu")
    assert {cell.processes for cell in cells} == {1, 2, 4} and {cell.spread for cell in cells} == {"ddp", "fsdp"}
    assert {cell.precision for cell in cells} == {"float32", "mixed"} and len(experiment.smoke("cpu")) == 4


def record(processes, private, ordinary, outcome="ok"):
    def entry(seconds, peak):
        turns = [{"round": i, "position": 0, "step_seconds": [s]} for i, s in enumerate(seconds)]
        return {"turns": turns, "memory": [{"peak_bytes": peak}, {"peak_bytes": peak // 2}][:processes]}

    trial = DistributedTrial(processes=processes, spread="fsdp", **FEW)
    result = {
        "communication": "gloo",
        "oversubscribed": processes > 2,
        "backends": {"nonprivate": entry(ordinary, 1000), "bk_mixed": entry(private, 1200)},
    }
    return made(trial, result if outcome == "ok" else {}, outcome)


def test_ratios_are_of_the_same_round_and_scaling_of_one_process():
    left_out = LeftOut()
    records = [record(1, [2.0, 4.0], [1.0, 2.0]), record(2, [2.5, 5.0], [2.0, 4.5]), record(4, [1], [1], "crash")]
    frame = distributed.table(records, left_out)
    private = frame[frame.backend == "bk_mixed"].set_index("processes")
    assert private.throughput_ratio[1] == 0.5 and private.throughput_ratio[2] == pytest.approx((0.8 + 0.9) / 2)
    assert (private.least[2], private.greatest[2]) == (0.8, 0.9)
    assert private.memory_ratio[2] == pytest.approx(1.2) and private.samples_per_second[2] == pytest.approx(4 / 3.75)
    assert private.scaling[1] == 1.0 and private.scaling[2] == pytest.approx((2 / 3.75) / (2 / 3))


def test_the_figure_marks_what_is_oversubscribed():
    records = [record(1, [2.0], [1.0]), record(2, [2.5], [4.0]), record(4, [3.0], [2.0])]
    frame = distributed.table(records, LeftOut())
    figure = distributed.plot(frame, " ".join(distributed.FIGURE.caption(records, frame)))
    faces = [line.get_markerfacecolor() for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert figure.axes[0].get_ylim()[1] > 1.6 and distributed.plot(frame[:0], "none")  # the whole range is in sight
    assert faces.count("white") == 1 and len(faces) == 3
    assert list(distributed.FIGURE.texts(frame).oversubscribed).count("yes") == 2
