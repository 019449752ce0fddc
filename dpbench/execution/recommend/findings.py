"""What was found of each backend on one model: exactness, time and memory beside ordinary training, largest batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dpbench.records.statistics import MIN_EFFECT
from dpbench.trials.outcome import Outcome

ORDINARY = "nonprivate"
LEFT_OUT = "left out for want of time"
NOT_FOUND = "not found for want of time"
#: By how much a ratio may be off that few rounds gave, beside what their own scatter says.
_FEW = {1: 0.1, 2: 0.05}
#: Of a scale by the median absolute deviation to a standard deviation; of a mean's error to a median's.
_MAD, _MEDIAN = 1.4826, 1.2533
#: Why a search for the largest batch ended -> what is to be said of its number.
NOTES = {
    "bracketed": "",
    "full": "",
    "limit": "and more: the search ends there",
    "nothing": "not even one sample fits",
    "time": "at least: the search was cut off for want of time",
}


@dataclass
class Finding:
    """One backend. `ratios` to ordinary training of the same round; `largest` as a `LargestTrial` gives it."""

    backend: str
    status: str = "not measured"
    reason: str = LEFT_OUT
    verification: Mapping[str, Any] = field(default_factory=dict)
    coverage: Mapping[str, float] | None = None
    ratios: Sequence[float] = ()
    step_seconds: float | None = None
    peak_bytes: int | None = None
    baseline_bytes: int | None = None
    memory_ratio: float | None = None
    memory_source: str | None = None
    largest: int | None = None
    largest_ended: str | None = None
    largest_note: str = LEFT_OUT

    @property
    def time_ratio(self) -> float | None:
        """The median over rounds."""
        return median(self.ratios) if self.ratios else None

    @property
    def candidate(self) -> bool:
        """Clips, is exact, and was timed: only such are ever recommended."""
        return self.backend != ORDINARY and self.status == "ok" and bool(self.ratios)

    def interval(self) -> tuple[float, float]:
        """The time ratio's noise: what the rounds scatter, and what so few of them may be off by."""
        logs = [math.log(ratio) for ratio in self.ratios]
        middle = median(logs)
        spread = _MAD * median(abs(x - middle) for x in logs)
        half = 2 * _MEDIAN * spread / math.sqrt(len(logs)) + math.log1p(_FEW.get(len(logs), MIN_EFFECT))
        return math.exp(middle - half), math.exp(middle + half)

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
        low, high = self.interval() if self.ratios else (None, None)
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
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "memory_source": self.memory_source,
        }


def take_group(findings: Mapping[str, Finding], backends: Mapping[str, Mapping[str, Any]]) -> None:
    """Enter what one process has measured: the entries of a `RecommendTrial`, ordinary training among them.

    Args:
        findings: backend -> what is known of it, changed in place.
        backends: backend -> its entry.
    """
    base = backends.get(ORDINARY, {})
    turns = {turn["round"]: median(turn["step_seconds"]) for turn in base.get("turns", [])}
    peak = (base.get("memory") or {}).get("peak_bytes")
    for name, entry in backends.items():
        if name == ORDINARY and findings[name].ratios:
            continue  # it is measured anew in every process; the first one's seconds stand
        _take(findings[name], entry, turns, peak)


def _take(found: Finding, entry: Mapping[str, Any], turns: Mapping[int, float], peak: int | None) -> None:
    if entry["outcome"] == Outcome.TIMEOUT and found.ratios:
        return  # left out this time: what is known stands
    end_as(found, str(entry["outcome"]), entry.get("evidence"))
    found.verification = entry.get("verification") or {}
    found.coverage = entry.get("coverage", found.coverage)
    if found.status != "ok":
        return
    own = {turn["round"]: median(turn["step_seconds"]) for turn in entry.get("turns", [])}
    found.ratios = [seconds / turns[number] for number, seconds in own.items() if turns.get(number)]
    found.step_seconds = median(own.values()) if own else None
    memory = entry.get("memory") or {}
    found.peak_bytes, found.memory_source = memory.get("peak_bytes"), memory.get("source")
    found.baseline_bytes = memory.get("baseline_bytes")
    if found.peak_bytes is not None and peak:
        found.memory_ratio = found.peak_bytes / peak


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


def take_search(found: Finding, outcome: str, evidence: str | None, result: Mapping[str, Any] | None) -> None:
    """Enter what a `LargestTrial` came to.

    Args:
        found: of one backend, changed in place.
        outcome: of the search.
        evidence: of the search.
        result: of the search, if it ended well.
    """
    if outcome == Outcome.OK and result is not None:
        found.largest, found.largest_ended = result["batch_size"], result["ended"]
        found.largest_note = NOTES[result["ended"]]
        return
    lines = (evidence or "").strip().splitlines() or [outcome]
    said = lines[-1] if outcome == Outcome.ERROR else lines[0]
    found.largest_note = NOT_FOUND if outcome == Outcome.TIMEOUT else f"not simulated: {outcome}: {said}"


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Ordinary training, then what was timed from fast to slow, then the rest.

    Args:
        findings: of all backends.
    """
    return sorted(findings, key=lambda f: (f.backend != ORDINARY, f.status != "ok", f.time_ratio or math.inf))
