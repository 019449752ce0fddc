"""Two real steps beside what was foretold, and the one look at the backend before them."""

import json

import pytest
import torch
from test_measure_overhead import backends  # noqa: F401  which registers those of its module

from dpbench.measure import largest, verify
from dpbench.trials import ConfirmTrial, LargestTrial
from dpbench.trials.line_shapes import flaw_of_result
from dpbench.trials.outcome import Mismatch, Outcome, classify

BUDGET = 32 * 2**20
TRIAL = ConfirmTrial(model="cnn", backend="mixed_ghost", batch_size=4, memory_budget=BUDGET)


def test_what_was_foretold_fits_and_a_step_of_the_search_beyond_does_not():
    one = {"model": "cnn", "backend": "mixed_ghost", "memory_budget": BUDGET}
    foretold = largest.run(LargestTrial(**one, batch_size=8))
    seen = {probe["batch_size"]: probe for probe in foretold["probes"]}
    found = largest.confirm(TRIAL.replace(batch_size=foretold["batch_size"]))
    at, beyond = found["probes"]
    assert (at["batch_size"], at["fits"], beyond["fits"]) == (foretold["batch_size"], True, False)
    for probe in (at, beyond):  # the very batches that the search ended with
        assert probe["memory"]["source"] == "cpu_allocator"
        assert probe["memory"]["peak_bytes"] == pytest.approx(seen[probe["batch_size"]]["peak_bytes"], rel=0.02)
    assert flaw_of_result("confirm", json.loads(json.dumps(found))) is None


def test_where_it_does_not_fit_the_second_step_is_smaller(monkeypatch):
    asked = []

    def peak(trial, workload, size, device):
        asked.append(size)
        if size == 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"source": "cuda_allocator", "peak_bytes": BUDGET}

    monkeypatch.setattr(largest, "_peak", peak)
    probes = largest.confirm(TRIAL.replace(batch_size=100))["probes"]
    assert asked == [100, 99]
    assert [(probe["fits"], probe["memory"] is None) for probe in probes] == [(False, True), (True, False)]
    assert len(largest.confirm(TRIAL.replace(batch_size=7, max_batch_size=7))["probes"]) == 1  # the limit of the search


def test_what_fails_otherwise_is_no_want_of_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("a kernel that does not launch")

    monkeypatch.setattr(largest, "_peak", broken)
    with pytest.raises(RuntimeError, match="does not launch"):
        largest.confirm(TRIAL)


def test_a_backend_is_looked_at_once_on_few_samples_and_a_wrong_one_takes_no_step(monkeypatch):
    looks, steps = [], []
    verified, measured = verify.verified, largest.peak_of
    monkeypatch.setattr(verify, "verified", lambda *args: looks.append(len(args[2])) or verified(*args))
    monkeypatch.setattr(largest, "peak_of", lambda *args: steps.append(1) or measured(*args))
    found = largest.confirm(TRIAL.replace(batch_size=64, memory_budget=2**30))
    assert looks == [verify.SAMPLES] and len(steps) == 2
    assert found["verification"]["max_grad_error"] < 1e-9  # in float64
    assert found["verification"]["in_own_precision"]["samples"] == verify.SAMPLES
    with pytest.raises(Mismatch, match="wrong differs from the microbatch oracle") as caught:
        largest.confirm(TRIAL.replace(backend="wrong"))
    outcome, _, result = classify(caught.value)
    assert outcome == Outcome.MISMATCH and "probes" not in result and len(steps) == 2
