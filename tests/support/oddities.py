"""Unusual uses of parameters in models: cases that are exact, and refused cases with their messages."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import deform_conv2d

from dpbench.conformance.modules import Fused

B, T, D = 5, 4, 6
Forward = Callable[[nn.Module, Tensor], Tensor]


class Case(NamedTuple):
    """`parts` creates parameters and layers by torch's generator; `shape` is a sample's."""

    name: str
    forward: Forward
    parts: Callable[[], dict[str, Any]]
    shape: tuple[int, ...] = (T, D)


def layer_and_vector() -> dict[str, Any]:
    return {"layer": nn.Linear(D, 3), "p": torch.randn(3)}


def layer_and_two_vectors() -> dict[str, Any]:
    return {**layer_and_vector(), "q": torch.randn(D)}


LIKE = [
    Case("view_as", lambda m, x: x + m.p.view_as(x[0]), lambda: {"p": torch.randn(T * D)}),
    Case("reshape_as", lambda m, x: x * m.p.reshape_as(x[0]), lambda: {"p": torch.randn(T * D)}),
    Case("type_as", lambda m, x: x * m.p.type_as(x), lambda: {"p": torch.randn(D)}),
    Case("to another", lambda m, x: x @ m.p.to(x), lambda: {"p": torch.randn(D, 3)}),
]


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


def viewed(m: Any, x: Tensor) -> Tensor:
    h = F.linear(x, m.w)
    h[:, 0] += m.b
    h[..., 1].mul_(m.b[0])
    h.view(len(x), -1).sub_(m.w.flatten()[: T * D])
    return h


def in_part_and_as_another_view(m: Any, x: Tensor) -> Tensor:
    """With a bias torch gives a view of the product of all positions, and follows its change by another node."""
    h = m.layer(x)
    h[:, 1:] += h[:, :-1].clone()
    h.view(len(x), -1).sigmoid_()
    return m.after(h)


def weight_and_bias() -> dict[str, Any]:
    return {"w": torch.randn(D, D), "b": torch.randn(D)}


CHANGED = [
    Case("the base of a view changed", view_of_changed, lambda: {"w": torch.randn(D, D)}),
    Case("data and a parameter written into a constant", filled, weight_and_bias),
    Case("views of activations changed by parameters", viewed, weight_and_bias),
    Case(
        "the output over positions changed in place",
        in_part_and_as_another_view,
        lambda: {"layer": nn.Linear(D, 3), "after": nn.Linear(3, 3)},
    ),
]


def mixed_complex(m: Any, x: Tensor) -> Tensor:
    h = torch.complex(m.p.expand_as(m.layer(x)), m.layer(x)) @ torch.complex(m.w, m.w.t())
    return torch.view_as_real(torch.cat([h * m.p, F.linear(h, torch.complex(m.w, m.p)) - m.q], -1))


def sparse(m: Any, x: Tensor) -> Tensor:
    """Trains a few entries of a weight (SHiRA), beside sparse data of all samples; vmap knows no sparse tensors."""
    entries = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 3]]), m.p, (3, D))
    return F.linear(torch.sparse.mm(torch.eye(D, dtype=x.dtype).to_sparse(), x.t()).t(), m.w + entries)


def normalised_alone(m: Any, x: Tensor) -> Tensor:
    """Nothing but scales and shifts is trained: no use has an input that needs a gradient."""
    return m.head(m.instance(torch.tanh(m.group(m.convolution(x)))).flatten(1))


def norms() -> dict[str, Any]:
    frozen = {"convolution": nn.Conv2d(4, 4, 3), "head": nn.Linear(64, 3)}
    trained = {"group": nn.GroupNorm(2, 4), "instance": nn.InstanceNorm2d(4, affine=True)}
    return {name: layer.requires_grad_(False) for name, layer in frozen.items()} | trained


VIEWS_AND_COMPLEX = [
    Case("norms alone", normalised_alone, norms, (4, 6, 6)),
    Case("sparse entries", sparse, lambda: {"w": torch.randn(3, D), "p": torch.randn(2)}, (D,)),
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


RECURRENT = [
    Case("ReLU cell without bias", steps, lambda: {"cell": nn.RNNCell(D, 3, bias=False, nonlinearity="relu")}),
    Case("LSTM cell", steps_of_two_states, lambda: {"cell": nn.LSTMCell(D, 3), "h": torch.randn(3)}),
]


def bilinear(m: Any, x: Tensor) -> Tensor:
    return m.layer(x, torch.linspace(-1, 1, 4, dtype=x.dtype).repeat(len(x), 1))


def sampled(m: Any, x: Tensor) -> Tensor:
    grid = torch.tanh(m.p).expand(len(x), -1, -1, -1)
    return F.grid_sample(x[:, :, None].unflatten(-1, (2, 3)).squeeze(2), grid, align_corners=False)


def scattered(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return h.scatter(1, (h > 0).long(), m.p.expand(len(x), T, 3))


def tokens(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.p.expand(len(x), 2, 3), m.layer(x), m.p[None].expand(len(x), 1, -1)], 1)
    return torch.concatenate([h * h, m.p.expand(len(x), 1, 3)], axis=1)


ROWS = [
    Case("scatter of an expanded parameter", scattered, layer_and_vector),
    Case("grid_sample by a parameter", sampled, lambda: {"p": torch.randn(1, 3, 3, 2)}),
    Case("bilinear with a constant", bilinear, lambda: {"layer": nn.Bilinear(D, 4, 3)}, (D,)),
    Case(
        "a matrix times a vector",
        lambda m, x: (x @ m.p) * (m.q @ x).sum(1, True),
        lambda: {"p": torch.randn(D), "q": torch.randn(T)},
    ),
    Case("tokens in front", tokens, layer_and_vector),
    Case(
        "distances from as many points as samples",
        lambda m, x: torch.cdist(m.layer(x[:, 0]), m.w),
        lambda: {"layer": nn.Linear(D, 3), "w": torch.randn(B, 3)},
    ),
    Case("where", lambda m, x: torch.where(x > 0, m.p.expand_as(x), x * m.p), lambda: {"p": torch.randn(D)}),
]

# Rows written into other tensors: of the batch, of a part of it, or of a parameter

Taking = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(module, rows [n, 3] of some positions, their samples [n], their positions [n]) -> [n, 3]."""


