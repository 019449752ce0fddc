"""Search for the largest batch that fits, as a schedule of ordinary trials.

Nothing runs here. `MaxBatch.next_batch_size` is a pure function of the probes so far. So a killed search resumes from
its records, and tests use memory models of their own.

memory(B) = a + b·B predicts where the budget is reached: probe slightly below it, then one tolerance step to the other
side. The line goes through the two known peaks that are nearest to the limit, or through one and the memory held before
its step (the probe's baseline). Without a line, and after `PATIENCE` probes (allocators round, kernels choose
workspaces), doubling and bisection end the search. If memory is nearly linear in B, as in training, that takes two to
five probes. The answer is always a batch that fitted in a probe.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dpbench.errors import UsageError
from dpbench.trials.outcome import Outcome
from dpbench.trials.steps import BatchTrial, ConfirmTrial, LargestTrial, PeakTrial

PATIENCE = 6
#: A probe aims below the predicted limit by this share of the tolerance, so that the next step covers its error.
_BELOW = 1 / 3


@dataclass(frozen=True)
class Probe:
    """A probe's result: whether the batch fits; the peak and the memory held before, in bytes, if known."""

    fits: bool
    peak_bytes: int | None = None
    baseline_bytes: int | None = None


def probes_of(record: Mapping[str, Any]) -> dict[int, Probe]:
    """Batch size -> result of a record's probe; of all probes if one trial ran a whole search.

    Args:
        record: of a trial that succeeded or did not fit.
    """
    result = record.get("result") or {}
    if (probes := result.get("probes")) is not None:
        return {each["batch_size"]: Probe(each["fits"], each["peak_bytes"]) for each in probes}
    memory = result.get("memory") or {}
    fits = record["outcome"] == Outcome.OK
    return {record["trial"]["batch_size"]: Probe(fits, memory.get("peak_bytes"), memory.get("baseline_bytes"))}


@dataclass(frozen=True, kw_only=True)
class MaxBatch:
    """Find the largest batch size at which `probe` fits; then run `then` there, in every round.

    The search ends when the largest fitting and the smallest failing batch are within `tolerance` (relative) or one
    sample of each other, or when `max_batch_size` fits, which means "not limited by memory". The declared batch sizes
    of `probe` and `then` are ignored. A probe of kind `largest` is a whole search, with results of several batches.

    Methods take:
        batch_size, seen: the size to run; batch size -> its probe.
    """

    probe: PeakTrial | LargestTrial
    then: BatchTrial | None = None
    max_batch_size: int = 16384
    start: int = 8
    tolerance: float = 0.02

    def check(self) -> None:
        """Raise a UsageError for numbers with which the search would not end."""
        for name in ("start", "max_batch_size"):
            size: Any = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"a whole number of at least 1 for {name}", size)
        if not isinstance(self.tolerance, int | float) or not 0 <= self.tolerance < 1:
            raise UsageError("a share of at least 0 and below 1 for tolerance", self.tolerance)

    def probe_at(self, batch_size: int) -> PeakTrial | LargestTrial:
        """Return the probe of a batch size."""
        return self.probe.replace(batch_size=batch_size)

    def then_at(self, batch_size: int) -> BatchTrial | None:
        """Return the trial at the largest batch size; None without `then`."""
        return None if self.then is None else self.then.replace(batch_size=batch_size)

    def bounds(self, seen: Mapping[int, Probe]) -> tuple[int, int | None]:
        """(largest that fits, or 0; smallest that does not, or None).

        If a larger batch fitted although a smaller one failed, the failure counts.
        """
        high = min((size for size, probe in seen.items() if not probe.fits), default=None)
        low = max((size for size, probe in seen.items() if probe.fits and (high is None or size < high)), default=0)
        return low, high

    def answer(self, seen: Mapping[int, Probe]) -> int:
        """The largest batch size known to fit; 0 if none does."""
        return self.bounds(seen)[0]

    def next_batch_size(self, seen: Mapping[int, Probe]) -> int | None:
        """The batch size to probe next, never a repeated one; None when the search has ended."""
        if not seen:
            return min(self.start, self.max_batch_size)
        low, high = self.bounds(seen)
        least = low + max(1, int(self.tolerance * low))
        if high is None:
            if low >= self.max_batch_size:
                return None
            most, guess = self.max_batch_size, 2 * low
        else:
            if high - low <= max(1, self.tolerance * low):
                return None
            most, guess = high - max(1, int(self.tolerance / (1 + self.tolerance) * high)), (low + high) // 2
        if len(seen) < PATIENCE and (predicted := self._predict(seen, low, high)) is not None:
            guess = int(min(predicted * (1 - _BELOW * self.tolerance), most))
        guess = min(max(guess, least), most)
        return guess if high is None else min(max(guess, low + 1), high - 1)

    def _predict(self, seen: Mapping[int, Probe], low: int, high: int | None) -> float | None:
        """The batch size at which the budget is reached, by a line through known peaks; None without one."""
        budget = self.probe.memory_budget
        peaks = {size: probe.peak_bytes for size, probe in sorted(seen.items()) if probe.peak_bytes is not None}
        if budget is None or not peaks:
            return None
        below, above = [size for size in peaks if size <= low], [size for size in peaks if size > low]
        sizes = [below[-1], above[0]] if below and above else below[-2:] or above[:2]
        points = [(size, peaks[size]) for size in sizes]
        before = seen[sizes[0]].baseline_bytes
        if len(points) == 1 and before is not None:
            points.insert(0, (0, before))
        if len(points) == 1:
            return None
        (size_a, peak_a), (size_b, peak_b) = points
        slope = (peak_b - peak_a) / (size_b - size_a)
        if slope <= 0:
            return math.inf if high is None else None  # memory does not grow with the batch
        return size_a + (budget - peak_a) / slope


def searches(
    device: str,
    models: Iterable[str],
    backends: Iterable[str],
    *,
    budget: int,
    limit: int = 16384,
    limits: Mapping[str, int] | None = None,
    **settings: Any,
) -> list[MaxBatch]:
    """Search the largest batch of each model and backend, as in Figure 3 of arXiv:2205.10683.

    The search is simulated on fake tensors of the device, which takes no memory. On CUDA the whole search is one trial,
    and two real steps confirm its answer.

    Args:
        device: "cpu" or "cuda".
        models: references; the outer loop.
        backends: names.
        budget: bytes.
        limit: the largest batch to try.
        limits: smaller limits, by backend.
        settings: other fields of the trials, such as `image_size`.
    """
    found = []
    backends = list(backends)
    for model in models:
        for backend in backends:
            largest = min(limit, (limits or {}).get(backend, limit))
            shared: dict[str, Any] = {"model": model, "backend": backend, "device": device, "memory_budget": budget}
            shared |= settings
            probe: PeakTrial | LargestTrial = PeakTrial(**shared, batch_size=8, simulated=True)
            then = None
            if device != "cpu":
                probe = LargestTrial(**shared, batch_size=32, max_batch_size=largest)
                then = ConfirmTrial(**shared, batch_size=8, max_batch_size=largest)
            found.append(MaxBatch(probe=probe, then=then, max_batch_size=largest, start=32))
    return found
