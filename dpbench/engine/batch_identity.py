"""Identify which of the loader's batches the model reads: the last one drawn is not always the one stepped.

Frameworks read ahead: accelerate, timm and transformers' Trainer fetch the next batch before they step this one. So a
`Ticket` for each batch handed out remembers its tensors. When the model is called, its inputs match a ticket if they
are, in this order of preference:

    the same tensors, or views of them
    copies: on another device, of another dtype
    copies up to a scale and a shift in each feature, as a normalisation makes them

If only one ticket is open, it is taken; but a padded one is stepped only if a feature of its tensors is found in the
inputs, in the order of its rows, as padding is known by its place. If several are open and none matches, the call is
refused: the records of the losses, the padding among them, and whether the logical batch is complete would be unknown.
A batch whose step raised stays open until another is stepped, as it may be retried.

A batch that was stepped or left out is remembered for a while. The model may read it again, to evaluate it, but no step
accepts it: its records would be in two sums, or twice in one, and its padding would count as records. So are the parts
of a logical batch that the caller accumulates, until its step.
"""

import math
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from clipping.core.autograd import versions_of
from clipping.core.batches import tensors_of
from dpbench.engine.errors import Misuse, PrivacyWarning

ROWS, COLUMNS, CANDIDATES = 16, 4, 256
"""Samples and features of a tensor to compare: the features of the largest variance among evenly spaced candidates."""
CLOSED, COMPARED = 64, 2
"""Number of finished batches to remember, and of the last ones that are also recognised by copies."""
TELLING = 8
"""Least number of different values that identify a copy of an earlier part: coded features may agree by chance."""
EXACT = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest error that casting leaves in a scaled copy, relative to its spread; 1e-4 in other dtypes."""


_Read = list[tuple[weakref.ref[Tensor], int]]  # tensors, none of them kept alive, and their versions


class Ticket:
    """A physical batch that was handed out.

    Args:
        step: number of its logical batch.
        is_last: whether it is the last piece of its logical batch.
        real, handed: the number of the data's samples, and of all samples, with padding.
        batch: as the loader yields it, in any containers.

    Attributes:
        failed: a step of it raised.
        released: its logical batch was released, or may have been.
        in_order: padding is known to come last in all that the model has read since the last step.

    Methods take:
        tensors: the model's inputs.
    """

    failed = released = False
    in_order = True

    def __init__(self, step: int, is_last: bool, real: int, handed: int, batch: Any) -> None:
        self.step, self.is_last, self.real, self.handed = step, is_last, real, handed
        self.probes = [_Probe(x) for x in _dense_in(batch)]
        if handed > real:
            self.probes += [_Probe(x) for x in _stacked(batch, handed)]
        self._read: _Read = []

    def distance(self, tensors: list[Tensor]) -> float:
        """Returns 0 if `tensors` are the ticket's, infinity if they cannot come from it, NaN if unknown."""
        if not self.probes:
            return math.nan
        found = [min((probe.distance(x) for probe in self.probes), key=_likeliest) for x in tensors]
        return max((each for each in found if not math.isnan(each)), default=math.nan)

    def own(self, tensors: list[Tensor]) -> int:
        """Count the tensors that are the ticket's own, not copies, without any computation."""
        return sum(any(probe.is_of(x) for probe in self.probes) for x in tensors)

    def has_order(self, tensors: list[Tensor]) -> bool:
        """Returns whether padding is known to come last in `tensors`."""
        if self.real in (0, self.handed) or self.own(tensors) or _alike([self], tensors):
            return True
        return any(probe.is_part_of(x) for probe in self.probes for x in tensors)

    @property
    def is_telling(self) -> bool:
        """Whether other records hardly have the same values."""
        return self.handed >= COLUMNS and any(probe.is_telling for probe in self.probes)

    def was_read(self, tensors: list[Tensor]) -> None:
        """Remember the inputs that the model computed from this batch."""
        self._read = _noted(tensors)

    def has_read(self, tensors: list[Tensor]) -> bool:
        """Returns whether the model read these tensors, at least one, before, unchanged since. Computes nothing."""
        known = {(id(ref), version) for ref, version in self._read}  # Python makes one such reference to a tensor
        return len(tensors) > 0 and all((id(ref), version) in known for ref, version in _noted(tensors))


