"""Odd things that models do with their parameters: each exact, or refused by name; verification is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import Flat, UnsupportedModel, load_backend
from clipping.oracle import definition

BACKENDS = ("ghost", "bk_mixed", "fastgradclip")
CLIP = Flat(max_grad_norm=0.5)
B, T, D = 5, 4, 6
Forward = Callable[[nn.Module, Tensor], Tensor]


class Odd(nn.Module):
    """Parameters and layers by name, and what is done with them."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


class Case(NamedTuple):
    """`parts` are made anew, of torch's generator; `shape` is a sample's."""

    name: str
    forward: Forward
    parts: Callable[[], dict[str, Any]]
    shape: tuple[int, ...] = (T, D)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) - targets[:, None]).square().mean(1)


def made(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Odd(case.forward, **case.parts()).double()
    return model, torch.randn(B, *case.shape, dtype=torch.float64), torch.randn(B, dtype=torch.float64)


def assert_exact(backend: str, case: Case, verify: bool = False) -> None:
    model, x, y = made(case)
    expected = definition(model, squared_error, x, y, clip=CLIP)
    with load_backend(backend)(model, squared_error, clip=CLIP, verify=verify) as b:
        out = b(x, y)
    assert expected.norms is not None and expected.norms.min() > CLIP.max_grad_norm / 100
    torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
    assert any(g.any() for g in expected.grads.values())
    for name, g in expected.grads.items():
        torch.testing.assert_close(out.grads[name], g, rtol=1e-9, atol=1e-11)


def layer_and_vector() -> dict[str, Any]:
    return {"layer": nn.Linear(D, 3), "p": torch.randn(3)}


def gated(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h + m.gate * (h + m.p.expand_as(h))


LIKE = [
    Case("expand_as", lambda m, x: m.layer(x) + m.p.expand_as(m.layer(x)), layer_and_vector),
    Case("expand_as, multiplied", lambda m, x: m.layer(x) * m.p.expand_as(m.layer(x)), layer_and_vector),
    Case("expand_as in a gate", gated, lambda: {**layer_and_vector(), "gate": torch.tensor(0.7)}),
    Case("an activation typed as a parameter", lambda m, x: x.type_as(m.p) * m.p, lambda: {"p": torch.randn(D)}),
    Case("view_as", lambda m, x: x + m.p.view_as(x[0]), lambda: {"p": torch.randn(T * D)}),
    Case("reshape_as", lambda m, x: x * m.p.reshape_as(x[0]), lambda: {"p": torch.randn(T * D)}),
    Case("type_as", lambda m, x: x * m.p.type_as(x), lambda: {"p": torch.randn(D)}),
    Case("to another", lambda m, x: x @ m.p.to(x), lambda: {"p": torch.randn(D, 3)}),
    Case("to another by keyword", lambda m, x: x * m.p.to(tensor=x), lambda: {"p": torch.randn(D)}),
    Case("broadcast_tensors", lambda m, x: torch.mul(*torch.broadcast_tensors(x, m.p)), lambda: {"p": torch.randn(D)}),
    Case(
        "a constant made like the data", lambda m, x: m.layer(torch.eye(T, D).type_as(x)) + x[..., :3], layer_and_vector
    ),
]


def cleared(m: Any, x: Tensor) -> Tensor:
    b = m.b.clone()
    b[2:4].zero_()
    return F.linear(x, m.w, b)


def scaled(m: Any, x: Tensor) -> Tensor:
    b = m.b.clone()
    before = F.linear(x, m.w, b)
    b.mul_(m.w[0])
    b[1] = m.w[2, 3]
    return before.tanh() * b


def copied(m: Any, x: Tensor) -> Tensor:
    b = torch.zeros(D, dtype=x.dtype)
    b[:3].copy_(m.b[3:])
    b[4] = m.w[0, 0]
    return F.linear(x, m.w * b, b)


def view_of_changed(m: Any, x: Tensor) -> Tensor:
    b = m.w.clone()
    v = b.t()
    b[0] = 2.0
    b *= 3
    return x @ v


def filled(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), T, D, dtype=x.dtype)
    h[:, 1:] = x[:, 1:]
    h[:, 0] = m.b
    return F.linear(h, m.w)


def overwritten(m: Any, x: Tensor) -> Tensor:
    h = m.b.expand(len(x), T, D).clone()
    h[:, 1:] = torch.tanh(F.linear(x[:, 1:], m.w))
    return h * h


def viewed(m: Any, x: Tensor) -> Tensor:
    h = F.linear(x, m.w)
    h[:, 0] += m.b
    h[..., 1].mul_(m.b[0])
    h.view(len(x), -1).sub_(m.w.flatten()[: T * D])
    return h


def masked(m: Any, x: Tensor) -> Tensor:
    h = F.linear(x, m.w)
    mask = x[..., 0] > 0
    h[mask] = m.b
    h[~mask] = m.b.square().expand(int((~mask).sum()), D)
    return torch.tanh(h * x)


def weight_and_bias() -> dict[str, Any]:
    return {"w": torch.randn(D, D), "b": torch.randn(D)}


CHANGED = [
    Case("a clone cleared in part", cleared, weight_and_bias),
    Case("changed between two uses", scaled, weight_and_bias),
    Case("parameters written into a constant", copied, weight_and_bias),
    Case("the base of a view changed", view_of_changed, weight_and_bias),
    Case("data and a parameter written into a constant", filled, weight_and_bias),
    Case("data written into an expanded parameter", overwritten, weight_and_bias),
    Case("views of activations changed by parameters", viewed, weight_and_bias),
    Case("a parameter where a mask says so", masked, weight_and_bias),
    Case("multiplied in place", lambda m, x: x.clone().mul_(m.p).div_(m.p + 3), lambda: {"p": torch.randn(D)}),
]

EXACT = [*LIKE, *CHANGED]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_exact(case: Case, backend: str):
    assert_exact(backend, case)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_exact_with_verification(case: Case):
    assert_exact("bk_mixed", case, verify=True)


def data_into_some_rows(m: Any, x: Tensor) -> Tensor:
    h = F.linear(x, m.w)
    h[2] = m.b
    return h


def data_into_a_view(m: Any, x: Tensor) -> Tensor:
    b = m.b.expand(len(x), T, D).clone()
    b[:, 0].copy_(x[:, 0])
    return b


REFUSED = [
    (Case("rows set", data_into_some_rows, weight_and_bias), "b: __setitem__: sets some rows of the batch"),
    (Case("a view written to", data_into_a_view, weight_and_bias), "b: copy_: writes data into a tensor made of param"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "said"), REFUSED, ids=lambda v: v.name if isinstance(v, Case) else "")
def test_refused_by_name(case: Case, said: str, backend: str):
    model, x, y = made(case)
    with (
        load_backend(backend)(model, squared_error, clip=CLIP, verify=False) as b,
        pytest.raises(UnsupportedModel, match=said) as error,
    ):
        b(x, y)
    assert "remedy: " in str(error.value) and "\n" not in str(error.value)
