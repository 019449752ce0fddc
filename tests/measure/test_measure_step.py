"""The body of a step trial: verified, timed, its memory taken, in that order."""

import math

import pytest
import torch
from test_measure_overhead import backends  # noqa: F401  which registers those of its module

from clipping import Flat
from dpbench.measure import memory, step
from dpbench.models.loading import load_workload
from dpbench.trials import PeakTrial, StepTrial
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Mismatch, OverBudget

TRIAL = StepTrial(model="cnn", backend="mixed_ghost", batch_size=4, image_size=16, steps=2, max_seconds=0.1)


def test_a_backend_in_a_file_of_ones_own_is_timed_and_its_memory_taken(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from clipping.backends.microbatch import Microbatch\n\n\n"
        "class Own(Microbatch):\n    'Ours.'\n\n    name = 'own'\n"
    )
    assert step.run(TRIAL.replace(backend=f"{file}:Own"))["step_seconds"]
    peak = PeakTrial(model="cnn", backend=f"{file}:Own", batch_size=2, image_size=16, simulated=True)
    assert memory.run(peak)["memory"]["peak_bytes"] > 0


def test_the_record_of_a_step():
    result = step.run(TRIAL)
    keys = "parameters step_seconds warmup_seconds way memory verification coverage loss precision"
    assert set(result) == set(keys.split())
    assert len(result["step_seconds"]) >= 2 and len(result["warmup_seconds"]) >= 1
    assert all(seconds > 0 for seconds in result["step_seconds"] + result["warmup_seconds"])
    assert set(result["memory"]) == {"source", "peak_bytes", "baseline_bytes"}
    assert result["verification"]["samples"] == 2 and result["verification"]["tolerance"] == 1e-6
    assert 0 < result["verification"]["max_grad_error"] < 1e-12
    assert sum(result["coverage"].values()) == pytest.approx(1)
    workload = load_workload("cnn", image_size=16)
    inputs, targets = workload.batch(4)
    losses = workload.loss_fn(workload.model(inputs), targets)
    assert result["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert result["parameters"] == sum(p.numel() for p in workload.model.parameters())
    to_json(result)


@pytest.mark.parametrize("backend", ["nonprivate", "mixed_ghost"])
def test_verification_and_timing_leave_no_trace_in_the_peak(backend):
    """It is that of a step alone, in a process that did nothing else."""
    result = step.run(TRIAL.replace(backend=backend, data="synthetic"))
    alone = memory.run(
        PeakTrial(model="cnn", backend=backend, batch_size=4, image_size=16, data="synthetic", simulated=False)
    )
    assert result["memory"] == {name: value for name, value in alone["memory"].items() if name != "phases"}


def test_a_wrong_gradient_is_a_mismatch_and_is_not_timed():
    said = r"^wrong differs from the microbatch oracle: .* 1\.0e\+00 in the gradient of '0\.bias'"
    with pytest.raises(Mismatch, match=said) as caught:
        step.run(TRIAL.replace(backend="wrong"))
    result = caught.value.result
    assert result["verification"]["max_grad_error"] == pytest.approx(1)
    assert result["verification"]["max_norm_error"] < 1e-12
    assert "step_seconds" not in result and "memory" not in result


def test_over_budget_keeps_what_was_measured():
    with pytest.raises(OverBudget) as caught:
        step.run(TRIAL.replace(memory_budget=1000))
    assert {"step_seconds", "memory", "verification"} <= set(caught.value.result)


def test_the_clipping_threshold_is_the_trials(monkeypatch):
    seen = []
    real = Flat.factors
    monkeypatch.setattr(Flat, "factors", lambda self, norms: (seen.append(self.max_grad_norm), real(self, norms))[1])
    step.run(TRIAL.replace(max_grad_norm=0.125))
    assert set(seen) - {math.inf} == {0.125}  # the definition's norms are of no threshold


@pytest.mark.gpu
@pytest.mark.alone
def test_a_step_on_cuda():
    kept = step.run(TRIAL.replace(device="cuda"))["memory"]
    assert kept["source"] == "cuda_allocator" and kept["peak_bytes"] > kept["baseline_bytes"]
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step.run(TRIAL.replace(device="cuda", batch_size=4096, memory_budget=64 * 2**20))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
