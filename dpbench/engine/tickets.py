"""Which of the loader's batches does the model read? The last one drawn is not always the one that is stepped.

Frameworks read ahead: accelerate, timm and transformers' Trainer ask for the next batch before they step this one. So a
batch is known by its tensors. Each that is handed out has a `Ticket`; when the model is called, the ticket is found
whose tensors these are:

    the same tensors, or views of them
    copies: on another device, of another dtype
    copies up to a scale and a shift in each feature, as a normalisation makes them

Where one ticket alone is open, it is that one. Where several are and none is recognised, nobody knows of which records
the losses are, how many of them are padding, and whether the logical batch is complete: that is refused. A batch whose
step has raised stays open until another one is stepped, since it may be tried again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from dpbench.engine.containers import tensors_in
from dpbench.engine.errors import Misuse

ROWS, COLUMNS, CANDIDATES = 16, 4, 64
"""Of a tensor so many samples are compared, in so many features, which are those of so many that differ most."""
EXACT = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""What casting leaves of a scaled copy, relative to its spread; 1e-4 in other dtypes."""


class Ticket:
    """A physical batch that was handed out.

    Args:
        step: the number of its logical batch.
        is_last: the last piece of that.
        real, handed: how many samples of the data it has, and how many in all, with padding.
        batch: as the loader yields it, in whatever containers.

    Attributes:
        failed: a step of it has raised.
        released: of this logical batch something was released, or may have been.
    """

    failed = released = False

    def __init__(self, step: int, is_last: bool, real: int, handed: int, batch: Any) -> None:
        self.step, self.is_last, self.real, self.handed = step, is_last, real, handed
        self.probes = [_Probe(x) for x in tensors_in(batch) if x.dim()]

    def distance(self, tensors: list[Tensor]) -> float:
        """0 if these are its tensors, infinite if they cannot be made of them; NaN if nothing can be told.

        Args:
            tensors: that the model was called with.
        """
        if not self.probes:
            return float("nan")
        found = [min((probe.distance(x) for probe in self.probes), key=_unknown_last) for x in tensors]
        known = [each for each in found if each == each]
        return max(known) if known else float("nan")


class Tickets:
    """Those that were handed out and not stepped yet.

    Attributes:
        current: of the batch that the model has read since the last step.
    """

    def __init__(self) -> None:
        self.current: Ticket | None = None
        self._open: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._open)

    def hand_out(self, ticket: Ticket) -> None:
        """The loader gives this batch to the caller.

        Args:
            ticket: of the batch.
        """
        self._open.append(ticket)

    def clear(self) -> None:
        """No batch is open any longer."""
        self._open.clear()
        self.current = None

    def first(self) -> Ticket | None:
        """Of the batch that is read next, as far as anybody knows."""
        return self.current or next((ticket for ticket in self._open if not ticket.released), None)

    def read(self, inputs: Any, batch_size: int) -> None:
        """The model is called with these.

        Args:
            inputs: of the model.
            batch_size: of these.

        Raises:
            Misuse: several batches are open, and it cannot be told which one this is.
        """
        self.current = self._recognised([x for x in tensors_in(inputs) if x.dim()], batch_size)

    def take(self) -> Ticket | None:
        """The ticket of what is stepped; None for a batch of somebody else's. Those before it were left out."""
        return self._close(self.current)

    def take_empty(self) -> Ticket | None:
        """The same for a batch of no samples that the model was not called with."""
        fresh = [ticket for ticket in self._open if not ticket.released]
        if self.current is None and fresh:
            return self._close(min(fresh, key=lambda ticket: (ticket.real > 0, ticket.failed)))
        return self.take()

    def give_back(self, ticket: Ticket, *, released: bool) -> None:
        """Its step has raised: after a release, or before.

        Args:
            ticket: of the batch.
            released: whether its noise was drawn.
        """
        ticket.failed, ticket.released = True, released
        self._open.insert(0, ticket)

    def _close(self, ticket: Ticket | None) -> Ticket | None:
        self.current = None
        if ticket is not None:
            del self._open[: self._open.index(ticket) + 1]
        return ticket

    def _recognised(self, tensors: list[Tensor], batch_size: int) -> Ticket | None:
        failed = any(ticket.failed for ticket in self._open)
        if len(self._open) < 2 and not failed:
            return next(iter(self._open), None)
        fitting = [ticket for ticket in self._open if ticket.handed == batch_size]
        if fitting and not batch_size:
            return fitting[0]
        distances = [ticket.distance(tensors) for ticket in fitting]
        if 0.0 in distances:
            return _again(fitting[distances.index(0.0)])
        limit = max((EXACT.get(x.dtype, 1e-4) for x in tensors if x.is_floating_point()), default=0.0)
        alike = [ticket for ticket, distance in zip(fitting, distances, strict=True) if distance <= limit]
        if len(alike) != 1:
            raise Misuse(
                f"expected one of the {len(self._open)} batches that data_loader has handed out and that were not "
                f"stepped yet, got inputs of {batch_size} samples that are "
                + ("none of these" if not alike else "several of these")
                + ": hand the model their tensors, moved or cast or normalised, in the order of their samples; or read "
                "no batch ahead, and leave none out (weigh its losses by 0 instead)"
                + ("; a step of one of these has raised, so begin to iterate anew to leave it" if failed else "")
            )
        return _again(alike[0])


