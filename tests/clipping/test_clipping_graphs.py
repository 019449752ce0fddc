"""Steps that run as one graph: the same bits where it is traced, the same but for rounding where it is compiled."""

import abc
import functools
import gc
import itertools
import logging
import os
import shutil
import time
import warnings
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import product
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases import FIFTEEN, NOT_FOR
from graphs import CLIP, not_compiled, only, opened, planned, require_equal
from marks import name_of, slow_unless
from torch import nn

import clipping.program.graphs
import clipping.program.step
from clipping import Flat, PerLayer, UnsupportedModel, load_backend
from clipping.checks.verification import compare
from clipping.numerics.traced_operations import is_traced, tracing
from clipping.program.capture import _CAPTURES, Captured, is_captured
from clipping.program.unguarded import Unguarded
from dpbench.conformance.cases import CASES, Case, cross_entropy
from dpbench.conformance.modules import Net

#: Cases whose rows are where numbers say, in a rule that reads them.
NO_GRAPH = ("bags of different sizes",)
#: A case of each kind of rule, and those that differ in a graph.
QUICK = {
    *FIFTEEN,
    *NO_GRAPH,
    "hidden state above a frozen layer",
    "encoder, sequence first",
    "vision transformer's parameters",
}
NEEDS_COMPILER = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")


def ways(backend):
    return [graph.way for graph in backend.graphs._graphs]


def small(*layers):
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *layers, nn.Linear(8, 3))


def batch(size=6, dtype=torch.float32):
    return torch.randn(size, 5, dtype=dtype), torch.randint(3, (size,))


def steps(backend, x, y, count=4):
    """The last of several steps, each from the same seed."""
    for _ in range(count):
        torch.manual_seed(1)
        found = backend(x, y)
    return found


@pytest.mark.parametrize(
    ("case", "backend"),
    slow_unless(
        lambda case, name: name == "bk_mixed" and case.name in QUICK,
        product(CASES, ("bk_mixed", "ghost", "fastgradclip")),
    ),
    ids=name_of,
)
def test_a_traced_step_has_the_bits_of_the_eager_one(case: Case, backend: str):
    if case.name in NOT_FOR.get(backend, ()):
        pytest.skip("refused without a graph, too")
    model, x, y, loss = case.make()
    with load_backend(backend)(model, loss, clip=CLIP, verify=False, **planned(backend)) as eager:
        expected = steps(eager, x, y)
    with opened(backend, model, loss, verify=False) as traced:
        if case.name in NO_GRAPH:
            with pytest.raises(UnsupportedModel, match=r"its step is no graph.*remedy: compile=False"):
                steps(traced, x, y)
            steps(load_backend(backend)(model, loss, compile="auto"), x, y)  # runs eagerly
            return
        found = steps(traced, x, y)
        assert ways(traced) == ["traced"]
        assert traced.graphs.steps > 0
        assert traced.coverage == eager.coverage
        assert traced.sensitivity_bound(64) == eager.sensitivity_bound(64)
    assert torch.equal(found.norms, expected.norms)
    assert torch.equal(found.losses, expected.losses)
    assert list(found.grads) == list(expected.grads)
    assert all(torch.equal(found.grads[name], expected.grads[name]) for name in expected.grads)


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bk_mixed", "nonprivate"])
def test_a_compiled_step_is_the_eager_one_but_for_rounding(backend, monkeypatch):
    """Dropout draws what it draws in an eager step, and what is timed draws nothing."""
    model, (x, y) = small(nn.Dropout(0.4)), batch()
    monkeypatch.setattr(clipping.program.step.time, "perf_counter", iter(range(10**6)).__next__)
    only(monkeypatch, "compiled")
    with (
        load_backend(backend)(model, cross_entropy, clip=Flat(max_grad_norm=0.5)) as eager,
        opened(backend, model) as b,
    ):
        for seed in range(6):
            torch.manual_seed(seed)
            expected, after = eager(x, y), torch.rand(())
            torch.manual_seed(seed)
            found = b(x, y)
            assert compare(found, expected).within(1e-5)
            assert torch.equal(torch.rand(()), after)
        assert ways(b) == ["compiled"]


