"""LSTM, GRU, plain RNN and their cells, step by step, as torch's kernels return no gradient for each step.

A layer runs as linear layers over all steps (`clipping.rules.recurrence`). A cell is one step, which the tape sees, and
the uses of several steps add up before the norm. A packed sequence is padded; after its end the state stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.provenance.derived_parameters import depends_on_data, mark_data, samples_of
from clipping.rules.base import Refused
from clipping.rules.recurrence import GRU, LSTM, RELU, TANH, Cell, Layer, recurrence


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
    """Expand a state [B, H] to the rows of x [B, ...]; initial zeros have them, too."""
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
