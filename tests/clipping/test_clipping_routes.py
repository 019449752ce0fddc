"""All routes are exact: every way of every rule, and the backend with its planner forced to each."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case
from routes import BATCH, OPERATIONS, Operation, cancelling, forced, gradients, random_convolution
from torch import Tensor, nn

from clipping import Flat, PerLayer, load_backend
from clipping.accel import cpu
from clipping.backends.tape import MixedGhost
from clipping.explain.parameter_use import record
from clipping.numerics import gram as grams
from clipping.planning.planner import Planner
from clipping.rules.base import Route, Rule
from clipping.tape.record import Tape
from dpbench.conformance.contract import CHECKS
from dpbench.conformance.judging import judge
from dpbench.conformance.suite import checks

STYLES = ("plain", "groups", "depthwise", "multiplier", "pointwise", "transposed")
KNOWN = checks()
KINDS = ("ghost", "kept", "discarded")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def hold(operation: Operation) -> None:
    """Norms, gradients and weighted sums of every way and block, beside autograd's."""
    output, _ = operation.run(operation.inputs, operation.weight)
    g = torch.randn_like(output)
    expected = gradients(operation, g)
    squares, factors = expected.flatten(1).square().sum(1), torch.tensor([0.5, 0.0, 1.5], dtype=torch.float64)
    _, rule = operation.run(operation.inputs, operation.weight)
    assert rule.samples(g) == BATCH
    for way in ("", *rule.instantiations):
        for samples in (slice(0, BATCH), slice(1, 2), slice(1, 3)):
            close(rule.instantiate(g, samples, way).reshape(-1, *rule.parameter.shape), expected[samples], way)
    for ghost, ways in ((True, rule.ghosts), (False, rule.instantiations)):
        for way in ways:
            for block in (0, 1, 2):
                close(rule.squared_norms(g, Route(ghost, way, block)), squares, f"{way}, blocks of {block}")
    close(rule.weighted(g, factors), torch.tensordot(factors, expected, 1), "weighted")


