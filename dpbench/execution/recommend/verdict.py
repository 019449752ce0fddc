"""Which backend to take, and why, in one sentence.

Only exact ones come into question, and of these what fits in the budget at the batch size. The fastest is taken, by the
upper end of its interval (`Finding.interval`), so that a noisy time wins nothing; of those that cannot be told from it
by their times, the one that takes the least memory. Two times cannot be told apart if their intervals overlap and they
are not far apart (`FAR`); two memories, within `MIN_EFFECT`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dpbench.execution.recommend.findings import ORDINARY, Finding
from dpbench.records.statistics import MIN_EFFECT

#: A ratio of two times that is never laid to noise.
FAR = 1.25
#: Times of fewer rounds than this are called rough.
FEW = 3


class Verdict(NamedTuple):
    """`backend` is None if none can be recommended."""

    backend: str | None
    reason: str


def verdict(findings: Collection[Finding], batch_size: int, budget: str) -> Verdict:
    """Which backend to take, and why.

    Args:
        findings: of all backends.
        batch_size: that times and memory were measured at.
        budget: in words, such as "16 GiB".
    """
    exact = fastest_first(findings)
    if not exact:
        return Verdict(None, f"no backend that clips is known to be exact on this model{_why(findings)}")
    fitting = [f for f in exact if not f.too_large(batch_size)]
    if not fitting:
        most = max(exact, key=lambda f: (f.largest or 0, -_time(f)))
        if not most.largest:
            return Verdict(None, f"not even one sample fits in {budget} with any exact backend")
        return Verdict(
            most.backend,
            f"take {most.backend} with a smaller batch: with no exact backend do {batch_size} samples fit in {budget}, "
            f"and it takes the most, {most.largest} (simulated), at {_costs(most)} ordinary training",
        )
    fastest = fitting[0]
    rivals = [f for f in fitting if f is fastest or tied(fastest, f)]
    least = min(rivals, key=_memory)
    chosen = least if _memory(least) < (1 - MIN_EFFECT) * _memory(fastest) else fastest
    said = [
        f"take {chosen.backend}: exact{_fallback(chosen)}, {_costs(chosen)} ordinary training{_batch(chosen, budget)}"
    ]
    others = [f for f in fitting if f is not chosen]
    tie = next((f for f in rivals if f is not chosen), None)
    if tie is not None:
        said.append(_tied(chosen, tie))
    elif others:
        said.append(f"the next best exact one, {others[0].backend}, costs {_costs(others[0])} it")
    faster = [f.backend for f in exact if f not in fitting and _time(f) < _time(chosen)]
    if faster:
        said.append(f"faster, but without room for {batch_size} samples in {budget}: {', '.join(faster)}")
    return Verdict(chosen.backend, "; ".join(said))


def fastest_first(findings: Collection[Finding]) -> list[Finding]:
    """What is exact and timed, by the time that it takes at the worst.

    Args:
        findings: of all backends.
    """
    return sorted((f for f in findings if f.candidate), key=lambda f: f.interval()[1])


def contenders(findings: Collection[Finding]) -> list[Finding]:
    """The fastest exact one, and all that may be as fast for all that is known, whatever the noise.

    Args:
        findings: of all backends.
    """
    exact = fastest_first(findings)
    return [f for f in exact if f.interval()[0] <= exact[0].interval()[1]]


def tied(a: Finding, b: Finding) -> bool:
    """Whether their times cannot be told apart.

    Args:
        a, b: of two backends that were timed.
    """
    (low_a, high_a), (low_b, high_b) = a.interval(), b.interval()
    return low_a <= high_b and low_b <= high_a and max(_time(a), _time(b)) <= FAR * min(_time(a), _time(b))


def _time(found: Finding) -> float:
    assert found.time_ratio is not None
    return found.time_ratio


def _memory(found: Finding) -> float:
    return float("inf") if found.memory_ratio is None else found.memory_ratio


def _costs(found: Finding) -> str:
    rough = f" (roughly: {len(found.ratios)} round{'s' * (len(found.ratios) > 1)})" if len(found.ratios) < FEW else ""
    time = f"{_time(found):.2f}x the time{rough}"
    return f"{time} of" if found.memory_ratio is None else f"{time} and {found.memory_ratio:.2f}x the memory of"


def _batch(found: Finding, budget: str) -> str:
    if not found.largest:
        return ""
    if found.largest_ended == "limit":
        return f", batch up to {found.largest} and more in {budget} (simulated)"
    at_least = "at least " if found.largest_ended == "time" else ""
    return f", batch up to {at_least}{found.largest} in {budget} (simulated)"


def _fallback(found: Finding) -> str:
    share = (found.coverage or {}).get("fallback", 0.0)
    return f" ({share:.1%} of the parameters by fallback)" if share else ""


def _tied(chosen: Finding, other: Finding) -> str:
    """Of two whose times cannot be told apart: why not the other."""
    mine, others = _memory(chosen), _memory(other)
    same = f"{other.backend} cannot be told from it by time ({_time(other):.2f}x)"
    if others > mine / (1 - MIN_EFFECT):
        return f"{same}, but takes more memory ({others:.2f}x)"
    return f"{same} or memory ({others:.2f}x)"


def _why(findings: Collection[Finding]) -> str:
    """What stands in the way of the backends, the commonest first."""
    counts: dict[str, list[str]] = {}
    for found in findings:
        if found.backend != ORDINARY:
            counts.setdefault(found.status, []).append(found.backend)
    words: Sequence[str] = [f"{status}: {', '.join(names)}" for status, names in counts.items()]
    ordinary = next((f for f in findings if f.backend == ORDINARY), None)
    if ordinary is not None and ordinary.status not in ("ok", "not measured"):
        return f", and ordinary training fails too ({ordinary.reason})"
    if set(counts) == {"not measured"}:
        return ": there was no time to measure any; ask with a smaller --batch-size or with more --seconds"
    return f" ({'; '.join(words)})" if words else ""