class Tickets:
    """The tickets of the batches that were handed out and not stepped yet.

    Attributes:
        current: of the batch that the model has read since the last step.

    Methods take:
        drawn: the number of the loader's finished logical batches.
    """

    def __init__(self) -> None:
        self.current: Ticket | None = None
        self._open: list[Ticket] = []
        self._closed: deque[Ticket] = deque(maxlen=CLOSED)  # latest first
        self._sizes: set[int] = set()  # of batches that were handed out
        self._padded = False  # whether one of them was padded
        self._size = -1  # of the batch that the model has read since the last step
        self._news = False  # whether one was handed out since then
        self._inputs: list[Tensor] = []  # of the model since the last step or part
        self._parts: list[Ticket] = []  # of the logical batch that the caller accumulates
        self._warns = True  # of a batch that was not handed out

    def __len__(self) -> int:
        return len(self._open)

    def __reduce__(self) -> Any:
        """A copy or a pickle has no batches: its loader hands out others."""
        return Tickets, ()

    def hand_out(self, ticket: Ticket) -> None:
        """Add the batch that the loader yields."""
        self._news = True
        self._sizes.add(ticket.handed)
        self._padded |= ticket.handed > ticket.real
        self._open.append(ticket)

    def clear(self) -> None:
        """Close all open batches."""
        self._closed.extendleft(self._open)
        self._open.clear()
        self.drop_parts()
        self.current = None

    def first(self) -> Ticket | None:
        """Returns the ticket most likely to be read next."""
        if self.current in self._open:
            return self.current
        return next((ticket for ticket in self._open if not ticket.released), None)

    def read(self, inputs: Any, batch_size: int, recording: bool) -> bool:
        """Find the batch of the model's inputs.

        Args:
            inputs, batch_size: of this call.
            recording: batches of this size are being recorded.

        Returns:
            Whether this call is one more pass over the batch being recorded.

        Raises:
            Misuse: several batches are open, and the inputs match none or several.
        """
        tensors = _dense_in(inputs)
        before, found = self.current, self._exact(tensors, batch_size)
        if found is None:  # another view of the same samples, if no other batch was handed out
            stays = recording and not self._news and (before in self._open or not self._open)
            found = before if stays else self._likely(tensors, batch_size)
        goes_on = recording and found is before
        if found is not None and found in self._open:
            if found.released:
                raise Misuse(
                    "expected another batch of data_loader, got the one whose step raised after its release had begun: "
                    "it is accounted, and a second release of the same sample would not be; go on with the next one"
                )
            found.in_order = found.has_order(tensors) and (found.in_order or not goes_on)
            found.was_read(tensors)
        self._inputs = self._inputs + tensors if goes_on else tensors
        self.current, self._size, self._news = found, batch_size, False
        return goes_on

    def take(self, drawn: int) -> Ticket | None:
        """Close and return the ticket of the batch to step, and those before it; None for a batch of the caller's own.

        Raises:
            Misuse: the batch is finished, its padding is unknown, or it is in the logical batch already.
        """
        ticket = self._checked(drawn)
        self._parts, self._inputs = [], []
        return self._close(ticket)

    def _checked(self, drawn: int) -> Ticket | None:
        ticket = self.current
        if any(map(self._is_of, self._parts)):
            raise Misuse(
                "expected other records in each part of a logical batch, got the tensors of an earlier part: a record "
                "in both would move the sum by twice the clipping norm; add the losses of all heads or views of a "
                "record, and step once"
            )
        if ticket is None and self._padded and self._size in self._sizes:
            raise Misuse(
                f"expected a batch of data_loader, got one of {self._size} samples, as many as its padded ones have, "
                "and none of those that are to be stepped: padding would count as records"
            )
        if ticket is not None and (ticket in self._closed or (ticket.step < drawn and not ticket.failed)):
            raise Misuse(
                "expected a batch of data_loader that was not stepped yet, got one that is done with (it was stepped, "
                "or left out, or its iteration was broken off): its records would be in two sums, or twice in one, "
                "which is not accounted; go on with the next one, begin to iterate anew, or take one loader of pairs "
                "for a zip of two"
            )
        if ticket in self._open and any(each.step == ticket.step for each in self._open[: self._open.index(ticket)]):
            warnings.warn(
                "expected optimizer.step(loss=losses) on each piece of a logical batch, the last of which moves the "
                "parameters, got one after a piece that was left out, whose records are not in the sum: step on all, "
                "also within accelerator.accumulate()",
                PrivacyWarning,
                stacklevel=2,
            )
        if ticket is not None and not ticket.in_order:
            raise Misuse(
                f"expected the {ticket.handed} samples of a padded batch of data_loader in its order, got inputs in "
                "which they are not found, so that padding may count as records: sort within the model, change records "
                "in the data set, or take data_loader(pad=False)"
            )
        if ticket is None and self._sizes and self._warns:
            self._warns = False
            warnings.warn(
                f"expected a batch of data_loader, got one that is none of its last {CLOSED}: how it was drawn is "
                "assumed; iterate data_loader anew in each epoch, and keep no batches (list, itertools.cycle)",
                PrivacyWarning,
                stacklevel=2,
            )
        return ticket

    def refuse_part(self) -> None:
        """Raise Misuse if a batch added to a sum by hand is in it, came from the loader, or looks as if it did."""
        if self.current is not None:
            raise Misuse(
                "expected optimizer.step(loss=losses) with every batch of data_loader: it knows which are parts of a "
                "logical batch; for larger ones take a larger batch_size"
            )
        self._close(self._checked(0))

    def added_part(self) -> None:
        """Remember the inputs of the batch that was added to a sum by hand."""
        size = len(self._inputs[0]) if self._inputs else 0
        self._parts.append(Ticket(-1, False, size, size, self._inputs))
        self._parts[-1].was_read(self._inputs)
        self._inputs = []  # an empty step may come next, which reads nothing

    def drop_parts(self) -> None:
        """Forget the parts of a logical batch, as its sum is dropped."""
        self._parts = []

    def take_empty(self, drawn: int) -> Ticket | None:
        """As `take`, for a batch of no samples, which the model may not have read."""
        if self.current in self._open:
            return self.take(drawn)
        self._parts.clear()
        fresh = (ticket for ticket in self._open if not ticket.released)
        return self._close(min(fresh, key=lambda ticket: (ticket.real > 0, ticket.failed), default=None))

    def give_back(self, ticket: Ticket, *, released: bool) -> None:
        """Reopen a batch whose step raised.

        Args:
            ticket: of the batch.
            released: whether its noise was drawn.
        """
        ticket.failed, ticket.released = True, released
        if ticket in self._closed:
            self._closed.remove(ticket)
        self._open.insert(0, ticket)

    def _is_of(self, part: Ticket) -> bool:
        """Whether the model has read this part again: its tensors, or copies of them (two calls of `x.to(device)`)."""

        def again(x: Tensor) -> bool:
            return part.has_read([x]) or (part.is_telling and not part.own([x]) and part.distance([x]) == 0.0)

        return len(self._inputs) > 0 and all(map(again, self._inputs))

    def _close(self, ticket: Ticket | None) -> Ticket | None:
        self.current, self._size = None, -1
        if ticket is not None:
            count = self._open.index(ticket) + 1
            self._closed.extendleft(self._open[:count])
            del self._open[:count]
        return ticket

    @property
    def _unsure(self) -> bool:
        return len(self._open) > 1 or any(ticket.failed for ticket in self._open)

    def _exact(self, tensors: list[Tensor], batch_size: int) -> Ticket | None:
        """The open or closed ticket of these tensors, or of equal copies; None without one.

        Reads no GPU tensor unless no open batch has its size, or several may be meant.
        """
        on_host = all(x.device.type == "cpu" for x in tensors)
        fitting = [ticket for ticket in self._open if ticket.handed == batch_size]
        if fitting and not batch_size:
            return fitting[0]
        equal = [ticket for ticket in fitting if ticket.own(tensors) == len(tensors) > 0]
        if not equal and (on_host or self._unsure):
            equal = [ticket for ticket in fitting if ticket.distance(tensors) == 0.0]
        if equal:
            return max(equal, key=lambda ticket: ticket.own(tensors))
        closed = [ticket for ticket in self._closed if ticket.handed == batch_size > 0]
        owns = {ticket: ticket.own(tensors) for ticket in (*fitting, *closed)}
        most = [ticket for ticket in owns if owns[ticket] == max(owns.values()) > 0]
        if len(most) == 1 and most[0] in fitting:  # beside tensors of the caller's own
            return most[0]
        read = [ticket for ticket in closed if ticket.has_read(tensors)]
        if not read and (on_host or not fitting):
            last = closed[:COMPARED] if batch_size >= COLUMNS else []
            some = [ticket for ticket in closed if ticket in last or ticket.own(tensors) == len(tensors) > 0]
            read = [ticket for ticket in some if ticket.distance(tensors) == 0.0]
        return next(iter(read), None)

    def _likely(self, tensors: list[Tensor], batch_size: int) -> Ticket | None:
        """Return the ticket whose tensors, scaled and shifted, are `tensors`; else the one most likely to be next."""
        if not self._unsure:
            only, done = self._open[:1], [ticket for ticket in self._closed if ticket.handed == batch_size]
            on_host = all(x.device.type == "cpu" for x in tensors)
            if (on_host or not only) and not (only and only[0].handed != batch_size) and not _alike(only, tensors):
                only = [*_alike(done[:COMPARED], tensors), *only]
            return next(iter(only), None)
        fitting = [ticket for ticket in self._open if ticket.handed == batch_size]
        alike = _alike(fitting, tensors)
        if not alike:  # no other fits: it is the one whose distance is unknown
            alike = [ticket for ticket in fitting if ticket.probes and math.isnan(ticket.distance(tensors))]
        if len(alike) != 1:
            failed = any(ticket.failed for ticket in self._open)
            raise Misuse(
                f"expected one of the {len(self._open)} batches that data_loader has handed out and that were not "
                f"stepped yet, got inputs of {batch_size} samples that are "
                + ("none of these" if not alike else "several of these")
                + ": pass the model their tensors, moved or cast or normalised, in the order of their samples; or read "
                "no batch ahead, and leave none out (weigh its losses by 0 instead)"
                + ("; a step of one of these has raised, so begin to iterate anew to leave it" if failed else "")
            )
        return alike[0]


