"""Whole training steps of every engine, interleaved: each trains, has its turns, and leaves the model as it was."""

from typing import get_args

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from clipping.program.step import Way
from dpbench.errors import UsageError
from dpbench.measure import counters, training_step
from dpbench.measure.bench import open_workload
from dpbench.measure.jax_peer.entry import KNOWN
from dpbench.records.reader import entries
from dpbench.trials.steps import WAYS
from dpbench.trials.whole_step import TrainingStepTrial
from experiments.evidence import EXPERIMENT as EVIDENCE
from experiments.training_step import EXPERIMENT
from tests.support.graphs import not_compiled

ENGINES = ("nonprivate", "bk_mixed", "opacus_hooks", "opacus_ghost")


def trial(**changes) -> TrainingStepTrial:
    given = {"model": "cnn", "image_size": 16, "backends": ENGINES, "batch_size": 4, "rounds": 2, "max_seconds": 0.1}
    return TrainingStepTrial(**(given | changes))


@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("AdamW", marks=pytest.mark.slow)])
def test_every_engine_has_turns_and_memory(optimizer):
    pytest.importorskip("opacus")
    found = training_step.run(trial(optimizer=optimizer))
    assert list(found["backends"]) == list(ENGINES) and found["energy"] in ("RAPL", "NVML", "not readable")
    for name, entry in found["backends"].items():
        assert entry["outcome"] == "ok", (name, entry["evidence"])
        assert len(entry["turns"]) == 2 and all(turn["step_seconds"] for turn in entry["turns"])
        assert entry["memory"]["peak_bytes"] > entry["memory"]["baseline_bytes"] > 0
        assert entry["verification"] or name == "nonprivate"
        assert entry["way"] == "eager"
    plain, ours = (found["backends"][name]["memory"]["baseline_bytes"] for name in ("nonprivate", "bk_mixed"))
    assert plain == ours, "model, batch and the optimizer's state"


@pytest.mark.filterwarnings("ignore:expected the step to run:RuntimeWarning")
@pytest.mark.parametrize(
    ("way", "ran"),
    [
        ("traced", ("traced",)),
        pytest.param("best", ("eager", "traced"), marks=pytest.mark.slow),
        pytest.param("compiled", (), marks=pytest.mark.slow),  # which is not available here
    ],
)
def test_both_run_in_the_way_of_the_trial_or_are_refused(way, ran, monkeypatch):
    not_compiled(monkeypatch)
    found = training_step.run(trial(way=way, backends=("nonprivate", "bk_mixed", "opacus_hooks")))["backends"]
    for name, entry in found.items():
        if ran and name != "opacus_hooks":
            assert entry["outcome"] == "ok" and entry["way"] in ran and len(entry["turns"]) == 2, (name, entry)
        else:
            assert entry["outcome"] == "unsupported" and f"runs {way} here" in entry["evidence"], (name, entry)
    assert trial(way=way).label().endswith(f"{way}, SGD")


def test_a_trial_names_a_way_of_programs_that_its_device_has():
    assert (*get_args(Way), "best") == WAYS
    with pytest.raises(UsageError, match="expected a way, got 'replay'; did you mean 'replayed'"):
        trial(way="replay")
    with pytest.raises(ValueError, match="expected device=cuda for steps replayed as CUDA graphs, got cpu"):
        trial(way="replayed")
    for asked, compiled in ((trial(way="eager"), False), (trial(way="best"), True)):
        assert asked.compiled is asked.describe()["compiled"] is compiled


@pytest.mark.parametrize("declared", [EXPERIMENT, EVIDENCE])
def test_on_a_gpu_every_model_of_ours_runs_in_each_way_beside_ordinary_training(declared):
    steps = [cell for cell in declared.cells("cuda") if type(cell) is TrainingStepTrial and "bk_mixed" in cell.backends]
    ways: dict[object, set[str]] = {}
    for step in steps:
        ways.setdefault(step.replace(way="eager", rounds=1), set()).add(step.way)
        assert step.backends == ("nonprivate", "bk_mixed")
    assert len(ways) >= 8 and all(own == {"eager", "replayed", "compiled", "best"} for own in ways.values())


