"""What `explain --measure` adds: seconds of each route, and the regret of the plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_explain import BATCH, total
from torch import nn

from clipping.backends.tape import MixedGhost
from clipping.explain.parameter_use import record
from clipping.explain.plan_regret import candidates, followed, regrets, remeasured, settled
from clipping.explain.routes import explain
from clipping.planning.costs import predicted
from clipping.planning.planner import Plan, Planner
from clipping.rules.base import Route
from dpbench.conformance.cases import CASES


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def measurable() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)
    return nn.Sequential(*layers), torch.randn(BATCH, 3, 6, 6)


def test_predicted_and_measured_seconds_of_each_route():
    model, x = measurable()
    found = explain(model, total, x, torch.zeros(BATCH), measure=True)
    by_name = {row.parameter: row for row in found.rows}
    for name, row in by_name.items():
        assert row.predicted is not None and row.measured is not None
        assert list(row.predicted) == list(row.measured) == ["ghost", "kept", "discarded"]
        has_ghost = name in ("0.weight", "4.weight")
        assert (row.predicted["ghost"] is not None) == has_ghost
        assert all(seconds is None or seconds > 0 for seconds in (*row.predicted.values(), *row.measured.values()))
        assert row.measured["kept"] is not None and row.measured["kept"] > 1e-6  # an operation takes that long
    assert found.regret is not None and set(found.regret) == {"formula", "timed"}
    assert all(0 <= seconds < 0.1 for seconds in found.regret.values())


def test_nothing_is_timed_unless_it_was_asked_for(monkeypatch):
    def timed(*_):
        raise AssertionError("timed")

    monkeypatch.setattr("clipping.planning.planner.measured", timed)
    monkeypatch.setattr("clipping.explain.plan_regret.measured", timed)
    model, x = measurable()
    found = explain(model, total, x, torch.zeros(BATCH))
    assert found.regret is None and {row.measured for row in found.rows} == {None}


def test_the_regret_is_what_the_taken_routes_lose(monkeypatch):
    """With seconds that are known: ghost 3, kept 2, discarded 1 of every use; one plan discards, the other does not."""
    monkeypatch.setattr("clipping.explain.plan_regret.remeasured", lambda _, routes: {r: pretended(r) for r in routes})
    model, x = measurable()
    planner = Planner(file=False)
    readings, _ = record(MixedGhost(model, total, verify=False), x, torch.zeros(BATCH), planner)
    costs = {i: predicted(reading.rule, reading.use.output) for i, reading in enumerate(readings)}
    routes = [Route() for _ in readings]
    best = Plan(routes, {}, False)
    kept = Plan([Route(kept=True) for _ in readings], {}, False)
    ghost = Plan([Route(ghost=bool(r.rule.ghosts)) for r in readings], {}, False)
    assert len(readings) == 6
    assert regrets(readings, [best, kept, ghost], costs) == [0, 6, 2 * 2]


def pretended(route: Route) -> float:
    return 3.0 if route.ghost else 2.0 if route.kept else 1.0


def test_routes_take_turns_and_noise_in_one_round_is_no_regret(monkeypatch):
    model, x = measurable()
    (reading, *_), _ = record(MixedGhost(model, total, verify=False), x, torch.zeros(BATCH), Planner(file=False))
    seen = []

    def clock(run, device):
        seen.append(run.args[1])
        return (100.0 if len(seen) in (1, 5) else 1.0), None

    monkeypatch.setattr("clipping.explain.plan_regret._seconds", clock)
    routes = [Route(), Route(kept=True)]
    assert remeasured(reading, routes) == {route: 1.0 for route in routes}
    assert seen == routes * (len(seen) // 2) and len(seen) >= 8


@pytest.mark.parametrize("name", ["conv2d groups", "conv2d depthwise", "windows", "embedding padding_idx", "low rank"])
def test_what_the_second_measurement_runs_is_right(name):
    """Norm and sum by each route that may be timed."""
    model, inputs, targets, loss_fn = next(case for case in CASES if case.name == name).make()
    planner = Planner(file=False)
    readings, (plan,) = record(MixedGhost(model, loss_fn, verify=False), inputs, targets, planner)
    for i, reading in enumerate(readings):
        if not reading.is_planned:
            continue
        rule, g = reading.rule, reading.g
        assert g is not None
        gradients = rule.instantiate(g, slice(0, rule.samples(g))).flatten(1)
        costs = predicted(rule, reading.use.output)
        for route in {settled(reading, plan.routes[i]), *candidates(reading, costs)}:
            for chosen in (route, replace(route, block=2)):
                squares, total, _ = followed(reading, chosen)
                torch.testing.assert_close(squares, gradients.square().sum(1), rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(total.flatten(), gradients.sum(0), rtol=1e-9, atol=1e-12)
