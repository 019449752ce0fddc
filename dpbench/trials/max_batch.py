"""The search for the largest batch that fits, as a schedule of ordinary trials.

Nothing is run here. `MaxBatch.next_batch_size` is a pure function of what has been seen so far, so a search that was
killed continues from its records, and is tested on memory models of our own making.

The strategy: memory(B) = a + b·B predicts where the budget is reached; probe there, then one tolerance step to the
other side. What seeds the line, from the most telling to the least:

- two peaks that are known: the line through them;
- one: the line from it to what is held before the step (the baseline of the probe, or `a` of the forecast);
- none: the forecast, which is what a trial of another kind (`seed`) has found by simulation;
- nothing at all: probe `start`, and its double.

Where memory is nearly linear in B, as it is for training, that is two to five probes, also after a forecast that is
wrong by a tenth. After `PATIENCE` probes nothing is believed any more (allocators round, kernels choose workspaces),
and plain doubling and bisection end the search. Whatever was predicted, the answer is a batch that was seen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpbench.errors import UsageError
from dpbench.trials.base import Trial
from dpbench.trials.steps import LargestTrial, PeakTrial, StepTrial

PATIENCE = 6
#: Two probes closer than this say little about the slope between them.
_APART = 0.9
#: A probe aims this share of the tolerance below the predicted limit: what it misses by is then within the next step.
_BELOW = 1 / 3
#: After so many failures whose peak is not known, the forecast is tried at this share of the smallest of them.
_RETREAT = (0.96, 0.9, 0.8, 0.65)


@dataclass(frozen=True)
class Probe:
    """What one probe told: whether the batch fits, and the peak in bytes, and what was held before, where known."""

    fits: bool
    peak_bytes: int | None = None
    baseline_bytes: int | None = None


@dataclass(frozen=True)
class Forecast:
    """memory(B) = `fixed` + `slope`·B, in bytes, before anything was probed."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, points: Mapping[int, int]) -> Forecast | None:
        """The line through the two largest of (batch size -> peak in bytes); None if they say of no growth.

        Args:
            points: of probes that have ended.
        """
        if len(points) < 2:
            return None
        (size_a, peak_a), (size_b, peak_b) = sorted(points.items())[-2:]
        slope = (peak_b - peak_a) / (size_b - size_a)
        return cls(peak_a - slope * size_a, slope) if slope > 0 else None

    @classmethod
    def of_record(cls, record: Mapping[str, Any] | None) -> Forecast | None:
        """What a trial of kind `largest` has found; None if it has not ended, or not well.

        Args:
            record: of the trial, or None.
        """
        if record is None or record["outcome"] != "ok":
            return None
        probes = record["result"].get("probes", [])
        return cls.through({probe["batch_size"]: probe["peak_bytes"] for probe in probes})


