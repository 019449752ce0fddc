"""Recommend a backend in one sentence, with the reason and the alternatives.

Candidates are exact, and fit in the budget at the batch size. The one with the fastest median is taken, or the one with
the least memory among those with indistinguishable times. Two times are indistinguishable if both have intervals, and
these overlap; two memories, if they are within `MIN_EFFECT`.

Functions take:
    findings: of all backends.
    batch_size: as requested.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dpbench.execution.recommend.findings import NOT_KNOWN, ORDINARY, ROUNDS, Finding
from dpbench.records.statistics import MIN_EFFECT

#: The most alternatives to name, and the well-known ones that are always named.
_NAMED = 4
_KNOWN = ("opacus_hooks", "opacus_ghost")


class Verdict(NamedTuple):
    """`backend` is None if there is none to recommend."""

    backend: str | None
    reason: str


def verdict(
    findings: Collection[Finding], batch_size: int, budget: str, slow: Mapping[str, Any] | None = None
) -> Verdict:
    """Recommend a backend, and say why.

    Args:
        budget: in words, such as "16 GiB".
        slow: an ordinary step that was too slow for any comparison (`dpbench.measure.recommend.run`), or None.
    """
    timed = (f for f in findings if f.candidate)  # by median; those of fewer samples or rounds come later
    exact = sorted(timed, key=lambda f: (f.smaller is not None, f.interval() is None, _time(f)))
    if not exact:
        return Verdict(None, _too_slow(slow, batch_size) if slow else _nothing(findings))
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
    rivals = [f for f in fitting if f is fastest or _indistinguishable(fastest, f)]
    least = min(rivals, key=_memory)
    chosen = least if _memory(least) < (1 - MIN_EFFECT) * _memory(fastest) else fastest
    said = [
        f"take {chosen.backend}: exact{_fallback(chosen)}, {_costs(chosen)} ordinary training{_batch(chosen, budget)}"
    ]
    tie = next((f for f in rivals if f is not chosen), None)
    if tie is not None:
        said.append(_tied(chosen, tie))
    said.append(_beaten(findings, [f for f in exact if f is not chosen and f is not tie], chosen.smaller))
    faster = [f.backend for f in exact if f not in fitting and _time(f) < _time(chosen)]
    if faster:
        said.append(f"faster, but without room for {batch_size} samples in {budget}: {', '.join(faster)}")
    if chosen.smaller is not None:
        said.append(f"these times are of {chosen.smaller} samples: for {batch_size}, ask with more --seconds")
    return Verdict(chosen.backend, "; ".join(filter(None, said)))


def _indistinguishable(a: Finding, b: Finding) -> bool:
    """Whether the times are indistinguishable, given enough rounds."""
    first, second = a.interval(), b.interval()
    return first is not None and second is not None and first[0] <= second[1] and second[0] <= first[1]


def _nothing(findings: Collection[Finding]) -> str:
    """Why there is none to recommend."""
    unknown = [f for f in findings if f.status == NOT_KNOWN]
    if not unknown:
        return f"no backend that clips is known to be exact on this model{_why(findings)}"
    rounds = ", ".join(f"{f.backend} {min(f.ratios):.2f}x to {max(f.ratios):.2f}x" for f in unknown)
    return f"not known, the machine is busy: rounds differ too much ({rounds}); stop other programs, and ask again"


def _too_slow(slow: Mapping[str, Any], batch_size: int) -> str:
    """What there was no time for, and what to do."""
    seconds = slow["seconds"]
    one = "one sample" if slow["samples"] == 1 else f"{slow['samples']} samples"
    less = "or ask on a GPU (--device cuda), or with shorter inputs or a smaller model of the same kind"
    if seconds is None:
        said = f"not known: one step of ordinary training with {one} took all the time"
        return f"{said}; ask with more --seconds, {less}"
    step = seconds * batch_size / slow["samples"]
    needed = 1.5 * (330 * seconds / slow["samples"] + 50 * step)
    return (
        f"not known: a step of ordinary training takes {seconds:.1f} s with {one}, about {step:.0f} s with "
        f"{batch_size}, too long to compare backends in the time; --seconds {_round_up(needed):d} should do, {less}"
    )


def _round_up(seconds: float) -> int:
    unit = 10 ** max(1, math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / unit) * unit


def _time(found: Finding) -> float:
    assert found.ratio is not None
    return found.ratio


def _memory(found: Finding) -> float:
    return float("inf") if found.memory_ratio is None else found.memory_ratio


def _costs(found: Finding) -> str:
    count = len(found.ratios)
    rough = f" (roughly: {count} round{'s' * (count > 1)})" if count < ROUNDS else ""
    time = f"{_time(found):.2f}x the time{rough}"
    return f"{time} of" if found.memory_ratio is None else f"{time} and {found.memory_ratio:.2f}x the memory of"


def _beaten(findings: Collection[Finding], others: Sequence[Finding], smaller: int | None) -> str:
    """The times of the alternatives: well-known ones, and the fastest."""
    if not others:
        return f"nothing else could be measured{_why([f for f in findings if not f.candidate])}"
    known = [f for f in others if f.backend in _KNOWN]
    named = sorted([*known, *[f for f in others if f not in known][: _NAMED - len(known)]], key=_time)
    samples = [f" with {f.smaller} samples" if f.smaller not in (None, smaller) else "" for f in named]
    takes = [" takes", *[""] * len(named)]
    times = [f"{f.backend}{verb} {_time(f):.2f}x{few}" for f, verb, few in zip(named, takes, samples, strict=False)]
    unknown = [f.backend for f in findings if f.status == NOT_KNOWN]
    return ", ".join(times) + (f"; not known, for the machine is busy: {', '.join(unknown)}" if unknown else "")


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
    """Why not the other of two with indistinguishable times."""
    mine, others = _memory(chosen), _memory(other)
    same = f"{other.backend} cannot be told from it by time ({_time(other):.2f}x)"
    if others > mine / (1 - MIN_EFFECT):
        return f"{same}, but takes more memory ({others:.2f}x)"
    return f"{same} or memory ({others:.2f}x)"


def _why(findings: Collection[Finding]) -> str:
    """The statuses of the backends, most common first."""
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
