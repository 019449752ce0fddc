"""LSTM, GRU, plain RNN and their cells, step by step, as torch's kernels return no gradient for each step.

The tape sees each call of a cell as one use, and adds the uses of several steps before the norm. A whole layer would
have one use of the recurrent weight and some ten nodes a step, as step t applies a linear layer to h_{t-1}. Here all
steps run without a graph, as one autograd node. Then one linear layer reads all of h_0 ... h_{T-1}. Only its gradient
is needed, not its output: its node receives the gradient δ_t of each step's gates by backpropagation through time. So
the per-sample gradient of the weight is Σ_t δ_t h_{t-1}ᵀ, as for any linear layer over T positions. A packed sequence
is padded; its state does not change after its end.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipping.core.dtypes import as_autocast
from clipping.provenance.derived_parameters import depends_on_data, mark_data, samples_of
from clipping.rules.base import Refused


class Cell(NamedTuple):
    """One step of a recurrent layer.

    Attributes:
        run: (gates from the input [B, gH], gates from the hidden state [B, gH], state [B, H]) -> (output, new state).
        slopes: (the arguments of `run` for all steps, and the states after each, [B, T, ·]) -> factors that `back`
            uses, each [B, T, ·].
        back: (factors of one step, gradients [B, H] of its output and of its state) -> gradients of both its gates and
            of the previous state.
    """

    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    slopes: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    back: Callable[..., tuple[Tensor, Tensor, Tensor]]


class Layer(NamedTuple):
    """A recurrent layer in one direction.

    Attributes:
        cell: its cell.
        weight, bias: recurrent weight [gH, P] and bias [gH].
        projection: [P, H] of an LSTM with projection, else None.
        reverse: run the last step first.
        inside: [B, T], False where a sequence has ended and its state stays; None if no sequence ends early.
    """

    cell: Cell
    weight: Tensor
    bias: Tensor | None
    projection: Tensor | None
    reverse: bool
    inside: Tensor | None


def recurrence(layer: Layer, from_input: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run all steps; return the hidden states, [T, B, P] in memory as in torch, and the last hidden state and state.

    Args:
        from_input: gates, [B, T, gH].
        hidden, state: initial values, [B, P] and [B, H].
    """
    samples = samples_of(from_input)
    # the tape sees here that a learned state is read
    hidden, state = (
        x + mark_data(torch.zeros_like(x, requires_grad=False), samples) if x.requires_grad else x
        for x in (hidden, state)
    )
    with torch.no_grad(), torch._C.DisableTorchFunction():
        ran = _run(layer, from_input.detach(), hidden.detach(), state.detach())
    gates = F.linear(mark_data(ran.read, samples), layer.weight, layer.bias)
    projected = None if ran.given is None else F.linear(mark_data(ran.given, samples), layer.projection)  # type: ignore[arg-type]
    out, *last = _Recurrence.apply(layer, ran, from_input, gates, projected, hidden, state)
    h, s = (mark_data(x, samples) for x in last)
    return out, h, s


class _Ran(NamedTuple):
    """The hidden state that each step reads and, if projected, the cell's output, [B, T, ·]; slopes; the results."""

    read: Tensor
    given: Tensor | None
    slopes: tuple[Tensor, ...]
    out: Tensor
    hidden: Tensor
    state: Tensor


def _run(layer: Layer, from_input: Tensor, h: Tensor, s: Tensor) -> _Ran:
    weight, bias, projection = (None if x is None else as_autocast(x.detach()) for x in layer[1:4])
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
        found[t] = read, given, h, gates, before, after
    columns = [list(column) for column in zip(*found, strict=True)]
    found.clear()
    after, before, gates = (torch.stack(columns.pop(), 1) for _ in range(3))
    slopes = layer.cell.slopes(from_input, gates, before, after)
    del after, before, gates
    out, cells = torch.stack(columns.pop()), columns.pop()
    projects = None if projection is None else torch.stack(cells, 1)
    return _Ran(torch.stack(columns.pop(), 1), projects, slopes, out, h.clone(), s.clone())


