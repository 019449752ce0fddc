"""What `clipping.explain.routes` says: figures computed by hand, and decisions that are those of the backends."""

from dataclasses import replace

import pytest
import torch
from cases import FIFTEEN
from marks import name_of, slow_unless
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from clipping import load_backend
from clipping.core.batches import map_tensors
from clipping.explain.routes import Cost, Row, explain
from clipping.planning.planner import Planner
from dpbench.conformance.cases import CASES, Case, cross_entropy
from dpbench.conformance.modules import Net, reused, tied

BACKENDS = {"ghost": "ghost", "instantiate": "fastgradclip", "mixed": "mixed_ghost", "plan": "bk_mixed"}
BATCH = 3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def total(outputs, targets):
    """A loss that depends on every output."""
    return outputs.flatten(1).square().sum(1) + 0 * targets


def rows(model: nn.Module, *size: int, inputs=None, loss=total) -> dict[str, Row]:
    """parameter -> its only row, for inputs [3, *size] in float32."""
    inputs = torch.randn(BATCH, *size) if inputs is None else inputs
    found = explain(model, loss, inputs, torch.zeros(BATCH))
    assert len({row.parameter for row in found}) == len(found)
    return {row.parameter: row for row in found}


def shape_of(row: Row) -> tuple[int | None, ...]:
    return row.positions, row.inputs, row.outputs, row.groups


def test_a_linear_layer_over_ten_positions():
    found = rows(nn.Linear(6, 5), 10, 6)
    weight, bias = found["weight"], found["bias"]
    assert (weight.operation, shape_of(weight)) == ("linear", (10, 6, 5, 1))
    assert weight.bytes == Cost(ghost=4 * 2 * 10**2, instantiate=4 * 6 * 5)
    assert weight.operations == Cost(ghost=2 * 10**2 * (6 + 5), instantiate=2 * 10 * 6 * 5)
    assert (weight.paper, weight.reason) == ("instantiate", None)  # 200 > 30
    assert weight.routes == {"ghost": "ghost", "instantiate": "instantiate", "mixed": "instantiate"}
    assert (shape_of(bias), bias.paper) == ((None,) * 4, None)
    assert (bias.bytes, bias.operations) == (Cost(None, 4 * 5), Cost(None, 10 * 5))
    assert set(bias.routes.values()) == {"instantiate"}


def test_at_the_threshold_the_rule_takes_the_ghost_norm():
    """2T² = pd, with T = 2."""
    equal, above = (rows(nn.Linear(d, 2, bias=False), 2, d)["weight"] for d in (4, 3))
    assert (equal.paper, equal.routes["mixed"]) == ("ghost", "ghost")
    assert (above.paper, above.routes["mixed"]) == ("instantiate", "instantiate")


def test_a_strided_convolution():
    weight = rows(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), 3, 9, 7)["weight"]
    assert (weight.operation, shape_of(weight)) == ("conv2d", (5 * 4, 3 * 3 * 3, 8, 1))
    # by patches, which are made and copied beside the two Gram matrices; the gradient is that of a grouped convolution
    assert weight.bytes == Cost(ghost=4 * (2 * 20**2 + 2 * 20 * 27), instantiate=4 * 27 * 8)
    assert weight.operations == Cost(ghost=2 * 20**2 * (27 + 8), instantiate=2 * 20 * 27 * 8)


def test_a_convolution_of_many_positions_has_its_gram_matrices_from_pixels():
    weight = rows(nn.Conv2d(64, 8, 3, padding=1, bias=False), 64, 10, 10)["weight"]
    assert shape_of(weight) == (100, 576, 8, 1)
    assert weight.bytes.ghost == 4 * (2 * 100**2 + 100**2)  # both Gram matrices, and that of the 10x10 pixels
    assert weight.operations.ghost == 2 * 100**2 * (8 + 64)
    assert weight.plan == "discarded, grouped"


def test_a_grouped_convolution_has_gram_matrices_for_each_group():
    weight = rows(nn.Conv1d(6, 9, 2, groups=3, bias=False), 6, 5)["weight"]
    assert (weight.operation, shape_of(weight)) == ("conv1d", (4, 2 * 2, 3, 3))
    # by pixels, of which there are 5: both Gram matrices of a group, and that of its pixels
    assert weight.bytes == Cost(ghost=4 * 3 * (2 * 4**2 + 5**2), instantiate=4 * 9 * 2 * 2)
    assert weight.operations == Cost(ghost=2 * (3 * 4**2 * 3 + 5**2 * 6), instantiate=3 * 2 * 4 * 4 * 3)
    assert weight.paper == "instantiate"  # 32 > 12 in each group


