"""The planner: what it chooses, within what memory, and when it times."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import clipping.planning.planner
from clipping import compare, load_backend
from clipping.planning.costs import Costs
from clipping.planning.planner import Choice, Plan, Planner
from clipping.rules.base import Bias, Route
from clipping.tape.record import Tape


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    """A convolution of many positions, one of few, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 32, 3, stride=4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum(1)


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 16, 16), torch.zeros(size)


def planned(planner: Planner, size: int = 8, model: nn.Module | None = None, times: int = 1) -> Plan:
    """What it makes of a forward pass."""
    model = network() if model is None else model
    x, _ = batch(size)
    parameters = dict(model.named_parameters())
    tape = Tape(parameters, (x,), size)
    with tape:
        losses = total(model(x), torch.zeros(size))
    for _ in range(times):
        plan = planner.plan(tape, losses)
    tape.close()
    return plan


def test_the_paper_s_rule():
    # 2T² against pd: 2·256² > 8·27, 2·4² <= 32·72, and 2 <= 10·512
    plan = planned(Planner("paper"))
    assert [plan.routes[i].ghost for i in plan.costs] == [False, True, True]


ROOM = 16 * 2**20


@pytest.mark.parametrize(
    ("strategy", "expected"), [("time", (False, True)), ("auto", (True, False)), ("memory", (False, False))]
)
def test_what_each_strategy_takes(strategy, expected):
    rule = Bias(torch.zeros(3), 1)
    assert rule.room() == ROOM
    choices = [
        Choice(Route(ghost=True, block=8), 2.0, 1000, ROOM),  # a large workspace
        Choice(Route(ghost=True, block=2), 3.0, 1000, ROOM // 4),
        Choice(Route(), 9.0, 1000, 0),
        Choice(Route(kept=True), 1.0, 9000, 0),
    ]
    taken = Planner(strategy)._chosen(rule, choices)
    assert (taken.route.ghost, taken.route.kept) == expected and taken.route.block != 8
    assert Planner()._chosen(rule, choices[:1]) is choices[0]  # there is no smaller one


def test_a_plan_is_made_once_and_timed_at_the_second_call(monkeypatch):
    calls: list[int] = []
    real = clipping.planning.planner.measured
    monkeypatch.setattr(clipping.planning.planner, "measured", lambda *a: (calls.append(1), real(*a))[1])
    model, seen = network(), []
    with load_backend("bk_mixed")(model, total, verify=False) as backend:
        for _ in range(4):
            before = len(calls)
            backend(*batch())
            seen.append(len(calls) - before)
        (plan,) = backend.planner._plans.values()
    assert seen == [0, 3, 0, 0] and plan.timed


def test_what_is_timed_draws_none_of_the_caller_s_numbers():
    """Else dropout would depend on which costs are on record on the machine."""
    model, drawn = network(), []
    for timing in (True, False):
        torch.manual_seed(3)
        x, y = batch()
        with load_backend("bk_mixed")(model, total, verify=False, timing=timing) as backend:
            backend.planner.file = False
            for _ in range(3):
                backend(x, y)
        drawn.append(torch.rand(()))
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("strategy", "mode"), [("paper", nullcontext), ("memory", nullcontext), ("auto", FakeTensorMode)]
)
def test_strategies_without_seconds_and_fake_tensors_time_nothing(monkeypatch, strategy, mode):
    monkeypatch.setattr(clipping.planning.planner, "measured", lambda *_: pytest.fail("timed"))
    with mode():
        assert not planned(Planner(strategy), times=3).timed


def test_batches_of_about_the_same_size_share_a_plan(monkeypatch):
    made: list[int] = []
    real = Planner._made
    monkeypatch.setattr(Planner, "_made", lambda self, *a: (made.append(a[1].shape[0]), real(self, *a))[1])
    model = network()
    with load_backend("bk_mixed")(model, total, verify=False) as backend:
        for size in (9, 12, 15, 10, 3, 2, 17, 33, 9):
            out = backend(*batch(size))
            assert out.norms is not None and out.norms.shape == (size,)
    assert made == [9, 12, 33, 9]  # up to 32 by formula and then timed, and once more from 33 on


def test_changing_sizes_are_exact():
    """Poisson sampling: a plan of one size serves the others of its kind."""
    model, loss = network().double(), total
    oracle = load_backend("microbatch")(model, loss, verify=False)
    with load_backend("bk_mixed")(model, loss, verify=False) as backend, oracle:
        for size in (5, 7, 4, 6, 1, 12, 7):
            x, y = batch(size)
            found = compare(backend(x.double(), y.double()), oracle(x.double(), y.double()))
            assert found.within(1e-9), (size, found)


def test_memory_that_runs_out_while_timing_leaves_the_formulas(monkeypatch):
    calls: list[int] = []

    def too_large(rule: Any, output: Any) -> Costs:
        calls.append(1)
        raise torch.OutOfMemoryError("no memory for a second copy")

    monkeypatch.setattr(clipping.planning.planner, "measured", too_large)
    model = network()
    formulas = planned(Planner("auto"), model=model)
    with load_backend("bk_mixed")(model, total, verify=False) as backend:
        for _ in range(3):
            backend(*batch())
        (plan,) = backend.planner._plans.values()
    assert len(calls) == 1  # asked once, and not at every step
    assert plan.routes == formulas.routes


def test_a_plan_keeps_nothing_of_the_step_alive():
    model = network()
    activations: list[weakref.ref[Any]] = []
    model[1].register_forward_hook(lambda module, inputs, output: activations.append(weakref.ref(output)))
    with load_backend("bk_mixed")(model, total, verify=False) as backend:
        for _ in range(3):
            x, y = batch()
            activations.append(weakref.ref(x))
            out = backend(x, y)
            del x, y
        assert out.norms is not None
        gc.collect()
        assert len(activations) >= 6 and [alive() for alive in activations] == [None] * len(activations)
