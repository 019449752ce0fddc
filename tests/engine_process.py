"""One process of two of a distributed training: python engine_process.py RANK FOLDER. Writes what became of it."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dpbench import PrivacyEngine


def train(rank=0, wrap=False):
    """The state after two epochs, and the number of steps."""
    torch.manual_seed(rank)  # the models differ until the engine makes them one
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    called = nn.parallel.DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = PrivacyEngine(
        called,
        batch_size=6,
        sample_size=60,
        max_grad_norm=0.5,
        noise_multiplier=1.0,
        generator=torch.Generator().manual_seed(7),
    )
    with warnings.catch_warnings(action="ignore"):
        engine.attach(optimizer)
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 6, generator=numbers), torch.randint(0, 3, (60,), generator=numbers)
    for _ in range(2):
        for xs, ys in engine.data_loader(torch.utils.data.TensorDataset(x, y), max_physical_batch_size=2):
            optimizer.step(loss=F.cross_entropy(called(xs), ys, reduction="none"))
    engine.detach()
    return model.state_dict(), engine.steps


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save([train(rank), train(rank, wrap=True)], f"{folder}/{rank}.pt")
    dist.barrier()  # or the first to end takes its store away from the other
    dist.destroy_process_group()
    os._exit(0)  # past the end of the interpreter, at which gloo's threads now and then abort the process
