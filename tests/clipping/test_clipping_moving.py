"""What a step may write to, and is restored after one that runs again (`clipping.checks.moving`)."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clipping import load_backend
from clipping.checks import moving
from clipping.checks.moving import Moving
from clipping.numerics.rng_replay import Draws
from dpbench.conformance.modules import Net


class Counted:
    """A loss that counts its calls in a number, in a list and in a tensor, and can reach its data."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.calls, self.seen, self.total = data, 0, list[int](), torch.zeros(2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(outputs))
        self.total += 1
        return outputs


def test_what_a_loss_holds_is_restored_but_no_dataset_is_copied(monkeypatch):
    monkeypatch.setattr(moving, "LARGEST", 100)
    counted = Counted(torch.zeros(26))
    state = Moving(nn.BatchNorm1d(100), counted.loss)
    kept = [x.shape for x, *_ in state.state().kept]
    assert (2,) in kept and (100,) in kept and (26,) not in kept
    with state.repeated(Draws()):
        counted.loss(torch.ones(3), torch.ones(3))
    assert state.has_moved and (counted.calls, counted.seen, counted.total.tolist()) == (0, [], [0.0, 0.0])


COUNT, SHARED = 0, [0]
calls = Counter[str]()
"""Of the name of an attribute of `Everywhere`, whose code does not read this."""


def counted_outside() -> int:
    global COUNT, FIRST
    COUNT += 1
    SHARED[0] += 1
    try:
        FIRST += 1
    except NameError:
        FIRST = 1
    return COUNT + SHARED[0] + FIRST


class Helper:
    """Counts its calls in its class, within an inner function."""

    found = 0

    def count(self) -> int:
        def inner() -> int:
            INNER[0] += 1
            return INNER[0]

        type(self).found += 1
        return self.found + inner()


INNER = [0]


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Everywhere(nn.Module):
    """Moves state in each place that code can write to, and returns all of it."""

    calls = of_method = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.slots, self.array, self.names = nn.Linear(2, 2), Slots(), np.zeros(3), Counter[str]()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("moved", torch.ones(3))
        self.pair = torch.zeros(()), torch.zeros(())
        self.sparse = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]
        self.helper = Helper()
        self.generators = torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)
        of_hook = [0]

        def hook(*_: object) -> None:
            of_hook[0] += 1

        self.of_hook = of_hook
        self.layer.register_forward_hook(hook)
        self.layer.register_forward_hook(self.hook)

    def hook(self, *_: object) -> None:
        self.of_method += 1

    def forward(self, x: Tensor, calls: list[int] = [0]) -> list[object]:  # noqa: B006
        type(self).calls += 1
        calls[0] += 1
        self.slots.calls += 1
        self.array += 1
        self.names["forward"] += 1
        self.layer.weight.calls = getattr(self.layer.weight, "calls", 0) + 1
        self.moved.data.mul_(0.5)
        self.pair[1].add_(1)
        for adjacency in self.sparse:
            adjacency.mul_(2)
        self.frozen.data = self.frozen.data * 0.5
        self.layer.weight.data.mul_(0.5)
        self.layer(x)
        of_torch, of_python, of_numpy = self.generators
        drawn = float(torch.rand((), generator=of_torch)), of_python.random(), float(of_numpy.random())
        of_functions = self.helper.count(), counted_outside(), self.of_hook[0]
        counts = *of_functions, self.calls, calls[0], self.slots.calls, self.names["forward"]
        tensors = [
            *self.moved.tolist(),
            *self.frozen.tolist(),
            self.pair[1].item(),
            *(adjacency.to_dense()[0, 0].item() for adjacency in self.sparse),
            *self.layer.weight.flatten().tolist(),
        ]
        return [*counts, self.of_method, *self.array.tolist(), self.layer.weight.calls, *tensors, *drawn]


def test_attributes_of_the_name_of_a_global_are_not_the_global():
    assert not any(x is calls for x, _ in Moving(Everywhere()).state().held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_frozen_parameter_is_copied_if_it_moves_and_only_then(dtype):
    """The first batch is verified before it is known which one moves."""

    def taught(net: Any, x: Tensor) -> Tensor:
        if moves:
            net.frozen.data.mul_(0.5)
        return net.layer(x) * net.frozen

    for moves in (True, False):
        model = Net(taught, layer=nn.Linear(2, 2), frozen=torch.ones(())).to(dtype)
        model.frozen.requires_grad_(False)
        with load_backend("bk_mixed")(model, lambda outputs, targets: outputs.sum(1)) as backend:
            backend(torch.randn(3, 2, dtype=dtype), torch.zeros(3))
            assert float(model.frozen) == (0.5 if moves else 1)
            assert len(backend.moving.state().kept) == moves


def test_every_place_that_code_writes_to_is_restored():
    model = Everywhere()
    state, x = Moving(model), torch.ones(1, 2)
    with torch.no_grad():
        before = state.marks()
        model(x)
        assert state.saw(before) == [model.layer.weight]
        present = state.state()
        runs = []
        for _ in range(2):
            with state.repeated(Draws(), present):
                runs.append(model(x))
        after = model(x)
    assert state.has_moved and runs[0] == runs[1] == after


def test_a_check_searches_once_for_the_state_and_again_for_new_members(monkeypatch):
    """A rerun may replace a module or be the first to write to a frozen parameter; the next one restores both."""
    searches = []
    monkeypatch.setattr(moving, "_state_of", lambda *of, real=moving._state_of: searches.append(1) or real(*of))
    model = Net(lambda net, x: x, layer=nn.BatchNorm1d(2), frozen=torch.ones(()))
    model.frozen.requires_grad_(False)
    state = Moving(model)
    with state.checking():
        for _ in range(3):
            with state.repeated(Draws()):
                model.seen = [1]
        assert len(searches) == 1 and state.has_moved and not hasattr(model, "seen")
        with state.repeated(Draws()):
            model.layer, model.frozen.data[...] = nn.BatchNorm1d(2), 5
        for _ in range(2):
            with state.repeated(Draws()):
                model.layer(torch.randn(3, 2))
                model.frozen.data.zero_()
            assert int(model.layer.num_batches_tracked) == 0 and float(model.frozen) == 5
        model.eval()
        with state.repeated(Draws()):
            model.train()
        assert not model.training and len(searches) == 3
    begin = state.state()
    for i, (value, more) in enumerate([(2, 0), ([2], 1)]):
        model.calls = value
        with state.checking(begin), state.repeated(Draws()):
            model.calls = 7
            model.layer.running_mean += 1
        assert model.calls == value and not model.layer.running_mean.any(), i
        assert len(searches) == 4 + more, i
