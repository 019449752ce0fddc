"""jax_privacy as an engine: the same models in jax, a process without torch, and turns beside jax's own plain step."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from clipping import Flat, UnsupportedModel, compare
from dpbench.measure import training_step, verify
from dpbench.measure.bench import open_workload
from dpbench.measure.jax_peer import handed
from dpbench.measure.jax_peer.entry import settings_of
from dpbench.models.workload import Workload
from dpbench.trials.line_shapes import flaw_of_result
from dpbench.trials.not_here import NotHere
from dpbench.trials.outcome import PartlyFailed
from dpbench.trials.whole_step import JAX_PRIVACY, TrainingStepTrial

GPT2 = "transformers:gpt2?n_layer=2&n_embd=32&n_head=4&vocab_size=64@16"
TEXT = {"model": GPT2, "image_size": None, "data": "synthetic"}
with_jax = pytest.mark.skipif(handed.unavailable() is not None, reason="jax or jax_privacy is not installed")


def trial(**changes) -> TrainingStepTrial:
    given = {"model": "mlp", "image_size": 8, "backends": ("nonprivate", JAX_PRIVACY), "batch_size": 4, "rounds": 2}
    return TrainingStepTrial(**(given | {"max_seconds": 0.1} | changes))


def test_the_process_imports_no_torch():
    code = "import sys, dpbench.measure.jax_peer.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_weights_and_a_batch_are_handed_over_as_they_are():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2))
    model[2].bias.requires_grad_(False)
    inputs, targets = torch.randn(5, 3, 4, 4), torch.tensor([0, 1, 1, 0, 1])
    arrays = handed.arrays_of(Workload(model, torch.nn.MSELoss(), lambda size: ()), inputs, targets)
    assert set(arrays) == {"p/0.weight", "p/0.bias", "p/2.weight", "inputs", "targets"}, "what is trained"
    assert np.array_equal(arrays["p/0.weight"], model[0].weight.detach()) and arrays["inputs"].dtype == np.float32
    assert np.array_equal(arrays["inputs"], inputs) and arrays["targets"].dtype == np.int32


def test_without_jax_the_entry_says_how_to_get_it(monkeypatch):
    found_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "jax" in name else found_spec(name))
    found = training_step.run(trial())["backends"][JAX_PRIVACY]
    assert found["outcome"] == "unsupported"
    assert "jax_privacy is not available here" in found["evidence"] and "[jax]'" in found["evidence"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"model": "vgg11"}, "vgg11 is not written in jax here"), ({"precision": "bfloat16"}, "bfloat16 is not measured")],
)
def test_refuses_what_it_has_not(changes, words):
    asked = trial(**changes)
    with pytest.raises(UnsupportedModel, match=words):
        settings_of(asked, Workload(torch.nn.Linear(2, 2), torch.nn.MSELoss(), lambda size: ()))


def process_of(answers: list[object], tmp_path, monkeypatch) -> handed.Process:
    """A process in place of jax's, which gives these answers one by one and then fails."""
    (tmp_path / "fake_worker.py").write_text(
        f"import os\n\nanswers = {answers!r}\n\n\n"
        "def work(do, more):\n    return answers.pop(0) if answers else os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fake_worker", raising=False)  # that of another test
    monkeypatch.setattr(handed, "work", importlib.import_module("fake_worker").work)
    model = torch.nn.Linear(2, 2)
    return handed.Process(
        Workload(model, torch.nn.MSELoss(), lambda size: ()), torch.ones(1, 2), torch.ones(1), None, cuda=False
    )


def test_errors_of_the_process_are_told_apart(tmp_path, monkeypatch):
    answers = [{"jax": "1"}, ("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory"), ("KeyError", "no such thing")]
    with process_of(answers, tmp_path, monkeypatch) as process:
        assert process.versions == {"jax": "1"}
        with pytest.raises(MemoryError, match="Out of memory"):
            process.ask("compile")
        with pytest.raises(RuntimeError, match="KeyError: no such thing"):
            process.ask("compile")
        with pytest.raises(RuntimeError, match="went away"):
            process.ask("compile")


def test_a_device_that_jax_has_not_is_not_here(tmp_path, monkeypatch):
    said = "Unable to initialize backend 'cuda': Backend 'cuda' is not in the list of known backends"
    with pytest.raises(NotHere, match="Unable to initialize backend 'cuda'"):
        process_of([("RuntimeError", said)], tmp_path, monkeypatch)


@with_jax
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="jax may have a GPU")
def test_jax_without_a_gpu_says_so():
    workload = Workload(torch.nn.Linear(2, 2), torch.nn.MSELoss(), lambda size: ())
    settings = settings_of(trial(), workload)
    with pytest.raises(NotHere, match="JAX_PLATFORMS=cuda"):
        handed.Process(workload, torch.ones(1, 2), torch.ones(1), settings, cuda=True)


@with_jax
@pytest.mark.parametrize(
    "changes",
    [
        {"model": "mlp"},
        pytest.param(TEXT, marks=pytest.mark.slow),
        pytest.param({"model": "cnn", "image_size": 16}, marks=pytest.mark.slow),
        pytest.param({"model": "resnet18"}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: changes["model"].partition("?")[0],
)
def test_it_is_the_same_model_with_the_same_clipped_sum(changes):
    """In float64; some samples are clipped and some are not."""
    asked = trial(**changes, precision="float64")
    workload = open_workload(asked)
    inputs, targets = workload.batch(3)
    norms = verify.oracle(workload, inputs, targets, Flat(max_grad_norm=1.0)).norms
    asked = asked.replace(max_grad_norm=float(norms.median()))
    expected = verify.oracle(workload, inputs, targets, Flat(max_grad_norm=asked.max_grad_norm))
    with handed.Process(workload, inputs, targets, settings_of(asked, workload), cuda=False) as process:
        found = process.clipped(3)
    assert compare(found, expected).within(1e-9), compare(found, expected)
    assert torch.allclose(found.losses, expected.losses, rtol=1e-9)


@with_jax
@pytest.mark.slow
def test_another_form_of_the_model_is_a_mismatch():
    """GELU by the error function in place of its approximation by tanh."""
    with pytest.raises(PartlyFailed, match="jax_privacy \\(mismatch\\)") as failed:
        training_step.run(trial(**TEXT | {"model": GPT2.replace("?", "?activation_function=gelu&")}))
    assert "differs from the microbatch oracle" in failed.value.result["backends"][JAX_PRIVACY]["evidence"]


@with_jax
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_an_entry_has_turns_of_both_steps_and_the_time_of_compiling(optimizer):
    found = training_step.run(trial(optimizer=optimizer))
    assert flaw_of_result("training_step", json.loads(json.dumps(found))) is None, "as its record has it"
    entry = found["backends"][JAX_PRIVACY]
    assert entry["outcome"] == "ok", entry["evidence"]
    for own in (entry, entry["plain"]):
        assert [turn["round"] for turn in own["turns"]] == [0, 1] and all(turn["step_seconds"] for turn in own["turns"])
        assert own["memory"]["source"] == "xla" and own["memory"]["peak_bytes"] > own["memory"]["baseline_bytes"] > 0
    assert entry["way"] == "jitted" and entry["microbatch"] in (None, 1)
    assert set(entry["compile_seconds"]) == {"plain", "private"}
    assert entry["verification"]["max_grad_error"] < 1e-9 < entry["verification"]["in_own_precision"]["tolerance"]
    assert entry["loss"] > 0 and set(entry["versions"]) == {"jax", "jax_privacy"}