@pytest.mark.filterwarnings("ignore:expected the step to run:RuntimeWarning")
def test_the_fastest_way_is_taken(monkeypatch):
    """By a clock on which the slow way takes fifty times as long."""
    model, (x, y), ticks = small(), batch(), iter(range(10**6))
    not_compiled(monkeypatch)
    monkeypatch.setattr(clipping.program.step.time, "perf_counter", ticks.__next__)
    for fastest, slow in (("eager", "__call__"), ("traced", "_eager")):
        run = getattr(clipping.program.step.Graph, slow)

        def slowly(self, *given, run=run):
            for _ in range(50):
                next(ticks)
            return run(self, *given)

        with monkeypatch.context() as patched, opened("bk_mixed", model, timing=True) as b:
            patched.setattr(clipping.program.step.Graph, slow, slowly)
            steps(b, x, y, 5)
            assert ways(b) == [fastest]
            assert (b.graphs.steps == 0) == (fastest == "eager")


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (Mock(side_effect=RuntimeError("no compiler here")), "RuntimeError: no compil"),
        (lambda graph, inputs, options: lambda *given: [2 * x for x in graph(*given)], "not exact.*as it was traced"),
    ],
)
def test_what_does_not_compile_or_to_another_step_is_said_and_not_taken(compiler, said, monkeypatch):
    monkeypatch.setattr("torch._inductor.compile", compiler)
    with opened("bk_mixed", small(), timing=True) as b, pytest.warns(RuntimeWarning, match=said):
        steps(b, *batch())
    assert ways(b)[0] in ("traced", "eager")


def half():
    """A layer that no loss depends on."""
    return Net(lambda net, x: net.used(x) + 0.0 * net.idle(x).detach(), used=nn.Linear(5, 3), idle=nn.Linear(5, 3))


def test_a_layer_that_no_loss_depends_on_has_its_share_of_the_threshold():
    b = require_equal(half(), [batch(dtype=torch.float64)] * 4, clip=PerLayer(max_grad_norm=0.05))
    assert b.graphs.steps > 0


@pytest.mark.parametrize("way", ["traced", pytest.param("compiled", marks=[NEEDS_COMPILER, pytest.mark.slow])])
def test_what_a_graph_gives_is_the_caller_s_to_write_to(way, monkeypatch):
    """As the engine does, which adds its noise in place; and it is what the eager step gives, but for rounding."""
    only(monkeypatch, way)
    model, (x, y) = half(), batch()
    with load_backend("bk_mixed")(model, cross_entropy, clip=CLIP) as eager:
        expected = eager(x, y)
    with opened("bk_mixed", model, verify=False) as b:
        first = steps(b, x, y)
        assert ways(b) == [way]
        assert compare(first, expected).within(1e-5)
        kept = {name: grad.clone() for name, grad in first.grads.items()}, first.norms.clone(), first.losses.clone()
        for _ in range(3):
            for tensor in (*first.grads.values(), first.norms, first.losses):
                tensor.fill_(7.0)
            first = b(x, y)
            assert all(torch.equal(first.grads[name], kept[0][name]) for name in kept[0])
            assert torch.equal(first.norms, kept[1])
            assert torch.equal(first.losses, kept[2])
        assert not kept[0]["idle.weight"].any()


