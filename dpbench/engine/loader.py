"""The engine's data loader: yields logical batches, drawn by the accounted scheme, in physical pieces.

A logical batch of more than `max_physical_batch_size` samples comes in several pieces. `optimizer.step` accumulates all
but the last one. The distribution of the logical batch does not change.

Pieces may be padded to one of a few sizes, the multiples of √b, where b is the expected or the largest size of a piece.
Nine sizes cover a Poisson sample within four deviations, at 1/(2√b) more work on average, 3 % at b = 256: each has a
program, where samples of any size had more shapes than there are programs (`clipping.program.graphs.MOST`). Padding is
copies of the piece's first sample (of the data's first if the piece is empty), whose losses have weight 0. A copy
is a valid input, as zeros may not be. Its gradient is never in the sum.

A collator that mixes records, as mixup does, is refused: C would not bound one record's share of the sum.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from clipping.checks.rerun import coarsest
from clipping.core.batches import map_tensors, same_values, tensors_of
from clipping.distributed.spread import sharded_modules
from clipping.numerics.rng_replay import Draws
from dpbench.engine.batch_identity import Ticket
from dpbench.engine.distributed import place
from dpbench.engine.errors import Misuse

if TYPE_CHECKING:
    from dpbench.engine.engine import PrivacyEngine

RECORDS = 8
"""Most records to collate for a check, spread over the data set."""
DRAWS = 16
"""Batches compared of a collator that draws random numbers: one that mixes half of its batches passes 1 time in 65,000.
"""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative tolerance of a record's numbers, by dtype."""
OF_ANY_SIZE = "poisson", "truncated_poisson", "balls_and_bins"
"""The samplings whose batches vary in size, and may be empty."""
Collate = Callable[[list[Any]], Any]


