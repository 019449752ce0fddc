"""The first command: what it runs, how much of that, and that it does not grow."""

import pytest
import torch

from dpbench.experiment import MaxBatch
from dpbench.measure import largest, simulate
from dpbench.measure.memory import UnsupportedSimulation
from dpbench.trials import OverheadTrial
from experiments import stress_test
from experiments.stress_test import BACKENDS, LARGE, RESNETS, TEXTS, VGGS

MODELS = RESNETS + VGGS + TEXTS + LARGE

#: The memory of ten minutes on two cores: a thousand operations take a sixth of a second of one core.
PROBES, OPERATIONS = 400, 2_400_000


def test_it_searches_every_model_and_times_the_smaller_ones_at_a_batch_that_shows_the_cost():
    cells = stress_test.cells("cpu")
    searches = [cell for cell in cells if isinstance(cell, MaxBatch)]
    timed = [cell for cell in cells if isinstance(cell, OverheadTrial)]
    assert {(s.probe.model, s.probe.backend) for s in searches} == {(m, b) for m in MODELS for b in BACKENDS}
    assert all(search.probe.simulated and search.then is None for search in searches)
    assert [trial.model for trial in timed] == RESNETS[:3] and len(searches) + len(timed) == len(cells)
    assert all(trial.batch_size >= 16 and list(trial.backends) == BACKENDS for trial in timed)
    assert stress_test.EXPERIMENT.rounds == 1


def test_on_a_gpu_two_real_steps_confirm_what_was_foretold():
    cells = stress_test.cells("cuda")
    searches = [cell for cell in cells if isinstance(cell, MaxBatch)]
    assert {(s.probe.model, s.probe.backend) for s in searches} == {(m, b) for m in MODELS for b in BACKENDS}
    for search in searches:
        assert (search.probe.kind, search.then.kind) == ("largest", "confirm")
        for name in ("model", "backend", "device", "precision", "memory_budget", "max_batch_size", "tolerance"):
            assert getattr(search.probe, name) == getattr(search.then, name), name
        assert search.probe.tolerance == search.tolerance and search.probe.batch_size == search.start


@pytest.mark.slow
@pytest.mark.parametrize("share", range(4))
def test_its_searches_have_few_probes_and_few_operations(share, monkeypatch):
    """Each quarter of them has its share of what ten minutes hold."""
    count = 0
    dispatch = simulate.StorageLifetimes.__torch_dispatch__

    def counted(self, func, *args, **kwargs):
        nonlocal count
        count += func is not torch.ops.prim.device.default
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(simulate.StorageLifetimes, "__torch_dispatch__", counted)
    probes = 0
    for search in [cell for cell in stress_test.cells("cpu") if isinstance(cell, MaxBatch)][share::4]:
        seen = {}
        while (size := search.next_batch_size(seen)) is not None:
            try:
                seen[size] = largest._probe(search.probe_at(size))
            except UnsupportedSimulation:  # ends the search: torch.func.vmap, or Opacus, refuses the model
                break
        probes += len(seen)
        assert len(seen) <= 5 and (size is not None or search.answer(seen))
    print(f"{probes} probes, {count} operations")
    assert probes <= PROBES / 4 and count <= OPERATIONS / 4
