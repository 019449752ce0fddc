"""Groups failed trials by cause: how often and where each happened, and the recorded evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dpbench.records.reader import PAIRED, Record
from dpbench.report import style
from dpbench.report.data.statistics import is_probe
from dpbench.trials.outcome import DOES_NOT_FIT

_SHOWN = {"family": "", "model": "", "backend": "", "accountant": ""}
_SHOWN |= {"batch_size": "B=", "sample_rate": "q=", "delta": "δ="}
_NAMED = ("scheme", "fault", "network", "dtype")
_NO_EVIDENCE = "no evidence recorded"


@dataclass
class Failure:
    """One cause. `where`: trial -> how often; `evidence`: of the first trial, in full."""

    outcome: str
    cause: str
    evidence: str
    where: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Total number of failures."""
        return sum(self.where.values())


def failed(record: Record) -> bool:
    """True if a record is a failure; a probe beyond its budget is a search's result."""
    return record.outcome != "ok" and not (is_probe(record) and record.outcome in DOES_NOT_FIT)


def cause(record: Record) -> str:
    """The line of the evidence with the reason: the last of a traceback, else the first."""
    told = [line.strip() for line in record.evidence.splitlines() if line.strip()] or [_NO_EVIDENCE]
    return told[-1 if record.outcome == "error" else 0]


def place(record: Record) -> str:
    """The trial, in a few words."""
    shown = dict(record.trial)
    for name, look in (("model", style.model), ("backend", lambda b: style.backend(b).name)):
        if isinstance(shown.get(name), str):
            shown[name] = look(shown[name])
    words = [f"{sign}{shown[name]}" for name, sign in _SHOWN.items() if name in shown]
    words += [f"{shown['image_size']} px"] if record.kind in PAIRED and shown["image_size"] else []
    words += [f"{name.replace('_', ' ')} {shown[name]}" for name in _NAMED if shown.get(name)]
    return " ".join(words) or record.kind


def grouped_failures(records: Iterable[Record]) -> list[Failure]:
    """The failures among `records` (of one backend each), the gravest first; causes may differ in numbers."""
    found: dict[tuple[str, str], Failure] = {}
    for record in records:
        if failed(record):
            said = cause(record)
            key = record.outcome, re.sub(r"\d[\d.,e+-]*", "#", said)
            group = found.setdefault(key, Failure(record.outcome, said, record.evidence.strip() or _NO_EVIDENCE))
            where = place(record)
            group.where[where] = group.where.get(where, 0) + 1
    grave = ["mismatch", *reversed(style.OUTCOMES)]
    return sorted(
        found.values(),
        key=lambda f: (grave.index(f.outcome) if f.outcome in grave else len(grave), -f.count),
    )
