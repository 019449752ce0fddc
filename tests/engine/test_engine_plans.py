"""The engine plans by timing, and what it found is part of a checkpoint: the same training again, to the bit."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
from attached import attached, cross_entropy
from torch import nn
from torch.utils.data import TensorDataset

from dpbench import PrivacyEngine


class Net(nn.Module):
    """A convolution and a linear layer over positions, both with several routes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.head = nn.Conv2d(3, 8, 3), nn.Linear(36, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.linear(self.conv(x).flatten(2)).tanh().mean(1))


def trained(model: nn.Module, engine: PrivacyEngine, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Epochs of two steps."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, 8, 8, generator=generator), torch.arange(64) % 3)
    loader = engine.data_loader(data)
    for x, y in (batch for _ in range(epochs) for batch in loader):
        optimizer.step(loss=cross_entropy(model(x), y))


def made(model: nn.Module, **options) -> tuple[PrivacyEngine, torch.optim.Optimizer]:
    _, optimizer, engine = attached(model, lr=0.1, batch_size=32, epochs=100, max_grad_norm=0.5, **options)
    return engine, optimizer


@pytest.mark.parametrize("seeded", [False, True])
def test_a_private_engine_times_its_routes_in_the_second_step_and_a_seeded_one_never(seeded, caplog):
    options = {"generator": torch.Generator().manual_seed(1)} if seeded else {}
    model = Net()
    with caplog.at_level(logging.INFO, "clipping.planning.planner"):
        trained(model, *made(model, **options), epochs=4)
    timed = [record.message for record in caplog.records if "by their times on this device" in record.message]
    assert bool(timed) is not seeded


def test_what_was_planned_by_timing_is_repeated_from_a_checkpoint_to_the_bit():
    model = Net()
    engine, optimizer = made(model)
    trained(model, engine, optimizer, epochs=2)
    file = io.BytesIO()
    torch.save({"engine": engine.state_dict(), "model": copy.deepcopy(model.state_dict())}, file)
    trained(model, engine, optimizer, epochs=2)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["engine"]["backend"]["plans"], "nothing was planned"
    again = Net()
    again.load_state_dict(state["model"])
    second, other = made(again)
    second.load_state_dict(state["engine"], replay=True)
    trained(again, second, other, epochs=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
