"""Whole steps on the fake device of `fake_cuda.py`, once settled: run python fake_settled.py in a process that has it.

A step reads nothing back from the device: not in the forward pass, the clipping, the noise or the optimizer, eager or
as a program. The rare steps that check samples or the caller's code once more do, and are switched off here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clipping.checks import sample_independence
from clipping.program import graphs
from clipping.program.cuda_graph import Pool
from dpbench import PrivacyEngine

SETTLED = 7
"""Steps that plan, capture, trace, compare and check."""


def record(pool: Pool, run: Callable[[], object], device: torch.device) -> Any:
    """Stands in for a CUDA graph, which the fake lacks: the same operations at each replay."""
    run()
    return SimpleNamespace(replay=run)


def each_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def asks(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = each_loss(outputs, targets)
    losses.detach().sum().item()
    return losses


def settled(loss_fn: Callable[[Tensor, Tensor], Tensor], compile: Any) -> str:
    """How the settled step runs. In it a synchronisation is an error."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    engine = PrivacyEngine(model, batch_size=8, sample_size=64, max_grad_norm=1.0, noise_multiplier=1.0)
    engine.timing = False  # the graph is replayed whatever it takes
    engine.attach(optimizer)
    step = engine.make_step(loss_fn, compile=compile)
    x, y = torch.randn(8, 1, 6, 6).cuda(), torch.randint(0, 4, (8,)).cuda()
    for _ in range(SETTLED):
        step(x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.privacy_spent().steps == SETTLED + 1
    return "eager" if step.graphs is None else step.graphs.way


def main() -> None:
    Pool.record = record  # type: ignore[method-assign]
    graphs.RATE = sample_independence.RATE = 0.0
    ways = [settled(each_loss, "auto"), settled(each_loss, False)]
    try:
        settled(asks, False)
    except RuntimeError as error:
        ways.append(str(error).partition(" (")[0])
    print(*ways, sep="; ")


if __name__ == "__main__":
    main()
