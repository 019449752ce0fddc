"""Unusual uses of parameters in models: cases that are exact, and refused cases with their messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B, T, D = 5, 4, 6
Forward = Callable[[nn.Module, Tensor], Tensor]


class Odd(nn.Module):
    """A module of named parameters and layers, with a forward function."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


class Case(NamedTuple):
    """`parts` creates parameters and layers by torch's generator; `shape` is a sample's."""

    name: str
    forward: Forward
    parts: Callable[[], dict[str, Any]]
    shape: tuple[int, ...] = (T, D)


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
    Case("a constant to the data", lambda m, x: m.layer(torch.eye(T, D).double().to(x)) + x[..., :3], layer_and_vector),
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
    Case(
        "positions multiplied by data in place",
        lambda m, x: F.embedding(torch.arange(T).expand(len(x), T), m.p).mul_(x).tanh(),
        lambda: {"p": torch.randn(T, D)},
    ),
    Case("multiplied in place", lambda m, x: x.clone().mul_(m.p).div_(m.p + 3), lambda: {"p": torch.randn(D)}),
]


def einsum_in_place(m: Any, x: Tensor) -> Tensor:
    h = torch.einsum("binh,tnh->bnit", m.layer(x).view(-1, T, 2, 3), torch.einsum("td,dnh->tnh", m.constant, m.p))
    h *= 2.0
    h[..., 0] += 1
    return h


def spectral(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x).transpose(1, 2)
    return torch.fft.irfft(torch.fft.rfft(h, n=2 * T) * torch.fft.rfft(m.p, n=2 * T), n=2 * T)[..., :T]


def filtered(m: Any, x: Tensor) -> Tensor:
    weight = torch.view_as_complex(m.p)
    return torch.fft.irfft(torch.fft.rfft(m.layer(x), dim=1) * weight + weight.conj(), n=T, dim=1)


def state_space(m: Any, x: Tensor) -> Tensor:
    kernel = torch.exp(torch.complex(-m.p.exp(), m.q)[:, None] * torch.arange(2 * T)).real
    u = torch.fft.rfft(m.layer(x), n=2 * T, dim=1)
    return torch.fft.irfft(torch.einsum("bfd,df->bfd", u, torch.fft.rfft(kernel)), n=2 * T, dim=1)[:, :T]


def mixed_complex(m: Any, x: Tensor) -> Tensor:
    h = torch.complex(m.p.expand_as(m.layer(x)), m.layer(x)) @ torch.complex(m.w, m.w.t())
    return torch.view_as_real(torch.cat([h * m.p, F.linear(h, torch.complex(m.w, m.p)) - m.q], -1))


VIEWS_AND_COMPLEX = [
    Case(
        "an einsum changed in place",
        einsum_in_place,
        lambda: {"layer": nn.Linear(D, D), "p": torch.randn(5, 2, 3), "constant": torch.randn(7, 5)},
    ),
    Case("a spectrum of a parameter", spectral, lambda: {"layer": nn.Linear(D, 3), "p": torch.randn(3, T)}),
    Case("a parameter viewed as complex", filtered, lambda: {"layer": nn.Linear(D, 3), "p": torch.randn(3, 3, 2)}),
    Case(
        "a diagonal state space",
        state_space,
        lambda: {"layer": nn.Linear(D, 3), "p": torch.randn(3), "q": torch.randn(3)},
    ),
    Case(
        "real and complex in every operation",
        mixed_complex,
        lambda: {**layer_and_vector(), "w": torch.randn(3, 3), "q": torch.randn(())},
    ),
]


def steps(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 3)
    for t in range(T):
        h = m.cell(x[:, t], h)
    return h


def steps_of_two_states(m: Any, x: Tensor) -> Tensor:
    h, c = m.h.expand(len(x), 3), torch.zeros(len(x), 3, dtype=x.dtype)
    for t in range(T):
        h, c = m.cell(x[:, t], (h, c))
    return h * c


def learned_state(m: Any, x: Tensor) -> Tensor:
    h = m.h.expand(len(x), 3)
    return m.cell(x[:, 1], m.cell(x[:, 0], h))


def projected(m: Any, x: Tensor) -> Tensor:
    out, (h, c) = m.rnn(x)
    return torch.cat([out.flatten(1), h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1)], 1)


