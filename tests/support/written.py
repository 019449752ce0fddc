"""Cases that write rows into other tensors and read them: rows of the batch, of a part of it, or of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oddities import B, Case, D, Forward, T, layer_and_vector
from torch import Tensor, nn

Taking = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(module, rows [n, 3] of some positions, their samples [n], their positions [n]) -> [n, 3]."""


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


def of_sorted(back: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    """Sort samples, and restore their order by `back(rows, order)`."""

    def forward(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        h = m.layer(x)
        return m.after((back(m.layer(x[order]).tanh() * m.p, order) + h).square())

    return forward


def of_ends(write: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> Forward:
    """`write(module, h [B, T, 3], mask [B, T], last [B])` changes entries of the sequences h."""

    def forward(m: Any, x: Tensor) -> Tensor:
        inside = x[..., 0] > 0
        return m.after(write(m, m.layer(x), inside, inside.sum(1).clamp(max=T - 1)).tanh()).sum(1)

    return forward


def halves(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    found, half = torch.zeros(h.shape).to(h), len(h) // 2
    found[:half] = h[:half]
    found[half:] = h[half:]
    return found * m.p


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


def counted(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Divide by the number of rows of each sample."""
    counts = torch.zeros(B).to(h).index_add(0, samples, torch.ones(len(h)).to(h))
    return h / counts[samples][:, None] * m.p


def masked(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    h = h.clone()
    h[h[:, 0] > 0] = m.p
    return h.index_put((h[:, 1] > 0,), m.p) * h


def turned(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Reverse rows and restore them by gathering entries; then sort each row's entries."""
    back = torch.arange(len(h)).flip(0)[:, None]
    h = m.layer.bias + h.gather(0, back.expand(h.shape)) * m.p
    h = torch.take_along_dim(h, back, 0)
    return h.gather(1, h.detach().argsort(1)) * m.p


def beside(m: Any, h: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    h = torch.cat([h[:, :1], m.p[1:].expand(len(h), 2)], 1)
    return torch.stack([h, m.p.expand(len(h), 3)], 1).prod(1) + h


def padded(m: Any, x: Tensor) -> Tensor:
    inside = x[..., 0] > 0
    places = inside.nonzero().unbind(1)
    h = m.layer(x[inside])
    return m.after(h.new_zeros(*x.shape[:2], 3).index_put(places, h).tanh() * m.p).sum(1)


def written_one_by_one(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros(len(x) * T, 3).to(x)
    for i in reversed(range(len(x))):
        found[i * T : (i + 1) * T] = m.layer(x[i])
    return m.after(found.tanh() * m.p).view(len(x), T, 3).sum(1)


def ends_one_by_one(m: Any, h: Tensor, inside: Tensor, last: Tensor) -> Tensor:
    h = h.clone()
    for i, end in enumerate(last):
        h[i, int(end)] = m.p
    return h


def assigned(m: Any, h: Tensor, inside: Tensor, last: Tensor) -> Tensor:
    h = h.clone()
    h[torch.arange(len(h)), last] = m.p
    return h


def filled(m: Any, h: Tensor, inside: Tensor, last: Tensor) -> Tensor:
    """Fill positions outside the mask with a parameter."""
    found = m.p.expand(h.shape).clone()
    found[inside] = h[inside]
    return found


def filled_at(m: Any, h: Tensor, inside: Tensor, last: Tensor) -> Tensor:
    at = torch.arange(len(h)), last
    found = m.p.expand(h.shape).clone()
    found[at] = h[at]
    return found * m.p.expand(h.shape).clone().index_put(at, h[at])


def flat(m: Any, h: Tensor, inside: Tensor, last: Tensor) -> Tensor:
    rows = h.flatten(0, 1).clone()
    rows[torch.arange(len(h)) * T + last] = m.p
    return rows.view(h.shape)


TAKING = (halves, columns, copied_columns, one_of_two, counted, masked, turned, beside)
WRITTEN = [
    *(
        Case(f"of some: {take.__name__}", of_some(take), parts)
        for take in (halves, columns, copied_columns, one_of_two)
    ),
    *(Case(f"of some: {take.__name__}", of_some(take), parts) for take in (counted, masked, turned, beside)),
    Case("sorted, index_copy", of_sorted(lambda h, at: torch.zeros_like(h).index_copy(0, at, h)), parts, (D,)),
    Case("sorted, index_copy_", of_sorted(lambda h, at: torch.zeros(h.shape).to(h).index_copy_(0, at, h)), parts, (D,)),
    Case("sorted, index_add", of_sorted(lambda h, at: torch.zeros_like(h).index_add(0, at, h)), parts, (D,)),
    Case("sorted, index_put", of_sorted(lambda h, at: torch.zeros_like(h).index_put((at,), h)), parts, (D,)),
    Case("sorted, gather", of_sorted(lambda h, at: h.gather(0, at.argsort()[:, None].expand(h.shape))), parts, (D,)),
    Case("sorted, take_along_dim", of_sorted(lambda h, at: h.take_along_dim(at.argsort()[:, None], 0)), parts, (D,)),
    Case("padded", padded, parts),
    Case("written one by one", written_one_by_one, parts),
    Case("ends, one by one", of_ends(ends_one_by_one), parts),
    Case("ends", of_ends(assigned), parts),
    Case("ends, index_put", of_ends(lambda m, h, _, at: h.index_put((torch.arange(len(h)), at), m.p)), parts),
    Case(
        "ends, added",
        of_ends(lambda m, h, _, at: h.clone().index_put_((torch.arange(len(h)), at), m.p, accumulate=True)),
        parts,
    ),
    Case("ends of rows", of_ends(flat), parts),
    Case("filled", of_ends(filled), parts),
    Case("filled at", of_ends(filled_at), parts),
]
"""Backends on the tape are exact on each."""