class _Recurrence(torch.autograd.Function):
    """The finished run as a function of its gates, of the projected output if any, and of the first states."""

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
        ctx.save_for_backward(*weights, layer.inside, *ran.slopes)
        ctx.cell, ctx.reverse = layer.cell, layer.reverse
        ctx.dtypes = from_input.dtype, gates.dtype, None if projected is None else projected.dtype
        return ran.out, ran.hidden, ran.state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight, projection, inside, *slopes = ctx.saved_tensors
        of_input, of_hidden, of_projected = ctx.dtypes
        weight = weight.to(of_hidden)
        projection = None if projection is None else projection.to(of_projected)
        outs, dh, ds = grads
        steps = list(zip(outs.unbind(0), *(each.unbind(1) for each in slopes), strict=True))
        found: list[Any] = [None] * len(steps)
        for t in range(len(steps)) if ctx.reverse else reversed(range(len(steps))):
            out, *mine = steps[t]
            dh = dh + out
            kept: Any = None
            if inside is not None:
                now = inside[:, t, None]
                kept = torch.where(now, 0, dh), torch.where(now, 0, ds)
                dh, ds = torch.where(now, dh, 0), torch.where(now, ds, 0)
            given = dh if projection is None else dh.to(of_projected) @ projection
            into, out_of, ds = ctx.cell.back(*mine, given, ds)
            found[t] = into, out_of, dh
            dh = (out_of.to(of_hidden) @ weight).to(outs.dtype)
            if kept is not None:
                dh, ds = dh + kept[0], ds + kept[1]
        same = all(into is out_of for into, out_of, _ in found)
        into = torch.stack([each[0] for each in found], 1)
        out_of = into if same else torch.stack([each[1] for each in found], 1)
        projected = None if projection is None else torch.stack([each[2] for each in found], 1).to(of_projected)
        return None, None, into.to(of_input), out_of.to(of_hidden), projected, dh, ds


def _lstm(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + h).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _lstm_slopes(x: Tensor, h: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (x + h).chunk(4, dim=-1)
    i, f, g, o, c = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid(), after.tanh()
    of_gates = torch.cat([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), c * o * (1 - o)], -1)
    return of_gates, o * (1 - c * c), f


