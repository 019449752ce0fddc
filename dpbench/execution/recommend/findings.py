"""What was found of each backend on one model: exactness, time and memory beside ordinary training, largest batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dpbench.trials.outcome import Outcome

ORDINARY = "nonprivate"
LEFT_OUT = "left out for want of time"
NOT_FOUND = "not found for want of time"
NOT_KNOWN = "not known"
#: Rounds from which on an interval is stated.
ROUNDS = 5
#: No private step is so much faster than ordinary training, and no two rounds differ so much, on a machine at rest.
FASTEST, SPREAD = 0.8, 2.0
#: The chance, at most, that the median lies outside an interval (of five rounds: 2/32).
_OUTSIDE = 1 / 16
#: Why a search for the largest batch ended -> what is to be said of its number.
NOTES = {
    "bracketed": "",
    "full": "",
    "limit": "and more: the search ends there",
    "nothing": "not even one sample fits",
    "time": "at least: the search was cut off for want of time",
}


def doubt(ratios: Sequence[float]) -> str | None:
    """Why these rounds cannot be believed, in words; None if they can.

    Args:
        ratios: of times to ordinary training, one a round.
    """
    if not ratios or (median(ratios) >= FASTEST and max(ratios) <= SPREAD * min(ratios)):
        return None
    return f"the machine is busy: rounds from {min(ratios):.2f}x to {max(ratios):.2f}x"


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Of the median, by the order of the rounds (it lies outside with a chance of 1/16 at most); None below ROUNDS.

    Args:
        ratios: one a round.
    """
    count = len(ratios)
    if count < ROUNDS:
        return None
    ordered, inner = sorted(ratios), 0
    outside = 2 / 2**count  # the chance that all rounds lie on one side
    while outside <= _OUTSIDE and inner < count // 2:
        inner += 1
        outside += 2 * math.comb(count, inner) / 2**count
    return ordered[inner - 1], ordered[count - inner]


@dataclass
class Finding:
    """One backend. `ratios` to ordinary training, one a round; `largest` as a `LargestTrial` gives it.

    `smaller`: the samples that it was timed with, if there was no time for as many as were asked for.
    """

    backend: str
    status: str = "not measured"
    reason: str = LEFT_OUT
    verification: Mapping[str, Any] = field(default_factory=dict)
    coverage: Mapping[str, float] | None = None
    ratios: Sequence[float] = ()
    smaller: int | None = None
    step_seconds: float | None = None
    peak_bytes: int | None = None
    baseline_bytes: int | None = None
    memory_ratio: float | None = None
    memory_source: str | None = None
    largest: int | None = None
    largest_ended: str | None = None
    largest_note: str = LEFT_OUT

    @property
    def ratio(self) -> float | None:
        """The median over rounds of however many samples; None if there is none, or it cannot be believed."""
        return median(self.ratios) if self.ratios and self.status == "ok" else None

    @property
    def time_ratio(self) -> float | None:
        """The same of as many samples as were asked for."""
        return self.ratio if self.smaller is None else None

    @property
    def candidate(self) -> bool:
        """Clips, is exact, and was timed: only such are ever recommended."""
        return self.backend != ORDINARY and self.ratio is not None

    def interval(self) -> tuple[float, float] | None:
        """Of the ratio, see `interval`."""
        return interval(self.ratios) if self.ratio is not None else None

    def too_large(self, batch_size: int) -> bool:
        """Whether the batch is known not to fit in the budget.

        Args:
            batch_size: that was asked for.
        """
        return self.largest is not None and self.largest_ended != "time" and self.largest < batch_size

    def predicted_batch(self, batch_size: int, budget: int) -> int:
        """Where the budget is reached if what the step took beyond its baseline grows with the batch; at least 1.

        Args:
            batch_size: of the step that was measured.
            budget: bytes.
        """
        if self.peak_bytes is None or self.baseline_bytes is None or self.peak_bytes <= self.baseline_bytes:
            return batch_size
        step = self.peak_bytes - self.baseline_bytes
        return max(1, int(batch_size * (budget - self.baseline_bytes) / step))

    def as_row(self) -> dict[str, Any]:
        """The row of the contract, and what else is known."""
        low, high = (self.interval() if self.smaller is None else None) or (None, None)
        return {
            "backend": self.backend,
            "status": self.status,
            "coverage": dict(self.coverage) if self.coverage is not None else None,
            "time_ratio": self.time_ratio,
            "memory_ratio": self.memory_ratio,
            "max_batch_size": self.largest,
            "max_batch_note": self.largest_note,
            "reason": self.reason,
            "max_norm_error": self.verification.get("max_norm_error"),
            "max_grad_error": self.verification.get("max_grad_error"),
            "time_ratio_low": low,
            "time_ratio_high": high,
            "rounds": len(self.ratios),
            "smaller_batch": None if self.smaller is None else {"batch_size": self.smaller, "time_ratio": self.ratio},
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "memory_source": self.memory_source,
        }


