"""Groups failed trials by cause: how often and where each happened, and the recorded evidence."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dpbench.records.reader import PAIRED, Record
from dpbench.report import style
from dpbench.report.data.statistics import failed

_SHOWN = {"family": "", "model": "", "backend": "", "accountant": ""}
_SHOWN |= {"batch_size": "B=", "sample_rate": "q=", "delta": "δ="}
_NAMED = ("scheme", "fault", "network", "dtype")
_NO_EVIDENCE = "no evidence recorded"


#: The most places of a failure that are named.
PLACES = 10


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


def grouped_failures(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The failures among `records` (of one backend each) by cause, the gravest first; causes may differ in numbers.

    Each has its outcome as a word, its count, the cause, the places, and the first evidence if it says more.
    """
    found: dict[tuple[str, str], list[Record]] = {}
    for record in filter(failed, records):
        found.setdefault((record.outcome, re.sub(r"\d[\d.,e+-]*", "#", cause(record))), []).append(record)
    grave = {name: place for place, name in enumerate([*style.OUTCOMES, "mismatch"])}
    groups = sorted(found.values(), key=lambda group: (-grave.get(group[0].outcome, -1), -len(group)))
    return [_told(group) for group in groups]


def _told(group: list[Record]) -> dict[str, Any]:
    first, said = group[0], cause(group[0])
    places = [f"{name} ({count}×)" if count > 1 else name for name, count in Counter(map(place, group)).items()]
    rest, evidence = len(places) - PLACES, first.evidence.strip() or _NO_EVIDENCE
    return {
        "word": style.outcome(first.outcome),
        "count": len(group),
        "cause": said,
        "where": "; ".join(places[:PLACES]) + (f" and {rest:,} more" if rest > 0 else ""),
        "evidence": evidence if evidence != said else "",
    }
