"""Check that a collator mixes no records, as mixup does: then C would not bound one record's share of the sum."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipping.core.batches import tensors_of
from clipping.core.dtypes import coarsest
from clipping.numerics.rng_replay import Draws
from dpbench.engine.errors import Misuse

RECORDS = 8
"""Largest number of records, spread over the data set."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative tolerance of a record's numbers, by dtype."""
Collate = Callable[[list[Any]], Any]


def require_own_numbers(dataset: Any, most: int, collate: Collate) -> None:
    """Require the numbers of a record in a batch to be those beside copies of itself, if both batches have one shape.

    Both batches are built from the same random numbers. Integers (words, labels) are not compared.

    Args:
        dataset: indexable.
        most: records in a batch; below 2 nothing is checked.
        collate: records -> batch; its rows may have another order than the records.

    Raises:
        Misuse: a record's numbers depend on the other records.
    """
    places, draws = places_of(dataset, most), Draws()
    with draws.again():
        records = [dataset[i] for i in places]

    def batch_of(records: list[Any]) -> list[Tensor]:
        with draws.again():
            batch = collate([copy.copy(record) for record in records])  # the collator may remove fields
        rows = [x for x in tensors_of(batch) if x.is_floating_point() and x.layout == torch.strided]
        return [x for x in rows if x.dim() > 1 and len(x) == len(records)]

    together = batch_of(records) if records else []
    for place in range(2 if together else 0):
        copies = batch_of([records[place]] * len(records))
        if [x.shape for x in copies] != [x.shape for x in together]:
            continue
        for was, now in zip(together, copies, strict=True):
            same = torch.isclose(was.double(), now[place].double(), rtol=coarsest([was], TOLERANCE), equal_nan=True)
            if not same.flatten(1).all(1).any():
                raise Misuse(
                    f"expected the numbers of record {places[place]} to be its own, got others in a batch of "
                    f"{len(places)} than beside copies of itself: let collate_fn mix no records"
                )


def places_of(dataset: Any, most: int) -> list[int]:
    """Indices of a few records; none if a batch has fewer than two.

    Args:
        dataset, most: as in `require_own_numbers`.
    """
    count = min(most, len(dataset), RECORDS)
    return [] if count < 2 else [i * len(dataset) // count for i in range(count)]
