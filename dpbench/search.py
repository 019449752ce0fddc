"""The search for the largest batch that fits, as a schedule of ordinary trials.

Nothing is run here. `MaxBatch.next_batch_size` is a pure function of what has been seen so far, so a search that was
killed continues from its records, and is tested on memory models of our own making.

The strategy: probe `start` and its double; from two fitting peaks, memory(B) = a + b·B predicts where the budget is
reached; probe there, then one tolerance step to the other side. Where memory is linear in B, as it nearly is for
training, that is four probes. After `PATIENCE` probes the prediction is no longer trusted (allocators round, kernels
choose workspaces), and plain doubling and bisection end the search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpbench.trials import PeakTrial, StepTrial

PATIENCE = 6
#: Two probes closer than this say little about the slope between them.
_APART = 0.9


@dataclass(frozen=True)
class Probe:
    """What one probe told: whether the batch fits, and the peak in bytes where it is known."""

    fits: bool
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class MaxBatch:
    """Find the largest batch size at which `probe` fits; then run `then` there, in every round.

    The search ends when the largest that fits and the smallest that does not are within `tolerance` (relative) or one
    sample of each other, or when `max_batch_size` fits, which says "not limited by memory". Batch sizes of `probe` and
    `then` as declared are ignored.
    """

    probe: PeakTrial
    then: StepTrial | None = None
    max_batch_size: int = 16384
    start: int = 8
    tolerance: float = 0.02

    def probe_at(self, batch_size: int) -> PeakTrial:
        return self.probe.replace(batch_size=batch_size)

    def then_at(self, batch_size: int) -> StepTrial | None:
        return None if self.then is None else self.then.replace(batch_size=batch_size)

    def bounds(self, seen: Mapping[int, Probe]) -> tuple[int, int | None]:
        """(largest that fits, or 0; smallest that does not, or None).

        Where a larger batch fitted although a smaller one did not, the smaller one counts: what fits, fits always.
        """
        high = min((size for size, probe in seen.items() if not probe.fits), default=None)
        low = max((size for size, probe in seen.items() if probe.fits and (high is None or size < high)), default=0)
        return low, high

    def answer(self, seen: Mapping[int, Probe]) -> int:
        """The largest batch size known to fit; 0 if none does."""
        return self.bounds(seen)[0]

    def next_batch_size(self, seen: Mapping[int, Probe]) -> int | None:
        """The batch size to probe next, never one already seen; None when the search has ended."""
        low, high = self.bounds(seen)
        if not seen:
            return min(self.start, self.max_batch_size)
        predicted = self._predict(seen, low, high) if len(seen) < PATIENCE else None
        if high is None:
            return self._above(low, predicted)
        if high - low <= max(1, self.tolerance * low):
            return None
        return self._between(low, high, predicted)

    def _above(self, low: int, predicted: float | None) -> int | None:
        """Everything fitted so far."""
        if low >= self.max_batch_size:
            return None
        candidate = 2 * low if predicted is None else max(self._cap(predicted), low + self._step(low))
        return min(candidate, self.max_batch_size)

    def _between(self, low: int, high: int, predicted: float | None) -> int:
        """`low` fits (or is 0), `high` does not, and they are further apart than the tolerance."""
        if predicted is not None and low > 0:
            closest_below_high = high - max(1, int(self.tolerance / (1 + self.tolerance) * high))
            candidate = min(max(self._cap(predicted), low + self._step(low)), closest_below_high)
        elif predicted is not None:
            candidate = min(max(self._cap(predicted), 1), high - 1)
        elif low > 0 and high > 4 * low:
            candidate = math.isqrt(low * high)  # the tolerance is relative, so is the middle
        else:
            candidate = (low + high) // 2
        return min(max(candidate, low + 1), high - 1)

    def _step(self, low: int) -> int:
        return max(1, int(self.tolerance * low))

    def _cap(self, predicted: float) -> int:
        return int(min(predicted, self.max_batch_size))

    def _predict(self, seen: Mapping[int, Probe], low: int, high: int | None) -> float | None:
        """Where the line through two known peaks meets the budget; None if no two say so."""
        budget = self.probe.memory_budget
        pair = self._two_points(seen, low, high)
        if budget is None or pair is None:
            return None
        (size_a, peak_a), (size_b, peak_b) = pair
        slope = (peak_b - peak_a) / (size_b - size_a)
        if slope <= 0:
            return math.inf if high is None else None  # memory does not grow with the batch
        return size_a + (budget - peak_a) / slope

    def _two_points(
        self, seen: Mapping[int, Probe], low: int, high: int | None
    ) -> tuple[tuple[int, int], tuple[int, int]] | None:
        peaks = {size: probe.peak_bytes for size, probe in seen.items() if probe.peak_bytes is not None}
        if high in peaks and low in peaks:
            return (low, peaks[low]), (high, peaks[high])
        fitting = sorted(size for size in peaks if size <= low)
        if len(fitting) >= 2:
            apart = [size for size in fitting[:-1] if size <= _APART * fitting[-1]] or fitting[:-1]
            return (apart[-1], peaks[apart[-1]]), (fitting[-1], peaks[fitting[-1]])
        failing = sorted(size for size in peaks if high is not None and size >= high)
        if len(failing) >= 2:
            return (failing[0], peaks[failing[0]]), (failing[1], peaks[failing[1]])
        return None