@pytest.mark.parametrize("change", ["parameter", "dtype", "mode", "autocast", "frozen", "strides", "tf32"])
def test_what_is_another_step_has_another_graph(change, request):
    model, (x, y) = small(nn.Dropout(0.4)), batch()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast")
    with opened("bk_mixed", model, verify=False) as b:
        steps(b, x, y)
        if change == "parameter":
            model[0].weight.data = model[0].weight.data * 2
            model[3].weight = nn.Parameter(torch.randn(3, 8))
            model.load_state_dict({"0.bias": torch.randn(8)}, strict=False, assign=True)
        elif change == "dtype":
            model.double()
            x = x.double()
        elif change == "mode":
            model.eval()
        elif change == "frozen":
            model[0].weight.requires_grad_(False)
        elif change == "strides":
            x = x.t().contiguous().t()
        elif change == "tf32":
            switch = torch.backends.cudnn.conv
            request.addfinalizer(functools.partial(setattr, switch, "fp32_precision", switch.fp32_precision))
            switch.fp32_precision = "ieee"
        with autocast:
            found = steps(b, x, y)
            assert len(b.graphs._graphs) == (1 if change == "parameter" else 2)  # a parameter is an argument
            with load_backend("bk_mixed")(model, cross_entropy, clip=CLIP, verify=False, timing=False) as eager:
                expected = steps(eager, x, y)
    assert found.grads.keys() == expected.grads.keys()
    assert all(torch.equal(found.grads[name], expected.grads[name]) for name in expected.grads)
    assert torch.equal(found.norms, expected.norms)


