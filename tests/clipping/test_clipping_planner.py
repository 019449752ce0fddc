"""The planner: what it chooses, within what memory, when it times; and the file that costs are kept in."""

import gc
import json
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import clipping.planning.planner
from clipping import load_backend
from clipping.planning.costs import CostCache, Costs, measured, predicted
from clipping.planning.planner import Choice, Plan, Planner, accepted
from clipping.rules.base import Route, Spec
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.elementwise import Broadcast
from clipping.rules.linear import LinearWeight
from clipping.tape.record import Tape


def network() -> nn.Sequential:
    """A convolution of many positions, one of few, and a linear layer."""
    convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 32, 3, stride=4), nn.Tanh()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


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
    rule = Broadcast(torch.zeros(3), torch.Size((2, 3)))
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


def test_memory_goes_where_a_byte_saves_most_time():
    slow = Choice(Route(), 9.0, 1000, 0)
    offers = {
        0: (slow, Choice(Route(kept=True), 8.0, 2000, 0)),
        1: (slow, Choice(Route(kept=True), 1.0, 3000, 0)),  # 8 s for 2000 bytes
        2: (slow, Choice(Route(kept=True), 5.0, 1500, 0)),
        3: (slow, slow),
    }
    assert accepted(offers, 3000) == [2, 1]
    assert accepted(offers, 1600) == [2, 0]
    assert accepted(offers, 499) == []


def test_a_timed_plan_keeps_small_gradients_in_exchange_for_time(monkeypatch):
    """Of a depthwise convolution of few positions, whose ordinary weight gradient takes longest."""
    monkeypatch.setattr(
        clipping.planning.planner, "measured", lambda *of: predicted(*of)._replace(weight_gradient=1.0, kept=0.1)
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=6), nn.Conv2d(8, 8, 2, groups=8), nn.Flatten(), nn.Linear(8, 99))
    kept = [[route.kept for route in planned(Planner(file=False), model=model, times=n).routes[::2]] for n in (1, 2)]
    assert kept == [[False, False, False], [False, True, False]]


def test_a_plan_is_made_once_and_timed_at_the_second_call(monkeypatch):
    timed, seen = Mock(wraps=measured), []
    monkeypatch.setattr(clipping.planning.planner, "measured", timed)
    with load_backend("bk_mixed")(network(), total, verify=False) as backend:
        for _ in range(4):
            backend(*batch())
            seen.append(timed.call_count)
        (plan,) = backend.planner._plans.values()
    assert seen == [0, 3, 3, 3] and plan.timed


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


@pytest.mark.parametrize("strategy, mode", [("paper", nullcontext), ("memory", nullcontext), ("auto", FakeTensorMode)])
def test_strategies_without_seconds_and_fake_tensors_time_nothing(monkeypatch, strategy, mode):
    monkeypatch.setattr(clipping.planning.planner, "measured", lambda *_: pytest.fail("timed"))
    with mode():
        assert not planned(Planner(strategy), times=3).timed


def test_batches_of_about_the_same_size_share_a_plan(monkeypatch):
    made = Mock(wraps=Planner._made)
    monkeypatch.setattr(Planner, "_made", lambda *given: made(*given))  # a function is bound to its planner
    with load_backend("bk_mixed")(network(), total, verify=False) as backend:
        for size in (9, 12, 15, 10, 3, 2, 17, 33, 9):
            out = backend(*batch(size))
            assert out.norms is not None and out.norms.shape == (size,)
    sizes = [losses.shape[0] for _, _, losses, *_ in (call.args for call in made.call_args_list)]
    assert sizes == [9, 12, 33, 9]  # up to 32 by formula and then timed, and once more from 33 on


def test_memory_that_runs_out_while_timing_leaves_the_formulas(monkeypatch):
    timed = Mock(side_effect=torch.OutOfMemoryError("no memory for a second copy"))
    monkeypatch.setattr(clipping.planning.planner, "measured", timed)
    model = network()
    formulas = planned(Planner("auto"), model=model)
    with load_backend("bk_mixed")(model, total, verify=False) as backend:
        for _ in range(3):
            backend(*batch())
        (plan,) = backend.planner._plans.values()
    assert timed.call_count == 1  # and not at every step
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


CPU = torch.device("cpu")
COSTS = Costs({(True, "pixels", 8): 1e-3, (True, "patches", 0): 3e-3, (False, "grouped", 4): 2e-3}, 5e-4, None)
OTHER = Costs({(False, "direct", 1): 2e-3}, 5e-4, 1e-5)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def conv(batch: int = 4) -> tuple[ConvolutionWeight, Spec]:
    weight, x = torch.randn(6, 4, 3, 3), torch.randn(batch, 4, 8, 8)
    rule = ConvolutionWeight(weight, x, torch.Size((8, 8)), [1, 1], [1, 1], [1, 1], 1)
    return rule, Spec(torch.Size((batch, 6, 8, 8)), torch.float32)


