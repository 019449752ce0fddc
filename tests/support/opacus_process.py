"""One process of two of a distributed training by Opacus' interface."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.integrations.opacus import BatchMemoryManager, PrivacyEngine


def make(mode: str, wrap: bool, **others):
    """Seeded (engine, wrapped model, optimizer, criterion, loader)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(60, 6, generator=numbers), torch.randint(0, 3, (60,), generator=numbers))
    engine = PrivacyEngine()
    with warnings.catch_warnings(action="ignore"):
        made = engine.make_private(
            module=nn.parallel.DistributedDataParallel(model) if wrap else model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
            data_loader=DataLoader(data, batch_size=8),  # 8 batches of 60 records: 7.5 on average, divided by 7
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            grad_sample_mode=mode,
            noise_generator=torch.Generator().manual_seed(7),
            **others,
        )
    return engine, made[0], made[1], made[2] if mode == "ghost" else nn.CrossEntropyLoss(), made[-1]


def train(mode: str = "hooks", wrap: bool = False, most: int = 3):
    """(weights after two epochs, steps)."""
    engine, model, optimizer, criterion, loader = make(mode, wrap)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer) as pieces:
        for _ in range(2):
            for x, y in pieces:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    model.cleanup()
    return weights, engine.engine.steps


def refused() -> str:
    """The error message for the caller's own batches."""
    try:
        make("hooks", False, poisson_sampling=False)
    except Exception as error:
        return str(error)
    return "nothing"


def failing(rank: int) -> str:
    """The error in each process if the first one's loss mixes samples."""
    _, model, optimizer, _, loader = make("hooks", False)
    try:
        for x, y in loader:
            out = model(x)
            F.cross_entropy(out - out.detach().mean(0) if rank == 0 else out, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        return str(error)
    return "nothing"


def main(folder):
    """The weights after training and how many steps there were, by hooks and by ghost, and what was raised."""
    dist.init_process_group("gloo")
    return [train(), train("ghost", wrap=True), failing(dist.get_rank()), refused()]
