"""The findings for each backend on one model: exactness, time and memory relative to ordinary training, largest batch.

Functions take:
    findings: backend -> its finding, updated in place.
    found: one backend's finding, updated in place.
    ratios: of times to ordinary training, one a round.
    batch_size: as requested.
    outcome, evidence: of the trial.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dpbench.errors import telling_line
from dpbench.trials.outcome import Outcome

ORDINARY = "nonprivate"
LEFT_OUT = "left out for want of time"
NOT_FOUND = "not found for want of time"
NOT_KNOWN = "not known"
#: The least rounds for an interval.
ROUNDS = 5
#: On an idle machine no private step is faster than this, and no two rounds differ by more.
FASTEST, SPREAD = 0.8, 2.0
#: The largest probability that the median lies outside an interval (of five rounds: 2/32).
_OUTSIDE = 1 / 16
#: Why a search for the largest batch ended -> the note on its number.
NOTES = {
    "bracketed": "",
    "full": "",
    "limit": "and more: the search ends there",
    "nothing": "not even one sample fits",
    "time": "at least: the search was cut off for want of time",
}


def doubt(ratios: Sequence[float]) -> str | None:
    """Why these rounds are not credible, in words; None if they are."""
    if not ratios or (median(ratios) >= FASTEST and max(ratios) <= SPREAD * min(ratios)):
        return None
    return f"the machine is busy: rounds from {min(ratios):.2f}x to {max(ratios):.2f}x"


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """An interval of the median, by order statistics (misses it with probability at most 1/16); None below ROUNDS."""
    count = len(ratios)
    if count < ROUNDS:
        return None
    ordered, inner = sorted(ratios), 0
    outside = 2 / 2**count  # the probability that all rounds lie on one side
    while outside <= _OUTSIDE and inner < count // 2:
        inner += 1
        outside += 2 * math.comb(count, inner) / 2**count
    return ordered[inner - 1], ordered[count - inner]


@dataclass
class Finding:
    """One backend. `ratios` are to ordinary training, one a round; `largest` is the result of a `LargestTrial`.

    `smaller`: the batch size that was timed, if there was no time for the requested one.
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
        """The median over rounds, at any batch size; None if there is none, or it is not credible."""
        return median(self.ratios) if self.ratios and self.status == "ok" else None

    @property
    def time_ratio(self) -> float | None:
        """The same at the requested batch size."""
        return self.ratio if self.smaller is None else None

    @property
    def candidate(self) -> bool:
        """Whether it clips, is exact, and was timed: only such backends are recommended."""
        return self.backend != ORDINARY and self.ratio is not None

    def interval(self) -> tuple[float, float] | None:
        """The interval of the ratio, see `interval`."""
        return interval(self.ratios) if self.ratio is not None else None

    def too_large(self, batch_size: int) -> bool:
        """Whether the batch is known not to fit in the budget."""
        return self.largest is not None and self.largest_ended != "time" and self.largest < batch_size

    def predicted_batch(self, batch_size: int, budget: int) -> int:
        """The batch that reaches the budget if memory above the baseline grows with the batch; at least 1.

        Args:
            budget: bytes.
        """
        if self.peak_bytes is None or self.baseline_bytes is None or self.peak_bytes <= self.baseline_bytes:
            return batch_size
        step = self.peak_bytes - self.baseline_bytes
        return max(1, int(batch_size * (budget - self.baseline_bytes) / step))

    def as_row(self) -> dict[str, Any]:
        """The documented fields of a row, and others."""
        low, high = (self.interval() if self.smaller is None else None) or (None, None)
        own = (
            "backend",
            "status",
            "time_ratio",
            "memory_ratio",
            "reason",
            "step_seconds",
            "peak_bytes",
            "memory_source",
        )
        return {
            **{name: getattr(self, name) for name in own},
            **{name: self.verification.get(name) for name in ("max_norm_error", "max_grad_error")},
            "coverage": dict(self.coverage) if self.coverage is not None else None,
            "max_batch_size": self.largest,
            "max_batch_note": self.largest_note,
            "time_ratio_low": low,
            "time_ratio_high": high,
            "rounds": len(self.ratios),
            "smaller_batch": None if self.smaller is None else {"batch_size": self.smaller, "time_ratio": self.ratio},
        }


def take_race(findings: Mapping[str, Finding], backends: Mapping[str, Mapping[str, Any]], batch_size: int) -> None:
    """Enter the results of a `RecommendTrial`.

    Args:
        backends: backend -> its entry, see `dpbench.measure.recommend`.
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
    """Set the ratios of peaks to ordinary training's, where both come from one source."""
    base = findings[ORDINARY]
    for found in findings.values():
        if found.peak_bytes is not None and base.peak_bytes and found.memory_source == base.memory_source:
            found.memory_ratio = found.peak_bytes / base.peak_bytes


def end_as(found: Finding, outcome: str, evidence: str | None) -> None:
    """Record how a measurement ended: the exception of a traceback, else the first line."""
    said = telling_line(outcome, evidence) if evidence else ""
    found.status, found.reason = outcome, said
    if outcome == Outcome.TIMEOUT:
        found.status = "not measured"
        found.reason = said if said.startswith(LEFT_OUT) else f"{LEFT_OUT}: {said}"
    if found.status != "ok":
        found.largest_note = ""


def take_search(
    found: Finding, outcome: str, evidence: str | None, result: Mapping[str, Any] | None, batch_size: int
) -> None:
    """Enter the result of a `LargestTrial`, and its peak at `batch_size` unless that was measured.

    Args:
        result: of the search, if it succeeded.
    """
    if outcome == Outcome.OK and result is not None:
        found.largest, found.largest_ended = result["batch_size"], result["ended"]
        found.largest_note = NOTES[result["ended"]]
        peak = next((p["peak_bytes"] for p in result["probes"] if p["batch_size"] == batch_size), None)
        if found.peak_bytes is None and peak is not None:
            found.peak_bytes, found.memory_source = peak, "simulated"
        return
    said = f"not simulated: {outcome}: {telling_line(outcome, evidence)}"
    found.largest_note = NOT_FOUND if outcome == Outcome.TIMEOUT else said


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Ordinary training, then timed backends from fast to slow, then the rest."""
    return sorted(findings, key=lambda f: (f.backend != ORDINARY, f.status != "ok", f.ratio or math.inf))
