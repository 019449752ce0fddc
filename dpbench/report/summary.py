"""Describe records in words: their number, machine, version and dates."""

from collections.abc import Iterable
from datetime import datetime

from dpbench.records.reader import Record


def where(records: Iterable[Record]) -> str:
    """'cpu AMD EPYC, 2 CPUs; torch 2.15.0; on 1 January 2026; commit 0123456': for records of one device."""
    records = sorted(records, key=lambda r: r.utc)
    torch = sorted({str(r.environment["torch"]) for r in records if r.environment.get("torch")})
    versions = [(str(e.get("git_sha") or "unknown")[:7], e.get("git_dirty")) for e in (r.environment for r in records)]
    commits = dict.fromkeys(f"{sha} with changes" if dirty else sha for sha, dirty in versions)
    said = [records[0].device, *([f"torch {join(torch)}"] if torch else []), days(records)]
    return f"{'; '.join(said)}; {'commits' if len(commits) > 1 else 'commit'} {', '.join(commits)}"


def several(count: int, name: str) -> str:
    """'1 model', '1,200 models'."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def join(words: Iterable[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *first, last = list(words)
    return f"{', '.join(first)} and {last}" if first else last


def days(records: Iterable[Record]) -> str:
    """When they were measured: 'on 1 January 2026', 'from 1 January 2026 to 3 January 2026'."""
    found = sorted({record.utc[:10] for record in records})
    return f"on {_day(found[0])}" if len(found) == 1 else f"from {_day(found[0])} to {_day(found[-1])}"


def _day(iso: str) -> str:
    day = datetime.fromisoformat(iso)
    return f"{day.day} {day:%B %Y}"
