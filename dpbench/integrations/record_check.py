"""Check before training that a record's loss does not depend on the other records of its batch.

The engine sees operations on a batch, not how the batch was built. The loss of a record depends on the others if a
collator pads to the longest record and the model sees the padding (no attention mask, absolute positions after left
padding), or if it mixes records (mixup). Then C does not bound one record's share of the sum. So the check runs a few
records through the caller's own collator and loss, without dropout, together and one by one.

If collator or model draw random numbers (masked language models), the losses of a record alone differ anyway. The check
then compares the record among others with the record among copies of itself, for the same random numbers, if these two
batches have one shape. Other random numbers follow, as a collator may mix records in some batches only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipping.checks.moving import Moving, State
from clipping.checks.rerun import coarsest
from clipping.checks.verification import reading_float64
from clipping.core.batches import map_tensors, tensors_of
from clipping.core.dtypes import without_autocast
from clipping.distributed.spread import any_sharded
from clipping.numerics.rng_replay import Draws, WithoutDropping
from dpbench.engine import Misuse
from dpbench.engine.loader import DRAWS, Collate, places_of

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative tolerance of a loss, by its dtype, as batches of other shapes run other kernels.

A larger difference is computed again in float64, and must persist there.
"""
MUCH = 100.0
"""Multiple of the tolerance that counts if the model cannot run in float64."""
REMEDY = (
    "pad all records to one length (padding='max_length'), with an attention_mask, or let collator and loss mix no "
    "records and divide by nothing that the batch holds"
)
LossesOf = Callable[[Any], Tensor]
Result = TypeVar("Result")


class _Undropped(TorchFunctionMode):
    """Makes `F.dropout` and its variants return their input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


def look(model: nn.Module, dataset: Any, most: int, collate: Collate, losses_of: LossesOf) -> None:
    """Raise a Misuse if the loss of a record depends on the other records of its batch.

    Args:
        model: in training mode; its state, that of the loss and all random generators are restored afterwards.
        dataset: indexable.
        most: records in a batch; below 2 nothing is checked.
        collate: records -> batch.
        losses_of: batch -> [B].
    """
    places = places_of(dataset, most)
    if not places:
        return
    draws, moving = Draws(), Moving(model, losses_of)
    with moving.repeated(draws) as begin, torch.enable_grad():  # a loss may differentiate, as for adversarial inputs
        seen = _Seen([dataset[i] for i in places], collate, losses_of, draws, moving, begin)
        found = seen.differing()
        if found is not None:
            found = _without_rounding(model, seen)
    if found is not None:
        place, was, now, how = found
        raise Misuse(
            f"expected the loss of record {places[place]} to be its own, got {was:.6g} in a batch of {len(places)} and "
            f"{now:.6g} {how}: {REMEDY}"
        )


def _without_rounding(model: nn.Module, seen: _Seen) -> tuple[int, float, float, str] | None:
    """The difference in float64; if the model cannot be cast, a difference of `MUCH` tolerances."""
    if not any_sharded(list(model.parameters())):
        seen.wide = True
        with suppress(RuntimeError, TypeError, NotImplementedError), reading_float64(model), without_autocast():
            return seen.differing()
        seen.wide = False
    seen.tolerance = MUCH
    return seen.differing()


class _Seen:
    """A few records and their losses, in several batches. Each begins from the same state of model and loss.

    Attributes:
        wide: compute in float64.
        tolerance: in units of `TOLERANCE`.
    """

    wide = False
    tolerance = 1.0

    def __init__(
        self,
        records: list[Any],
        collate: Collate,
        losses_of: LossesOf,
        draws: Draws,
        moving: Moving,
        begin: State,
    ) -> None:
        self._records, self._collate, self._losses_of, self._draws = records, collate, losses_of, draws
        self._moving, self._begin = moving, begin

    def differing(self) -> tuple[int, float, float, str] | None:
        """(place, loss in the batch, other loss, its batch) of the first record with two losses."""
        with self._draws.again(), WithoutDropping(), _Undropped():
            together, again = self._losses(self._records), self._losses(self._records)
            if torch.equal(together, again):
                alone = torch.cat([self._losses([record]) for record in self._records])
                found = self._first(together, alone, range(len(alone)), "alone")
                if found or not self._draws.used():
                    return found
        return self.beside_copies()

    def beside_copies(self) -> tuple[int, float, float, str] | None:
        """As `differing`, for two records among others and among copies of each, with the same random numbers.

        While the collator draws random numbers, others are tried. They cost a loss only if the record's rows differ.
        """
        for drawn in range(DRAWS):
            for place in range(2):
                copies = [self._records[place]] * len(self._records)
                ours, theirs = self._drawn(self._tensors, self._records), self._drawn(self._tensors, copies)
                if [x.shape for x in ours] != [x.shape for x in theirs]:
                    continue
                if drawn and all(_same_row(x, y, place) for x, y in zip(ours, theirs, strict=True)):
                    continue
                was, now = self._drawn(self._losses, self._records), self._drawn(self._losses, copies)
                if found := self._first(was, now, [place], "beside copies of itself"):
                    return found
            with self._draws.again():
                self._batch(self._records)
                draws, self._draws = self._draws, Draws()
                if not draws.used():
                    break
        return None

    def _drawn(self, function: Callable[[list[Any]], Result], records: list[Any]) -> Result:
        """Call a function of records, always with the same random numbers."""
        with self._draws.again():
            return function(records)

    def _tensors(self, records: list[Any]) -> list[Tensor]:
        return tensors_of(self._batch(records))

    def _losses(self, records: list[Any]) -> Tensor:
        self._begin = self._moving.state(last=self._begin)
        try:
            return self._losses_of(self._batch(records)).detach()
        finally:
            self._begin._replace(generators=[]).restore()  # generators go on: draws are told by two runs that differ

    def _batch(self, records: list[Any]) -> Any:
        batch = self._collate([copy.copy(record) for record in records])  # the collator may remove fields
        return map_tensors(lambda x: x.double() if self.wide and x.is_floating_point() else x, batch)

    def _first(self, was: Tensor, now: Tensor, places: Iterable[int], how: str) -> tuple[int, float, float, str] | None:
        off = (was.double() - now.double()).abs()
        allowed = self.tolerance * coarsest([was], TOLERANCE) * float(was.abs().max())
        return next(((i, float(was[i]), float(now[i]), how) for i in places if float(off[i]) > allowed), None)


def _same_row(x: Tensor, y: Tensor, place: int) -> bool:
    """Whether two tensors of a batch, [B, ...] if not of the batch as a whole, are the same for a record."""
    if x.layout != torch.strided or x.is_nested:
        return False
    return torch.equal(x[place : place + 1], y[place : place + 1]) if x.dim() else torch.equal(x, y)
