"""The planner: what it chooses, within what memory, and when it times."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import clipping.numerics.products
import clipping.planning.planner
from clipping import compare, load_backend
from clipping.accel import cuda
from clipping.backends.tape import BkMixed
from clipping.planning.costs import Costs
from clipping.planning.planner import Plan, Planner
from clipping.rules.base import GRAM_KERNEL, NORM_KERNEL, Route
from clipping.tape.record import Tape

Timed = Callable[[Any, Any], Costs]


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
        plan = planner.plan(tape, losses, lambda: list(parameters.values()))
    tape.close()
    return plan


def costs_of(ghost: float, kept: float, discarded: float) -> Costs:
    """Seconds of a sample's norm and sum together, by each thing to do with it."""
    return Costs({(True, "patches", 0): ghost, (False, "unfold", 0): 0.0}, discarded, kept)


@pytest.fixture
def costs(monkeypatch) -> Callable[[Timed], None]:
    """Replaces all costs by those of a function of rule and output."""

    def use(function: Timed) -> None:
        monkeypatch.setattr(clipping.planning.planner, "predicted", function)

    return use


def conv_only(rule: Any, output: Any) -> Costs:
    ways = {(True, way, 0): 5.0 for way in rule.ghosts} | {(False, way, 0): 1.0 for way in rule.instantiations}
    return Costs(ways, 1.0, 0.1)


def test_a_use_with_a_choice_and_the_other_ones():
    plan = planned(Planner())
    assert len(plan.routes) == 6 and [item.position for item in plan.items] == [0, 2, 4]  # weights; biases have none
    assert all(plan.routes[item.position] is item.taken.route for item in plan.items)
    assert [plan.routes[i].ghost for i in (1, 3, 5)] == [False] * 3
    for item in plan.items:
        assert {(c.route.ghost, c.route.kept) for c in item.choices} == {(True, False), (False, False), (False, True)}


def test_a_depthwise_convolution_has_a_choice_though_it_has_no_gram_form():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3, bias=False), nn.Flatten())
    (item,) = planned(Planner(), model=model).items
    assert {(c.route.ghost, c.route.kept) for c in item.choices} == {(False, False), (False, True)}


def test_the_fastest_route_whatever_the_memory(costs):
    costs(conv_only)
    plan = planned(Planner("time"))
    assert {(item.taken.route.ghost, item.taken.route.kept) for item in plan.items} == {(False, True)}


def test_the_paper_s_rule():
    plan = planned(Planner("paper"))
    # 2T² against pd: 2·256² > 8·27, 2·4² <= 32·72, and 2 <= 10·512
    assert [item.paper for item in plan.items] == [False, True, True]
    assert [item.taken.route.ghost for item in plan.items] == [False, True, True]


def test_least_memory():
    plan = planned(Planner("memory"))
    for item in plan.items:
        kinds = {(choice.route.ghost, choice.route.kept): choice for choice in reversed(item.choices)}
        assert item.taken.held.bytes == min(choice.held.bytes for choice in kinds.values())
        assert len(item.choices) > len(kinds)  # of each also smaller blocks


def test_auto_keeps_the_limit_where_that_can_be(costs):
    """Kept gradients are fastest, and here the largest of all there is."""
    costs(conv_only)
    fast, limited = planned(Planner("time"), size=64), planned(Planner("auto", memory_overhead=0.4), size=64)
    assert fast.ordinary == limited.ordinary
    assert fast.peak > 1.4 * fast.ordinary >= limited.peak
    assert sum(i.taken.seconds for i in limited.items) > sum(i.taken.seconds for i in fast.items)
    some = [item.taken.route.kept for item in limited.items]
    assert any(some) and not all(some)  # no more is given up than must be


def test_without_a_limit_auto_is_the_fastest(costs):
    costs(conv_only)
    fast, unlimited = planned(Planner("time"), size=64), planned(Planner("auto", memory_overhead=1e9), size=64)
    assert [item.taken.route for item in fast.items] == [item.taken.route for item in unlimited.items]


def test_a_limit_out_of_reach_costs_a_fair_price_and_no_more(costs):
    """No plan keeps less than -50 %: what saves memory for nearly nothing is taken, what is dear is not."""

    def priced(dear: float) -> Timed:
        def function(rule: Any, output: Any) -> Costs:
            return (
                Costs({(False, rule.instantiations[0], 0): 1.0, (True, rule.ghosts[0], 0): dear}, 1.0, 0.1)
                if rule.ghosts
                else Costs({(False, rule.instantiations[0], 0): 1.0}, 1.0, 0.1)
            )

        return function

    costs(priced(1.0))
    fair = planned(Planner("auto", memory_overhead=-0.5), size=64)
    costs(priced(1e6))
    dear = planned(Planner("auto", memory_overhead=-0.5), size=64)
    fastest = planned(Planner("time"), size=64)
    assert fair.peak > 0.5 * fair.ordinary and fair.peak < fastest.peak
    assert not any(item.taken.route.ghost for item in dear.items)  # a million seconds for some kilobytes
    assert dear.peak <= fastest.peak


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


