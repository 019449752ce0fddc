"""The loaders of `make_private` and `BatchMemoryManager`: Poisson samples, or the caller's own batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from dpbench.engine import Misuse, PrivacyEngine
from dpbench.integrations.loader_options import batch_size_of, shared_options
from dpbench.integrations.opacus.by_hand import ByEngine


class DPDataLoader(ByEngine, DataLoader[Any]):
    """Batches for one engine's private training; other attributes are those of the source loader.

    Args:
        source: the caller's.
        engine: accounts.
        poisson: sample each step, each record with probability `sample_rate`; else yield the source's own batches.
        see: maps each batch to the one yielded.
    """

    def _begin(
        self, source: DataLoader[Any], engine: PrivacyEngine, poisson: bool, see: Callable[[Any], Any]
    ) -> None:  # not DataLoader's: it loads nothing itself
        self.__dict__.update(source=source, _engine=engine, poisson=poisson, _see=see, _epochs=Epochs(engine))
        self.__dict__["sample_rate"] = engine.settings.mechanism.sample_rate
        self.__dict__["_inner"] = engine.data_loader(source.dataset, **shared_options(source)) if poisson else source

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (self._see(batch) for batch in self._epochs.of(self._inner))

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        if self.poisson and name in ("sampler", "batch_sampler"):
            raise AttributeError(
                f"expected the batches of this loader itself, got its {name}: the engine samples them; leave it "
                "out of accelerate's prepare, and for pieces of a batch take BatchMemoryManager of "
                "dpbench.integrations.opacus"
            )
        return getattr(self.source, name)

    def stepped(self) -> None:
        """Count the release of one of its logical batches."""
        if not self.poisson:
            self._epochs.stepped()

    def in_pieces(self, most: int, skip: Callable[[bool], None]) -> DPDataLoader:
        """The same batches in pieces of `most` samples; the optimizer steps at the last one.

        Args:
            most: samples.
            skip: called before each piece with True if the optimizer only accumulates it. Not called for
                Poisson samples, whose pieces the engine knows.
        """
        pieces = DPDataLoader.__new__(DPDataLoader)
        pieces.__dict__.update(self.__dict__)
        if self.poisson:
            found = self._engine.data_loader(self.dataset, max_physical_batch_size=most, **shared_options(self.source))
        else:
            found = _Split(self.source, most, skip, self._engine)
        pieces.__dict__["_inner"] = found
        return pieces


class Epochs:
    """Counts how often the iterations of a loader may have used a record.

    An iteration counts as often as there were steps between two of its batches, also if it is interrupted, because the
    next iteration may begin with the same records. So may an iteration that alternates with it, as in zip.
    """

    def __init__(self, engine: PrivacyEngine) -> None:
        self._engine = engine
        self._counted = self._steps = 0
        self._iteration: object = None

    def of(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a loader; the first step within them begins an epoch.

        Args:
            loader: of the caller's.
        """
        mine = object()
        for batch in loader:
            if self._iteration is not mine:
                self._iteration, self._counted = mine, 0
            self._steps = 0
            yield batch

    def stepped(self) -> None:
        """Count a step; the first one of an epoch also counts all batches of earlier epochs."""
        self._steps += 1
        if self._steps > self._counted:
            length = self._engine.settings.steps_per_epoch
            before = -(-max(self._engine.drawn, self._engine.steps - 1) // length)
            self._engine.drawn = max(self._engine.drawn, before * length + 1)
            self._counted = self._steps


class _Split:
    """A loader's batches in pieces of `most` samples."""

    def __init__(self, source: DataLoader[Any], most: int, skip: Callable[[bool], None], engine: PrivacyEngine) -> None:
        self._pieces = _Pieces(source.batch_sampler, most)
        self._loader: DataLoader[Any] = DataLoader(source.dataset, batch_sampler=self._pieces, **shared_options(source))
        self._skip, self._engine = skip, engine

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        is_last, fresh = self._pieces.is_last, True
        for batch in batches:
            if fresh:  # drop a batch whose last piece was left out
                self._engine._drop_parts()
            fresh = is_last.popleft()
            self._skip(not fresh)
            yield batch


class _Pieces:
    """Index lists, and a queue of whether each is the last piece of its batch."""

    def __init__(self, batches: Any, most: int) -> None:
        self._batches, self._most = batches, most
        self.is_last: deque[bool] = deque()

    def __len__(self) -> int:
        size = getattr(self._batches, "batch_size", None) or self._most
        return len(self._batches) * -(-size // self._most)

    def __iter__(self) -> Iterator[list[int]]:
        self.is_last = deque()
        return self._generate(self.is_last)

    def _generate(self, is_last: deque[bool]) -> Iterator[list[int]]:
        for batch in self._batches:
            for start in range(0, len(batch), self._most):
                is_last.append(start + self._most >= len(batch))
                yield batch[start : start + self._most]


def records_of(source: DataLoader[Any]) -> int:
    """The chosen batch size of all processes together; a loader with a DistributedSampler has the size of one process.

    Args:
        source: the caller's loader.
    """
    sampler: Any = getattr(source.batch_sampler, "sampler", None)
    return batch_size_of(source) * (sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1)


def scheme_of(source: DataLoader[Any], poisson: bool) -> str:
    """The scheme that batches are accounted by: "poisson", "shuffled" or "one_pass".

    Args:
        source: the caller's loader.
        poisson: whether Poisson samples replace them.

    Raises:
        Misuse: a scheme without accounting, or one that Poisson samples cannot replace.
    """
    batches = source.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    kind = type(sampler) if type(batches) is BatchSampler else None
    if kind is SequentialSampler or (poisson and kind is DistributedSampler):
        return "poisson" if poisson else "one_pass"
    if kind is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return "poisson" if poisson else "shuffled"
    came = type(batches if kind is None else sampler).__name__
    if poisson:
        raise Misuse(
            f"expected a data_loader without a sampler of its own with poisson_sampling=True, got one with {came}: "
            "Poisson samples draw every record at one rate; weigh the losses, or leave the sampler out"
        )
    raise Misuse(
        f"expected poisson_sampling=True, or a data_loader with shuffle=True or False, got one with {came}: what ε its "
        "batches have is not known"
    )