def test_more_shapes_than_there_are_graphs_for(monkeypatch):
    monkeypatch.setattr(clipping.program.graphs, "MOST", 2)
    model = small()
    with opened("bk_mixed", model) as b, load_backend("bk_mixed")(model, cross_entropy, clip=b.clip) as eager:
        with pytest.warns(RuntimeWarning, match=r"at most 2 graphs.*pad=True"):
            for size in (4, 5, 6):
                x, y = batch(size)
                assert compare(steps(b, x, y), steps(eager, x, y)).within(1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps(b, x, y)  # said once
        assert len(b.graphs._graphs) == 2
        assert b.ways["others"] == "eager: there are more than 2 graphs"


@pytest.mark.filterwarnings("ignore:expected at most 2 graphs:RuntimeWarning")
def test_a_number_that_changes_in_each_step_is_not_asked_about_for_ever(monkeypatch):
    monkeypatch.setattr(clipping.program.graphs, "MOST", 2)
    model, (x, y), said = Net(lambda m, x: m.layer(x) * m.weight, layer=nn.Linear(5, 3)), batch(), []
    monkeypatch.setattr(logging.getLogger("torch._dynamo.convert_frame"), "callHandlers", said.append)
    with opened("bk_mixed", model, verify=False) as b:
        for model.weight in np.linspace(0.1, 1.0, 9).tolist():
            b(x, y)
        assert b.graphs._missed == 3 and b.ways == {"others": "eager: there are more than 2 graphs"}
    assert not said


@pytest.mark.filterwarnings("ignore:expected the step to run:RuntimeWarning")
def test_on_a_cpu_a_training_warms_up_before_its_steps_are_graphs(monkeypatch):
    """Unless its results may not depend on timings, or each step has to be a graph."""
    not_compiled(monkeypatch)
    monkeypatch.setattr(clipping.program.graphs, "WARM_UP", 20.0)
    x, y = batch()
    for options, waits in (({}, True), ({"timing": False}, False), ({"compile": True}, False)):
        with load_backend("bk_mixed")(small(), cross_entropy, **{"compile": "auto", **options}) as b:
            monkeypatch.setattr(time, "monotonic", lambda: 0.0)
            steps(b, x, y)
            assert (b.ways == {"others": "eager: the first 20 s"}) is waits
            monkeypatch.setattr(time, "monotonic", lambda: 20.0)
            steps(b, x, y)
            assert "others" not in b.ways and ways(b) in (["traced"], ["eager"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.autograd.detect_anomaly])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_step_within_a_mode_of_autograd_is_the_ordinary_one(mode):
    model, (x, y) = small(), batch()
    with load_backend("bk_mixed")(model, cross_entropy, clip=CLIP) as eager, opened("bk_mixed", model) as b:
        expected = eager(x, y)
        with mode():
            assert compare(steps(b, x, y), expected).within(1e-6)
            assert compare(eager(x, y), expected).within(1e-6)
        steps(b, x, y)
        assert ways(b) == ["traced"]


def test_an_empty_batch_has_no_graph():
    with opened("bk_mixed", small()) as b:
        found = steps(b, *batch(0))
    assert found.losses.shape == (0,)
    assert all(not grad.any() for grad in found.grads.values())


@pytest.mark.filterwarnings("ignore:expected the step to run:RuntimeWarning")
def test_ways_are_part_of_what_is_settled(monkeypatch):
    model, (x, y) = small(), batch()
    not_compiled(monkeypatch)
    with opened("bk_mixed", model, timing=True) as b:
        steps(b, x, y, 5)
        settled = b.settle()
    assert list(settled["graphs"].values()) == ways(b)
    other = load_backend("bk_mixed")(model, cross_entropy, clip=b.clip, compile=True)
    other.resume({**settled, "graphs": dict.fromkeys(settled["graphs"], "eager")})
    steps(other, x, y, 5)
    assert ways(other) == ["eager"]
    assert other.settle()["graphs"] == dict.fromkeys(settled["graphs"], "eager")


@pytest.mark.parametrize("backend", ["microbatch", "opacus_hooks"])
def test_a_step_that_is_no_graph_is_refused(backend):
    pytest.importorskip("opacus")
    with pytest.raises(ValueError, match=rf"^expected compile=False for {backend}, whose step is no graph"):
        load_backend(backend)(small(), cross_entropy, compile=True)
    said = load_backend(backend)(small(), cross_entropy, compile="auto").ways
    assert said == {"all": f"eager: the step of {backend} is no graph"}


def sentences(size=6):
    ids = torch.randint(1, 9, (size, 7))
    for i, length in enumerate(torch.randint(1, 8, (size,)).tolist()):
        ids[i, length:] = 0
    return ids, torch.randint(3, (size,))


def written(ids):
    """Shapes do not say what is in it any more."""
    rows = torch.arange(len(ids))
    rows[0] = ids[0, 0] % 2
    return rows


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        (lambda x: torch.arange(len(x)), 0),
        (lambda x: torch.arange(len(x) + 1)[:-1].view(-1), 0),
        (lambda ids: (ids.sum(1) % 6).argsort().argsort(), 0),
        (lambda ids: ids[:, 0].argsort(stable=True), 0),
        (written, 2),  # in order, as in the traced batch, in half of the batches
    ],
)
def test_rows_that_numbers_choose_are_those_of_each_batch(rows, missed):
    """Of each sample the position where it ends, as heads of decoders read it."""

    def forward(net, ids):
        return net.head(net.first(net.embed(ids)).tanh()[rows(ids), (ids != 0).sum(1) - 1])

    model = Net(forward, embed=nn.Embedding(9, 5), first=nn.Linear(5, 5), head=nn.Linear(5, 3))
    require_graphs(model, [sentences() for _ in range(8)], most_missed=missed)


def require_graphs(model, batches, loss=cross_entropy, most_missed=0):
    """Steps are the eager ones, and all but the first three, and at most some, run as graphs."""
    b = require_equal(model, batches, loss)
    assert b.graphs.steps >= len(batches) - 3 - most_missed
    assert b.graphs.steps < len(batches) - 3 or not most_missed
    assert ("eager in" in " ".join(b.ways.values())) == (most_missed > 0)


