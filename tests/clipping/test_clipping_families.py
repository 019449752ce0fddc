"""Rows that are not the batch's, weights in products of any layout, and odd things that models do with parameters.

Each pattern is a module of a few lines, held against the definition in float64, in every backend of the tape; or
refused by name.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import name_of
from oddities import EXACT, REFUSED, B, Case, D, T
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipping import Flat, PerLayer, UnsupportedModel, compare, load_backend
from dpbench.conformance.modules import Net

P, E = 3, 3
BACKENDS = ("fastgradclip", "ghost", "bk_mixed")
FAST = {"bk_mixed": {"timing": False}}
BY_FALLBACK = {
    "real and complex in every operation",
    "distances from as many points as samples",
    "elementwise operations of steps first",
    "custom functions",
    "solved",
    "an operator without vmap",
}


def made(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """Of the inputs' first numbers some are positive; none of one sample's, all of another's."""
    torch.manual_seed(1)
    model = Net(case.forward, **case.parts()).double()
    x = torch.randn(B, *case.shape).double()
    x[1, ..., 0], x[2, ..., 0] = -x[1, ..., 0].abs(), x[2, ..., 0].abs()
    return model, x, torch.randn(B).double()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.tanh().flatten(1).mean(1) - targets).square()


# Mixtures of experts