class PrivateLoader:
    """An iterable over physical batches; each iteration runs to the end of the current epoch of training.

    Args:
        engine: draws the batches, and learns which piece is the last. Each of n processes gets every n-th record.
        dataset, pad, options: as in `PrivacyEngine.data_loader`.
        most: samples in a physical batch; None for no limit.

    Attributes:
        dataset: as given.
        is_last: the last yielded physical batch ends its logical batch.
        is_empty: it holds no record, or padding alone.

    Raises:
        ValueError: the arguments conflict, or an empty batch cannot be made.
    """

    def __init__(
        self, engine: PrivacyEngine, dataset: Any, most: int | None, pad: bool | None, options: dict[str, Any]
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise ValueError(
                "expected a dataset, got a DataLoader: hand its dataset, with collate_fn and num_workers beside"
            )
        if not hasattr(dataset, "__len__"):
            raise ValueError("expected a dataset with a length and records by index, got one that is only iterable")
        settings = engine.settings
        if len(dataset) != settings.sample_size:
            raise ValueError(f"expected a dataset of sample_size={settings.sample_size}, got {len(dataset)} records")
        if most is not None and most < 1:
            raise ValueError(f"expected max_physical_batch_size >= 1, got {most!r}")
        mine = sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"} & options.keys())
        if mine:
            raise ValueError(f"expected no {', '.join(mine)}: how batches are drawn is the engine's `sampling`")
        collate_fn = options.pop("collate_fn", None) or default_collate
        self.dataset, self._engine, self._most, self._pad, self._collate_fn = dataset, engine, most, pad, collate_fn
        self._ordered = True if collate_fn is default_collate else None  # None: not known yet
        if collate_fn is not default_collate:
            require_own_numbers(dataset, most or settings.batch_size, collate_fn)
        collate = _Collate(dataset, collate_fn)
        if settings.mechanism.sampling in OF_ANY_SIZE and not self._pads():
            collate.require_empty()
        self._seeds = None
        if options.get("generator") is None:  # else the loader would draw from the global one
            self._seeds = options["generator"] = torch.Generator()
        self.is_last = self.is_empty = False
        self._pieces = _Pieces(engine, most, self._pads)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._pieces, collate_fn=collate, **options)

    def __getattr__(self, name: str) -> Any:
        if name in ("sampler", "batch_sampler"):  # accelerate.skip_first_batches asks for them
            raise AttributeError(
                f"expected the batches of data_loader itself, got its {name}: the engine draws them, and skips none; "
                "after engine.load_state_dict it goes on behind the last step"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _pads(self) -> bool:
        """Whether to pad now; `make_step` may be called after the loader was made."""
        engine, wanted = self._engine, self._pad
        if wanted is None and self._most is None:
            runs_programs = engine._recorder.backend.graphs is not None and is_on_gpu(engine.model)
            wanted = runs_programs and engine.settings.mechanism.sampling in OF_ANY_SIZE
        elif wanted is None:
            several = place()[1] > 1  # they run the same pieces, and a loop may communicate in each
            wanted = several or is_on_gpu(engine.model) or bool(sharded_modules(engine.model))
        if wanted and self._ordered is None:
            self._ordered = keeps_order(self.dataset, self._collate_fn)
        return wanted and (bool(self._ordered) or self._pad is True)

    def __len__(self) -> int:
        """Physical batches in the current epoch of training; draws and counts them all if logical batches are split."""
        return self._pieces.count()

    def __iter__(self) -> Iterator[Any]:
        self._engine._begin_drawing()
        key = self._pieces.key
        if self._seeds is not None:  # workers draw other numbers in each iteration
            self._seeds.manual_seed(self._engine._sampler.seed_of_workers(self._pieces.first))
        with torch.device("cpu"):  # the generator's device, whatever the default
            batches = iter(self._loader)
        drawn = self._pieces.drawn
        for batch in batches:
            if self._pieces.key != key:
                raise Misuse(
                    "expected a new iteration of data_loader after engine.load_state_dict, got the next batch of one "
                    "that began before: it is of another training, whose batches may have been stepped already"
                )
            step, self.is_last, real, handed = drawn.popleft()
            self.is_empty = real == 0
            if 0 < real < handed and not self._ordered:
                raise Misuse(
                    "expected a collate_fn that keeps the order of the records, as padding is known by its place, got "
                    "one that moves them: sort within the model, or take data_loader(pad=False)"
                )
            batch = self._engine._recorder.follow(batch)
            with torch._C.DisableTorchFunctionSubclass():
                self._engine._tickets.hand_out(Ticket(step, self.is_last, real, handed, batch))
            yield batch
        self._engine._ended = self._pieces.end
        self._engine._unread.read(wait=True)


def is_on_gpu(model: nn.Module) -> bool:
    """Returns whether the model is on a CUDA device, where each new shape is expensive."""
    return any(p.device.type == "cuda" for p in model.parameters())


class _Pieces:
    """Index lists for the DataLoader, and a queue of (logical batch's number, is its last piece, samples, size)."""

    def __init__(self, engine: PrivacyEngine, most: int | None, pads: Callable[[], bool]) -> None:
        self._engine, self._sampler, self._most, self._shard = engine, engine._sampler, most, place()
        self.steps_per_epoch = engine.settings.steps_per_epoch
        self._pads, self._grain = pads, math.isqrt(most or engine.settings.batch_size // self._shard[1]) or 1
        self.end = 0
        self._counted: tuple[tuple[bytes, int], int, int] | None = None  # (key, epoch, physical batches)
        self.drawn: deque[tuple[int, bool, int, int]] = deque()

    @property
    def key(self) -> tuple[bytes, int]:
        """The key of the sampling, and its branch."""
        return self._sampler.key, self._sampler.branch

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn = deque()  # fresh, as workers may have drawn ahead in an interrupted iteration
        return self._generate(self.drawn)

    def _generate(self, drawn: deque[tuple[int, bool, int, int]]) -> Iterator[list[int]]:
        rank, processes = self._shard
        first, pads = self.first, self._pads()
        self.end = (first // self.steps_per_epoch + 1) * self.steps_per_epoch
        for step in range(first, self.end):
            sample = self._sampler.batch(step)
            batch = sample[rank::processes].tolist()
            longest = self._longest(len(sample))
            size = self._most or longest
            for start in range(0, longest, size):
                piece = batch[start : start + size]
                wanted = self._padded(min(size, longest - start)) if pads else len(piece)
                drawn.append((step, start + size >= longest, len(piece), wanted))
                yield piece + (piece or [0])[:1] * (wanted - len(piece))

    def count(self) -> int:
        """Physical batches of the epoch."""
        if self._most is None:
            return self.steps_per_epoch
        epoch = self.first // self.steps_per_epoch
        if self._counted is None or self._counted[:2] != (self.key, epoch):
            steps = range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)
            pieces = sum(-(-self._longest(len(self._sampler.batch(step))) // self._most) for step in steps)
            self._counted = self.key, epoch, pieces
        return self._counted[2]

    @property
    def first(self) -> int:
        """The logical batch that an iteration begins with; skipped batches are not drawn again."""
        return max(self._engine.drawn, self._engine._ended)

    def _padded(self, samples: int) -> int:
        """The padded size of a piece from the samples of its largest shard; equal in all processes."""
        padded = max(1, -(-samples // self._grain)) * self._grain
        return min(self._most or padded, padded)

    def _longest(self, samples: int) -> int:
        """Samples in the largest shard; every process yields as many pieces, the last possibly empty."""
        return max(1, -(-samples // self._shard[1]))


class _Collate:
    """`collate`; for no samples the collated first record without its row: tensors [0, ...]."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def require_empty(self) -> None:
        """Raise a ValueError if a batch of no samples, which Poisson sampling may draw, cannot be collated."""
        try:
            with Draws().again():
                self([])
        except ValueError as error:
            raise ValueError(f"{error}: a Poisson sample may be empty; have collate_fn make them, or pad") from error

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self._collate(samples)
        batch = self._collate([self._dataset[0]])
        if not tensors_of(batch):
            raise ValueError(f"expected tensors in tuples, lists, mappings or dataclasses, got {type(batch).__name__}")
        return map_tensors(_without_rows, batch)


def _without_rows(x: Tensor) -> Tensor:
    if not x.is_nested and not x.dim():  # a number about the batch
        return x
    try:
        return x.index_select(0, torch.zeros(0, dtype=torch.int64, device=x.device)) if x.is_sparse else x[:0]
    except (RuntimeError, NotImplementedError, IndexError) as error:
        kind = "nested" if x.is_nested else str(x.layout)
        raise ValueError(f"expected tensors [B, ...] that may have no rows, got one that is {kind}") from error


def require_own_numbers(dataset: Any, most: int, collate: Collate) -> None:
    """Require that a record's floating-point values do not depend on the other records that are collated with it.

    Compares each of two records among others with the same record among copies of itself, if both batches have one
    shape. Both batches are built from the same random numbers, `DRAWS` times anew. Integers (words, labels) are not
    compared.

    Args:
        dataset: indexable.
        most: records in a batch; below 2 nothing is checked.
        collate: records -> batch; its rows may have another order than the records.

    Raises:
        Misuse: a record's numbers depend on the other records.
    """
    places = places_of(dataset, most)

    def batch_of(records: list[Any]) -> list[Tensor]:
        batch = collate([copy.copy(record) for record in records])  # the collator may remove fields
        rows = [x for x in tensors_of(batch) if x.is_floating_point() and x.layout == torch.strided]
        return [x for x in rows if x.dim() > 1 and len(x) == len(records)]

    with Draws().again():
        records = [dataset[i] for i in places]
        for _ in range(DRAWS if records else 0):
            draws = Draws()
            together = batch_of(records)
            for number in range(2 if together else 0):
                with draws.again():
                    copies = batch_of([records[number]] * len(records))
                _require_same(together, copies, number, places)
            if not draws.used():
                break


def _require_same(together: list[Tensor], copies: list[Tensor], number: int, places: list[int]) -> None:
    """Require that record `number` has the same numbers in two batches, if these have one shape."""
    if [x.shape for x in copies] != [x.shape for x in together]:
        return
    for was, now in zip(together, copies, strict=True):
        same = torch.isclose(was.double(), now[number].double(), rtol=coarsest([was], TOLERANCE), equal_nan=True)
        if not same.flatten(1).all(1).any():
            raise Misuse(
                f"expected the numbers of record {places[number]} to be its own, got others in a batch of "
                f"{len(places)} than beside copies of itself: let collate_fn mix no records"
            )


def keeps_order(dataset: Any, collate: Collate) -> bool:
    """Whether rows have the places of their records, as far as a few records tell.

    A record is collated at each of three places among copies of another. A collator that sorts gives the same rows
    each time, unless both records are equal. One that moves records at random, or draws numbers before it sorts, moves
    the copies.

    Args:
        dataset: indexable.
        collate: a list of records -> a batch; drawn numbers are restored.
    """

    def batch_of(*records: Any) -> list[Tensor]:
        with draws.again():
            batch = tensors_of(collate([copy.copy(record) for record in records]))
        return [x for x in batch if x.layout == torch.strided and not x.is_nested]

    draws = Draws()
    with draws.again():
        records = [dataset[i] for i in places_of(dataset, RECORDS)]
    for one, other in itertools.pairwise(records):
        first, second, third = batch_of(one, other, other), batch_of(other, one, other), batch_of(other, other, one)
        if _same(first, second) and not _same(first, batch_of(other, other, other)):
            return False
        if len(batch_of(other, other)) != len(first):  # tensors of each record, not rows
            continue
        for x, y, z in zip(first, second, third, strict=False):
            if all(each.dim() and len(each) == 3 for each in (x, y, z)) and not _same([x[2], y[0]], [y[2], z[0]]):
                return False
    return True


def _same(batch: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two batches have the same values; NaN equals NaN."""
    return len(batch) == len(other) and all(map(same_values, batch, other))


def places_of(dataset: Any, most: int) -> list[int]:
    """Indices of a few records; none if a batch has fewer than two.

    Args:
        dataset, most: as in `require_own_numbers`.
    """
    count = min(most, len(dataset), RECORDS)
    return [] if count < 2 else [i * len(dataset) // count for i in range(count)]
