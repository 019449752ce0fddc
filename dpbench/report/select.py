"""Which records a figure is drawn from: one device, the newest of each trial and round, one setting a figure.

Nothing is dropped in silence: whatever does not enter is counted by its reason, and the caption says so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpbench.environment import device_label
from dpbench.store import read_runs

K = TypeVar("K", bound=Hashable)

#: A reason for leaving records out of a figure -> how many.
LeftOut = Counter[str]


@dataclass(frozen=True)
class Record:
    """A trial's record together with the environment of the run that wrote it."""

    device: str
    experiment: str
    id: str
    round: int
    fingerprint: str
    trial: Mapping[str, Any]
    outcome: str
    evidence: str
    result: Mapping[str, Any]
    utc: str
    environment: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.trial["kind"])

    @property
    def cell(self) -> tuple[str, str]:
        """(model, backend)."""
        return self.trial["model"], self.trial["backend"]

    def setting(self, name: str) -> Any:
        """A field of the trial, or what the run made of it where the trial left it open; None where it has none."""
        if name == "experiment":
            return self.experiment
        if name == "threads":
            return self.trial.get("threads") or self.environment.get("threads")
        return self.trial.get(name)


def read(source: Path) -> list[Record]:
    """All records below the folder `source`. Smoke runs (in folders ``*-smoke``) count only if it is one itself."""
    folders = {path.parent for path in source.rglob("*.jsonl")}
    chosen = sorted(
        folder for folder in folders if not any(p.endswith("-smoke") for p in folder.relative_to(source).parts)
    )
    return [
        Record(
            device=device_label(run.environment),
            experiment=line["experiment"],
            id=line["id"],
            round=line["round"],
            fingerprint=line["fingerprint"],
            trial=line["trial"],
            outcome=line["outcome"],
            evidence=line.get("evidence") or "",
            result=line.get("result") or {},
            utc=line["utc"],
            environment=run.environment,
        )
        for folder in chosen
        for run in read_runs(folder)
        for line in run.records
    ]


def by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by device label: a CPU's and a GPU's never share a figure."""
    return dict(sorted(grouped(records, lambda record: record.device).items()))


def newest(records: Sequence[Record], left_out: LeftOut) -> list[Record]:
    """The newest record of each (trial id, round); the file's order decides between equal times."""
    kept: dict[tuple[str, int], Record] = {}
    for record in records:
        old = kept.get((record.id, record.round))
        if old is None or record.utc >= old.utc:
            kept[record.id, record.round] = record
    left_out["superseded by a newer record"] += len(records) - len(kept)
    return list(kept.values())


def newest_version(records: Sequence[Record], cell: Callable[[Record], Hashable], left_out: LeftOut) -> list[Record]:
    """Of each cell, the records that come from the source version of its newest one.

    A cell whose rounds or probes come from two versions of the code is no measurement of either.
    """
    kept = []
    for group in grouped(records, cell).values():
        latest = max(group, key=lambda record: record.utc).fingerprint
        kept += [record for record in group if record.fingerprint == latest]
    left_out["of an older version of the same cell"] += len(records) - len(kept)
    return kept


def newest_trial(records: Sequence[Record], left_out: LeftOut) -> list[Record]:
    """Of the records of one cell, the rounds of the trial that was measured last."""
    latest = max(records, key=lambda record: record.utc).id
    kept = [record for record in records if record.id == latest]
    left_out["of an older declaration of the same cell"] += len(records) - len(kept)
    return kept


def grouped(records: Iterable[Record], key: Callable[[Record], K]) -> dict[K, list[Record]]:
    """Records by `key(record)`, in the order of first appearance."""
    groups: dict[K, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def facets(
    records: Sequence[Record], fields: Mapping[str, Sequence[str]]
) -> Iterator[tuple[dict[str, Any], list[Record]]]:
    """Split records so that each part has one value of every field: (what tells the part apart, its records).

    `fields` says to which kinds of trial a field applies; a record of another kind, or one that leaves the field
    open (None), belongs to every part. Only fields with more than one value appear in the dict.
    """
    values: dict[str, list[Any]] = {}
    for field, kinds in fields.items():
        found = {r.setting(field) for r in records if r.kind in kinds} - {None}
        values[field] = sorted(found, key=lambda value: (str(type(value)), value)) or [None]
    parts: dict[frozenset[int], dict[str, Any]] = {}
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        part = frozenset(
            index
            for index, r in enumerate(records)
            if all(r.kind not in kinds or r.setting(f) in (None, chosen[f]) for f, kinds in fields.items())
        )
        if part and not any(part < other for other in parts):
            parts = {other: label for other, label in parts.items() if not other < part}
            parts.setdefault(part, {f: v for f, v in chosen.items() if len(values[f]) > 1})
    for part, label in parts.items():
        yield label, [records[index] for index in sorted(part)]
