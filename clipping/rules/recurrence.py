"""The steps of a recurrent layer as one node, so that its recurrent weight is used once, over all of them.

Step t reads h_{t-1} by a linear layer. Unrolled, that is one use of the weight for each step, and some ten nodes of
autograd's. Here the steps are run without a graph; then one linear layer reads all of h_0 ... h_{T-1}. What it gives is
not needed, but its gradient is: the node behind it hands it that of each step's gates, δ_t, by backpropagation through
time, and so the per-sample gradient of the weight is Σ_t δ_t h_{t-1}ᵀ, that of any linear layer over T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipping.sources import mark_data, samples_of

Step = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""t, gradients [B, H] of what step t gives and of its state -> those of both its gates [B, gH], of the state before."""


class Cell(NamedTuple):
    """One step of a recurrent layer.

    Attributes:
        run: (gates from the input [B, gH], from the hidden state [B, gH], state [B, H]) -> (what it gives, state).
        back: (the same of all steps [B, T, ·], the states after each) -> its `Step`.
    """

    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    back: Callable[[Tensor, Tensor, Tensor, Tensor], Step]


class Layer(NamedTuple):
    """A layer in one direction.

    Attributes:
        cell: its kind.
        weight, bias: of the hidden state, [gH, P] and [gH].
        projection: [P, H] of LSTMs that have one.
        reverse: the last step is the first.
        inside: [B, T], False where a sequence has ended, and the state stays; None where none has.
    """

    cell: Cell
    weight: Tensor
    bias: Tensor | None
    projection: Tensor | None
    reverse: bool
    inside: Tensor | None