def test_what_is_written_down_is_read_again(folder):
    cache = CostCache(CPU)
    assert cache.get("a") is None
    cache.add({"a": COSTS})
    cache.add({"b": OTHER})
    again = CostCache(CPU)
    assert (again.get("a"), again.get("b"), again.get("c")) == (COSTS, OTHER, None)
    assert the_file(folder).name.startswith("routes-cpu-")
    assert set(json.loads(the_file(folder).read_text())) == {"a", "b"}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"norms": [[true, "pixels"',
        "[1, 2]",
        '{"a": {"norms": [[1, 2]], "kept": null}}',
        "\x00",
        "[" * 100_000,
    ],
    ids=["torn", "a list", "other fields", "binary", "brackets"],
)
def test_a_torn_or_foreign_file_is_measured_again(folder, text):
    CostCache(CPU).add({"a": COSTS})
    the_file(folder).write_text(text)
    cache = CostCache(CPU)
    assert cache.get("a") is None
    cache.add({"b": OTHER})
    assert (CostCache(CPU).get("a"), CostCache(CPU).get("b")) == (None, OTHER)


WRONG = [
    {"norms": norms, "weight_gradient": 1e-3, "kept": None, "reach": 0.0}
    for norms in (
        [],
        [[True, "pixels", 8, float("nan")]],
        [[True, "pixels", -0.5, 1e-3]],
        [[True, "nobody's", 0, 1e-9]],
    )
]


def test_a_step_goes_on_whatever_stands_in_the_file(folder):
    """Each entry is wrong in a way of its own; the norms are those of a step without a file."""
    model, (x, y) = network(), batch()

    def norms() -> torch.Tensor:
        with load_backend("bk_mixed")(model, total) as backend:
            return [backend(x, y).norms for _ in range(3)][-1]  # a second step times what is not on record

    expected = norms()
    entries = json.loads(the_file(folder).read_text())
    assert entries
    for wrong in WRONG:
        the_file(folder).write_text(json.dumps(dict.fromkeys(entries, wrong)))
        torch.testing.assert_close(norms(), expected)


def test_what_others_could_have_written_is_not_used_and_said(folder):
    CostCache(CPU).add({"a": COSTS})
    the_file(folder).chmod(0o777)
    with pytest.warns(UserWarning, match="timed routes are not kept: .*others may write to"):
        cache = CostCache(CPU)
    before = the_file(folder).read_text()
    cache.add({"b": OTHER})
    assert cache.get("a") is None and cache.get("b") == OTHER and the_file(folder).read_text() == before


def test_off_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("HOME", str(tmp_path)), ("XDG_CACHE_HOME", str(tmp_path)), ("DPBENCH_CACHE", "off")):
        monkeypatch.setenv(name, value)
    cache = CostCache(CPU)
    cache.add({"a": COSTS})
    assert cache.get("a") == COSTS and not list(tmp_path.iterdir())
    assert CostCache(CPU).get("a") is None


@pytest.mark.parametrize(
    ("variables", "where"),
    [({"XDG_CACHE_HOME": "xdg"}, "xdg/dpbench"), ({}, ".cache/dpbench"), ({"DPBENCH_CACHE": ""}, ".cache/dpbench")],
)
def test_where_the_file_lies_by_default(tmp_path, monkeypatch, variables, where):
    for name in ("DPBENCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    CostCache(CPU).add({"a": COSTS})
    assert len(list((tmp_path / where).glob("routes-cpu-*.json"))) == 1


def test_measured_costs_have_a_route_of_each_kind():
    rule, output = conv()
    costs = measured(rule, output)
    assert {key[0] for key in costs.norms} == {True, False}
    assert all(0 <= block < 4 and seconds > 0 for (_, _, block), seconds in costs.norms.items())  # 0: of any size
    assert costs.weight_gradient > 0 and costs.reach > 0 and costs.kept is not None and costs.kept > 0
    assert {way for ghost, way, _ in costs.norms if ghost} <= set(rule.ghosts)
    assert {way for ghost, way, _ in costs.norms if not ghost} <= set(rule.instantiations)


def test_a_small_batch_is_one_block_also_if_a_poisson_sample_is_larger():
    rule, output = LinearWeight(torch.randn(8, 8), torch.randn(16, 3, 8)), Spec(torch.Size((16, 3, 8)), torch.float32)
    assert {block for _, _, block in measured(rule, output).norms} == {0}
    assert rule.blocks(torch.randn(23, 3, 8), "gram", 0) == [slice(0, 23)]


def test_what_the_formulas_call_hopeless_is_not_timed(monkeypatch):
    """2T²(p + d) against 2Tpd, with T = 2048 and a tiny weight: minutes by Gram matrices in the worst case."""
    rule = LinearWeight(torch.randn(4, 4), torch.randn(64, 2048, 4))
    monkeypatch.setattr(type(LinearWeight.ways[0]), "norms", lambda *_: pytest.fail("timed"))
    costs = measured(rule, Spec(torch.Size((64, 2048, 4)), torch.float32))
    assert costs.best(ghost=True) is None and costs.best(ghost=False) is not None


def test_the_next_run_times_nothing_again(folder, monkeypatch):
    timed, seen = Mock(wraps=measured), []
    monkeypatch.setattr(clipping.planning.planner, "measured", timed)
    for _ in range(2):
        with load_backend("bk_mixed")(network(), total, verify=False) as backend:
            for _ in range(3):
                backend(*batch())
        seen.append(timed.call_count)
    assert seen == [3, 3]


def test_training_needs_no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "file" / "cache"))
    with load_backend("bk_mixed")(network(), total, verify=False) as backend:
        for _ in range(2):
            assert backend(*batch()).norms is not None
