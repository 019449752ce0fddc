"""Check before training that a record's loss does not depend on the other records of its batch.

The engine sees operations on a batch, not how the batch was built. The loss of a record depends on the others if a
collator pads to the longest record and the model sees the padding (no attention mask, absolute positions after left
padding), or if it mixes records (mixup). Then C does not bound one record's share of the sum. So the check runs a few
records through the caller's own collator and loss, without dropout, together and one by one.

If collator or model draw random numbers (masked language models), the losses of a record alone differ anyway. The check
then compares the record among others with the record among copies of itself, for the same random numbers. It does
nothing if these two batches differ in shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipping.checks.second_look import Moving
from clipping.checks.verification import reading_float64
from clipping.core.batches import map_tensors, tensors_of
from clipping.core.dtypes import coarsest, without_autocast
from clipping.distributed.spread import any_sharded
from clipping.numerics.rng_replay import Draws, WithoutDropping
from dpbench.engine import Misuse
from dpbench.engine.loader import Collate, places_of

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


class _Undropped(TorchFunctionMode):
    """Makes `F.dropout` and its variants return their input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


def look(model: nn.Module, dataset: Any, most: int, collate: Collate, losses_of: LossesOf) -> None:
    """Raise a Misuse if the loss of a record depends on the other records of its batch.

    Args:
        model: in training mode; its buffers and all random generators are restored afterwards.
        dataset: indexable.
        most: records in a batch; below 2 nothing is checked.
        collate: records -> batch.
        losses_of: batch -> [B].
    """
    places = places_of(dataset, most)
    if not places:
        return
    draws = Draws()
    with Moving(model).repeated(draws), torch.no_grad():
        seen = _Seen([dataset[i] for i in places], collate, losses_of, draws)
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
        device = next(model.parameters()).device
        with suppress(RuntimeError, TypeError, NotImplementedError), reading_float64(model), without_autocast(device):
            return seen.differing()
        seen.wide = False
    seen.tolerance = MUCH
    return seen.differing()


class _Seen:
    """A few records and their losses, in several batches.

    Attributes:
        wide: compute in float64.
        tolerance: in units of `TOLERANCE`.
    """

    wide = False
    tolerance = 1.0

    def __init__(self, records: list[Any], collate: Collate, losses_of: LossesOf, draws: Draws) -> None:
        self._records, self._collate, self._losses_of, self._draws = records, collate, losses_of, draws

    def differing(self) -> tuple[int, float, float, str] | None:
        """(place, loss in the batch, other loss, its batch) of the first record with two losses."""
        with self._draws.again(), WithoutDropping(), _Undropped():
            together, again = self._losses(self._records), self._losses(self._records)
            if torch.equal(together, again):
                alone = torch.cat([self._losses([record]) for record in self._records])
                return self._first(together, alone, range(len(alone)), "alone")
        return self.beside_copies()

    def beside_copies(self) -> tuple[int, float, float, str] | None:
        """The same for two records, beside others and beside copies of each, with the same random numbers."""
        for place in range(2):
            was, shapes = self._drawn(self._records)
            now, others = self._drawn([self._records[place]] * len(self._records))
            if shapes == others and (found := self._first(was, now, [place], "beside copies of itself")):
                return found
        return None

    def _drawn(self, records: list[Any]) -> tuple[Tensor, list[torch.Size]]:
        """The losses of a batch, always with the same random numbers, and its shapes."""
        with self._draws.again():
            shapes = [x.shape for x in tensors_of(self._batch(records))]
        with self._draws.again():
            return self._losses(records), shapes

    def _losses(self, records: list[Any]) -> Tensor:
        return self._losses_of(self._batch(records)).detach()

    def _batch(self, records: list[Any]) -> Any:
        batch = self._collate([copy.copy(record) for record in records])  # the collator may remove fields
        return map_tensors(lambda x: x.double() if self.wide and x.is_floating_point() else x, batch)

    def _first(self, was: Tensor, now: Tensor, places: Iterable[int], how: str) -> tuple[int, float, float, str] | None:
        off = (was.double() - now.double()).abs()
        allowed = self.tolerance * coarsest([was], TOLERANCE) * float(was.abs().max())
        return next(((i, float(was[i]), float(now[i]), how) for i in places if float(off[i]) > allowed), None)