def recurrence(layer: Layer, from_input: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All steps: the hidden states, [T, B, P] in memory as torch has them, and the last hidden state and state.

    Args:
        layer: what is run.
        from_input: gates, [B, T, gH].
        hidden, state: to begin with, [B, P] and [B, H].
    """
    samples = samples_of(from_input)
    # a state that is learned is read here, where the tape sees it
    hidden, state = (
        x + mark_data(torch.zeros_like(x, requires_grad=False), samples) if x.requires_grad else x
        for x in (hidden, state)
    )
    with torch.no_grad(), torch._C.DisableTorchFunction():
        ran = _run(layer, from_input.detach(), hidden.detach(), state.detach())
    gates = F.linear(mark_data(ran.read, samples), layer.weight, layer.bias)
    projected = None if layer.projection is None else F.linear(mark_data(ran.given, samples), layer.projection)
    out, *last = _Recurrence.apply(layer, ran, from_input, gates, projected, hidden, state)
    h, s = (mark_data(x, samples) for x in last)
    return out, h, s


class _Ran(NamedTuple):
    """Of each step, [B, T, ·]: what it read, its gates from that, its state before and after, what its cell gave.

    And what the layer gives.
    """

    read: Tensor
    gates: Tensor
    before: Tensor
    after: Tensor
    given: Tensor
    out: Tensor
    hidden: Tensor
    state: Tensor


def _run(layer: Layer, from_input: Tensor, h: Tensor, s: Tensor) -> _Ran:
    weight, bias, projection = (None if x is None else _cast(x.detach()) for x in layer[1:4])
    count = from_input.shape[1]
    found: list[Any] = [None] * count
    for t in reversed(range(count)) if layer.reverse else range(count):
        read, before = h, s
        gates = F.linear(h, weight, bias)  # type: ignore[arg-type]
        given, s = layer.cell.run(from_input[:, t], gates, s)
        h, after = given if projection is None else F.linear(given, projection), s
        if layer.inside is not None:
            now = layer.inside[:, t, None]
            h, s = torch.where(now, h, read), torch.where(now, s, before)
        found[t] = read, gates, before, after, given, h
    *steps, out = zip(*found, strict=True)
    return _Ran(*(torch.stack(each, 1) for each in steps), torch.stack(out), h.clone(), s.clone())  # type: ignore[call-arg]


def _cast(weight: Tensor) -> Tensor:
    """Once, and not in each step, where autocast would."""
    kind = weight.device.type
    wanted = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return weight.to(torch.get_autocast_dtype(kind)) if wanted else weight


class _Recurrence(torch.autograd.Function):
    """What was run, as a function of its gates, of what is projected if anything is, and of the first states."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        ran: _Ran,
        from_input: Tensor,
        gates: Tensor,
        projected: Tensor | None,
        hidden: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = layer.weight.detach(), None if layer.projection is None else layer.projection.detach()
        ctx.save_for_backward(from_input, ran.gates, ran.before, ran.after, *weights, layer.inside)
        ctx.cell, ctx.reverse = layer.cell, layer.reverse
        ctx.projected = None if projected is None else projected.dtype
        return ran.out, ran.hidden, ran.state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        from_input, gates, before, after, weight, projection, inside = ctx.saved_tensors
        outs, dh, ds = grads
        count, step = from_input.shape[1], ctx.cell.back(from_input, gates, before, after)
        weight = weight.to(gates.dtype)
        found: list[Any] = [None] * count
        for t in range(count) if ctx.reverse else reversed(range(count)):
            dh = dh + outs[t]
            kept: Any = None
            if inside is not None:
                now = inside[:, t, None]
                kept = torch.where(now, 0, dh), torch.where(now, 0, ds)
                dh, ds = torch.where(now, dh, 0), torch.where(now, ds, 0)
            given = dh if projection is None else dh.to(ctx.projected) @ projection.to(ctx.projected)
            into, out_of, ds = step(t, given, ds)
            found[t] = into, out_of, dh
            dh = (out_of.to(gates.dtype) @ weight).to(outs.dtype)
            if kept is not None:
                dh, ds = dh + kept[0], ds + kept[1]
        into, out_of, through = (torch.stack(each, 1) for each in zip(*found, strict=True))
        projected = None if projection is None else through.to(ctx.projected)
        return None, None, into.to(from_input.dtype), out_of.to(gates.dtype), projected, dh, ds


def _lstm(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + h).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _lstm_back(x: Tensor, h: Tensor, before: Tensor, after: Tensor) -> Step:
    i, f, g, o = (x + h).chunk(4, dim=-1)
    i, f, g, o, c = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid(), after.tanh()
    slopes = torch.cat([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), c * o * (1 - o)], -1)
    reaching = o * (1 - c * c)

    def step(t: int, given: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = (
            torch.addcmul(state, given, reaching[:, t])
            if state.dtype == given.dtype
            else state + given * reaching[:, t]
        )
        both = torch.cat([state, state, state, given], -1) * slopes[:, t]
        return both, both, state * f[:, t]

    return step


def _gru(x: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
    z, n = torch.sigmoid(xz + hz), torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    state = n + z * (state - n)
    return state, state


def _gru_back(x: Tensor, h: Tensor, before: Tensor, after: Tensor) -> Step:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    candidate = (1 - z) * (1 - n * n)
    slopes = torch.cat([candidate * hn * r * (1 - r), (before - n) * z * (1 - z), candidate], -1)
    of_hidden = torch.cat([torch.ones_like(z), torch.ones_like(z), r], -1)

    def step(t: int, given: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = state + given
        of_input = torch.cat([state, state, state], -1) * slopes[:, t]
        return of_input, of_input * of_hidden[:, t], state * z[:, t]

    return step


def _tanh(x: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.tanh(x + h)
    return out, out


def _tanh_back(x: Tensor, h: Tensor, before: Tensor, after: Tensor) -> Step:
    return _of_output(1 - after * after)


def _relu(x: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.relu(x + h)
    return out, out


def _relu_back(x: Tensor, h: Tensor, before: Tensor, after: Tensor) -> Step:
    return _of_output((after > 0).to(after.dtype))


def _of_output(slopes: Tensor) -> Step:
    """Of a cell whose state is what it gives, and which does not read the one before."""

    def step(t: int, given: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = (given + state) * slopes[:, t]
        return both, both, torch.zeros_like(state)

    return step


LSTM, GRU, TANH, RELU = Cell(_lstm, _lstm_back), Cell(_gru, _gru_back), Cell(_tanh, _tanh_back), Cell(_relu, _relu_back)
