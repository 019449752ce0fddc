"""One process of two of a distributed training by Opacus' interface."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from opacus_made import Made
from torch import nn
from torch.utils.data import TensorDataset


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
    """The weights after training and how many steps there were, by hooks and by ghost, and what was raised."""
    dist.init_process_group("gloo")
    return [train(), train("ghost", wrap=True), failing(dist.get_rank()), refused()]
