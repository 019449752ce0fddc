"""Activation functions, whose backward pass is written over the gradient that it is handed if that is nobody else's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import Flat, compare, load_backend
from clipping.accel import chunked_conv
from clipping.accel.overwriting import of_any_size
from clipping.core.reference import definition
from clipping.core.types import ClippedGradient
from dpbench.conformance.cases import cross_entropy

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


def skipped_in_place(h: Tensor, act: Any, m: Model) -> Tensor:
    out = act(m.norm(m.second(h)))
    out = m.third(out)
    out += h
    return act(out)


def left_out(h: Tensor, act: Any, m: Model) -> Tensor:
    """A convolution that comes to nothing, and a sum."""
    m.third(h)
    return act(m.second(h)) + h


JOINS = (
    plain,
    lambda h, act, m: act(m.second(h) + h),
    skipped_in_place,
    lambda h, act, m: Shared.apply(act(m.second(h)), act(m.third(h))),  # two activations that have one gradient
    lambda h, act, m: Mul.apply(act(m.second(h)), act(m.third(h))),
    lambda h, act, m: m.second(h) * act(m.third(h)),
    left_out,
    lambda h, act, m: m.third(act(m.second(h)).flatten(2).unflatten(2, (8, 8))),
)


def made(kind: str, join: Callable[..., Tensor]) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(KINDS[kind], join).double()
    return model, torch.randn(B, 3, 8, 8, dtype=torch.float64), torch.randint(0, 3, (B,))


@pytest.mark.parametrize("kind", KINDS)
def test_exact(kind: str):
    """Those in place at each join, by the backends in turn; relu by all of them; a formula needs no join of its own."""
    for turn, join in enumerate(JOINS if "relu" in kind else (plain, skipped_in_place), list(KINDS).index(kind)):
        model, x, y = made(kind, join)
        expected = definition(model, cross_entropy, x, y, clip=CLIP)
        for backend in BACKENDS if kind == "relu" else (BACKENDS[turn % 3],):
            require_exact(backend, model, x, y, expected)


def test_exact_where_convolutions_are_done_in_pieces(monkeypatch):
    """Where two gradients meet, neither overwrites the other."""
    monkeypatch.setattr(chunked_conv, "PIECE", 64)
    chunked_conv._is_large.cache_clear()
    for join in JOINS:
        model, x, y = made("relu", join)
        expected = definition(model, cross_entropy, x, y, clip=CLIP)
        for backend in BACKENDS:
            require_exact(backend, model, x, y, expected)
    chunked_conv._is_large.cache_clear()


def require_exact(backend: str, model: Model, x: Tensor, y: Tensor, expected: ClippedGradient) -> None:
    with of_any_size(), load_backend(backend)(model, cross_entropy, clip=CLIP, verify=False) as b:
        for _ in range(3 if backend == "bk_mixed" else 2):  # a plan is timed in the second
            assert compare(b(x, y), expected).within(1e-12)


def test_what_a_hook_keeps_stays_as_it_was():
    kept: list[tuple[Tensor, Tensor]] = []

    def stored(h: Tensor, act: Any, m: Model) -> Tensor:
        y = act(m.second(h))
        y.register_hook(lambda g: kept.append((g, g.clone())))
        return m.third(y)

    model, x, y = made("tanh", stored)
    with of_any_size(), load_backend("ghost")(model, cross_entropy, clip=CLIP, verify=False) as b:
        b(x, y)
    assert kept and all(torch.equal(g, before) for g, before in kept)


def test_what_torch_refuses_stays_refused():
    model, x, y = made("relu", lambda h, act, m: torch.tanh(m.second(h), out=torch.empty_like(h)))
    with (
        of_any_size(),
        load_backend("ghost")(model, cross_entropy, clip=CLIP, verify=False) as b,
        pytest.raises(RuntimeError, match="don't support automatic differentiation"),
    ):
        b(x, y)
