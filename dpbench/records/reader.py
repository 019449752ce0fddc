"""Reads records with the environments of their runs, and selects the newest, by device.

Imports neither pandas nor matplotlib. No record is dropped silently: records left out are counted by reason.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dpbench.errors import UsageError, nearest, printable
from dpbench.experiment import experiment_names, is_reference, load_experiment
from dpbench.records.environment import device_label
from dpbench.records.store import Run, read_runs
from dpbench.trials.line_shapes import result_of
from dpbench.trials.outcome import FINAL

K = TypeVar("K", bound=Hashable)

#: Kinds of trial with several interleaved backends, each with an entry.
PAIRED = ("overhead", "training_step")
#: Reason for leaving records out of a figure -> their number.
LeftOut = Counter[str]


class Record(msgspec.Struct, frozen=True, dict=True):  # a dataclass takes nine times as long to make
    """A trial's record, with the environment and the name of its run.

    `seconds`: of the whole trial; `load`: the machine's load average (1 minute) at its end, None if not recorded;
    `stolen`: the share of CPU time that went to other guests of the same host meanwhile; `version`: the hash of the
    sources and libraries alone; `path`: of the file.
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
    path: Path | None = None

    @property
    def node(self) -> str:
        """The machine of the measurement."""
        return str(self.environment.get("host", ""))

    @property
    def place(self) -> tuple[int, str]:
        """(round, node): only times of the same place make a ratio."""
        return self.round, self.node

    @property
    def edition(self) -> str:
        """The version of sources and libraries, and the machine: records of two editions do not mix.

        On one machine it is the fingerprint; nodes of a sweep with the same sources and libraries share one edition.
        """
        sweep = self.environment.get("executor")
        return f"{sweep['cluster']} {self.version}" if sweep and self.version else self.fingerprint

    @functools.cached_property
    def kind(self) -> str:
        """The trial's kind: "step", "epsilon" and so on."""
        return str(self.trial["kind"])

    @property
    def cell(self) -> tuple[str, str]:
        """(model, backend)."""
        return self.trial["model"], self.trial["backend"]

    def setting(self, name: str) -> Any:
        """A field of the trial, or the run's default for an open field; None without such a field.

        Args:
            name: of a field.
        """
        if name == "experiment":
            return self.experiment
        if name == "threads":
            return self.trial.get("threads") or self.environment.get("threads")
        return self.trial.get(name)


def read(source: Path) -> list[Record]:
    """All records of a file or below a folder; smoke runs (folders ``*-smoke``) count only if `source` is one."""
    if source.is_file():
        return _records(read_runs(source))
    folders = {path.parent for path in source.rglob("*.jsonl")}
    chosen = sorted(
        folder for folder in folders if not any(p.endswith("-smoke") for p in folder.relative_to(source).parts)
    )
    return _records(run for folder in chosen for run in read_runs(folder))


def _records(runs: Iterable[Run]) -> list[Record]:
    named = [(run, printable(run.path.stem)) for run in runs]
    return [from_line(line, run.environment, name, run.path) for run, name in named for line in run.records]


def from_line(line: Mapping[str, Any], environment: Mapping[str, Any], run: str, path: Path | None = None) -> Record:
    """A trial's line as a `Record`.

    Args:
        line: a trial's, of today's schema.
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
        result=result_of(line),
        utc=line["utc"],
        environment=environment,
        seconds=line.get("seconds") or 0.0,
        load=line.get("load"),
        stolen=line.get("stolen"),
        run=run,
        version=line.get("version"),
        path=path,
    )


def locate(text: str, results: Path = Path("results")) -> Path:
    """The path of the named records: an experiment in `results`, or a folder or file of records.

    Args:
        results: the folder of experiments.

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
    if not text or not path.exists():  # '' would be the current folder
        raise UsageError("an experiment, or a folder or file with records", text, nearest(text, names))
    if path.is_dir() and next(path.rglob("*.jsonl"), None) is None:
        raise UsageError(f"records (*.jsonl) in {path}", "none")
    return path


def by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by device label, the latest measured first: a CPU and a GPU never share a figure."""
    groups = grouped(records, lambda record: record.device)
    newest_first = sorted(groups, key=lambda device: (max(r.utc for r in groups[device]), device), reverse=True)
    return {device: groups[device] for device in newest_first}


def newest(records: Sequence[Record], left_out: LeftOut) -> list[Record]:
    """The newest record of each (trial id, round); for equal times, the last in the file."""
    kept: dict[tuple[str, int], Record] = {}
    for record in records:
        old = kept.get((record.id, record.round))
        if old is None or _supersedes(record, old):
            kept[record.id, record.round] = record
    left_out["superseded by a newer record"] += len(records) - len(kept)
    return list(kept.values())


def _supersedes(record: Record, old: Record) -> bool:
    """A final outcome is not run again, so it is the last of its fingerprint, whatever its time."""
    ended = record.outcome in FINAL
    if record.fingerprint == old.fingerprint and ended != (old.outcome in FINAL):
        return ended
    return record.utc >= old.utc


def newest_version(records: Sequence[Record], cell: Callable[[Record], Hashable], left_out: LeftOut) -> list[Record]:
    """For each cell, the records with the source version of its newest one.

    Rounds or probes from two versions of the code measure neither.

    Args:
        cell: from a record to its cell.
    """
    kept = []
    for group in grouped(records, cell).values():
        latest = max(group, key=lambda record: record.utc).edition
        kept += [record for record in group if record.edition == latest]
    left_out["of an older version of the same cell"] += len(records) - len(kept)
    return kept


def entries(records: Iterable[Record]) -> list[Record]:
    """Split records of several backends into one each, with outcome, evidence and result; keep others.

    A trial that ended as a whole (a timeout, a crash) counts for each of its backends.
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
            found.append(msgspec.structs.replace(record, trial=dict(record.trial) | {"backend": name}, **changes))
    return found


def turns_of(record: Record, entry: Mapping[str, Any]) -> dict[tuple[tuple[int, str], int], Sequence[float]]:
    """((round of the run, node), round within the trial) -> the seconds of each step; {} if none was timed.

    Args:
        record: of one run.
        entry: of a backend in it, or the result of a `step`.
    """
    alone = [{"round": 0, "step_seconds": entry["step_seconds"]}] if "step_seconds" in entry else ()
    return {(record.place, turn["round"]): turn["step_seconds"] for turn in entry.get("turns") or alone}


def newest_trial(records: Sequence[Record], left_out: LeftOut) -> list[Record]:
    """Among the records of one cell, the rounds of the latest trial."""
    latest = max(records, key=lambda record: record.utc).id
    kept = [record for record in records if record.id == latest]
    left_out["of an older declaration of the same cell"] += len(records) - len(kept)
    return kept


def grouped(records: Iterable[Record], key: Callable[[Record], K]) -> dict[K, list[Record]]:
    """Records by `key(record)`, in the order of first appearance.

    Args:
        key: of a record's group.
    """
    groups: dict[K, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