def routed(net, x):
    """A mixture of experts by one grouped product, with rows sorted by expert."""
    weights, chosen = net.router(x.flatten(0, 1)).softmax(-1).topk(2)
    expert, order = chosen.flatten().sort()
    ends = (expert[:, None] <= torch.arange(4)).sum(0).to(torch.int32)
    rows = torch.ops.transformers.grouped_mm_fallback(x.flatten(0, 1)[order // 2], net.experts, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return (rows[back].view(*weights.shape, -1) * weights[..., None]).sum(1).view(*x.shape[:2], -1).mean(1)


def test_experts_by_a_grouped_product_are_in_the_graph():
    pytest.importorskip("transformers.integrations.moe")
    model = Net(routed, router=nn.Linear(5, 4), experts=torch.randn(4, 5, 3))
    require_graphs(model, [(torch.randn(6, 7, 5, dtype=torch.float64), torch.randint(3, (6,))) for _ in range(6)])


def test_transpositions_as_dynamo_writes_them_are_in_the_graph():
    batches = [(torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])) for _ in range(4)]
    from_the_left = lambda net, x: net.head((net.weight @ x.T).T.tanh())  # noqa: E731
    model = Net(from_the_left, weight=torch.randn(6, 5), head=nn.Linear(6, 3))
    assert require_equal(model, batches).graphs.steps > 0


def test_ctc_loss_is_in_the_graph():
    def loss(outputs, targets):
        frames, labels = torch.full((len(outputs),), 7), torch.full((len(outputs),), 2)
        chances = outputs.log_softmax(-1).transpose(0, 1)
        return torch.nn.functional.ctc_loss(chances, targets, frames, labels, reduction="none")

    batches = [(torch.randn(6, 7, 5, dtype=torch.float64), torch.randint(1, 3, (6, 2))) for _ in range(5)]
    require_graphs(small(), batches, loss)


class Metaclass(type):
    rate = 1.0


class Tool(metaclass=Metaclass):
    """A plain object that a model holds."""

    kind = 1.0

    def __init__(self) -> None:
        self.factors = OrderedDict(first=1.0, second=2.0)
        self.module = ModuleType("a_module")
        self.far = SimpleNamespace(further=SimpleNamespace(furthest=SimpleNamespace(numbers={})))

    @functools.cached_property
    def cached(self) -> float:
        return float(len(self.factors))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kind * self.cached

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.kind


class DerivedTool(Tool):
    pass