RECURRENT = [
    Case("GRU cell", steps, lambda: {"cell": nn.GRUCell(D, 3)}),
    Case("RNN cell", steps, lambda: {"cell": nn.RNNCell(D, 3)}),
    Case("ReLU cell without bias", steps, lambda: {"cell": nn.RNNCell(D, 3, bias=False, nonlinearity="relu")}),
    Case("LSTM cell", steps_of_two_states, lambda: {"cell": nn.LSTMCell(D, 3), "h": torch.randn(3)}),
    Case("GRU cell from a learned state", learned_state, lambda: {"cell": nn.GRUCell(D, 3), "h": torch.randn(1, 3)}),
    Case("LSTM with proj_size", projected, lambda: {"rnn": nn.LSTM(D, 4, 2, proj_size=3, batch_first=True)}),
    Case(
        "LSTM with proj_size, both ways",
        projected,
        lambda: {"rnn": nn.LSTM(D, 4, bias=False, proj_size=2, batch_first=True, bidirectional=True)},
    ),
]


def bilinear(m: Any, x: Tensor) -> Tensor:
    return m.layer(x, torch.linspace(-1, 1, 4, dtype=x.dtype).repeat(len(x), 1))


def sampled(m: Any, x: Tensor) -> Tensor:
    grid = torch.tanh(m.p).expand(len(x), -1, -1, -1)
    return F.grid_sample(x[:, :, None].unflatten(-1, (2, 3)).squeeze(2), grid, align_corners=False)


def bilinear_over_positions(m: Any, x: Tensor) -> Tensor:
    return m.layer(x, x.cos())


def scattered(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h.scatter(1, (h > 0).long(), m.p.expand(len(x), T, 3))


def tokens(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.p.expand(len(x), 2, 3), m.layer(x), m.p[None].expand(len(x), 1, -1)], 1)
    return torch.concatenate([h * h, m.p.expand(len(x), 1, 3)], axis=1)


