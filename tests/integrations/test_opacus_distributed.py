"""Opacus' interface in one process and in two: the same sample, the same weights, noise once; and errors end in all."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from opacus_made import Made
from ranks import ranks
from torch import nn
from torch.utils.data import TensorDataset

pytestmark = [
    pytest.mark.slow,  # test_engine_distributed shows the engine's part
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


def make(mode: str, wrap: bool, **others) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(60, 6, generator=numbers), torch.randint(0, 3, (60,), generator=numbers))
    options = {"grad_sample_mode": mode, "noise_generator": torch.Generator().manual_seed(7), **others}
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    called = nn.parallel.DistributedDataParallel(model) if wrap else model
    with warnings.catch_warnings(action="ignore"):  # 8 batches of 60 records: 7.5 on average, divided by 7
        return Made(called, data, batch_size=8, optimizer=sgd, max_grad_norm=0.5, **options)


def train(mode: str = "hooks", wrap: bool = False, most: int = 3):
    """(weights after two epochs, steps)."""
    made = make(mode, wrap)
    with made.pieces(most) as pieces:
        for _ in range(2):
            made.train(loader=pieces)
    weights = [p.detach().clone() for p in made.model.parameters()]
    made.model.cleanup()
    return weights, made.steps


def refused() -> str:
    """The error message for the caller's own batches."""
    try:
        make("hooks", False, poisson_sampling=False)
    except Exception as error:
        return str(error)
    return "nothing"


def failing(rank: int) -> str:
    """The error in each process if the first one's loss mixes samples."""
    try:
        make("hooks", False).train(lambda out, y: F.cross_entropy(out - out.detach().mean(0) if rank == 0 else out, y))
    except Exception as error:
        return str(error)
    return "nothing"


def main(folder):
    """In each process: the weights and the number of steps, by hooks and by ghost, and what was raised."""
    dist.init_process_group("gloo")
    return [train(), train("ghost", wrap=True), failing(dist.get_rank()), refused()]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What became of each of two processes."""
    return ranks(tmp_path_factory.mktemp("two"), Path(__file__))


@pytest.mark.parametrize(("place", "mode"), [(0, "hooks"), (1, "ghost")])
def test_one_process_and_two_have_the_same_weights(two, place, mode):
    alone, steps = train(mode, most=6)
    for found in two:
        weights, count = found[place]
        assert count == steps == 16
        for mine, p in zip(weights, alone, strict=True):
            torch.testing.assert_close(mine, p, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(two[0][place][0], two[1][place][0], strict=True))


def test_a_refusal_in_one_process_is_an_error_in_the_other(two):
    assert "samples mix" in two[0][2]
    assert "process 0 raised an error: nothing of it is released" in two[1][2]


def test_batches_of_the_caller_s_own_are_refused_in_several_processes(two):
    assert all("expected poisson_sampling=True" in found[3] and "in several processes" in found[3] for found in two)
