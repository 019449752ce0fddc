"""What people run: dropout, channels_last, fused optimizers, other defaults of torch, compiled callers.

Each step is the ordinary one's, clipped: by autograd, in the same graph, of the same random numbers.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attached import attached, cross_entropy
from by_hand import clipped_sum
from torch import Tensor, nn

from clipping import UnsupportedModel
from clipping.checks import rerun
from clipping.checks.verification import reading_float64
from dpbench.conformance.modules import Net

B, C = 4, 0.3


def words(inside: nn.Module, times: int = 1) -> nn.Module:
    """[B, T, 16] -> [B, T, 3], by something that drops, given its input so many times, and a dropout after it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        found = net.inside(*[net.before(x)] * times)
        return net.after(F.dropout(found[0] if isinstance(found, tuple) else found, 0.2))

    return Net(forward, before=nn.Linear(16, 16), inside=inside, after=nn.Linear(16, 3))


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return words(kind(16, 8, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True))


DROPPING = {
    "attention": lambda: words(nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True), 3),
    "encoder layer": lambda: words(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)),
    "transformer": lambda: words(nn.Transformer(16, 4, 1, 1, 32, batch_first=True), 2),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
}


def channels_last() -> tuple[nn.Module, Tensor]:
    """Weights of several layouts: two that `channels_last` turns, and two that are permuted as they are made."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.second(F.relu(net.norm(net.first(x)))).mean((2, 3)) @ net.turned
        return x[:, :5] * torch.einsum("abc,nb->nac", net.permuted, x[:, :3]).sum(2)

    torch.manual_seed(0)
    layers = {"first": nn.Conv2d(4, 8, 3, padding=1), "norm": nn.GroupNorm(2, 8), "second": nn.Conv2d(8, 6, 3)}
    permuted = {"turned": torch.randn(9, 6).t(), "permuted": torch.randn(3, 4, 5).permute(2, 0, 1)}
    model, x = Net(forward, **layers, **permuted), torch.randn(B, 4, 8, 8)
    return model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().mean(1)


def keeps(net: Any, x: Tensor) -> Tensor:
    net.kept = net.first(x)
    return net.second(net.kept)


FIRST = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: torch.randn(B, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)), lambda: torch.randn(B, 3, 8, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), lambda: torch.randint(0, 9, (B, 5))),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)), lambda: torch.randn(B, 4, 8, 8)),
    "LSTM": (lambda: words(nn.LSTM(16, 16, batch_first=True)), lambda: torch.randn(B, 7, 16)),
    "bias": (
        lambda: Net(lambda net, x: net.layer(x + net.bias), bias=torch.zeros(8), layer=nn.Linear(8, 3)),
        lambda: torch.randn(B, 8),
    ),
    "activation": (lambda: Net(keeps, first=nn.Linear(8, 8), second=nn.Linear(8, 3)), lambda: torch.randn(B, 8)),
}


def engine_for(model, kind=torch.optim.SGD, lr=0.1, **options):
    """(optimizer, engine)."""
    return attached(model, kind, lr, **{"batch_size": B, "max_grad_norm": C, "noise_multiplier": 0.0} | options)[1:]


def step_like_the_ordinary_one(model: nn.Module, x: Tensor, backend: str = "bk_mixed", seed: int = 5) -> None:
    """One step of SGD with lr = 1 takes the clipped gradient off."""
    ordinary, before = copy.deepcopy(model), copy.deepcopy(dict(model.named_parameters()))
    optimizer, _ = engine_for(model, lr=1.0, backend=backend)
    torch.manual_seed(seed)
    losses = losses_of(model, x)
    optimizer.step(loss=losses)
    torch.manual_seed(seed)
    expected = losses_of(ordinary, x)
    torch.testing.assert_close(torch.Tensor(losses.detach()), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, total in clipped_sum(expected, dict(ordinary.named_parameters()), C).items():
        found, g = before[name] - dict(model.named_parameters())[name], total / B
        torch.testing.assert_close(found, g, rtol=1e-3, atol=1e-5 * float(g.abs().max()) + 1e-7)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "bk_mixed") for name in DROPPING),
        *product(["transformer", "LSTM"], ["ghost", "microbatch"]),
    ],
)
def test_what_drops_draws_as_the_ordinary_model_does(name: str, backend: str, monkeypatch):
    """So that a look whether samples stay apart sees no difference, and needs none in float64."""
    monkeypatch.setattr(rerun, "reading_float64", lambda model: pytest.fail("looked in float64"))
    torch.manual_seed(0)
    step_like_the_ordinary_one(DROPPING[name](), torch.randn(B, 7, 16), backend)


@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "microbatch"])
def test_a_look_in_float64_leaves_the_gradient(backend: str, monkeypatch):
    differing = rerun.differing
    looked = []

    def differs_in_float32(before, after, change, tolerance):
        looked.extend(x.dtype for x in before)
        other = before and before[0].dtype == torch.float32 and not change.own.all()
        return 0 if other else differing(before, after, change, tolerance)

    monkeypatch.setattr(rerun, "differing", differs_in_float32)
    torch.manual_seed(0)
    step_like_the_ordinary_one(recurrent(nn.LSTM), torch.randn(B, 7, 16), backend)
    assert set(looked) == {torch.float32, torch.float64}


def test_a_look_in_float64_that_fails_leaves_the_model():
    model = recurrent(nn.LSTM)
    parameters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="on the way"), reading_float64(model):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        raise RuntimeError("on the way")
    assert all(p is parameters[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "fastgradclip", "microbatch"])
def test_weights_in_channels_last(backend: str):
    step_like_the_ordinary_one(*channels_last(), backend)


@pytest.mark.parametrize(("backend", "noise"), [("bk_mixed", "discrete"), ("microbatch", "gaussian")])
def test_gradients_lie_in_memory_as_autograd_lays_them(backend: str, noise: str):
    model, x = channels_last()
    losses_of(model, x).mean().backward()
    strides = {name: p.grad.stride() for name, p in model.named_parameters()}
    assert any(not p.grad.is_contiguous() for p in model.parameters())
    optimizer, engine = engine_for(model, backend=backend, noise=noise, noise_multiplier=1.0)
    optimizer.zero_grad()
    engine.virtual_step(losses_of(model, x[:2]))
    optimizer.step(loss=losses_of(model, x[2:]))
    assert {name: p.grad.stride() for name, p in model.named_parameters()} == strides


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_pair_the_right_entries(kind: type[torch.optim.Optimizer]):
    """They go by memory, and ask nobody."""
    found = []
    for fused in (False, True):
        model, x = channels_last()
        optimizer, _ = engine_for(model, partial(kind, fused=fused), lr=1e-2)
        for _ in range(3):
            optimizer.step(loss=losses_of(model, x))
        found.append(model.state_dict())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "backend"), [*product(FIRST, ["bk_mixed"]), *product(["linear", "activation"], ["ghost", "microbatch"])]
)
def test_what_is_changed_in_place_before_the_step_is_noticed_as_autograd_does(name: str, backend: str):
    """A buffer that the next batch is copied into, say."""
    make, batch = FIRST[name]
    torch.manual_seed(0)
    model, x = make(), batch()

    def changed(x: Tensor) -> Tensor:
        losses = losses_of(model, x)
        (model.kept.detach() if name == "activation" else x).zero_()
        return losses

    try:
        changed(x.clone()).mean().backward()
        refused = False
    except RuntimeError as error:
        refused = "modified by an inplace operation" in str(error)
    assert refused == (name != "bias")
    optimizer, engine = engine_for(model, backend=backend)
    optimizer.zero_grad()
    for _ in range(2):  # and not by the verification of the first step
        mine = x.clone()
        optimizer.step(loss=losses_of(model, mine))
        mine.zero_()
    if refused:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            optimizer.step(loss=changed(x.clone()))
    else:
        optimizer.step(loss=changed(x.clone()))
    optimizer.step(loss=losses_of(model, x))
    assert engine.steps == (3 if refused else 4)


@contextmanager
def torch_defaults(to: torch.dtype | str) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_device(to) if isinstance(to, str) else torch.set_default_dtype(to)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("default", "options"),
    [
        *((torch.float64, {}), (torch.bfloat16, {"clip": "automatic"})),
        *(("meta", {"noise": "discrete"}), ("meta", {"clip": "per_layer"})),
    ],
    ids=str,
)
def test_defaults_of_torch_change_nothing(default: torch.dtype | str, options: dict):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, 8), torch.arange(64) % 5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))

    def trained() -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        seeded = {} if "noise" in options else {"generator": torch.Generator("cpu").manual_seed(3)}
        optimizer, engine = engine_for(mine, noise_multiplier=1.0, **seeded, **options)
        for x, y in engine.data_loader(data):
            optimizer.step(loss=cross_entropy(mine(x), y))
        engine.privacy_spent()
        return mine.state_dict()

    expected = trained()
    with torch_defaults(default):
        found = trained()
    if "noise" not in options:  # discrete noise has no seed
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {x.dtype for x in found.values()} == {torch.float32}


def called(how: str, model: nn.Module, x: Tensor) -> Tensor:
    if how == "the model":
        return losses_of(torch.compile(model, backend="eager"), x)
    if how == "in place":
        model.compile(backend="eager")
        return losses_of(model, x)
    return torch.compile(losses_of, backend="eager")(model, x)


@pytest.mark.parametrize("how", ["the model", "in place", "a function around it"])
def test_what_is_compiled_after_the_engine_is_refused_or_exact(how: str):
    torch.manual_seed(0)
    x = torch.randn(B, 5)
    for backend in ("bk_mixed", "microbatch"):
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        ordinary = copy.deepcopy(model)
        optimizer, _ = engine_for(model, lr=1.0, backend=backend)
        if backend != "microbatch":
            with pytest.raises(UnsupportedModel, match=r"compiled.*or use microbatch"):
                called(how, model, x)
            continue
        optimizer.step(loss=called(how, model, x))
        expected = clipped_sum(losses_of(ordinary, x), dict(ordinary.named_parameters()), C)
        for name, p in ordinary.named_parameters():
            torch.testing.assert_close(p - expected[name] / B, model.state_dict()[name], rtol=1e-5, atol=1e-6)


@torch.library.custom_op("dpbench_tests::product", mutates_args=())
def product_of(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


product_of.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1], g.t() @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_weight_that_an_operator_of_a_library_reads():
    torch.manual_seed(0)
    x = torch.randn(B, 5)
    model = Net(
        lambda m, x: product_of(m.layer(x).tanh(), m.p), layer=nn.Linear(5, 8), p=nn.Parameter(torch.randn(3, 8))
    )
    ordinary = copy.deepcopy(model)
    optimizer, _ = engine_for(model, lr=1.0)
    optimizer.step(loss=losses_of(model, x))
    expected = clipped_sum(losses_of(ordinary, x), dict(ordinary.named_parameters()), C)
    for name, p in ordinary.named_parameters():
        torch.testing.assert_close(p - expected[name] / B, model.state_dict()[name], rtol=1e-5, atol=1e-6)
