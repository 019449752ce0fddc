"""Records as their readers need them: each with the environment of its run, the newest of each, by device.

Imports neither pandas nor matplotlib. Nothing is dropped in silence: what does not enter is counted by its reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpbench.errors import UsageError, nearest
from dpbench.experiment import experiment_names, is_reference, load_experiment
from dpbench.records.environment import device_label
from dpbench.records.store import Run, read_runs
from dpbench.trials.outcome import FINAL

K = TypeVar("K", bound=Hashable)

#: Kinds of trial in which several backends take turns, and each has an entry.
PAIRED = ("overhead", "training_step")
#: A reason for leaving records out of a figure -> how many.
LeftOut = Counter[str]


@dataclass(frozen=True)
class Record:
    """A trial's record together with the environment of the run that wrote it, and the name of that run.

    `seconds` the whole trial took; `load` is the machine's load average (1 minute) at its end, None where not recorded.
    `stolen` is the share of the CPUs' time that went to other guests of the same host while it ran.
    `version` is the hash of the sources and libraries alone.
    """

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
    seconds: float = 0.0
    load: float | None = None
    stolen: float | None = None
    run: str = ""
    version: str | None = None

    @property
    def node(self) -> str:
        """The machine that measured it."""
        return str(self.environment.get("host", ""))

    @property
    def place(self) -> tuple[int, str]:
        """(round, node): two times of one place make a ratio."""
        return self.round, self.node

    @property
    def edition(self) -> str:
        """Which version of the sources and libraries was measured, and where: two editions are no one measurement.

        On one machine its fingerprint; the nodes of a sweep that run the same are one edition.
        """
        sweep = self.environment.get("executor")
        return f"{sweep['cluster']} {self.version}" if sweep and self.version else self.fingerprint

    @property
    def kind(self) -> str:
        """Of the trial: "step", "epsilon" and so on."""
        return str(self.trial["kind"])

    @property
    def cell(self) -> tuple[str, str]:
        """(model, backend)."""
        return self.trial["model"], self.trial["backend"]

    def setting(self, name: str) -> Any:
        """A field of the trial, or what the run made of it where the trial left it open; None where it has none.

        Args:
            name: of a field.
        """
        if name == "experiment":
            return self.experiment
        if name == "threads":
            return self.trial.get("threads") or self.environment.get("threads")
        return self.trial.get(name)


def read(source: Path) -> list[Record]:
    """All records of a file or below a folder; smoke runs (in folders ``*-smoke``) count only if it is one itself.

    Args:
        source: a folder or a file.
    """
    if source.is_file():
        return _records(read_runs(source))
    folders = {path.parent for path in source.rglob("*.jsonl")}
    chosen = sorted(
        folder for folder in folders if not any(p.endswith("-smoke") for p in folder.relative_to(source).parts)
    )
    return _records(run for folder in chosen for run in read_runs(folder))


def _records(runs: Iterable[Run]) -> list[Record]:
    return [from_line(line, run.environment, run.path.stem) for run in runs for line in run.records]


def from_line(line: Mapping[str, Any], environment: Mapping[str, Any], run: str) -> Record:
    """A trial's line as a `Record`.

    Args:
        line: a trial's, of today's schema.
        environment: of its run.
        run: the name of its file.
    """
    return Record(
        device=device_label(environment),
        experiment=line["experiment"],
        id=line["id"],
        round=line["round"],
        fingerprint=line["fingerprint"],
        trial=line["trial"],
        outcome=line["outcome"],
        evidence=line.get("evidence") or "",
        result=line.get("result") or {},
        utc=line["utc"],
        environment=environment,
        seconds=line.get("seconds") or 0.0,
        load=line.get("load"),
        stolen=line.get("stolen"),
        run=run,
        version=line.get("version"),
    )


def locate(text: str, results: Path = Path("results")) -> Path:
    """Where the records lie that a person means: those of an experiment in `results`, or a folder or file of records.

    Args:
        text: what was typed.
        results: where experiments have their folders.

    Raises:
        UsageError: in one line, if there are none.
    """
    path = Path(text)
    names = experiment_names()
    if text in names or is_reference(text):
        folder = results / load_experiment(text).name
        if any(folder.glob("*.jsonl")):
            return folder
        if not path.is_dir():
            raise UsageError(f"records in {folder} (`python -m dpbench run {text}` makes them)", "none")
    if not path.exists():
        raise UsageError("an experiment, or a folder or file with records", text, nearest(text, names))
    if path.is_dir() and next(path.rglob("*.jsonl"), None) is None:
        raise UsageError(f"records (*.jsonl) in {path}", "none")
    return path


def by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by device label, the one that was measured last first: a CPU's and a GPU's never share a figure.

    Args:
        records: of any devices.
    """
    groups = grouped(records, lambda record: record.device)
    newest_first = sorted(groups, key=lambda device: (max(r.utc for r in groups[device]), device), reverse=True)
    return {device: groups[device] for device in newest_first}