def test_an_ordinary_step_does_not_pay_for_our_engine_s_checks():
    workload, device, watched = open_workload(trial()), torch.device("cpu"), []
    entries = {name: training_step._Engine(name, trial(), device) for name in ("nonprivate", "bk_mixed")}
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: watched.append(optimizer))
    for entry in entries.values():
        entry.open(workload, *workload.batch(4))
    for name, entry in entries.items():
        watched.clear()
        entry.turn(0, 0)
        assert len(entry.record["turns"]) == 1 and bool(watched) == (name == "bk_mixed")
        entry._close()
    handle.remove()


@pytest.mark.parametrize("name", ["nonprivate", "bk_mixed", "opacus_hooks", "opacus_ghost"])
def test_a_step_moves_the_parameters_and_ends_without_gradients(name):
    if name.startswith("opacus"):
        pytest.importorskip("opacus")
    asked = trial()
    workload = open_workload(asked)
    inputs, targets = workload.batch(4)
    optimizer = training_step._optimizer("SGD", workload.model)
    before = [p.detach().clone() for p in workload.model.parameters()]
    opened = training_step._OF_OTHERS.get(name, training_step._ours)
    step = opened(training_step._Given(name, workload, optimizer, inputs, targets))
    assert step.take().shape == (4,)
    assert not any(torch.equal(p, old) for p, old in zip(workload.model.parameters(), before, strict=True))
    assert not any(p.grad is not None and p.grad.any() for p in workload.model.parameters())
    step.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in workload.model.modules())


@pytest.mark.filterwarnings("ignore:expected the step to run:RuntimeWarning")
def test_an_engine_without_noise_that_clips_nothing_takes_the_plain_step(monkeypatch):
    made = training_step.PrivacyEngine

    def without_noise(model, **options):
        return made(model, **(options | {"noise_multiplier": 0.0, "max_grad_norm": 1e6}))

    monkeypatch.setattr(training_step, "PrivacyEngine", without_noise)
    moved = []
    ways = training_step._plain, training_step._ours, training_step._plain_compiled, training_step._ours_compiled
    not_compiled(monkeypatch)
    for opened in ways:
        workload = open_workload(trial())
        inputs, targets = workload.batch(4)
        optimizer = training_step._optimizer("SGD", workload.model)
        step = opened(training_step._Given("bk_mixed", workload, optimizer, inputs, targets))
        for _ in range(5):
            losses = step.take()
        assert step.graphs is None or step.graphs.way in ("eager", "traced")
        step.close()
        moved.append(torch.cat([losses, *(p.detach().flatten() for p in workload.model.parameters())]))
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=1e-4, atol=1e-6)


def test_records_are_those_of_engines():
    assert {cell.kind for cell in EXPERIMENT.cells("cpu")} == {"training_step", "parts"}
    assert len({cell.model for cell in EXPERIMENT.cells("cpu")}) == 13
    in_jax = {cell.model for cell in EXPERIMENT.cells("cpu") if "jax_privacy" in getattr(cell, "backends", ())}
    assert {model.partition("?")[0] for model in in_jax} == set(KNOWN)
    with pytest.raises(UsageError, match="expected an optimizer, got 'Adam'; did you mean 'AdamW'"):
        trial(optimizer="Adam")
    assert entries([]) == []


def test_energy_of_packages_is_read_past_the_end_of_their_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "_RAPL", tmp_path)
    assert counters.energy(torch.device("cpu")) == ("not readable", None)
    for package in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "max_energy_range_uj").write_text("999\n")
        (tmp_path / package / "energy_uj").write_text("900\n")
    by, joules = counters.energy(torch.device("cpu"))
    assert by == "RAPL" and joules is not None and joules() == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("950\n")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999\n")  # a part of package 0
    assert joules() == pytest.approx(250e-6)