def test_norms_and_bare_parameters_have_no_linear_form():
    found = rows(nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.GroupNorm(2, 4)), 3, 5, 5)
    for name, operations in (("1.weight", 4), ("1.bias", 4)):
        row = found[name]
        assert (row.operation, shape_of(row), row.paper, row.reason) == ("group_norm", (None,) * 4, None, None)
        assert (row.bytes, row.operations) == (Cost(None, 4 * 4), Cost(None, operations))


def test_an_embedding_adds_up_the_rows_that_were_read():
    ids = torch.randint(0, 50, (BATCH, 7))
    weight = rows(nn.Embedding(50, 4), inputs=ids)["weight"]
    assert (weight.operation, shape_of(weight), weight.paper) == ("embedding", (7, 50, 4, 1), "ghost")
    assert weight.bytes == Cost(ghost=4 * 2 * 7 * 4, instantiate=4 * 50 * 4)
    assert weight.operations == Cost(ghost=7 * 4, instantiate=7 * 4)


def test_a_tied_head_has_a_row_for_each_use_and_their_cross_term_in_the_first():
    ids = torch.randint(0, 7, (BATCH, 3))
    found = explain(tied(), lambda outputs, _: outputs.square().sum((1, 2)), ids, torch.zeros(BATCH))
    embedding, head = (row for row in found if row.parameter == "embedding.weight")
    assert (embedding.operation, shape_of(embedding)) == ("embedding", (3, 7, 4, 1))
    assert (head.operation, shape_of(head)) == ("linear", (3, 4, 7, 1))
    assert {row.routes["mixed"] for row in (embedding, head)} == {"ghost"}  # 18 <= 28
    assert head.bytes.ghost == 4 * 2 * 3**2
    assert head.operations.ghost == 2 * 3**2 * (4 + 7)
    assert embedding.bytes.ghost == 4 * (2 * 3 * 4 + 2 * 3 * 3)
    assert embedding.operations.ghost == 3 * 4 + 2 * 3 * 3 * 4  # the inputs' Gram matrix is a look-up
    assert {embedding.plan, head.plan} == {"ghost, with cross terms"}


def test_a_layer_used_twice_has_its_cross_term_with_the_first_use():
    found = explain(reused(), total, torch.randn(BATCH, 4), torch.zeros(BATCH))
    first, second = (row for row in found if row.parameter == "layer.weight")
    assert (first.operations.ghost, second.operations.ghost) == (2 * (4 + 4) * 2, 2 * (4 + 4))
    assert (first.bytes.ghost, second.bytes.ghost) == (4 * 4, 4 * 2)


def test_several_uses_share_a_route():
    """The first prefers its gradient (T = 8), the second Gram matrices (T = 1): the gradients must be added up."""
    model = Net(lambda net, x: torch.tanh(x @ net.weight).mean(1) @ net.weight, weight=torch.randn(6, 6))
    first, second = explain(model, total, torch.randn(BATCH, 8, 6), torch.zeros(BATCH))
    assert (first.paper, second.paper) == ("instantiate", "ghost")
    assert (first.routes["mixed"], second.routes["mixed"]) == ("instantiate", "instantiate")
    assert (first.routes["ghost"], second.routes["ghost"]) == ("ghost", "ghost")
    assert first.reason is None
    assert second.reason == "the parameter has several uses, and another of them is instantiated"


def test_an_operation_without_a_formula_has_no_known_number_of_operations():
    row = rows(Net(lambda net, x: torch.maximum(x, net.weight), weight=torch.randn(6)), 6)["weight"]
    assert set(row.routes.values()) == {"fallback"}
    assert (row.bytes, row.operations) == (Cost(None, 4 * 6), Cost(None, None))
    assert row.reason is not None and row.reason.startswith("maximum has no formula")


def test_a_use_that_the_loss_does_not_depend_on_costs_nothing():
    heads = {"ignored": nn.Linear(4, 3, bias=False), "used": nn.Linear(4, 2, bias=False)}
    row = rows(Net(lambda net, x: (net.ignored(x), net.used(x))[1], **heads), 4)["ignored.weight"]
    assert (shape_of(row), set(row.routes.values())) == ((1, 4, 3, 1), {None})
    assert (row.bytes, row.operations) == (Cost(None, None), Cost(None, None))
    assert row.reason == "the loss does not depend on this use"
    assert (row.plan, row.predicted) == (None, None)


def test_frozen_parameters_have_no_row():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert list(rows(model, 4)) == ["1.weight", "1.bias"]