@dataclass(frozen=True, kw_only=True)
class MaxBatch:
    """Find the largest batch size at which `probe` fits; then run `then` there, in every round.

    The search ends when the largest that fits and the smallest that does not are within `tolerance` (relative) or one
    sample of each other, or when `max_batch_size` fits, which says "not limited by memory". Batch sizes of `probe` and
    `then` as declared are ignored. `seed`, a trial of kind `largest`, is run before the first probe, which begins where
    it ended; if it fails, the search goes on without it.
    """

    probe: PeakTrial
    then: StepTrial | None = None
    seed: Trial | None = None
    max_batch_size: int = 16384
    start: int = 8
    tolerance: float = 0.02

    def check(self) -> None:
        """
        Raises:
            UsageError: for numbers by which it would have no end.
        """
        for name in ("start", "max_batch_size"):
            size: Any = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"a whole number of at least 1 for {name}", size)
        if not isinstance(self.tolerance, int | float) or not 0 <= self.tolerance < 1:
            raise UsageError("a share of at least 0 and below 1 for tolerance", self.tolerance)

    def probe_at(self, batch_size: int) -> PeakTrial:
        """The probe of a batch size.

        Args:
            batch_size: to be tried.
        """
        return self.probe.replace(batch_size=batch_size)

    def then_at(self, batch_size: int) -> StepTrial | None:
        """The trial that follows at the largest batch size; None if there is none.

        Args:
            batch_size: that was found.
        """
        return None if self.then is None else self.then.replace(batch_size=batch_size)

    def bounds(self, seen: Mapping[int, Probe]) -> tuple[int, int | None]:
        """(largest that fits, or 0; smallest that does not, or None).

        Where a larger batch fitted although a smaller one did not, the smaller one counts: what fits, fits always.

        Args:
            seen: batch size -> its probe.
        """
        high = min((size for size, probe in seen.items() if not probe.fits), default=None)
        low = max((size for size, probe in seen.items() if probe.fits and (high is None or size < high)), default=0)
        return low, high

    def answer(self, seen: Mapping[int, Probe]) -> int:
        """The largest batch size known to fit; 0 if none does.

        Args:
            seen: batch size -> its probe.
        """
        return self.bounds(seen)[0]

    def next_batch_size(self, seen: Mapping[int, Probe], forecast: Forecast | None = None) -> int | None:
        """The batch size to probe next, never one already seen; None when the search has ended.

        Args:
            seen: batch size -> its probe.
            forecast: what simulations say of larger batches, if they do.
        """
        low, high = self.bounds(seen)
        predicted = self._predict(seen, low, high, forecast) if len(seen) < PATIENCE else None
        if not seen:
            return min(self.start if predicted is None else max(1, self._cap(predicted)), self.max_batch_size)
        if high is None:
            return self._above(low, predicted)
        if high - low <= max(1, self.tolerance * low):
            return None
        return self._between(seen, low, high, predicted)

    def _above(self, low: int, predicted: float | None) -> int | None:
        """Everything fitted so far."""
        if low >= self.max_batch_size:
            return None
        candidate = 2 * low if predicted is None else max(self._cap(predicted), low + self._step(low))
        return min(candidate, self.max_batch_size)

    def _between(self, seen: Mapping[int, Probe], low: int, high: int, predicted: float | None) -> int:
        """`low` fits (or is 0), `high` does not, and they are further apart than the tolerance."""
        if predicted is not None and self._cap(predicted) < high:
            closest_below_high = high - max(1, int(self.tolerance / (1 + self.tolerance) * high))
            candidate = min(max(self._cap(predicted), low + self._step(low), 1), closest_below_high)
        elif predicted is not None:  # what was believed is refuted, and by how much is not known
            failures = sum(not probe.fits for probe in seen.values())
            candidate = max(int(high * _RETREAT[min(failures, len(_RETREAT)) - 1]), low + self._step(low))
        elif low > 0 and high > 4 * low:
            candidate = math.isqrt(low * high)  # the tolerance is relative, so is the middle
        else:
            candidate = (low + high) // 2
        return min(max(candidate, low + 1), high - 1)

    def _step(self, low: int) -> int:
        return max(1, int(self.tolerance * low))

    def _cap(self, predicted: float) -> int:
        """A batch size a little below the limit that is predicted."""
        return int(min(predicted * (1 - _BELOW * self.tolerance), self.max_batch_size))

    def _predict(
        self, seen: Mapping[int, Probe], low: int, high: int | None, forecast: Forecast | None
    ) -> float | None:
        """Where the budget is reached, by what is known best; None if nothing says so."""
        budget = self.probe.memory_budget
        if budget is None:
            return None
        pair = self._two_points(seen, low, high)
        if pair is None:
            return self._by_less(seen, low, forecast, budget)
        (size_a, peak_a), (size_b, peak_b) = pair
        slope = (peak_b - peak_a) / (size_b - size_a)
        if slope <= 0:
            return math.inf if high is None else None  # memory does not grow with the batch
        return size_a + (budget - peak_a) / slope

    def _by_less(self, seen: Mapping[int, Probe], low: int, forecast: Forecast | None, budget: int) -> float | None:
        """The same where fewer than two peaks are known."""
        known = {size: probe for size, probe in seen.items() if probe.peak_bytes is not None}
        if known:
            size = max((size for size in known if size <= low), default=min(known))
            peak, before = known[size].peak_bytes, known[size].baseline_bytes
            assert peak is not None
            fixed = before if forecast is None else forecast.fixed
            return (budget - fixed) / (peak - fixed) * size if fixed is not None and peak > fixed else None
        return None if forecast is None else max(0.0, (budget - forecast.fixed) / forecast.slope)

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


def searches(
    device: str,
    models: Iterable[str],
    backends: Iterable[str],
    *,
    budget: int,
    limit: int = 16384,
    limits: Mapping[str, int] | None = None,
) -> list[MaxBatch]:
    """The largest batch of each model and backend, as in Figure 3 of arXiv:2205.10683.

    On CUDA it is measured, from where a simulated search ended, and then the step at that batch; on a CPU simulated.

    Args:
        device: "cpu" or "cuda".
        models: references, the first outermost.
        backends: names.
        budget: bytes.
        limit: the largest batch that is tried.
        limits: of a backend, where it is smaller.
    """
    found = []
    backends = list(backends)
    for model in models:
        for backend in backends:
            largest = min(limit, (limits or {}).get(backend, limit))
            shared: dict[str, Any] = {"model": model, "backend": backend, "device": device, "memory_budget": budget}
            probe = PeakTrial(**shared, batch_size=8, simulated=device == "cpu")
            search = MaxBatch(probe=probe, max_batch_size=largest, start=32)
            if device != "cpu":
                then = StepTrial(**shared, batch_size=8, steps=10, max_seconds=15.0)
                seed = LargestTrial(**shared, batch_size=32, max_batch_size=largest)
                search = replace(search, then=then, seed=seed)
            found.append(search)
    return found