def stacked(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    both = torch.stack([h, m.p.expand_as(h)], -2)
    return torch.hstack([both.flatten(1), m.p.expand(len(x), 3)]).square()


def solved(m: Any, x: Tensor) -> Tensor:
    return torch.linalg.solve((m.w + 4 * torch.eye(T)).expand(len(x), T, T), m.layer(x))


ROWS = [
    Case("W x, batch last", lambda m, x: (m.p @ x.t()).t(), lambda: {"p": torch.randn(3, D)}, (D,)),
    Case("W x", lambda m, x: torch.matmul(m.p, x) @ m.q, lambda: {"p": torch.randn(3, T), "q": torch.randn(D, 2)}),
    Case(
        "bmm with an expanded weight", lambda m, x: x.bmm(m.p.expand(len(x), -1, -1)), lambda: {"p": torch.randn(D, 3)}
    ),
    Case("bmm with queries", lambda m, x: m.p.expand(len(x), -1, -1).bmm(x), lambda: {"p": torch.randn(1, 2, T)}),
    Case("scatter of an expanded parameter", scattered, layer_and_vector),
    Case("grid_sample by a parameter", sampled, lambda: {"p": torch.randn(1, 3, 3, 2)}),
    Case("bilinear with a constant", bilinear, lambda: {"layer": nn.Bilinear(D, 4, 3)}, (D,)),
    Case("bilinear, as many outputs as samples", bilinear_over_positions, lambda: {"layer": nn.Bilinear(D, D, B)}),
    Case(
        "a matrix times a vector",
        lambda m, x: (x @ m.p) * (m.q @ x).sum(1, True),
        lambda: {"p": torch.randn(D), "q": torch.randn(T)},
    ),
    Case("tokens in front", tokens, layer_and_vector),
    Case("stacked", stacked, layer_and_vector),
    Case(
        "distances from as many points as samples",
        lambda m, x: torch.cdist(m.layer(x[:, 0]), m.w),
        lambda: {"layer": nn.Linear(D, 3), "w": torch.randn(B, 3)},
    ),
    Case("solved for each sample", solved, lambda: {"layer": nn.Linear(D, T), "w": torch.randn(T, T)}),
    Case("where", lambda m, x: torch.where(x > 0, m.p.expand_as(x), x * m.p), lambda: {"p": torch.randn(D)}),
]

EXACT = [*LIKE, *CHANGED, *VIEWS_AND_COMPLEX, *RECURRENT, *ROWS]


def data_into_some_rows(m: Any, x: Tensor) -> Tensor:
    h = F.linear(x, m.w)
    h[1:] = m.b
    return h


def data_into_a_view(m: Any, x: Tensor) -> Tensor:
    b = m.b.expand(len(x), T, D).clone()
    b[:, 0].copy_(x[:, 0])
    return b


def normalised(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(m.layer(x).transpose(1, 2), None, None, m.p, m.p, training=True)


def normalised_without_parameters(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(m.layer(x).flatten(1), None, None, training=True) * m.p.sum()


def by_statistics_of_channels(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return m.head((h / h.var(0).sum(1).add(1).view(1, -1, 1)).flatten(1))


def jagged(m: Any, x: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(m.layer(torch.nested.as_nested_tensor(list(x), layout=torch.jagged)), 0.0)


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.layer, x * m.p.sum(), use_reentrant=True)


def tangent(m: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda z: torch.tanh(m.layer(z)), (x,), (torch.ones_like(x),))[1] * m.p


def mapped(m: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda z: torch.tanh(F.linear(z, m.layer.weight) + m.p))(x)


def gathered(m: Any, x: Tensor) -> Tensor:
    return m.w.gather(1, (x[:, :3] > 0).long())


def packed(m: Any, x: Tensor) -> Tensor:
    lengths = torch.arange(len(x), 0, -1).clamp(max=T)
    return m.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True), m.p)[1].transpose(0, 1)


MIXES = "batch_norm: normalises over the samples of a batch.*group_norm"
REFUSED = [
    (Case("batch_norm by hand", normalised, layer_and_vector), MIXES),
    (Case("batch_norm by hand without parameters", normalised_without_parameters, layer_and_vector), MIXES),
    (
        Case(
            "statistics over samples, by channel",
            by_statistics_of_channels,
            lambda: {"layer": nn.Linear(D, D), "head": nn.Linear(B * D, 3)},
            (B, D),
        ),
        "head.weight: linear: numbers of several samples stand in one row",
    ),
    (
        Case("a complex parameter", lambda m, x: x, lambda: {"p": torch.randn(2, dtype=torch.complex64)}),
        "p: is complex",
    ),
    (Case("jagged", jagged, layer_and_vector), "layer.weight: linear: sparse and nested tensors have no rule"),
    (
        Case("sparse", lambda m, x: torch.sparse.mm(x.to_sparse(), m.p), lambda: {"p": torch.randn(D, 3)}, (D,)),
        "p: _sparse_mm: sparse and nested tensors have no rule",
    ),
    (
        Case("reentrant checkpoint", checkpointed, layer_and_vector),
        "checkpoint: with use_reentrant=True.*reentrant=False",
    ),
    (Case("jvp", tangent, layer_and_vector), "layer.weight: linear: is called inside of a torch.func transform"),
    (Case("vmap", mapped, layer_and_vector), "linear: is called inside of a torch.func transform"),
    (
        Case("rows of a parameter by position", gathered, lambda: {"w": torch.randn(2 * B, 4)}, (D,)),
        "w: gather: pairs 5 rows of the batch with 10 of a parameter",
    ),
    (
        Case(
            "entries handed out",
            lambda m, x: m.layer(x).masked_scatter(x[..., :3] > 0, m.p.expand(len(x), T, 3)),
            layer_and_vector,
        ),
        "p: masked_scatter: hands the entries of a parameter to samples in turn",
    ),
    (
        Case("largest", lambda m, x: m.bag((x[..., 0] > 0).long()), lambda: {"bag": nn.EmbeddingBag(7, 3, mode="max")}),
        "bag.weight: embedding_bag: an embedding bag in mode max has no rule",
    ),
    (Case("packed", packed, lambda: {"rnn": nn.GRU(D, 3), "p": torch.ones(1, B, 3)}), "gru: a packed sequence with a"),
    (Case("rows set", data_into_some_rows, weight_and_bias), "b: __setitem__: sets some rows of the batch"),
    (Case("a view written to", data_into_a_view, weight_and_bias), "b: copy_: writes data into a tensor made of param"),
]