def test_a_recurrent_weight_is_one_use_over_all_steps():
    model = Net(lambda net, x: net.lstm(x)[0], lstm=nn.LSTM(8, 8, batch_first=True))
    found = explain(model, total, torch.randn(BATCH, 200, 8), torch.zeros(BATCH))
    (use,) = (row for row in found if row.parameter == "lstm.weight_hh_l0")
    assert (use.positions, use.inputs, use.outputs) == (200, 8, 32)


def comparable(found: list[Row]) -> list[tuple]:
    return [tuple(sorted((key, str(value)) for key, value in vars(row).items())) for row in found]


@pytest.mark.parametrize("case", slow_unless(lambda case: case.name in FIFTEEN, CASES), ids=name_of)
def test_the_routes_are_those_that_the_backends_report(case: Case):
    """So are those of bk_mixed, whose plan is told in words."""
    model, inputs, targets, loss_fn = case.make()
    found = [
        replace(row, routes=row.routes | {"plan": planned(row)}) for row in explain(model, loss_fn, inputs, targets)
    ]
    for strategy, name in BACKENDS.items():
        with load_backend(name)(model, loss_fn, verify=False) as backend:
            backend(inputs, targets)
        if all(len(routes) == 1 for routes in routes_of(found, strategy).values()):
            assert shares(found, strategy, model) == pytest.approx(backend.coverage), name


def planned(row: Row) -> str | None:
    """The route that the words of the plan begin with, or "fallback" for an operation without a formula."""
    words = (row.plan or "").replace(",", " ").split()
    return "fallback" if row.routes["mixed"] == "fallback" else words[0] if words else None


def routes_of(found: list[Row], strategy: str) -> dict[str, set[str]]:
    routes: dict[str, set[str]] = {}
    for row in found:
        route = row.routes[strategy]
        if route is not None:
            routes.setdefault(row.parameter, set()).add(route)
    return routes


def shares(found: list[Row], strategy: str, model: nn.Module) -> dict[str, float]:
    """The coverage that a backend would report: parameters by route, and unused ones as instantiated."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    routes = routes_of(found, strategy)
    share = dict.fromkeys(("ghost", "instantiated", "fallback"), 0.0)
    for name, size in sizes.items():
        (route,) = routes.get(name, {"instantiate"})
        share[route if route in share else "instantiated"] += size / sum(sizes.values())
    return share


@pytest.mark.parametrize("case", slow_unless(lambda case: case.name in FIFTEEN, CASES), ids=name_of)
def test_fake_tensors_tell_the_same(case: Case):
    model, inputs, targets, loss_fn = case.make()
    # on real tensors some operations are other kernels, which save something else: a plan for memory may differ
    real = comparable(explain(model, loss_fn, inputs, targets, planner=Planner("time", file=False)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs, targets = map_tensors(mode.from_tensor, (inputs, targets))
    with mode:
        try:
            found = explain(model, loss_fn, inputs, targets, planner=Planner("time", file=False))
        except DynamicOutputShapeException:
            pytest.skip("its shapes depend on values: explain runs such a model on real tensors")
        assert comparable(found) == real


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    x = torch.randn(BATCH, 4)
    before = [(p.requires_grad, sorted(vars(p))) for p in model.parameters()]
    explain(model, cross_entropy, x, torch.zeros(BATCH, dtype=torch.long))
    assert [(p.requires_grad, sorted(vars(p))) for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters()) and not vars(x)


def measurable() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)
    return nn.Sequential(*layers), torch.randn(BATCH, 3, 6, 6)


def test_predicted_and_measured_seconds_of_each_route():
    model, x = measurable()
    found = explain(model, total, x, torch.zeros(BATCH), measure=True)
    by_name = {row.parameter: row for row in found}
    for name, row in by_name.items():
        assert row.predicted is not None and row.measured is not None
        assert list(row.predicted) == list(row.measured) == ["ghost", "kept", "discarded"]
        has_ghost = name in ("0.weight", "4.weight")
        assert (row.predicted["ghost"] is not None) == has_ghost
        assert all(seconds is None or seconds > 0 for seconds in (*row.predicted.values(), *row.measured.values()))
        assert row.measured["kept"] is not None and row.measured["kept"] > 1e-6  # an operation takes that long


def test_nothing_is_timed_unless_it_was_asked_for(monkeypatch):
    def timed(*_):
        raise AssertionError("timed")

    monkeypatch.setattr("clipping.planning.planner.measured", timed)
    monkeypatch.setattr("clipping.explain.routes.measured", timed)
    model, x = measurable()
    found = explain(model, total, x, torch.zeros(BATCH))
    assert {row.measured for row in found} == {None}
