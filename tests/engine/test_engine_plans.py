"""The engine plans by timing, and what it found is part of a checkpoint."""

import logging

import pytest
import torch
from attached import attached, cross_entropy
from torch import nn
from torch.utils.data import TensorDataset

from dpbench.conformance.modules import Net


def net() -> Net:
    """A convolution and a linear layer over positions, both with several routes."""
    parts = {"conv": nn.Conv2d(3, 8, 3), "linear": nn.Linear(36, 16), "head": nn.Linear(16, 3)}
    return Net(lambda net, x: net.head(net.linear(net.conv(x).flatten(2)).tanh().mean(1)), **parts)


@pytest.mark.parametrize("seeded", [False, True])
def test_a_private_engine_times_its_routes_in_the_second_step_and_a_seeded_one_never(seeded, caplog):
    generator = torch.Generator().manual_seed(1) if seeded else None
    model, optimizer, engine = attached(net(), lr=0.1, batch_size=32, max_grad_norm=0.5, generator=generator)
    loader = engine.data_loader(TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 3))
    with caplog.at_level(logging.INFO, "clipping.planning.planner"):
        for x, y in (batch for _ in range(4) for batch in loader):
            optimizer.step(loss=cross_entropy(model(x), y))
    timed = [record.message for record in caplog.records if "by their times on this device" in record.message]
    assert bool(timed) is not seeded
    plans = engine.state_dict()["backend"]["plans"]
    again = attached(net(), attach=False, batch_size=32, generator=generator, max_grad_norm=0.5)[2]
    again.load_state_dict(engine.state_dict(), replay=True)
    assert bool(plans) and again.state_dict()["backend"]["plans"] == plans