class UsesTool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tool, self.kind = nn.Linear(5, 3), DerivedTool(), abc.ABCMeta("Kind", (), {})

    @staticmethod
    def of_model(x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            late = self.tool.late
        except AttributeError:
            late = 1.0
        late *= getattr(self.tool.module, "late", 1.0) * float(os.getenv("DPBENCH_TEST_SCALE", "1"))
        late *= 2.0 if "DPBENCH_TEST_LATE" in os.environ else 1.0
        late *= Tool.rate * (2.0 if isinstance(self.tool, self.kind) else 1.0)
        with suppress(KeyError):
            late *= self.tool.far.further.furthest.numbers["late"]
        x = self.tool.of_class(self.tool.scaled(self.of_model(self.layer(x)))) * late
        for factor in self.tool.factors.values():
            x = torch.sin(x) * factor
        return x


def double(self, x: torch.Tensor) -> torch.Tensor:
    return 2 * x


BEHIND_GUARDS = {
    "a method of an object": lambda patch, model: patch.setattr(Tool, "scaled", double),
    "a method of a class": lambda patch, model: patch.setattr(Tool, "of_class", classmethod(double)),
    "a static method": lambda patch, model: patch.setattr(UsesTool, "of_model", staticmethod(lambda x: 2 * x)),
    "reloaded code": lambda patch, model: patch.setattr(Tool.scaled, "__code__", double.__code__),
    "an attribute that was absent": lambda patch, model: setattr(model.tool, "late", 2.0),
    "an order": lambda patch, model: model.tool.factors.move_to_end("first"),
    "a property that is computed anew": lambda patch, model: model.tool.__init__() or model.tool.factors.popitem(),
    "a class attribute that was absent": lambda patch, model: patch.setattr(DerivedTool, "kind", 2.0, raising=False),
    "a name that was absent in a module": lambda patch, model: setattr(model.tool.module, "late", 2.0),
    "an attribute of a metaclass": lambda patch, model: patch.setattr(Metaclass, "rate", 2.0),
    "a class of an ABC": lambda patch, model: model.kind.register(Tool),
    "a key far away": lambda patch, model: model.tool.far.further.furthest.numbers.update(late=2.0),
    "an environment variable": lambda patch, model: patch.setenv("DPBENCH_TEST_SCALE", "2"),
    "an environment variable that was absent": lambda patch, model: patch.setenv("DPBENCH_TEST_LATE", "2"),
}


@pytest.mark.parametrize(("kind", "after"), [*((kind, 4) for kind in BEHIND_GUARDS), ("reloaded code", 1)])
def test_what_torchdynamo_does_not_guard_is_another_step(kind, after, monkeypatch):
    model, (x, y) = UsesTool(), batch()
    monkeypatch.setenv("DPBENCH_TEST_SCALE", "1")
    with opened("bk_mixed", model, verify=False) as b:
        steps(b, x, y, after)
        before = b.graphs.steps
        BEHIND_GUARDS[kind](monkeypatch, model)
        with load_backend("bk_mixed")(model, cross_entropy, clip=CLIP, verify=False, timing=False) as eager:
            expected = eager(x, y)
        for _ in range(4):
            assert compare(b(x, y), expected).within(1e-6)
        assert b.graphs.steps > before >= after - 3


FACTOR = {"now": 1.0}


@torch.compiler.assume_constant_result
def declared_constant():
    return FACTOR["now"]


UNGUARDED = {
    "a function that is declared constant": declared_constant,
    "an iterator": functools.partial(next, itertools.cycle([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("kind", UNGUARDED)
def test_what_no_guard_sees_is_found_before_it_is_used(kind, monkeypatch):
    """TorchDynamo calls it once, or captures nothing; in the program's second step the caller's code runs, too."""
    model, (x, y) = small(), batch()
    with (
        opened("bk_mixed", model, lambda o, y: cross_entropy(o, y) * UNGUARDED[kind](), verify=False) as b,
        pytest.raises(UnsupportedModel, match="its step is no graph"),
    ):
        for step in range(9):
            monkeypatch.setitem(FACTOR, "now", 1.0 + step % 3)
            b(x, y)


@pytest.mark.parametrize("compile", [True, "auto"])
def test_what_no_guard_sees_is_an_error_if_it_was_used(compile, monkeypatch):
    monkeypatch.setattr(clipping.program.graphs, "RATE", 1.0)
    model, (x, y) = small(), batch()
    made = load_backend("bk_mixed")(
        model, lambda o, y: cross_entropy(o, y) * declared_constant(), clip=CLIP, compile=compile, timing=False
    )
    with made as b:
        steps(b, x, y, 6)
        assert b.graphs.steps > 2
        monkeypatch.setitem(FACTOR, "now", 2.0)
        with pytest.raises(UnsupportedModel, match="they depend on what TorchDynamo cannot guard"):
            b(x, y)


class Halves(torch.autograd.Function):
    """x and 3x, with a backward pass that is told of an output without a gradient, which TorchDynamo's is not."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 1, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return 0.5 * first if second is None else first + 3 * second


def test_a_gradient_that_is_captured_as_another_is_found_before_it_is_used():
    model, (x, y) = small(), batch(dtype=torch.float64)
    model.double()
    loss = lambda outputs, y: cross_entropy(Halves.apply(outputs)[0], y)  # noqa: E731
    with load_backend("bk_mixed")(model, loss, clip=CLIP, timing=False) as eager:
        expected = steps(eager, x, y)
    with load_backend("bk_mixed")(model, loss, clip=CLIP, timing=False, compile="auto") as b:
        assert compare(steps(b, x, y, 6), expected).within(1e-12)
        assert "gradient is not the captured graph's" in b.ways["others"]
    with opened("bk_mixed", model, loss) as b, pytest.raises(UnsupportedModel, match="gradient is not the captured"):
        steps(b, x, y)


def other_kernel(*, half):
    """A captured graph has another kernel than the caller's code, as attention with a mask in place of a flag has."""

    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return net.head(x).float() * (1.0 if torch.compiler.is_compiling() else 1 + 2**-6)

    return Net(forward, head=small())


def test_a_program_is_compared_as_precisely_as_it_computes():
    """The caller's dtypes do not tell: a model may enter autocast itself."""
    x, y = batch()
    with opened("bk_mixed", other_kernel(half=True), verify=False) as b:
        steps(b, x, y)
        assert ways(b) == ["traced"]
    with (
        opened("bk_mixed", other_kernel(half=False), verify=False) as b,
        pytest.raises(UnsupportedModel, match="losses are not the captured graph's"),
    ):
        steps(b, x, y)


NAMED = Net(lambda net, **inputs: net.layers(inputs["x"]), layers=small())


@pytest.mark.parametrize(("model", "given"), [(small(), lambda x: x), (NAMED, lambda x: {"x": x})])
def test_an_eager_step_leaves_nothing_of_its_batch_behind(model, given):
    alive = []
    with opened("bk_mixed", model, verify=False) as b:
        memory = np.ones((6, 5), dtype=np.float32)  # of the batch, which the backend detaches
        alive.append(weakref.ref(memory))
        b(given(torch.from_numpy(memory)), batch()[1])  # before there is a graph
        del memory
        gc.collect()
        assert alive[0]() is None and b.graphs._capture._raised is None


def test_a_closed_backend_leaves_neither_its_model_nor_its_graphs_behind():
    """TorchDynamo never frees a backend. On a GPU the memory of all graphs would stay, too."""

    def closed():
        model = small()
        with opened("bk_mixed", model, verify=False) as b:
            steps(b, *batch())
            assert not any(vars(x) for x in model.parameters())
            return [weakref.ref(x) for x in (model, b, *b.graphs._graphs)]

    left = closed()
    gc.collect()
    assert len(left) == 3 and not any(x() for x in left)


class Numbered(nn.Module):
    """A captured graph that takes the number 0 beside its tensors."""

    def forward(self, zero, x):
        return (x + zero,)


def test_a_number_of_python_s_among_a_graph_s_arguments_is_refused():
    x = torch.randn(4, 5)
    captured = Captured(torch.fx.symbolic_trace(Numbered()), 0, Unguarded([]))
    batch = clipping.program.step.Batch({}, x, (), 4)
    with pytest.raises(UnsupportedModel, match="computes with a number of Python's"):
        clipping.program.step.Graph("ours", captured, lambda *given: None, None, [0, x], batch, 0, None, None)


def test_threads_take_turns():
    """With one backend, and with a backend each: no thread gets another one's result, or leaves torch's tracer on."""
    call, batches = nn.Module.__call__, [batch(dtype=torch.float64) for _ in range(8)]
    model = small().double()
    alone = load_backend("bk_mixed")(model, cross_entropy, clip=CLIP, timing=False)
    expected = [alone(*each) for each in batches]
    one, another = (opened("bk_mixed", model, verify=False) for _ in range(2))
    for backends in ((one, one), (one, another)):
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(lambda b=b: [b(*each) for each in batches]) for b in backends]
        for run in runs:
            assert all(compare(x, y).within(1e-12) for x, y in zip(run.result(), expected, strict=True))
    assert one.graphs.steps > 8 and nn.Module.__call__ is call


@pytest.mark.parametrize(
    ("within", "is_within"), [(functools.partial(_CAPTURES.set, True), is_captured), (tracing, is_traced)]
)
def test_threads_are_captured_and_traced_apart(within, is_within):
    with ThreadPoolExecutor(1) as other, ExitStack() as its:
        other.submit(its.enter_context, within()).result()
        assert not is_within() and other.submit(is_within).result()
        with within():
            other.submit(its.close).result()
            assert is_within() and not other.submit(is_within).result()
    assert not is_within()