def _lstm_back(of_gates: Tensor, of_state: Tensor, f: Tensor, given: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    state = state + given * of_state
    both = torch.cat([state, state, state, given], -1) * of_gates
    return both, both, state * f


def _gru(x: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
    z, n = torch.sigmoid(xz + hz), torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    state = n + z * (state - n)
    return state, state


def _gru_slopes(x: Tensor, h: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    candidate = (1 - z) * (1 - n * n)
    return candidate * hn * r * (1 - r), (before - n) * z * (1 - z), candidate, r, z


def _gru_back(
    of_r: Tensor, of_z: Tensor, of_n: Tensor, r: Tensor, z: Tensor, given: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    state = state + given
    first, second, third = state * of_r, state * of_z, state * of_n
    return torch.cat([first, second, third], -1), torch.cat([first, second, third * r], -1), state * z


def _plain(activation: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Cell:
    """A cell that returns its state as output and does not read the previous state otherwise."""

    def run(x: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = activation(x + h)
        return out, out

    def back(slope: Tensor, given: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = (given + state) * slope
        return both, both, torch.zeros_like(state)

    return Cell(run, lambda x, h, before, after: (slope(after),), back)


LSTM, GRU = Cell(_lstm, _lstm_slopes, _lstm_back), Cell(_gru, _gru_slopes, _gru_back)  # type: ignore[arg-type]
TANH = _plain(torch.tanh, lambda after: 1 - after * after)
RELU = _plain(torch.relu, lambda after: (after > 0).to(after.dtype))


def _stepped(
    cell: Cell,
    input: Tensor,
    hidden: Tensor,
    state: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step: input [B, d], hidden and state [B, H]."""
    hidden, state = (_as_rows_of(input, x.view(x.shape)) for x in (hidden, state))
    return cell.run(F.linear(input, w_ih, b_ih), F.linear(hidden, w_hh, b_hh), state)


def _as_rows_of(x: Tensor, state: Tensor) -> Tensor:
    """Mark a state [B, H] that does not depend on data (initial zeros) with the rows of x [B, ...]."""
    return mark_data(state, samples_of(state if depends_on_data(state) else x))


def _sequence(cell: Cell, input: Tensor, hx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run sequences [T, B, d] or [B, T, d]; or packed [N, d], with each step's batch size in place of hx."""
    if isinstance(hx, Tensor) and not hx.is_floating_point():
        return _packed(cell, input, hx, *args)
    hidden, state = (hx, hx) if isinstance(hx, Tensor) else hx
    return _unrolled(cell, input, hidden, state, *args)


def _packed(
    cell: Cell, data: Tensor, sizes: Tensor, hx: Any, params: Any, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a packed sequence, data [N, d] and sizes [T]; the output is packed."""
    given = (hx, hx) if isinstance(hx, Tensor) else hx
    if any(x.requires_grad or bool(x.any()) for x in given):
        raise Refused("a packed sequence with a state to begin with has no rule", "pad the sequences, mask the loss")
    hidden, state = map(torch.zeros_like, given)
    padded, lengths = torch._pad_packed_sequence(data, sizes, True, 0.0, len(sizes))
    inside = torch.arange(len(sizes), device=data.device) < lengths.to(data.device)[:, None]
    rest = (*options, True, inside)  # batch first
    out, h, s = _unrolled(cell, padded, hidden, state, params, *rest)
    return torch._pack_padded_sequence(out, lengths, True)[0], h, s


def _unrolled(
    cell: Cell,
    input: Tensor,
    hidden: Tensor,
    state: Tensor,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    inside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all layers and directions; state [layers · directions, B, H], hidden likewise, or with proj_size for H.

    Args:
        inside: [B, T], False where a sequence has ended; None if no sequence ends early.
    """
    if input.dim() != 3:
        raise Refused("a recurrent layer without a batch dimension has no rule", "give it a batch")
    x = input if batch_first else input.transpose(0, 1)
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    plain = 4 if has_biases else 2
    last_hidden, last_state = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w_ih, w_hh, *more = params[index * per_cell : (index + 1) * per_cell]
            b_ih, b_hh = more[:2] if has_biases else (None, None)
            projection = more[-1] if per_cell > plain else None
            from_input = F.linear(x, w_ih, b_ih)
            h, s = (_as_rows_of(x, each[index]) for each in (hidden, state))
            run = Layer(cell, w_hh, b_hh, projection, bool(direction), inside)
            out, h, s = recurrence(run, from_input, h, s)
            outputs.append(out)
            last_hidden.append(h)
            last_state.append(s)
        out = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
        if dropout and train and layer < num_layers - 1:
            out = F.dropout(out, dropout, train)
        # steps first in memory, as in torch: dropout draws in that order
        x = mark_data(out.transpose(0, 1), samples_of(h))
    return x if batch_first else x.transpose(0, 1), torch.stack(last_hidden), torch.stack(last_state)


def _of_sequences(cell: Cell, results: int = 2) -> Callable[..., Any]:
    return lambda input, *args: _sequence(cell, input, *args)[:results]


def _of_a_step(cell: Cell) -> Callable[..., Any]:
    return lambda input, hx, *params: _stepped(cell, input, hx, hx, *params)[0]


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _of_sequences(LSTM, 3),
    torch.gru: _of_sequences(GRU),
    torch.rnn_tanh: _of_sequences(TANH),
    torch.rnn_relu: _of_sequences(RELU),
    torch.lstm_cell: lambda input, hx, *params: _stepped(LSTM, input, *hx, *params),
    torch.gru_cell: _of_a_step(GRU),
    torch.rnn_tanh_cell: _of_a_step(TANH),
    torch.rnn_relu_cell: _of_a_step(RELU),
}
