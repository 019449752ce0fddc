"""Declarations: identities that last, grids, experiments by name and by file."""

import json
import subprocess
import sys

import pytest

from dpbench.errors import UsageError
from dpbench.experiment import experiment_names, grid, load_experiment
from dpbench.trials import CheckTrial, EpsilonTrial, OverheadTrial, PeakTrial, StepTrial, Trial, canonical_json
from dpbench.trials.max_batch import MaxBatch

STEP = StepTrial(model="cnn", backend="ghost", batch_size=8)


def test_grid_makes_every_combination_and_a_list_is_an_axis():
    trials = grid(StepTrial, model=["cnn", "vgg11"], backend=["ghost", "vmap"], batch_size=8)
    assert [f"{t.model} {t.backend}" for t in trials] == ["cnn ghost", "cnn vmap", "vgg11 ghost", "vgg11 vmap"]
    assert {t.batch_size for t in trials} == {8}


def test_the_identity_is_in_the_fields_and_not_in_the_limit():
    assert len(STEP.id) == 16 and set(STEP.id) <= set("0123456789abcdef")
    assert STEP.id == StepTrial(batch_size=8, backend="ghost", model="cnn").id
    assert STEP.replace(timeout=1.0).id == STEP.id
    assert STEP.replace(batch_size=9).id != STEP.id


def test_the_identity_is_the_same_in_another_process():
    code = "from dpbench.trials import *; print(StepTrial(model='cnn', backend='ghost', batch_size=8).id)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == STEP.id


def test_kinds_with_the_same_fields_are_different_trials():
    shared = {"model": "cnn", "backend": "ghost", "batch_size": 3}
    ids = {StepTrial(**shared).id, PeakTrial(**shared, simulated=True).id, CheckTrial(**shared).id}
    assert len(ids) == 3


@pytest.mark.parametrize(
    "trial",
    [
        STEP,
        PeakTrial(model="cnn", backend="ghost", batch_size=8, simulated=True, memory_budget=2**34),
        EpsilonTrial(accountant="moments", sample_rate=0.01, noise_multiplier=4.0, steps=10, delta=1e-5),
        CheckTrial(model="cnn", backend="ghost"),
        OverheadTrial(model="cnn", backends=["nonprivate", "ghost"], batch_size=8, image_size=None),
    ],
)
def test_a_trial_crosses_to_another_process_unchanged(trial):
    assert Trial.from_wire(json.loads(json.dumps(trial.to_wire()))) == trial
    assert trial.describe()["kind"] == trial.kind


def test_the_backends_of_one_trial_are_each_named_once():
    trial = OverheadTrial(model="cnn", backends=["nonprivate", "opacus_hooks"], batch_size=8)
    assert "opacus" in trial.modules() and trial.label() == "overhead cnn 8, 2 backends"
    assert trial.id == trial.replace(backends=("nonprivate", "opacus_hooks"), timeout=1.0).id
    assert trial.id != trial.replace(backends=["opacus_hooks", "nonprivate"]).id
    with pytest.raises(ValueError, match="expected backends, each once, got ghost, ghost"):
        trial.replace(backends=["ghost", "ghost"])
    with pytest.raises(ValueError, match="expected rounds of at least 1, got 0"):
        trial.replace(rounds=0)


@pytest.mark.parametrize("name", ["overhead", "resolution", "sequence_length"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_model_is_measured_once_beside_ordinary_training_and_has_a_short_name(name, device):
    from dpbench.report import style

    cells = load_experiment(name).cells(device)
    assert len({(cell.model, cell.image_size) for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.backends[0] == "nonprivate" and "bk_mixed" in cell.backends
        assert len(style.model(cell.model)) <= 28 and "?" not in style.model(cell.model)


def test_canonical_json_knows_no_infinity():
    assert canonical_json({"b": 1, "a": [1.5]}) == '{"a":[1.5],"b":1}'
    with pytest.raises(ValueError):
        canonical_json(float("inf"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_experiment_declares_trials_for_either_device(device):
    from clipping import is_backend
    from dpbench.conformance.coverage import COMPILED
    from dpbench.models.references import validate_reference
    from dpbench.trials.whole_step import JAX_PRIVACY

    for name in experiment_names():
        experiment = load_experiment(name)
        assert experiment.name == name and experiment.doc
        for cell in [*experiment.cells(device), *experiment.smoke(device)]:
            for trial in [cell.probe, cell.then] if isinstance(cell, MaxBatch) else [cell]:
                if trial is not None and hasattr(trial, "model"):
                    validate_reference(trial.model)
                    named = getattr(trial, "backends", None) or [getattr(trial, "backend", "nonprivate")]
                    assert all(each == JAX_PRIVACY or is_backend(each.removesuffix(COMPILED)) for each in named), name
                    of_shapes = trial.kind in ("explain", "launches")
                    assert of_shapes or trial.device == device, name


def test_an_experiment_may_be_any_object_of_a_file_or_module(tmp_path, monkeypatch):
    text = "from dpbench.experiment import Experiment\ndef none(device): return []\n"
    text += "".join(f"{n.upper()} = Experiment(name='{n}', doc='d', cells=none, smoke=none)\n" for n in ("one", "two"))
    (tmp_path / "several_of_mine.py").write_text(text)
    assert load_experiment(f"{tmp_path}/several_of_mine.py:TWO").name == "two"
    monkeypatch.syspath_prepend(tmp_path)
    assert load_experiment("several_of_mine:ONE").name == "one"
    with pytest.raises(UsageError, match=r"TWOO = Experiment\(...\) in .*did you mean 'TWO'"):
        load_experiment(f"{tmp_path}/several_of_mine.py:TWOO")
    with pytest.raises(UsageError, match="no_such_module"):
        load_experiment("no_such_module:ONE")
