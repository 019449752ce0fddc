"""All routes are exact: every way of every rule, and the backend with its planner forced to each."""

import pytest
import torch
from cases import FIFTEEN
from routes import BATCH, OPERATIONS, Operation, cancelling, forced, gradients, random_convolution
from torch import Tensor, nn

from clipping import Flat, PerLayer, load_backend
from clipping.backends.tape import MixedGhost
from clipping.explain.routes import record
from clipping.planning.planner import Planner
from clipping.rules.base import Route, Rule
from dpbench.conformance.cases import CASES
from dpbench.conformance.contract import CHECKS
from dpbench.conformance.judging import judge
from dpbench.conformance.suite import checks

STYLES = ("plain", "groups", "depthwise", "multiplier", "pointwise", "transposed")
KNOWN = checks()
KINDS = ("ghost", "kept", "discarded")


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
def workspace(request, monkeypatch) -> str:
    """With what a norm may always use, and with next to nothing, so that every product is cut into blocks."""
    if request.param == "tiny":
        monkeypatch.setattr(Rule, "workspace", lambda self, g: 64 * g.element_size())
    return request.param


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_way_of_any_convolution(dims, style, workspace):
    """Every second one of eight, or four, in each workspace."""
    for number in range(workspace == "tiny", 8 if dims < 3 else 4, 2):
        operation = random_convolution(number, dims, style)
        try:
            hold(operation)
        except AssertionError as error:
            weight, inputs = list(operation.weight.shape), list(operation.inputs.shape)
            raise AssertionError(f"number {number}: weight {weight}, inputs {inputs}") from error


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
    assert ways - {"compiled"} == {"pixels", "patches", "unfold", "grouped", "shifts", "pairs"}
    geometries = [rule.geometry() for rule in rules]
    for field in ("kernel", "stride", "padding", "dilation"):
        assert len({value for geometry in geometries for value in getattr(geometry, field)}) > 1, field


def wrong_routes(name: str) -> dict[tuple[str, int], str]:
    """(kind of route, which of its ways) -> why not exact. A case whose rules have one way has no second."""
    found = {}
    for kind in KINDS:
        for nth in (0, 1):
            backend = forced(kind, nth)
            verdict = judge(name, KNOWN[name], backend)
            if verdict.result != "exact":
                found[kind, nth] = str(verdict.reason)
            if all(planner.most == 1 for planner in backend.planners):
                break
    return found


@pytest.mark.parametrize("case", FIFTEEN)
def test_the_planner_forced_to_each_route(case: str):
    """Every kind of route and every way of it; the tests above hold blocks of other sizes."""
    assert wrong_routes(case) == {}


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("norms ")])
def test_norms_of_each_route_in_half_precision(name):
    assert wrong_routes(name) == {}


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


def uncancelled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Norms of the gradients of the first half alone."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, : outputs.shape[1] // 2].flatten(1).sum(1) * targets

    with load_backend("fastgradclip")(model, loss, verify=False) as b:
        norms = b(x, y).norms
    assert norms is not None
    return norms


def mixed_precision() -> tuple[nn.Module, Tensor, Tensor]:
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Tanh(), nn.Conv2d(16, 32, 3, stride=2), nn.Tanh()
    model = nn.Sequential(*layers, nn.Flatten(2), nn.Linear(9, 24), nn.Flatten(), nn.Linear(32 * 24, 10))
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


@pytest.mark.parametrize("kind", [*KINDS, "bk_mixed", "bk_ghost"])
def test_norms_under_autocast_are_accumulated_outside_of_it(kind):
    model, x, y = mixed_precision()
    expected = exact_norms(model, x, y)
    backend = forced(kind) if kind in KINDS else load_backend(kind)
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