def take_race(findings: Mapping[str, Finding], backends: Mapping[str, Mapping[str, Any]], batch_size: int) -> None:
    """Enter what a `RecommendTrial` has found.

    Args:
        findings: backend -> what is known of it, changed in place.
        backends: backend -> its entry, see `dpbench.measure.recommend`.
        batch_size: that was asked for.
    """
    for name, entry in backends.items():
        found = findings[name]
        end_as(found, str(entry["outcome"]), entry.get("evidence"))
        found.verification = entry.get("verification") or {}
        found.coverage = entry.get("coverage")
        if found.status == "ok":
            _take_times(found, entry, batch_size)
            memory = entry.get("memory") or {}
            found.peak_bytes, found.memory_source = memory.get("peak_bytes"), memory.get("source")
            found.baseline_bytes = memory.get("baseline_bytes")
    set_memory_ratios(findings)


def _take_times(found: Finding, entry: Mapping[str, Any], batch_size: int) -> None:
    found.ratios, found.step_seconds = entry.get("ratios") or (), entry.get("step_seconds")
    found.smaller = None if entry.get("batch_size") in (None, batch_size) else entry["batch_size"]
    if not found.ratios:
        found.status, found.reason = "not measured", LEFT_OUT
    elif found.backend != ORDINARY and (why := doubt(found.ratios)) is not None:
        found.status, found.reason = NOT_KNOWN, f"{NOT_KNOWN}, {why}"


def set_memory_ratios(findings: Mapping[str, Finding]) -> None:
    """Peaks beside ordinary training's, where both come from one source.

    Args:
        findings: backend -> what is known of it, changed in place.
    """
    base = findings[ORDINARY]
    for found in findings.values():
        if found.peak_bytes is not None and base.peak_bytes and found.memory_source == base.memory_source:
            found.memory_ratio = found.peak_bytes / base.peak_bytes


def end_as(found: Finding, outcome: str, evidence: str | None) -> None:
    """Name how its measurement ended: of a traceback what was raised, of all else the first line.

    Args:
        found: of one backend, changed in place.
        outcome: of its trial.
        evidence: of its trial.
    """
    lines = [line.strip() for line in (evidence or "").splitlines() if line.strip()]
    said = (lines[-1] if outcome == Outcome.ERROR else lines[0]) if lines else ""
    found.status, found.reason = outcome, said
    if outcome == Outcome.TIMEOUT:
        found.status = "not measured"
        found.reason = said if said.startswith(LEFT_OUT) else f"{LEFT_OUT}: {said}"
    if found.status != "ok":
        found.largest_note = ""


def take_search(
    found: Finding, outcome: str, evidence: str | None, result: Mapping[str, Any] | None, batch_size: int
) -> None:
    """Enter what a `LargestTrial` came to; and the peak of `batch_size` samples, if that was not measured.

    Args:
        found: of one backend, changed in place.
        outcome: of the search.
        evidence: of the search.
        result: of the search, if it ended well.
        batch_size: that was asked for.
    """
    if outcome == Outcome.OK and result is not None:
        found.largest, found.largest_ended = result["batch_size"], result["ended"]
        found.largest_note = NOTES[result["ended"]]
        peak = next((p["peak_bytes"] for p in result["probes"] if p["batch_size"] == batch_size), None)
        if found.peak_bytes is None and peak is not None:
            found.peak_bytes, found.memory_source = peak, "simulated"
        return
    lines = (evidence or "").strip().splitlines() or [outcome]
    said = lines[-1] if outcome == Outcome.ERROR else lines[0]
    found.largest_note = NOT_FOUND if outcome == Outcome.TIMEOUT else f"not simulated: {outcome}: {said}"


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Ordinary training, then what was timed from fast to slow, then the rest.

    Args:
        findings: of all backends.
    """
    return sorted(findings, key=lambda f: (f.backend != ORDINARY, f.status != "ok", f.ratio or math.inf))