def routed(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B T, D], the weights of their experts [B T, 2] and which these are."""
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = m.router(tokens).softmax(-1).topk(2)
    return tokens, weights, chosen


def experts_by_index(m: Any, x: Tensor) -> Tensor:
    """Slices of a 3-d parameter, as Mixtral and its family."""
    tokens, weights, chosen = routed(m, x)
    result = torch.zeros_like(tokens)
    mask = F.one_hot(chosen, E).permute(2, 1, 0)
    for expert in mask.sum((-1, -2)).nonzero():
        expert = expert[0]
        which, token = torch.where(mask[expert])
        h = F.linear(tokens[token], m.up[expert]) + m.bias[expert]
        h = F.linear(F.silu(h), m.down[expert]) * weights[token, which, None]
        result.index_add_(0, token, h)
    return result.view(x.shape)


def experts_by_index_select(m: Any, x: Tensor) -> Tensor:
    tokens, weights, chosen = routed(m, x)
    result = tokens
    for number in range(E):
        token, which = (chosen == number).nonzero(as_tuple=True)
        h = torch.index_select(tokens, 0, token) @ m.up[number].t()
        h = F.layer_norm(h, (2 * P,), m.scale) @ m.down[number].t()
        result = result.index_add(0, token, h * weights[token, which].unsqueeze(-1))
    return result.unflatten(0, x.shape[:2])


def experts_sorted(m: Any, x: Tensor) -> Tensor:
    """Tokens sorted by expert, cut up, joined and put back, as JetMoe and DeepSeek's own code."""
    tokens, weights, chosen = routed(m, x)
    order = chosen.flatten().argsort()
    sizes = torch.bincount(chosen.flatten(), minlength=E).tolist()
    parts = tokens[order // 2].split(sizes)
    made = torch.cat([layer(part) for layer, part in zip(m.experts, parts, strict=True)])
    back = torch.empty_like(made)
    back[order] = made
    return (back.view(*chosen.shape, D) * weights.unsqueeze(-1)).sum(1).view(x.shape)


def experts_of_each_token(m: Any, x: Tensor) -> Tensor:
    """A matrix read for each token, and a batched product."""
    tokens, weights, chosen = routed(m, x)
    h = torch.bmm(m.up[chosen[:, 0]], tokens.unsqueeze(-1)).squeeze(-1) + m.bias[chosen[:, 0]]
    h = torch.bmm(h.tanh().unsqueeze(1), m.down[chosen[:, 0]].transpose(1, 2)).squeeze(1)
    return (h * weights[:, :1]).view(x.shape)


def experts_all(m: Any, x: Tensor) -> Tensor:
    """Every token to every expert, in a product with a stack of matrices, as Llama 4."""
    tokens = x.reshape(-1, D)
    scores = m.router(tokens).sigmoid()
    h = (tokens.repeat(E, 1) * scores.t().reshape(-1, 1)).view(E, -1, D)
    h = torch.bmm(torch.bmm(h, m.up.transpose(1, 2)).relu(), m.down.transpose(1, 2)) + m.shift[:, None]
    return h.reshape(E, -1, D).sum(0).view(x.shape)


def experts_grouped(m: Any, x: Tensor) -> Tensor:
    """The grouped product of torch, of rows sorted by expert; the last token is nobody's."""
    tokens, weights, chosen = routed(m, x)
    ids, order = chosen.flatten().sort()
    ends = torch.bincount(ids, minlength=E).cumsum(0).to(torch.int32)
    h = GROUPED(tokens[order // 2], m.up.transpose(1, 2), offs=ends) + m.bias[ids]
    h = GROUPED(h.relu(), m.down.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
    return h[order.argsort()].view(*chosen.shape, -1).sum(1).view(x.shape)


class Wide(TorchFunctionMode):
    """grouped_mm, which torch does not have in float64, by a loop."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (GROUPED, torch._grouped_mm):
            return func(*args, **kwargs)
        ends = kwargs["offs"].tolist()
        parts = zip([0, *ends], ends, args[1].unbind(), strict=False)
        return torch.cat([args[0][start:end] @ weight for start, end, weight in parts])


GROUPED: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm


def moe(d: int = D, p: int = 2 * P, **more: Tensor) -> dict[str, Any]:
    return {"router": nn.Linear(d, E), "up": torch.randn(E, p, d), "down": torch.randn(E, d, p), **more}


def with_bias() -> dict[str, Any]:
    return moe(bias=torch.randn(E, 2 * P))


def layers() -> dict[str, Any]:
    return {"router": nn.Linear(D, E), "experts": nn.ModuleList(nn.Linear(D, D) for _ in range(E + 1))[:E]}


EXPERTS = [
    Case("experts by index", experts_by_index, with_bias),
    Case("experts by index_select", experts_by_index_select, lambda: moe(scale=torch.randn(2 * P))),
    Case("experts, sorted", experts_sorted, layers),
    Case("experts, a matrix for each token", experts_of_each_token, with_bias),
    Case("experts, all of them", experts_all, lambda: moe(shift=torch.randn(E, D))),
    Case("experts, grouped", experts_grouped, with_bias),
]

# Rows of other orders


def graphs(m: Any, x: Tensor) -> Tensor:
    """Graphs end to end, as torch_geometric's layers have them: messages along edges, and the largest node of each."""
    count, nodes, _ = x.shape
    start, order = nodes * torch.arange(count)[:, None], x.argsort(1)
    ends = (start + order[..., 0]).flatten(), (start + order[..., 1] // 2).flatten()
    h = m.layer(m.norm(x.flatten(0, 1)))
    messages = h.index_select(0, ends[0]) * m.p
    arrived = h.new_zeros(len(h), 3).scatter_add_(0, ends[1][:, None].expand_as(messages), messages)
    h = (h + arrived) * m.p
    of = torch.arange(count).repeat_interleave(nodes)[:, None].expand_as(h)
    return m.head(h.new_zeros(count, 3).scatter_reduce_(0, of, h, "amax", include_self=False))


def split_up(m: Any, x: Tensor) -> Tensor:
    inside = x[..., 0] > -9
    flat = m.norm(x)[inside]
    parts = flat.split(inside.sum(1).tolist())
    return m.head(torch.stack([m.layer(part).mean(0) for part in parts]) * m.p)


def one_by_one(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.head(m.layer(m.norm(x[i])) * m.p + m.p) for i in range(len(x))])


def tokens_one_by_one(m: Any, x: Tensor) -> Tensor:
    ids = (x[..., 0] > 0).long()
    return (
        torch.stack([m.embedding(row) for row in ids]) + m.embedding(ids.flatten()[ids.flatten().argsort()]).sum() * 0
    )


def reversed_rows(m: Any, x: Tensor) -> Tensor:
    return m.layer(m.norm(x.flip(0))).flip(0)


def packed(m: Any, x: Tensor) -> Tensor:
    """Sequences of lengths that the batch is not sorted by, layer by layer, and a layer on what is packed."""
    lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    sequence = sequence._replace(data=m.head(sequence.data))
    made, state = m.rnn(sequence)
    made, _ = nn.utils.rnn.pad_packed_sequence(made, batch_first=True, total_length=T)
    made = m.after(made) if hasattr(m, "after") else made
    states = state if isinstance(state, tuple) else (state,)
    return torch.cat([made.flatten(1), *(each.transpose(0, 1).flatten(1) for each in states)], 1)


def packed_positions_first(m: Any, x: Tensor) -> Tensor:
    sequence = nn.utils.rnn.pack_sequence([row[: 1 + int(row[0, 0] > 0)] for row in x], enforce_sorted=False)
    return m.rnn(sequence)[1][0].transpose(0, 1).flatten(1)


def steps_by_length(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    h = x.new_zeros(len(x), 3)
    for t in range(T):
        h = m.cell(x[order, t], h)
    return h[order.argsort()]


def padded(m: Any, x: Tensor) -> Tensor:
    rows = nn.utils.rnn.pad_sequence([m.norm(row[: 1 + int(row[0, 0] > 0)]) for row in x])
    return F.linear(rows, m.p).sum(0)


def by_arrays(m: Any, x: Tensor) -> Tensor:
    """Indices in lists and in arrays of numpy's: samples swapped and back, positions, and one of each sample."""
    rows, last = np.arange(len(x)), (x[:, 1:, 0] > 0).sum(1).numpy()
    order = rows[::-1].copy()
    h = torch.zeros(len(x), T, 3).to(x)
    h[order] = m.layer(x[order])[:, np.array([2, 0, 1, 3]), :] * m.p[[2, 0, 1]]
    h[rows, 0] = m.p
    return h[:, [0, 2]].sum(1) + h[rows, last]


def samples_second(m: Any, x: Tensor) -> Tensor:
    """Positions first: samples sorted, and two views of each joined along the second dimension."""
    order = x[:, 0, 0].argsort()
    x = x.transpose(0, 1).index_select(1, order)
    one, other = m.layer(torch.cat([x, -x], 1)).chunk(2, 1)
    return (one * other).index_select(1, order.argsort()).transpose(0, 1)


def last_states(m: Any, x: Tensor) -> Tensor:
    """Of as many layers as samples, say, as people read them."""
    states = m.rnn(x)[1][0]
    h = states.view(m.rnn.num_layers, 2, len(x), 3)[-1]
    return m.head(torch.cat([h[0], h[1]], dim=1) + torch.stack([states[0], states[1]])[-1].repeat(1, 2))


def learned_states(m: Any, x: Tensor) -> Tensor:
    first = tuple(p.expand(-1, len(x), -1).contiguous() for p in (m.h, m.c))
    made, (h, c) = m.rnn(x, first)
    return torch.cat([made.flatten(1), h[0], c[0]], 1)


def steps_first(m: Any, x: Tensor) -> Tensor:
    return m.rnn(x.transpose(0, 1))[0].transpose(0, 1)


def recurrent() -> dict[str, Any]:
    return {"rnn": nn.LSTM(D, 3, B, batch_first=True, bidirectional=True), "head": nn.Linear(6, 3)}


def frozen(rnn: nn.Module) -> dict[str, Any]:
    return {"head": nn.Linear(D, 4), "rnn": rnn.requires_grad_(False), "after": nn.Linear(3, 2)}


def steps_first_after_a_layer(m: Any, x: Tensor) -> Tensor:
    made, (h, _) = m.rnn(m.head(x).transpose(0, 1))
    return torch.cat([m.after(made).transpose(0, 1).flatten(1), m.after(h[-1])], 1)


def row() -> dict[str, Any]:
    return {"layer": nn.Linear(D, 3), "norm": nn.LayerNorm(D), "p": torch.randn(3), "head": nn.Linear(3, 3)}


def only(*names: str) -> Callable[[], dict[str, Any]]:
    return lambda: {name: part for name, part in row().items() if name in names}


ROWS = [
    Case("graphs, end to end", graphs, row),
    Case("jagged, split", split_up, row),
    Case("one by one", one_by_one, row),
    Case("tokens, one by one", tokens_one_by_one, lambda: {"embedding": nn.Embedding(2, 3)}),
    Case("reversed", reversed_rows, only("layer", "norm")),
    Case("last states", last_states, recurrent),
    Case(
        "learned states",
        learned_states,
        lambda: {"rnn": nn.LSTM(D, 3, batch_first=True), "h": torch.randn(1, 1, 3), "c": torch.randn(1, 1, 3)},
    ),
    Case("steps first, relu", steps_first, lambda: {"rnn": nn.RNN(D, 3, 2, nonlinearity="relu", bias=False)}),
    Case("steps first, frozen", steps_first_after_a_layer, lambda: frozen(nn.LSTM(4, 3, 2))),
    Case("packed, frozen", packed, lambda: frozen(nn.LSTM(4, 3, 2, batch_first=True))),
    Case("packed LSTM", packed, lambda: {"head": nn.Linear(D, 4), "rnn": nn.LSTM(4, 3, 2, batch_first=True)}),
    Case("packed, positions first", packed_positions_first, lambda: {"rnn": nn.LSTM(D, 4, proj_size=3)}),
    Case("steps by length", steps_by_length, lambda: {"cell": nn.GRUCell(D, 3)}),
    Case("padded", padded, lambda: {"norm": nn.LayerNorm(D), "p": torch.randn(3, D)}),
    Case("by lists and arrays", by_arrays, only("layer", "p")),
    Case("samples in the second dimension", samples_second, only("layer")),
]

# Weights in products of any layout


def probe(m: Any, x: Tensor) -> Tensor:
    queries = m.queries.repeat(len(x), 1, 1)
    return m.attention(queries, x, x)[0]


def as_xlnet(m: Any, x: Tensor) -> Tensor:
    """XLNet's."""
    h = torch.einsum("ibh,hnd->ibnd", x.transpose(0, 1), m.w)
    scores = torch.einsum("ibnd,jnd->bnij", h + m.p, m.r)
    return torch.einsum("bnid,hnd->bih", scores.softmax(-1) @ h[:2].permute(1, 2, 0, 3), m.w)


W = {"w": (D, 2, 3), "p": (3,), "r": (2, 2, 3)}


def shaped(**shapes: tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(*shape) for name, shape in shapes.items()}


LAYOUTS = [
    Case("on the left", lambda m, x: m.w @ x.transpose(1, 2), shaped(w=(3, D))),
    Case("heads", lambda m, x: x.unflatten(-1, (2, 3)).transpose(1, 2) @ m.w, shaped(w=(2, 3, 4))),
    Case(
        "baddbmm of heads first",
        lambda m, x: torch.baddbmm(m.b, x.view(-1, 2, 3).permute(1, 0, 2), m.w).permute(1, 0, 2).reshape(len(x), T, 8),
        shaped(w=(2, 3, 4), b=(2, 1, 4)),
    ),
    Case(
        "learned queries of an attention",
        probe,
        lambda: {"queries": torch.randn(1, 2, D), "attention": nn.MultiheadAttention(D, 2, batch_first=True)},
    ),
    Case(
        "a distribution of a learned width",
        lambda m, x: -torch.distributions.Normal(m.layer(x), m.p.exp()).log_prob(x[..., :3]),
        only("layer", "p"),
    ),
    Case(
        "copies for each sample in any operation",
        lambda m, x: F.cosine_similarity(m.w.repeat(len(x), 1, 1), x[:, :2], dim=2),
        shaped(w=(2, D)),
    ),
    Case("einsum that sums the data", lambda m, x: torch.einsum("btd,ne->bne", x, m.w), shaped(w=(2, 3))),
    Case("einsum without an arrow", lambda m, x: torch.einsum("btd,de", x, m.w), shaped(w=(D, 3))),
    Case(
        "einsum with rows of an expanded one",
        lambda m, x: torch.einsum("btd,bde->bte", x, m.w.expand(len(x), D, 3)),
        shaped(w=(D, 3)),
    ),
    Case("positions first", as_xlnet, shaped(**W)),
    Case("einsum of data on both sides", lambda m, x: torch.einsum("btd,dne,bte->bn", x, m.w, x), shaped(w=(D, 2, D))),
    Case(
        "einsum of several weights",
        lambda m, x: torch.einsum("rn,...d,dpr,pn", m.a, x, m.b, m.c),
        shaped(a=(2, 3), b=(D, 4, 2), c=(4, 3)),
    ),
]

CASES = [*EXPERTS, *ROWS, *LAYOUTS, *EXACT]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_exact(case: Case) -> None:
    """Each kind of route once: gradients that are discarded, Gram matrices, and the planner's, verified besides."""
    model, x, y = made(case)
    with Wide():
        for clip, backends in ((Flat(0.05), BACKENDS), (PerLayer(0.05), ("bk_mixed",))):
            with load_backend("microbatch")(model, loss, clip=clip) as b:
                reference = b(x, y)
            assert all(g.any() for g in reference.grads.values())
            for name in backends:
                verify = name == "bk_mixed" and isinstance(clip, Flat)
                with load_backend(name)(model, loss, clip=clip, verify=verify, **FAST.get(name, {})) as b:
                    agreement = compare(b(x, y), reference)
                assert agreement.within(2e-13), (name, clip, agreement)
                assert (b.coverage["fallback"] > 0) == (case.name in BY_FALLBACK)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_grouped_product_of_torch_itself(backend: str) -> None:
    """In float32, which it has, for rows of sixteen bytes or more."""
    model = Net(experts_grouped, **moe(8, 4, bias=torch.randn(E, 4)))
    x, y = torch.randn(B, T, 8), torch.randn(B)
    with load_backend("microbatch")(model, loss, clip=Flat(0.05)) as b:
        reference = b(x, y)
    with load_backend(backend)(model, loss, clip=Flat(0.05), **FAST.get(backend, {})) as b:
        assert compare(b(x, y), reference).within(1e-4)


@pytest.mark.parametrize("case", EXPERTS[:-1], ids=name_of)
def test_exact_by_timed_routes_in_batches_of_other_sizes(case: Case) -> None:
    """Each time other rows go to other experts; the second step is timed."""
    (model, *_), clip = made(case), Flat(0.05)
    with (
        load_backend("microbatch")(model, loss, clip=clip) as oracle,
        load_backend("bk_mixed")(model, loss, clip=clip) as b,
    ):
        for count in (B, B, 2, 7, 1):
            x, y = torch.randn(count, T, D).double(), torch.randn(count).double()
            agreement = compare(b(x, y), oracle(x, y))
            assert agreement.within(1e-9), (count, agreement)


class Attends(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


DROPPING = {
    **{kind.__name__: functools.partial(kind, D, 4, 2) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    "attention": functools.partial(Attends, D, 1),
}


@pytest.mark.parametrize("kind", DROPPING)
def test_dropout_inside_of_an_operation_is_verified(kind: str) -> None:
    """The definition and the rule draw alike, though only the rule's dropout is an operation of its own."""
    torch.manual_seed(0)
    layer, x = DROPPING[kind](dropout=0.5, batch_first=True), torch.randn(B, 9, D)
    with load_backend("bk_mixed")(layer, lambda outputs, _: outputs[0].square().sum((1, 2)), compile=False) as b:
        b(x, torch.zeros(B))
        found, again = b(x, torch.zeros(B)).losses, layer(x)[0].square().sum((1, 2))
    assert not torch.allclose(found, again)  # it drops


def test_refused_by_name():
    for case, said in REFUSED:
        model, x, y = made(case)
        for backend in BACKENDS:
            with (
                pytest.raises(UnsupportedModel, match=said) as error,
                load_backend(backend)(model, loss, verify=False) as b,
            ):
                b(x, y)
            assert "remedy: " in str(error.value) and "\n" not in str(error.value)
