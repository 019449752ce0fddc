"""Activation functions, whose backward pass is written over the gradient that it is handed if that is nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import Flat, load_backend
from clipping.accel import chunked_conv
from clipping.accel.overwriting import Overwriting, of_any_size
from clipping.core.reference import definition
from clipping.core.types import ClippedGradient
from clipping.tape.graph import nodes, unrecorded
from clipping.tape.record import Tape

B = 5
BACKENDS = ("ghost", "bk_mixed", "fastgradclip")
CLIP = Flat(max_grad_norm=0.05)
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "a method": lambda x: x.relu(),
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu_": torch.relu_,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
}


class Shared(torch.autograd.Function):
    """Identity on two tensors of one gradient: it hands both the same one. No TorchFunctionMode sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


class Mul(Shared):
    """The same, of which the node is called as that of torch's product is, but for a number."""


class Model(nn.Module):
    """Images [B, 3, 8, 8]; `act` is the activation function, `join(h, act, module)` what is in the middle."""

    def __init__(self, act: Callable[[Tensor], Tensor], join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.act, self.join = act, join
        self.first, self.second, self.third = nn.Conv2d(3, 4, 3, padding=1), *(nn.Conv2d(4, 4, 1) for _ in range(2))
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.join(self.act(self.norm(self.first(x))), self.act, self)
        return self.head(self.act(F.max_pool2d(h, 2)).flatten(1))


def plain(h: Tensor, act: Any, m: Model) -> Tensor:
    return act(m.second(h))


def skipped(h: Tensor, act: Any, m: Model) -> Tensor:
    return act(m.second(h) + h)


def skipped_in_place(h: Tensor, act: Any, m: Model) -> Tensor:
    out = act(m.norm(m.second(h)))
    out = m.third(out)
    out += h
    return act(out)


def by_hand(h: Tensor, act: Any, m: Model) -> Tensor:
    """Both summands are activations, and have one gradient."""
    return Shared.apply(act(m.second(h)), act(m.third(h)))


def by_another_name(h: Tensor, act: Any, m: Model) -> Tensor:
    return Mul.apply(act(m.second(h)), act(m.third(h)))


def twice(h: Tensor, act: Any, m: Model) -> Tensor:
    return m.second(h) * act(m.third(h))


def left_out(h: Tensor, act: Any, m: Model) -> Tensor:
    """A convolution that comes to nothing, and a sum."""
    m.third(h)
    return act(m.second(h)) + h


def in_views(h: Tensor, act: Any, m: Model) -> Tensor:
    return m.third(act(m.second(h)).flatten(2).unflatten(2, (8, 8)))


JOINS = (plain, skipped, skipped_in_place, by_hand, by_another_name, twice, left_out, in_views)


def made(kind: str, join: Callable[..., Tensor]) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(KINDS[kind], join).double()
    return model, torch.randn(B, 3, 8, 8, dtype=torch.float64), torch.randint(0, 3, (B,))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def require_same(out: ClippedGradient, expected: ClippedGradient) -> None:
    assert expected.norms is not None
    torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
    for name, g in expected.grads.items():
        torch.testing.assert_close(out.grads[name], g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_exact(kind: str):
    """Those in place at each join, by the backends in turn; relu by all of them; a formula needs no join of its own."""
    for turn, join in enumerate(JOINS if "relu" in kind else (plain, skipped_in_place), list(KINDS).index(kind)):
        model, x, y = made(kind, join)
        expected = definition(model, loss, x, y, clip=CLIP)
        for backend in BACKENDS if kind == "relu" else (BACKENDS[turn % 3],):
            require_exact(backend, model, x, y, expected)


def require_exact(backend: str, model: Model, x: Tensor, y: Tensor, expected: ClippedGradient) -> None:
    with of_any_size(), load_backend(backend)(model, loss, clip=CLIP, verify=False) as b:
        for _ in range(3 if backend == "bk_mixed" else 2):  # a plan is timed in the second
            out = b(x, y)
            require_same(out, expected)


def recorded(model: Model, x: Tensor, y: Tensor) -> tuple[Tape, Tensor, list[Any]]:
    """A tape, the losses, and the nodes of activation functions, the last one of the model first."""
    parameters = dict(model.named_parameters())
    tape = Tape(parameters, (x, y), B)
    with of_any_size(), tape:
        losses = loss(model(x), y)
    assert not unrecorded(losses, tape, parameters)
    found = [node for node in nodes([losses.grad_fn]) if type(node) is Overwriting._backward_cls]
    return tape, losses, sorted(found, key=lambda node: -node._sequence_nr())


@pytest.mark.parametrize(
    ("join", "expected"),
    [
        (plain, [True, True, True]),
        (skipped, [True, True, False]),
        (skipped_in_place, [True, True, True, False]),
        (by_hand, [True, False, False, True]),
        (by_another_name, [True, False, False, True]),
        (twice, [True, True, True]),
        (left_out, [True, False, False]),
        (in_views, [True, True, True]),
    ],
)
def test_what_is_written_over(join: Callable[..., Tensor], expected: list[bool]):
    """Which gradients are nobody else's, from the last activation to the first."""
    _, _, found = recorded(*made("tanh", join))
    assert [node.alone for node in found] == expected


def test_a_gradient_is_written_over_in_the_tapes_own_pass_alone():
    tape, losses, found = recorded(*made("relu", plain))
    handed: list[tuple[int, Tensor]] = []
    given: list[int] = []
    found[0].register_prehook(lambda grads: handed.append((grads[0].data_ptr(), grads[0].clone())))
    found[0].register_hook(lambda inputs, outputs: given.append(inputs[0].data_ptr()))
    tape.backward(losses, lambda use, g: None, retain_graph=True)
    torch.autograd.grad(losses.sum(), list(tape.arrivals._anchors.values()), allow_unused=True)
    assert [handed[0][0] == given[0], handed[1][0] == given[1]] == [True, False]
    torch.testing.assert_close(handed[0][1], handed[1][1], rtol=0, atol=0)


def test_what_a_hook_keeps_stays_as_it_was():
    kept: list[tuple[Tensor, Tensor]] = []

    def stored(h: Tensor, act: Any, m: Model) -> Tensor:
        y = act(m.second(h))
        y.register_hook(lambda g: kept.append((g, g.clone())))
        return m.third(y)

    model, x, y = made("tanh", stored)
    with of_any_size(), load_backend("ghost")(model, loss, clip=CLIP, verify=False) as b:
        b(x, y)
    assert kept and all(torch.equal(g, before) for g, before in kept)


def test_small_activations_are_left_to_torch():
    model, x, y = made("relu", plain)
    tape = Tape(dict(model.named_parameters()), (x, y), B)
    with tape:
        losses = loss(model(x), y)
    assert not any(type(node) is Overwriting._backward_cls for node in nodes([losses.grad_fn]))


def test_what_torch_refuses_stays_refused():
    model, x, y = made("relu", lambda h, act, m: torch.tanh(m.second(h), out=torch.empty_like(h)))
    with (
        of_any_size(),
        load_backend("ghost")(model, loss, clip=CLIP, verify=False) as b,
        pytest.raises(RuntimeError, match="don't support automatic differentiation"),
    ):
        b(x, y)


class Block(nn.Module):
    """Images [B, 3, 8, 8]: of a ResNet the first convolution, a block of its own form, and the next stage."""

    def __init__(self, join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.join = join
        self.first, self.a, self.b, self.c, self.d = nn.Conv2d(3, 4, 3, padding=1), *(conv() for _ in range(4))
        self.norms, self.head = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(4)), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        h = self.join(self, h, self.norms[2](self.b(torch.relu(self.norms[1](self.a(h))))))
        return self.head(F.max_pool2d(torch.relu(self.norms[3](self.c(h))), 2).flatten(1))


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


def identity(m: Block, h: Tensor, y: Tensor) -> Tensor:
    return torch.relu(y + h)


def in_place(m: Block, h: Tensor, y: Tensor) -> Tensor:
    y += h
    return F.relu(y, inplace=True)


def other_way_round(m: Block, h: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(h + y)


def shortcut(m: Block, h: Tensor, y: Tensor) -> Tensor:
    return torch.relu(y + m.norms[2](m.d(h)))


def scaled(m: Block, h: Tensor, y: Tensor) -> Tensor:
    return torch.relu(torch.add(y, h, alpha=0.5))


def of_a_convolution(m: Block, h: Tensor, y: Tensor) -> Tensor:
    """A summand is a convolution's output."""
    return torch.relu(m.d(y) + h)


def three(m: Block, h: Tensor, y: Tensor) -> Tensor:
    return torch.relu(y + h) + m.d(h)


def sums_of_sums(m: Block, h: Tensor, y: Tensor) -> Tensor:
    return torch.relu(y + h + m.d(y))


def broadcast(m: Block, h: Tensor, y: Tensor) -> Tensor:
    return torch.relu(y.unsqueeze(1).expand(-1, 2, -1, -1, -1) + h.unsqueeze(1)).sum(1)


ENDS = (identity, in_place, other_way_round, shortcut, scaled, of_a_convolution, three, sums_of_sums, broadcast)


@pytest.mark.parametrize("join", ENDS)
def test_blocks_whose_convolutions_are_done_in_pieces(join: Callable[..., Tensor], monkeypatch):
    """Where two gradients meet, neither overwrites the other."""
    monkeypatch.setattr(chunked_conv, "PIECE", 64)
    chunked_conv._is_large.cache_clear()
    torch.manual_seed(0)
    model, x, y = Block(join).double(), torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 3, (8,))
    expected = definition(model, loss, x, y, clip=CLIP)
    for backend in BACKENDS:
        with of_any_size(), load_backend(backend)(model, loss, clip=CLIP, verify=False) as b:
            for _ in range(3 if backend == "bk_mixed" else 1):  # a plan is timed in the second
                require_same(b(x, y), expected)
    chunked_conv._is_large.cache_clear()