def newest(records: Sequence[Record], left_out: LeftOut) -> list[Record]:
    """The newest record of each (trial id, round); the file's order decides between equal times.

    Args:
        records: in the files' order.
        left_out: counts, by reason, what takes no part; changed in place.
    """
    kept: dict[tuple[str, int], Record] = {}
    for record in records:
        old = kept.get((record.id, record.round))
        if old is None or _supersedes(record, old):
            kept[record.id, record.round] = record
    left_out["superseded by a newer record"] += len(records) - len(kept)
    return list(kept.values())


def _supersedes(record: Record, old: Record) -> bool:
    """What has ended for good is not run again: whatever the clock said, it is the last of its fingerprint."""
    ended = record.outcome in FINAL
    if record.fingerprint == old.fingerprint and ended != (old.outcome in FINAL):
        return ended
    return record.utc >= old.utc


def newest_version(records: Sequence[Record], cell: Callable[[Record], Hashable], left_out: LeftOut) -> list[Record]:
    """Of each cell, the records that come from the source version of its newest one.

    A cell whose rounds or probes come from two versions of the code is no measurement of either.

    Args:
        records: of any cells.
        cell: from a record to what it belongs to.
        left_out: counts, by reason, what takes no part; changed in place.
    """
    kept = []
    for group in grouped(records, cell).values():
        latest = max(group, key=lambda record: record.utc).edition
        kept += [record for record in group if record.edition == latest]
    left_out["of an older version of the same cell"] += len(records) - len(kept)
    return kept


def entries(records: Iterable[Record]) -> list[Record]:
    """Records of several backends as records of one each, with its outcome, evidence and result; others as they are.

    A trial that ended as a whole (a timeout, a crash) ended so for each of its backends.

    Args:
        records: of any kinds.
    """
    found = []
    for record in records:
        if record.kind not in PAIRED:
            found.append(record)
            continue
        known = record.result.get("backends", {})
        for name in record.trial["backends"]:
            own = known.get(name, {"outcome": record.outcome, "evidence": record.evidence})
            changes: dict[str, Any] = {"outcome": own["outcome"], "evidence": own.get("evidence") or "", "result": own}
            found.append(dataclasses.replace(record, trial=dict(record.trial) | {"backend": name}, **changes))
    return found


def newest_trial(records: Sequence[Record], left_out: LeftOut) -> list[Record]:
    """Of the records of one cell, the rounds of the trial that was measured last.

    Args:
        records: of one cell.
        left_out: counts, by reason, what takes no part; changed in place.
    """
    latest = max(records, key=lambda record: record.utc).id
    kept = [record for record in records if record.id == latest]
    left_out["of an older declaration of the same cell"] += len(records) - len(kept)
    return kept


def grouped(records: Iterable[Record], key: Callable[[Record], K]) -> dict[K, list[Record]]:
    """Records by `key(record)`, in the order of first appearance.

    Args:
        records: to be sorted into groups.
        key: of a record's group.
    """
    groups: dict[K, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