def _again(ticket: Ticket) -> Ticket:
    if ticket.released:
        raise Misuse(
            "expected another batch of data_loader, got the one whose step raised after its release had begun: it is "
            "accounted, and a second release of the same sample would not be; go on with the next one"
        )
    return ticket


class _Probe:
    """A few numbers of a tensor [B, ...], by which copies of it are known."""

    def __init__(self, x: Tensor) -> None:
        self._itself = weakref.ref(x)
        storage = x.untyped_storage()
        own = storage.nbytes() == x.numel() * x.element_size()  # not a part of what other batches are parts of, too
        self._storage, self._shape = storage.data_ptr() if own else 0, x.shape
        count = x.shape[0]
        self._rows = torch.linspace(0, max(0, count - 1), min(count, ROWS)).long()
        self._columns = torch.zeros(0, dtype=torch.long)
        if x.numel():
            features = x.numel() // count
            candidates = torch.linspace(0, features - 1, min(features, CANDIDATES)).long()
            self._columns = candidates
            spread = self._of(x).var(0, correction=0)
            self._columns = candidates[spread.topk(min(COLUMNS, len(candidates))).indices]
            self._values = self._of(x)

    def distance(self, x: Tensor) -> float:
        """See `Ticket.distance`."""
        itself = self._itself()
        if itself is x or (itself is not None and self._storage and x.untyped_storage().data_ptr() == self._storage):
            return 0.0
        if x.shape[0] != self._shape[0] or x.numel() != self._shape.numel():
            return float("inf")
        if not x.numel():
            return float("nan")
        found, mine = self._of(x), self._values
        if torch.equal(found, mine.to(x.dtype).double()):
            return 0.0
        if not x.is_floating_point():
            return float("inf")
        if len(found) < COLUMNS:  # of so few samples anything is a scaled copy
            return float("inf")
        found, mine = found - found.mean(0), mine - mine.mean(0)
        told = mine.norm(dim=0) > 0
        if not told.any():
            return float("nan")
        found, mine = found[:, told], mine[:, told]
        scale = (found * mine).sum(0) / (mine * mine).sum(0)
        left = (found - scale * mine).norm(dim=0) / found.norm(dim=0).clamp(min=1e-30)
        return float(left.max()) if bool((scale > 0).all()) else float("inf")

    def _of(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(x.shape[0], -1)
        rows, columns = self._rows.to(x.device), self._columns.to(x.device)
        return flat[rows][:, columns].to("cpu", torch.float64)


def _unknown_last(distance: float) -> tuple[bool, float]:
    return distance != distance, distance
