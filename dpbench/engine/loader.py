"""The engine's data loader: logical batches drawn by the scheme that is accounted, handed out in physical pieces.

A logical batch of more than `max_physical_batch_size` samples comes in several pieces. `optimizer.step` knows which is
the last one: it accumulates the others, and the distribution of the logical batch is what it was.

Pieces may be padded to one of a few sizes, the multiples of √b, where b is the expected or the largest size of a piece:
nine of them hold a Poisson sample within four deviations, at 1/(2√b) more work on average, 3 % at b = 256. A piece is
padded with copies of its first sample (the data's first where it is empty), and their losses have weight 0. A copy is
fit for the model, where zeros may not be; its gradient is not in the sum, whatever it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from clipping.core.batches import map_tensors, tensors_of
from clipping.distributed.spread import sharded_modules
from clipping.numerics.rng_replay import Draws
from dpbench.engine.batch_identity import Ticket
from dpbench.engine.errors import Misuse
from dpbench.engine.sampling import Sampler
from dpbench.engine.state import State


class PrivateLoader:
    """An iterable over physical batches; each iteration goes to the end of the epoch that training is in.

    Args:
        engine: whose progress says where to begin, and who is told which piece is the last.
        sampler: the logical batches.
        dataset: indexable, of as many records as the sampler knows.
        most: samples in a physical batch; None for no limit.
        pad: to one of a few sizes.
        shard: (rank, processes): every so-manieth record of each logical batch.
        options: of torch's DataLoader: num_workers, pin_memory, collate_fn, ...

    Attributes:
        is_last: the physical batch that was yielded last ends its logical batch.
    """

    def __init__(
        self,
        engine: State,
        sampler: Sampler,
        dataset: Any,
        most: int | None,
        pad: bool,
        shard: tuple[int, int],
        options: dict[str, Any],
    ) -> None:
        collate = _Collate(dataset, options.pop("collate_fn", None) or default_collate)
        options.setdefault("generator", torch.Generator())  # or the loader would draw from the global one
        self.is_last = False
        self._engine = engine
        self._pieces = _Pieces(engine, sampler, most, pad, shard)
        if sampler.settings.mechanism.sampling in ("poisson", "truncated_poisson", "balls_and_bins") and not pad:
            collate.require_empty()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._pieces,
            collate_fn=collate,
            **options,
        )

    def __len__(self) -> int:
        """Physical batches in the epoch that training is in, from its beginning: what a whole iteration yields.

        Where logical batches are split they are drawn to be counted, which takes as long as to draw them.
        """
        return self._pieces.count()

    def __iter__(self) -> Iterator[Any]:
        self._engine._begin_drawing()
        key = self._pieces.key
        with torch.device("cpu"):  # where its generator is, whatever the default device
            batches = iter(self._loader)
        drawn = self._pieces.drawn
        for batch in batches:
            if self._pieces.key != key:
                raise Misuse(
                    "expected a new iteration of data_loader after engine.load_state_dict, got the next batch of one "
                    "that began before: it is of another training, whose batches may have been stepped already"
                )
            step, self.is_last, real, handed = drawn.popleft()
            self._engine._tickets.hand_out(Ticket(step, self.is_last, real, handed, batch))
            yield batch
        self._engine._ended = self._pieces.end
        self._engine._unread.read(wait=True)


def checked(engine: State, dataset: Any, most: int | None, pad: bool | None, options: Mapping[str, Any]) -> bool:
    """Whether `PrivacyEngine.data_loader` pads; raises a ValueError for arguments that do not go together.

    Args:
        engine: whose batches are drawn.
        dataset: with a length.
        most: `max_physical_batch_size`.
        pad: as it was given.
        options: of torch's DataLoader.
    """
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "expected a dataset, got a DataLoader: hand its dataset, with collate_fn and num_workers beside"
        )
    if len(dataset) != engine.settings.sample_size:
        raise ValueError(f"expected a dataset of sample_size={engine.settings.sample_size}, got {len(dataset)} records")
    if most is not None and most < 1:
        raise ValueError(f"expected max_physical_batch_size >= 1, got {most!r}")
    mine = sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"} & options.keys())
    if mine:
        raise ValueError(f"expected no {', '.join(mine)}: how batches are drawn is the engine's `sampling`")
    if pad is not None:
        return pad
    return most is not None and (is_on_gpu(engine.model) or bool(sharded_modules(engine.model)))


def is_on_gpu(model: nn.Module) -> bool:
    """Does the model compute on a CUDA device, where each new shape has a price?

    Args:
        model: any module.
    """
    return any(p.device.type == "cuda" for p in model.parameters())


class _Pieces:
    """Index lists for the DataLoader, and beside them (logical batch's number, is it its last piece, samples, size)."""

    def __init__(self, engine: State, sampler: Sampler, most: int | None, pad: bool, shard: tuple[int, int]) -> None:
        self._engine, self._sampler, self._most, self._shard = engine, sampler, most, shard
        self.steps_per_epoch = sampler.settings.steps_per_epoch
        self._grain = math.isqrt(most or sampler.settings.batch_size // shard[1]) or 1 if pad else None
        self.end = 0
        self._counted: tuple[tuple[bytes, int], int, int] | None = None  # (key, epoch, physical batches)
        self.drawn: deque[tuple[int, bool, int, int]] = deque()

    @property
    def key(self) -> tuple[bytes, int]:
        """Of the sampling, and its branch."""
        return self._sampler.key, self._sampler.branch

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn = deque()  # of this iteration alone: workers may have drawn ahead in one that was broken off
        return self._generate(self.drawn)

    def _generate(self, drawn: deque[tuple[int, bool, int, int]]) -> Iterator[list[int]]:
        rank, processes = self._shard
        first = self._first()
        self.end = (first // self.steps_per_epoch + 1) * self.steps_per_epoch
        for step in range(first, self.end):
            sample = self._sampler.batch(step)
            batch = sample[rank::processes].tolist()
            longest = self._longest(len(sample))
            size = self._most or longest
            for start in range(0, longest, size):
                piece = batch[start : start + size]
                wanted = self._padded(min(size, longest - start)) if self._grain else len(piece)
                drawn.append((step, start + size >= longest, len(piece), wanted))
                yield piece + (piece or [0])[:1] * (wanted - len(piece))

    def count(self) -> int:
        """Physical batches of the epoch."""
        if self._most is None:
            return self.steps_per_epoch
        epoch = self._first() // self.steps_per_epoch
        if self._counted is None or self._counted[:2] != (self.key, epoch):
            steps = range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)
            pieces = sum(-(-self._longest(len(self._sampler.batch(step))) // self._most) for step in steps)
            self._counted = self.key, epoch, pieces
        return self._counted[2]

    def _first(self) -> int:
        """The logical batch that an iteration begins with: what an earlier one left out is not drawn again."""
        return max(self._engine.drawn, self._engine._ended)

    def _padded(self, samples: int) -> int:
        """The padded size of a piece with so many samples in its largest part; all processes use the same."""
        assert self._grain is not None
        padded = max(1, -(-samples // self._grain)) * self._grain
        return min(self._most or padded, padded)

    def _longest(self, samples: int) -> int:
        """Every process has as many pieces, the last of them empty."""
        return max(1, -(-samples // self._shard[1]))


class _Collate:
    """`collate`; for no samples what it makes of one, emptied: tensors [0, ...]."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def require_empty(self) -> None:
        """Raise a ValueError if there is no batch of no samples, as a Poisson sample may be."""
        try:
            with Draws().again():
                self([])
        except ValueError as error:
            raise ValueError(f"{error}: a Poisson sample may be empty; have collate_fn make them, or pad") from error

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self._collate(samples)
        return _emptied(self._collate([self._dataset[0]]))


def _emptied(batch: Any) -> Any:
    """The same without its samples: tensors [0, ...]; what is no tensor stays as it is.

    Args:
        batch: tensors [B, ...] in nested mappings, lists and tuples.

    Raises:
        ValueError: it has no tensors, or one that cannot be empty.
    """
    if next(tensors_of(batch), None) is None:
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