def turned_back(m: Any, x: Tensor) -> Tensor:
    h, turned = m.layer(x.roll(2, 0)).tanh().roll(-2, 0), m.layer(torch.flip(x, [0, 1])).sin()
    return h * m.p + turned.flip((0, 1))


def attended_in_order(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    h = x[order]
    return m.attention(h, h, h)[0][order.argsort()] * m.q


def by_steps(m: Any, x: Tensor) -> Tensor:
    """States of all steps in one tensor, steps first."""
    states = torch.zeros(x.shape[1], len(x), 3).to(x)
    h = torch.zeros(len(x), 3).to(x)
    for t in range(x.shape[1]):
        states[t] = h = m.cell(x[:, t], h)
    return m.after(states).sum(0) + m.after(states[-1])


def bags_in_order(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return m.bag((x[order, :, 0] > 0).long() + (x[order, :, 1] > 0).long()).tanh()[order.argsort()] * m.p


def bags_of_positions(m: Any, x: Tensor) -> Tensor:
    ids = (x[..., :2] > 0).long() + (x[..., 2:4] > 0).long()
    return m.bag(ids.flatten(0, 1)).unflatten(0, x.shape[:2]) * m.p


def repeated(m: Any, x: Tensor) -> Tensor:
    """One step repeated, steps first, and a batch that stands twice in another."""
    steps = [m.layer(x.expand(B, -1, -1)), m.layer(x.unsqueeze(0).repeat(B, 1, 1))]
    return (steps[0] * steps[1].tanh()).sum(0) + m.layer(x.tile(2, 1)).tanh().view(2, -1, 3).sum(0) * m.p


def steps_first(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return m.layer(torch.where(x > 0, x, m.q) / (1 + m.q.square())).transpose(0, 1) * m.p


def broadcast(m: Any, x: Tensor) -> Tensor:
    """A parameter adds dimensions in front; each sample is taken from a stack."""
    x = m.layer(x) * m.steps * m.p
    return torch.stack([m.after(each.tanh())[-1] for each in torch.stack(x.unbind(0), 1)])


def read_twice(m: Any, x: Tensor) -> Tensor:
    """A view changed in place: whoever reads it first makes its node."""
    h = m.after(m.layer(x))
    h[..., 1:] -= h[..., :-1].clone()
    return m.after(h) * m.p + h


def of_nothing(m: Any, x: Tensor) -> Tensor:
    """Parameters read beside positions after the last."""
    rest = x[:, x.shape[1] :]
    return m.after(torch.cat([m.layer(x) * m.p, m.layer(rest) * m.p.exp() + m.p], 1))


def of_named(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("tbd->btd", m.layer(torch.einsum("btd->tbd", x)).tanh() + m.p)


def of_lengths(m: Any, x: Tensor) -> Tensor:
    short = [int(each[0, 0] > 0) for each in x]
    pieces = [m.layer(x[i, : x.shape[1] - less]) for i, less in enumerate(short)]
    padded = [F.pad(piece, (0, 0, 0, less)) for piece, less in zip(pieces, short, strict=True)]
    return m.after(torch.stack(padded) * m.p + x[..., :3])


def added_in_place(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x += m.q
    return m.layer(x) * m.p


def parts() -> dict[str, Any]:
    return {**layer_and_vector(), "after": nn.Linear(3, 3)}


def of_some(take: Taking) -> Forward:
    """Apply `take` to concatenated rows of some positions of all samples, then sum by sample."""

    def forward(m: Any, x: Tensor) -> Tensor:
        inside = x[..., 0] > 0
        inside[:, 0] = True
        samples, positions = inside.nonzero().unbind(1)
        rows = m.after(take(m, m.layer(x[inside]), samples, positions).tanh())
        return rows.new_zeros(len(x), 3).index_add(0, samples, rows)

    return forward


def put_in_order(m: Any, x: Tensor) -> Tensor:
    """Sort samples, and restore their order."""
    order = x[:, 0].argsort()
    h, rows = m.layer(x), m.layer(x[order]).tanh() * m.p
    return m.after((torch.zeros_like(rows).index_put((order,), rows) + h).square())


def of_ends(write: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> Forward:
    """`write(module, h [B, T, 3], mask [B, T], last [B])` changes entries of the sequences h."""

    def forward(m: Any, x: Tensor) -> Tensor:
        inside = x[..., 0] > 0
        return m.after(write(m, m.layer(x), inside, inside.sum(1).clamp(max=T - 1)).tanh()).sum(1)

    return forward


def columns(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    found = torch.zeros(h.shape).to(h)
    found[:, 0] = h[:, 1]
    found[..., 1:] = h[..., :2] * m.p[1:]
    return found


def copied_columns(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    turned = torch.zeros(h.shape).to(h).index_copy(1, torch.tensor([2, 0, 1]), h)
    return turned.index_add(1, torch.tensor([0, 0, 1]), h) * m.p


def one_of_two(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    of = (h[:, 0] > 0).long()
    first = torch.zeros(len(h), 2).to(h)
    first[torch.arange(len(h)), of] = 1.0
    second = torch.zeros(len(h), 2).to(h).scatter(1, of[:, None], 1.0)
    return h * (first @ m.p[:2, None]) * (second @ m.p[1:, None])


def masked_rows(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    h = h.clone()
    h[h[:, 0] > 0] = m.p
    return h * m.p


def turned(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Reverse rows and restore them by gathering entries; then sort each row's entries."""
    back = torch.arange(len(h)).flip(0)[:, None]
    h = m.layer.bias + h.gather(0, back.expand(h.shape)) * m.p
    h = torch.take_along_dim(h, back, 0)
    return h.gather(1, h.detach().argsort(1)) * m.p


def beside(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    h = torch.cat([h[:, :1], m.p[1:].expand(len(h), 2)], 1)
    return torch.stack([h, m.p.expand(len(h), 3)], 1).prod(1) + h


def assigned(m: Any, h: Tensor, inside: Tensor, last: Tensor) -> Tensor:
    h = h.clone()
    h[torch.arange(len(h)), last] = m.p
    return h


def flat(m: Any, h: Tensor, inside: Tensor, last: Tensor) -> Tensor:
    rows = h.flatten(0, 1).clone()
    rows[torch.arange(len(h)) * T + last] = m.p
    return rows.view(h.shape)


TAKING = (columns, copied_columns, one_of_two, masked_rows, turned, beside)
WRITTEN = [
    *(Case(f"of some: {take.__name__}", of_some(take), parts) for take in TAKING),
    Case("sorted, index_put", put_in_order, parts, (D,)),
    Case("ends", of_ends(assigned), parts),
    Case("ends of rows", of_ends(flat), parts),
]

PLACED = [
    Case("a new first dimension by an index", lambda m, x: m.layer(x[None])[0] * m.p, layer_and_vector, (D,)),
    Case("turned, and back", turned_back, layer_and_vector),
    Case(
        "attention of sorted samples",
        attended_in_order,
        lambda: {"attention": nn.MultiheadAttention(D, 2, batch_first=True), "q": torch.randn(D)},
    ),
    Case("states of steps", by_steps, lambda: {"cell": nn.GRUCell(D, 3), "after": nn.Linear(3, 3)}, (B, D)),
    Case("bags of sorted samples", bags_in_order, lambda: {"bag": nn.EmbeddingBag(3, 3), "p": torch.randn(3)}),
    Case("several bags a sample", bags_of_positions, lambda: {"bag": nn.EmbeddingBag(3, 3), "p": torch.randn(3)}),
    Case("repeated", repeated, layer_and_vector, (D,)),
    Case("elementwise operations of steps first", steps_first, layer_and_two_vectors),
    Case("broadcast with steps first", broadcast, lambda: {**parts(), "steps": torch.randn(B, 1, 3)}, (D,)),
    Case("a view changed in place and read twice", read_twice, parts),
    Case("a part without positions", of_nothing, parts),
    Case("permuted by einsum, as many positions as samples", of_named, layer_and_vector, (B, D)),
    Case("pieces of each sample, as many positions as samples", of_lengths, parts, (B, D)),
    Case(
        "a mean of as many branches as samples and features",
        lambda m, x: torch.stack([x * i for i in range(B)]).mean(0) @ m.w,
        lambda: {"w": torch.randn(B, 3)},
        (B,),
    ),
    Case("a parameter added to data in place", added_in_place, layer_and_two_vectors, (D,)),
]


class Rounded(torch.autograd.Function):
    """Rounds to multiples of a learned step, as learned step size quantisation does; vmap cannot run it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (g,), (x, step) = grads, ctx.saved_tensors
        scaled = x / step
        return g, ((scaled.round() - scaled) * g).sum().reshape(step.shape)


def rounded(m: Any, x: Tensor) -> Tensor:
    """Of data, of activations and of a weight; a weight and data in one function."""
    h = torch.tanh(F.linear(Rounded.apply(x, m.p), Rounded.apply(m.w, m.p)))
    return Fused.apply(Rounded.apply(h, m.q), (2 * m.w).view(D, D))


def with_constants(m: Any, x: Tensor) -> Tensor:
    """New parameters made of frozen ones, as peft does it, with as many rows as the batch or twice as many."""
    frozen = nn.Parameter(torch.arange(2.0 * B * D).to(x).sin().view(D, 2 * B).t())
    return x @ ((frozen + m.w) / (frozen + m.w.detach()).norm(dim=1).detach()[:, None] * m.p).view(2, B, D).mean(1).t()


def of_a_leaf(m: Any, x: Tensor) -> Tensor:
    """The batch as a leaf, in a form that older code has."""
    logits = m.layer(torch.autograd.Variable(x, requires_grad=True)) * m.p
    return F.cross_entropy(logits, x[:, :3].argmax(1), reduction="none")[:, None]


def solved(m: Any, x: Tensor) -> Tensor:
    """A system solved for each sample."""
    return torch.linalg.solve(m.w + 4 * torch.eye(D).to(x), x.unsqueeze(-1)).squeeze(-1)


def without_a_rule(m: Any, x: Tensor) -> Tensor:
    return torch.atan2(m.layer(x).transpose(0, 1), m.p).transpose(0, 1)


def without_vmap(m: Any, x: Tensor) -> Tensor:
    """A row of zeros for each sample, beside a bias with as many entries; an operator of another library."""
    offset = m.layer(x).view(len(x), 2, 1, 1).expand(-1, -1, 2, 2)
    return deform_conv2d(x.view(len(x), 1, 2, 3)[..., :2], offset, m.w, m.p)


OF_FUNCTIONS = [
    Case(
        "custom functions",
        rounded,
        lambda: {"w": torch.randn(D, D), "p": torch.rand(1) + 0.5, "q": torch.tensor(0.3)},
        (D,),
    ),
    Case("with constants", with_constants, lambda: {"w": torch.randn(2 * B, D), "p": torch.randn(D)}, (D,)),
    Case("a leaf of the batch", of_a_leaf, layer_and_vector, (D,)),
    Case(
        "the larger of a decayed constant and data",  # as in RWKV
        lambda m, x: torch.maximum(torch.zeros_like(x) - 0.5 + m.p, x),
        lambda: {"p": torch.randn(D)},
        (D,),
    ),
    Case("solved", solved, lambda: {"w": torch.randn(D, D)}, (D,)),
    Case(
        "an operator without vmap",
        without_vmap,
        lambda: {"layer": nn.Linear(D, 2), "w": torch.randn(B, 1, 1, 1), "p": torch.randn(B)},
        (D,),
    ),
]

EXACT = [*LIKE, *CHANGED, *VIEWS_AND_COMPLEX, *RECURRENT, *ROWS, *WRITTEN, *PLACED, *OF_FUNCTIONS]


def data_into_some_rows(m: Any, x: Tensor) -> Tensor:
    h = F.linear(x, m.w)
    h[1:] = m.b
    return h


def data_into_a_view(m: Any, x: Tensor) -> Tensor:
    b = m.b.expand(len(x), T, D).clone()
    b[:, 0].copy_(x[:, 0])
    return b


def overwritten(m: Any, x: Tensor) -> Tensor:
    h = m.b.expand(len(x), T, D).clone()
    h[:, 1:] = torch.tanh(F.linear(x[:, 1:], m.w))
    return h * h


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


def filled_in_place(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.clone().masked_fill_(x > 0, m.p[0]))


def prototypes(m: Any, x: Tensor) -> Tensor:
    """A parameter is the input of an operation whose weight depends on data, and a row is added to the batch."""
    x = torch.cat([x, m.extra])[:-1]
    return m.layer(x) + F.linear(m.points, x).t()


def gathered(m: Any, x: Tensor) -> Tensor:
    return m.w.gather(1, (x[:, :3] > 0).long())


def packed(m: Any, x: Tensor) -> Tensor:
    lengths = torch.arange(len(x), 0, -1).clamp(max=T)
    return m.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True), m.p)[1].transpose(0, 1)


MIXES = "batch_norm: normalises over the samples of a batch.*group_norm"


class Doubled(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * grads[0], torch.zeros(D).to(grads[0])


class Noisy(torch.autograd.Function):
    """Adds noise of a learned size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.noise = torch.randn_like(x)
        return x + ctx.noise * p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], (grads[0] * ctx.noise).flatten(0, -2).sum(0)


def beneath_a_mode(m: Any, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return Fused.apply(x, m.w)


def merged(m: Any, x: Tensor) -> Tensor:
    """Two rows joined to one, which may be of two samples."""
    flat = x[x[..., 0] > 0]
    flat = flat[: len(flat) // 2 * 2]
    return x.sum(-1) + m.layer(flat.reshape(-1, 2 * D)).sum()


def moved_namelessly(m: Any, x: Tensor) -> Tensor:
    return x.sum(-1) + m.layer(torch.kron(x[x[..., 0] > 0], torch.ones(2, 1).double())).sum()


REFUSED = [
    (
        Case("filled in place", filled_in_place, layer_and_vector),
        "p: masked_fill_: no exact rule for this operation in place .remedy: use its out-of-place",
    ),
    (
        Case(
            "prototypes",
            prototypes,
            lambda: {"layer": nn.Linear(D, 3), "points": torch.randn(3, D), "extra": torch.randn(1, D)},
            (D,),
        ),
        "(?=.*points: linear: a parameter is the input of the op).*extra: cat: concatenates parameters to",
    ),
    (
        Case("positions first", lambda m, x: m.layer(x + torch.zeros(7, 1, D)).mean(0), layer_and_vector, (D,)),
        r"layer.weight: linear: its output \[7, 5, 3\].*layer.bias: linear.*batch first",
    ),
    (
        Case("a custom function beneath a mode", beneath_a_mode, lambda: {"w": torch.randn(3, D)}, (D,)),
        "w: is read where the tape does not see it: by the custom function Fused, called beneath another mode",
    ),
    (
        Case("a custom function in place", lambda m, x: Doubled.apply(x * m.p, m.p), lambda: {"p": torch.randn(D)}),
        "p: Doubled: no exact rule for this operation in place",
    ),
    (
        Case("a custom function that draws", lambda m, x: Noisy.apply(x, m.p), lambda: {"p": torch.randn(D)}),
        "Noisy: draws random numbers, other ones when it runs again",
    ),
    (
        Case("rows of two samples joined", merged, lambda: {"layer": nn.Linear(2 * D, 3)}),
        "layer.weight: linear: numbers of several samples stand in one row .remedy: gather and scatter rows by",
    ),
    (
        Case("rows that an operation without a name moved", moved_namelessly, lambda: {"layer": nn.Linear(D, 3)}),
        "layer.weight: linear: it is not known which samples its rows belong to after kron .remedy: gather and",
    ),
    (
        Case(
            "one sample in an operation without a rule",
            lambda m, x: torch.stack([F.prelu(x[i], m.p) for i in range(len(x))]),
            lambda: {"p": torch.randn(D)},
        ),
        "p: prelu: no exact rule for one sample without a batch .remedy: apply it to a batch",
    ),
    (
        Case("a diagonal", lambda m, x: torch.einsum("btt,td->btd", x[..., :T], m.p), lambda: {"p": torch.randn(T, D)}),
        "p: einsum: an einsum that takes a diagonal has no rule .remedy: write it as torch.matmul or",
    ),
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
        Case(
            "a sparse weight",
            lambda m, x: torch.sparse.mm(m.p.to_sparse(), x.t()).t(),
            lambda: {"p": torch.randn(3, D)},
            (D,),
        ),
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
    (
        Case("steps first in an operation without a rule", without_a_rule, layer_and_vector, (B, D)),
        "p: atan2: no exact rule for it where samples are not in the first dimension .remedy: transpose its operands",
    ),
    (Case("packed", packed, lambda: {"rnn": nn.GRU(D, 3), "p": torch.ones(1, B, 3)}), "gru: a packed sequence with a"),
    (Case("rows set", data_into_some_rows, weight_and_bias), "b: __setitem__: sets some rows of the batch"),
    (Case("a view written to", data_into_a_view, weight_and_bias), "b: copy_: writes data into a tensor made of param"),
    (Case("data into a parameter", overwritten, weight_and_bias), "b: __setitem__: writes data into a tensor made of"),
]