def close(found: Tensor, expected: Tensor, said: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{said}: {text}")


@pytest.fixture(params=["as it is", "tiny"])
def workspace(request, monkeypatch) -> None:
    """With what a norm may always use, and with next to nothing, so that every product is cut into blocks."""
    if request.param == "tiny":
        monkeypatch.setattr(Rule, "workspace", lambda self, g: 64 * g.element_size())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_way_of_any_convolution(dims, style, workspace):
    for number in range(8 if dims < 3 else 4):
        operation = random_convolution(number, dims, style)
        try:
            hold(operation)
        except AssertionError as error:
            weight, inputs = list(operation.weight.shape), list(operation.inputs.shape)
            raise AssertionError(f"number {number}: weight {weight}, inputs {inputs}") from error


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_way_of_many_more_convolutions(dims, style, workspace):
    for number in range(100, 200):
        hold(random_convolution(number, dims, style))


def test_every_way_of_every_other_operation(workspace):
    for name in OPERATIONS:
        hold(OPERATIONS[name]())


def test_the_random_convolutions_have_all_ways():
    """Or the tests above would show less than they say."""
    rules = [
        operation.run(operation.inputs, operation.weight)[1]
        for style in STYLES
        for dims in (1, 2, 3)
        for operation in [random_convolution(number, dims, style) for number in range(4)]
    ]
    ways = {way for rule in rules for way in (*rule.ghosts, *rule.instantiations)}
    compiled = {"compiled"} if cpu.supported(torch.empty(0)) else set()
    assert ways == {"pixels", "patches", "unfold", "grouped", "shifts", "pairs"} | compiled
    geometries = [rule.geometry() for rule in rules]
    for field in ("kernel", "stride", "padding", "dilation"):
        assert len({value for geometry in geometries for value in getattr(geometry, field)}) > 1, field


def wrong_routes(name: str, blocks: tuple[int, ...]) -> dict[tuple[str, int, int], str]:
    """(kind of route, which of its ways, block) -> why not exact. A case whose rules have one way has no second."""
    found = {}
    for kind in KINDS:
        for nth in (0, 1):
            backends = [forced(kind, nth, block) for block in blocks]
            for block, backend in zip(blocks, backends, strict=True):
                verdict = judge(name, KNOWN[name], backend)
                if verdict.result != "exact":
                    found[kind, nth, block] = str(verdict.reason)
            if all(planner.most == 1 for planner in backends[0].planners):
                break
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_planner_forced_to_each_route(case: Case):
    """Every kind of route and every way of it; the tests above hold blocks of other sizes."""
    assert wrong_routes(case.name, (2,)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_route_in_blocks_of_any_size(case: Case):
    assert wrong_routes(case.name, (0, 1, 3)) == {}


@pytest.mark.parametrize("name", CHECKS)
def test_the_contract_on_each_route(name):
    assert wrong_routes(name, (2,)) == {}


def test_what_is_forced_is_taken():
    """The routes that the planner was told to take are those that the norms took: coverage says so."""
    setup = next(case for case in CASES if case.name == "conv2d groups").make()
    for kind, nth, way in (("ghost", 0, "pixels"), ("ghost", 1, "patches"), ("kept", 1, "grouped")):
        backend = forced(kind, nth)
        model, x, y, loss = setup
        with backend(model, loss, verify=False) as b:
            b(x, y)
            assert (b.coverage["ghost"] > 0.5) == (kind == "ghost")
        assert ("ConvolutionWeight", way) in backend.planners[0].taken


SHAPES = {
    "linear": (nn.Linear(16, 8, bias=False), (128, 16)),
    "convolution": (nn.Conv1d(8, 8, 3, stride=3, bias=False), (8, 384)),  # no patch reads both halves
}


class Halves(nn.Module):
    """The same input twice, whose gradients undo one another: the gradient is zero, but for rounding."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(1, 1)
        self.along = 1 if isinstance(layer, nn.Linear) else 2

    def forward(self, x):
        outputs = self.layer(torch.cat((x, x), self.along))
        return outputs if self.along == 1 else outputs.transpose(1, 2)


@pytest.mark.parametrize("clip", [PerLayer(1.0), Flat(1.0)], ids=["per layer", "flat"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", ["bk_ghost", "ghost", "bk_mixed"])
def test_gradients_that_cancel_are_never_nan(backend, name, clip):
    """Products of Gram matrices cancel to a little above or below zero: no root of that is taken."""
    layer, shape = SHAPES[name]
    model, x = Halves(layer), torch.randn(32, *shape) * 100
    y = torch.rand(32) + 0.5
    with load_backend(backend)(model, cancelling, clip=clip, verify=False) as b:
        out = b(x, y)
    assert out.norms is not None and bool((out.norms >= 0).all())
    assert all(bool(g.isfinite().all()) for g in out.grads.values())
    assert float(out.norms.max()) < 1e-2 * float(uncancelled(model, x, y).min())


def test_without_care_some_squares_would_be_negative():
    """What the test above is about does happen."""
    negative = 0
    for layer, shape in SHAPES.values():
        model, x = Halves(layer), torch.randn(32, *shape) * 100
        backend = MixedGhost(model, cancelling, verify=False)
        with torch.enable_grad():
            (reading,), _ = record(backend, x, torch.ones(32), Planner("memory"))
        rule, g = reading.rule, reading.g
        assert g is not None
        for way in rule.ghosts:
            negative += int((rule.squared_norms(g, Route(True, way)) < 0).sum())
    assert negative > 0


def uncancelled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Norms of the gradients of the first half alone."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, : outputs.shape[1] // 2].flatten(1).sum(1) * targets

    with load_backend("fastgradclip")(model, loss, verify=False) as b:
        norms = b(x, y).norms
    assert norms is not None
    return norms


def mixed_precision() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(2),
        nn.Linear(9, 24),
        nn.Flatten(),
        nn.Linear(32 * 24, 10),
    )
    return model, torch.randn(6, 3, 8, 8), torch.randint(0, 10, (6,))


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets, reduction="none")


def exact_norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In float64, outside of autocast, of the inputs and gradients that the step has inside of it."""
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        readings, _ = record(MixedGhost(model, losses, verify=False), x, y, Planner("memory"))
    assert torch.bfloat16 in {reading.g.dtype for reading in readings if reading.g is not None}
    squares = torch.zeros(len(x), dtype=torch.float64)
    for reading in readings:
        rule, g = reading.rule, reading.g
        assert g is not None
        for name in ("a", "x", "mean", "rstd"):
            if isinstance(value := getattr(rule, name, None), Tensor):  # what was multiplied was of g's dtype
                setattr(rule, name, (value.to(g.dtype) if name in "ax" else value).double())
        squares += rule.instantiate(g.double(), slice(0, len(x))).flatten(1).square().sum(1)
    return squares.sqrt()


@pytest.mark.parametrize("kind", [*KINDS, "planned"])
def test_norms_under_autocast_are_accumulated_outside_of_it(kind):
    model, x, y = mixed_precision()
    expected = exact_norms(model, x, y)
    backend = load_backend("bk_mixed") if kind == "planned" else forced(kind)
    with backend(model, losses, verify=False) as b, torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):  # the second call of a planner of its own is timed
            out = b(x, y)
    assert out.norms is not None and out.norms.dtype == torch.float32
    torch.testing.assert_close(out.norms.double(), expected, rtol=1e-3, atol=0)
    assert {name: (g.dtype, g.shape) for name, g in out.grads.items()} == {
        name: (p.dtype, p.shape) for name, p in model.named_parameters()
    }
    with load_backend("microbatch")(model, losses, verify=False) as oracle, torch.autocast("cpu", torch.bfloat16):
        reference = oracle(x, y).grads
    for name, g in out.grads.items():  # bfloat16 keeps 8 bits of each term
        assert float((g - reference[name]).norm()) <= 0.02 * float(reference[name].norm()), name


def test_bk_ghost_under_autocast():
    model, x, y = mixed_precision()
    expected = exact_norms(model, x, y)
    with load_backend("bk_ghost")(model, losses, verify=False) as b, torch.autocast("cpu", torch.bfloat16):
        out = b(x, y)
    assert out.norms is not None
    torch.testing.assert_close(out.norms.double(), expected, rtol=1e-3, atol=0)
    assert {g.dtype for g in out.grads.values()} == {torch.float32}


class Attention(nn.Module):
    """A query, a key and a value of one input, of different widths."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions
        self.query, self.key, self.value = (nn.Linear(6, width) for width in (5, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), self.positions, 6)
        return (torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)).flatten(1)


@pytest.mark.parametrize("positions", [1, 7, 200])
def test_layers_of_one_input_share_its_gram_matrix(positions, monkeypatch):
    shapes: list[torch.Size] = []

    def products(x: Tensor, y: Tensor) -> Tensor:
        shapes.append(x.shape)
        return original(x, y)

    original = grams.products
    monkeypatch.setattr(grams, "products", products)
    model, x, y = Attention(positions).double(), torch.randn(3, positions * 6).double(), torch.randn(3).double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().sum(1) * targets

    found = []
    for name in ("microbatch", "bk_ghost", "ghost"):
        with load_backend(name)(model, loss, verify=False) as backend:
            shapes.clear()
            found.append(backend(x, y))
        if name == "bk_ghost":
            halves = 2 if positions >= grams.HALVED else 1
            assert [shape[2] for shape in shapes].count(6) == (0 if positions == 1 else halves)
            assert len(shapes) == (0 if positions == 1 else 4 * halves)
    for out in found[1:]:
        torch.testing.assert_close(out.norms, found[0].norms, rtol=1e-10, atol=0)
        for parameter, grad in found[0].grads.items():
            torch.testing.assert_close(out.grads[parameter], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "waits"), [("bk_ghost", True), ("ghost", False)])
def test_norms_from_what_is_kept_anyway_wait_for_the_end_of_the_backward_pass(name, waits, monkeypatch):
    calls: list[str] = []
    products, backward = grams.products, Tape.backward
    monkeypatch.setattr(grams, "products", lambda *args: (calls.append("product"), products(*args))[1])
    monkeypatch.setattr(Tape, "backward", lambda *args, **kw: (backward(*args, **kw), calls.append("end")))
    with load_backend(name)(Attention(7), lambda outputs, _: outputs.sum(1), verify=False) as backend:
        backend(torch.randn(3, 42), torch.zeros(3))
    assert calls.count("end") == (1 if waits else 2) and "product" in calls
    assert (calls[0] == "end") == waits and (calls[-1] == "end") != waits