def test_what_is_timed_draws_none_of_the_caller_s_numbers(monkeypatch):
    """Else dropout would depend on which costs are on record on the machine."""
    monkeypatch.setattr(clipping.numerics.products, "_FROM", {})
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


@pytest.mark.parametrize("strategy", ["paper", "memory"])
def test_strategies_without_seconds_time_nothing(monkeypatch, strategy):
    monkeypatch.setattr(clipping.planning.planner, "measured", lambda *_: pytest.fail("timed"))
    planner = Planner(strategy)
    assert not planned(planner, times=3).timed


def test_fake_tensors_are_never_timed(monkeypatch):
    monkeypatch.setattr(clipping.planning.planner, "measured", lambda *_: pytest.fail("timed"))
    with FakeTensorMode():
        model = network()
        with load_backend("bk_mixed")(model, total, verify=False) as backend:
            for _ in range(3):
                backend(*batch())
            (plan,) = backend.planner._plans.values()
    assert not plan.timed and plan.peak > 0


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
    assert [item.taken.route for item in plan.items] == [item.taken.route for item in formulas.items]


def test_an_error_of_a_rule_while_timing_is_no_memory_error(monkeypatch):
    def broken(rule: Any, output: Any) -> Costs:
        raise RuntimeError("a mistake in a rule")

    monkeypatch.setattr(clipping.planning.planner, "measured", broken)
    with load_backend("bk_mixed")(network(), total, verify=False) as backend:
        backend(*batch())
        with pytest.raises(RuntimeError, match="a mistake in a rule"):
            backend(*batch())


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
        reached = [thing for thing in reachable(backend.planner) if isinstance(thing, Tensor)]
        assert reached == []


def reachable(root: object) -> list[object]:
    """Everything that an object leads to, but for modules, classes and functions."""
    stack, seen = [root], {id(root)}
    found = []
    while stack:
        thing = stack.pop()
        found.append(thing)
        for child in gc.get_referents(thing):
            if (
                id(child) not in seen
                and not isinstance(child, type)
                and type(child).__name__ not in ("module", "function")
            ):
                seen.add(id(child))
                stack.append(child)
    return found


def test_routes_are_planned_for_each_shape_apart():
    """The same model at two resolutions: many positions and few."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    with load_backend("bk_mixed")(model, total, verify=False) as backend:
        assert isinstance(backend, BkMixed)
        for size in (24, 4, 24):
            backend(torch.randn(4, 3, size, size), torch.zeros(4))
        many, few = backend.planner._plans.values()
    assert (many.items[0].paper, few.items[0].paper) == (False, True)
    assert many.timed and not few.timed


def test_uses_that_share_a_parameter_have_no_choice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.layer(torch.tanh(self.layer(x))))

    model = Twice()
    tape = Tape(dict(model.named_parameters()), (x := torch.randn(4, 6),), 4)
    with tape:
        losses = total(model(x), torch.zeros(4))
    plan = Planner().plan(tape, losses, lambda: list(model.parameters()))
    assert [item.position for item in plan.items] == [4]  # the head's weight
    assert len(plan.routes) == 6 and plan.routes[0] == plan.routes[2] == Route(ghost=True, way="gram")


@pytest.mark.parametrize("triton", [True, False])
def test_a_plan_by_formula_alone_has_kernels_on_a_gpu_that_has_them(triton, monkeypatch):
    """A norm of small gradients is little work beside writing and reading them; the library multiplies faster."""
    monkeypatch.setattr(cuda, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "_has_triton", lambda: triton)
    ways = {}
    for features, positions in ((16, 16), (2048, 512)):
        with FakeTensorMode():
            model, x = nn.Linear(features, features, device="cuda"), torch.empty(8, positions, features, device="cuda")
            with Tape(dict(model.named_parameters()), (x,), 8) as tape:
                losses = model(x).square().sum((1, 2))
            ways[features] = {
                route.way for route in Planner("time", timing=False).plan(tape, losses, lambda: []).routes
            }
        tape.close()
    assert (NORM_KERNEL in ways[16]) == triton and not {NORM_KERNEL, GRAM_KERNEL} & ways[2048]