def _dense_in(batch: Any) -> list[Tensor]:
    """Its strided tensors [B, ...]; sparse and nested ones are left out, as their memory is not one block."""
    return [x for x in tensors_of(batch) if x.layout == torch.strided and not x.is_nested and x.dim()]


def _noted(tensors: list[Tensor]) -> _Read:
    return list(zip(map(weakref.ref, tensors), versions_of(tensors), strict=True))


def _stacked(batch: Any, count: int) -> list[Tensor]:
    """The tensors of a list of `count` records, each with one row a record."""
    if not isinstance(batch, (list, tuple)) or len(batch) != count:
        return []
    fields = zip(*map(_dense_in, batch), strict=False)
    return [torch.stack(rows) for rows in fields if len({(x.shape, x.dtype) for x in rows}) == 1]


def _alike(tickets: Iterable[Ticket], tensors: list[Tensor]) -> list[Ticket]:
    """The tickets of which `tensors` are copies, exact or up to a scale and a shift in each feature."""
    limit = max((EXACT.get(x.dtype, 1e-4) for x in tensors if x.is_floating_point()), default=0.0)
    return [ticket for ticket in tickets if ticket.distance(tensors) <= limit]


class _Probe:
    """A few values of a tensor [B, ...] that identify its copies."""

    def __init__(self, x: Tensor) -> None:
        self._itself = weakref.ref(x)
        storage = x.untyped_storage()
        own = storage.nbytes() == x.numel() * x.element_size()  # not a slice of a storage that batches share
        self._storage, self._shape = storage.data_ptr() if own else 0, x.shape
        count = x.shape[0]
        self._rows = _spread(count, ROWS)
        self._columns = _spread(0, 0)
        if x.numel():
            features = x.numel() // count
            candidates = _spread(features, CANDIDATES)
            self._columns = candidates
            spread = self._of(x).var(0, correction=0)
            if bool(spread.any()):
                self._columns = candidates[spread.topk(min(COLUMNS, len(candidates))).indices]
            else:  # equal or very sparse samples: take the largest entries
                rows = x.detach().reshape(count, -1)[self._rows.to(x.device)]
                rows = rows.abs() if rows.is_complex() else rows.to(torch.float64).abs()
                self._columns = rows.argmax(1).unique()[:COLUMNS].cpu()
            self._values = self._of(x)

    def is_of(self, x: Tensor) -> bool:
        """Returns whether `x` is the tensor itself, or a view of all of it."""
        itself = self._itself()
        if itself is None:
            return False
        return itself is x or bool(self._storage and x.untyped_storage().data_ptr() == self._storage)

    @property
    def is_telling(self) -> bool:
        """Whether it has `TELLING` different values."""
        return bool(self._columns.numel()) and len(self._values.unique()) >= TELLING

    def distance(self, x: Tensor) -> float:
        """See `Ticket.distance`."""
        if self.is_of(x):
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
        if len(found) < COLUMNS:  # too few samples: anything is a scaled copy
            return float("nan")
        found, mine = found - found.mean(0), mine - mine.mean(0)
        told = mine.norm(dim=0) > 0
        if not told.any():  # equal samples are equal in any copy
            return float("nan") if (found.abs() <= 1e-6 * x.abs().amax()).all() else float("inf")
        found, mine = found[:, told], mine[:, told]
        scale = (found * mine).sum(0) / (mine * mine).sum(0)
        left = (found - scale * mine).norm(dim=0) / found.norm(dim=0).clamp(min=1e-30)
        return float(left.max()) if bool((scale > 0).all()) else float("inf")

    def is_part_of(self, x: Tensor) -> bool:
        """Returns whether a feature of `x` is one of these, up to a scale and a shift, so that it has their order."""
        told = [column for column in self._values.T if len(column.unique()) >= COLUMNS] if x.numel() else []
        if not told or x.shape[0] != self._shape[0]:
            return False
        mine, found = (each - each.mean(0) for each in (torch.stack(told, 1), self._of(x, every=True)))
        mine, found = (each / each.norm(dim=0).clamp(min=1e-30) for each in (mine, found))
        return bool(((mine.T @ found) >= 1 - EXACT.get(x.dtype, 1e-4) ** 2 / 2).any())

    def _of(self, x: Tensor, *, every: bool = False) -> Tensor:
        flat = (x.abs() if x.is_complex() else x).detach().reshape(x.shape[0], -1)[self._rows.to(x.device)]
        return (flat if every else flat[:, self._columns.to(x.device)]).to("cpu", torch.float64)


def _spread(count: int, most: int) -> Tensor:
    """At most `most` evenly spaced indices in 0 ... count - 1, with the first and the last."""
    return torch.linspace(0, max(0, count - 1), min(count, most), dtype=torch.float64, device="cpu").long()


def _likeliest(distance: float) -> tuple[bool, bool, float]:
    """Sort key: numbers, then NaN, then infinity."""
    return math.isinf(distance), math.isnan(distance), distance
