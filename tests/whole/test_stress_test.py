"""The first command: what it runs, how much of that, and that it does not grow."""

import pytest
import torch

from dpbench.experiment import MaxBatch
from dpbench.measure import largest, simulate
from dpbench.trials import OverheadTrial
from experiments import stress_test
from experiments.stress_test import BACKENDS, RESNETS, VGGS

#: The memory half of eight minutes on two cores: a thousand operations take a sixth of a second of one core.
PROBES, OPERATIONS = 300, 1_700_000


def test_it_searches_every_model_and_times_the_smaller_ones_at_a_batch_that_shows_the_cost():
    cells = stress_test.cells("cpu")
    searches = [cell for cell in cells if isinstance(cell, MaxBatch)]
    timed = [cell for cell in cells if isinstance(cell, OverheadTrial)]
    assert {(s.probe.model, s.probe.backend) for s in searches} == {(m, b) for m in RESNETS + VGGS for b in BACKENDS}
    assert all(search.probe.simulated and search.then is None and search.seed is None for search in searches)
    assert [trial.model for trial in timed] == RESNETS[:3] and len(searches) + len(timed) == len(cells)
    assert all(trial.batch_size >= 16 and list(trial.backends) == BACKENDS for trial in timed)
    assert stress_test.EXPERIMENT.rounds == 1


def test_on_a_gpu_it_measures_at_the_largest_batch():
    cells = stress_test.cells("cuda")
    assert all(isinstance(cell, MaxBatch) and cell.then is not None and cell.seed is not None for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(4))
def test_its_searches_have_few_probes_and_few_operations(share, monkeypatch):
    """Each quarter of them has its share of what eight minutes hold."""
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
            seen[size] = largest._probe(search.probe_at(size))
        probes += len(seen)
        assert search.answer(seen) and len(seen) <= 5
    print(f"{probes} probes, {count} operations")
    assert probes <= PROBES / 4 and count <= OPERATIONS / 4
