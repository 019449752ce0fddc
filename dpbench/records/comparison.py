"""Compares two sets of records: the cells they share, and the change in each.

A cell is what was measured: kind, device, model, backend (or the engine of a `training_step`), and every setting that
changes the number (batch size, precision, threads, ...), but not how often it was measured. Its quantities are

- `time`: seconds a step, of either run. The machine's state may have differed between them.
- `time ratio`: the same relative to ordinary training in the same rounds, if both have it: the machine's state cancels.
- `peak`: bytes; for `peak` probes, over all common batch sizes.
- `outcome`: only if it is `ok` on one side and not on the other.

Different devices, different numbers of threads, and simulated and measured memory make different cells. Across two
machines only what is relative to ordinary training is compared: `time ratio`, `memory ratio` of measured peaks, and
`outcome`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clipping import BACKENDS
from dpbench.records.reader import (
    PAIRED,
    LeftOut,
    Record,
    entries,
    grouped,
    newest,
    newest_trial,
    newest_version,
    turns_of,
)
from dpbench.records.statistics import Comparison, compare, compare_exact, compare_paired, outliers
from dpbench.trials import canonical_json
from dpbench.trials.outcome import DOES_NOT_FIT, Outcome

KINDS = ("step", *PAIRED, "peak")
#: Fields that say how much was measured, and not what.
EFFORT = ("timeout", "steps", "max_seconds", "rounds", "backends", "kind", "device")
_MEMORY_WORDS = {"slower": "larger", "faster": "smaller"}
VERDICTS = ("faster", "slower", "same", "inconclusive", "smaller", "larger", "failed", "fixed")


@dataclass(frozen=True)
class Row:
    """One quantity of one cell. `a` and `b` are seconds, bytes, ratios, or names of outcomes (without interval).

    `verdict` is one of `VERDICTS`: faster and slower for times, smaller and larger for memory, failed and fixed for
    outcomes. `rounds` and `outliers` are those of a and of b.
    """

    kind: str
    device: str
    model: str
    backend: str
    batch_size: int
    quantity: str
    verdict: str
    a: float | str
    b: float | str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    interval: str | None = None
    rounds: tuple[int, int] = (0, 0)
    outliers: tuple[int, int] = (0, 0)
    setting: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Cell:
    """One side's data of a cell: times by round, number of processes, peaks, and outcomes of its trials.

    `plain` has the times of the plain step of an engine in another framework, its base in place of `base`.
    """

    identity: Mapping[str, Any]
    base: str
    outcomes: Counter[str] = field(default_factory=Counter)
    times: dict[Any, Sequence[float]] = field(default_factory=dict)
    plain: dict[Any, Sequence[float]] = field(default_factory=dict)
    processes: set[tuple[int, str]] = field(default_factory=set)
    peaks: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    sizes: dict[int, str] = field(default_factory=dict)

    @property
    def failure(self) -> str | None:
        """The outcome that leaves it without a number; a backend that was wrong once is wrong."""
        if self.outcomes[Outcome.MISMATCH] or not self.outcomes[Outcome.OK]:
            return Outcome.MISMATCH if self.outcomes[Outcome.MISMATCH] else max(self.outcomes)
        return None


def compare_records(
    a: Sequence[Record], b: Sequence[Record], left_out: LeftOut, across: bool = False
) -> tuple[list[Row], list[str], list[str]]:
    """(rows of the common cells, names of cells only in a, and only in b).

    Args:
        across: each side is of one machine, and only ratios to ordinary training are compared.
    """
    sides = [_cells_of(records, left_out, across) for records in (a, b)]
    rows: list[Row] = []
    for key, first in sides[0].items():
        if (second := sides[1].get(key)) is not None:
            bases = [side.get(cell.base) for side, cell in zip(sides, (first, second), strict=True)]
            rows += _rows(first, second, bases, left_out, across)
    if across:
        rows = [replace(row, device=f"{a[0].device} → {b[0].device}") for row in rows]
    alone = [[_name_of(cell) for key, cell in sides[i].items() if key not in sides[1 - i]] for i in (0, 1)]
    return sorted(rows, key=_order), alone[0], alone[1]


def _cells_of(records: Sequence[Record], left_out: LeftOut, across: bool) -> dict[str, Cell]:
    """The cells of one side by their key, each with the newest records of its newest version."""
    known = [r for r in records if r.kind in KINDS]
    left_out["of kinds that hold no time and no memory"] += len(records) - len(known)
    latest = newest(known, left_out)
    cells: dict[str, Cell] = {}
    keys: dict[Any, str] = {}  # of all rounds of a trial

    def key_of(record: Record) -> str:
        own = record.id, record.device, record.trial["backend"], record.setting("threads")
        return keys.get(own) or keys.setdefault(own, canonical_json(_identity(record, across)))

    for key, group in grouped(entries(latest), key_of).items():
        kept = newest_version(group, lambda r: r.kind, left_out)
        if kept[0].kind != "peak":
            kept = newest_trial(kept, left_out)
        identity = _identity(kept[0], across)
        cell = cells[key] = Cell(identity, canonical_json(identity | {"backend": "nonprivate"}))
        for record in kept:
            _add(cell, record)
    return cells


def _identity(record: Record, across: bool) -> dict[str, Any]:
    """The record's cell. A search's probes are one cell, at any batch size."""
    fields = {name: value for name, value in record.trial.items() if name not in EFFORT}
    if record.kind == "peak":
        del fields["batch_size"]
    elif record.trial.get("device") == "cpu":
        fields["threads"] = record.setting("threads")
    if across:
        fields.pop("threads", None)
        return {"kind": record.kind} | fields
    return {"kind": record.kind, "device": record.device} | fields


def _add(cell: Cell, record: Record) -> None:
    cell.outcomes[record.outcome] += 1
    size = int(record.trial["batch_size"])
    if record.kind == "peak":
        cell.sizes[size] = record.outcome
    if record.outcome != Outcome.OK:
        return
    if memory := record.result.get("memory"):
        cell.peaks.setdefault(memory["source"], {})[record.round, size] = memory["peak_bytes"]
    cell.times |= turns_of(record, record.result)
    cell.plain |= turns_of(record, record.result.get("plain", {}))
    if record.kind in PAIRED:
        cell.processes.add(record.place)


def _name_of(cell: Cell) -> str:
    """A cell's kind, model, backend and batch size, if it has them."""
    known = (cell.identity.get(name) for name in ("kind", "model", "backend", "batch_size"))
    return " ".join(str(value) for value in known if value is not None)


def _rows(a: Cell, b: Cell, bases: Sequence[Cell | None], left_out: LeftOut, across: bool) -> Iterable[Row]:
    if a.identity["kind"] == "peak":
        return [] if across else _probe_rows(a, b, left_out)
    if a.failure or b.failure:
        if a.failure and b.failure:
            left_out["of cells that failed in both"] += a.outcomes.total() + b.outcomes.total()
            return []
        ends = (a.failure or "ok", b.failure or "ok")
        return [_row(a, "outcome", "failed" if b.failure else "fixed", *ends)]
    processes = (len(a.processes), len(b.processes)) if a.processes else None
    far = (outliers(a.times), outliers(b.times))
    rows = [] if across else [_compared(a, "time", compare(a.times, b.times), far)]
    if a.identity["backend"] != "nonprivate":
        pair = [
            own.plain or (base.times if base is not None and not base.failure else {})
            for own, base in zip((a, b), bases, strict=True)
        ]
        if all(own.keys() & base.keys() for own, base in zip((a.times, b.times), pair, strict=True)):
            found = compare_paired(a.times, pair[0], b.times, pair[1], processes=processes)
            rows.append(_compared(a, "time ratio", found, far))
        if across and all(memory := [_memory_ratios(*each) for each in zip((a, b), bases, strict=True)]):
            rows.append(_compared(a, "memory ratio", compare_exact(*memory)))
    if across:
        return rows
    for source in a.peaks.keys() & b.peaks.keys():
        peaks = [sorted(cell.peaks[source].values()) for cell in (a, b)]
        rows.append(_compared(a, "peak", compare_exact(*peaks), memory=source))
    return rows


def _memory_ratios(cell: Cell, base: Cell | None) -> list[float]:
    """Measured peaks over ordinary training's in the same rounds."""
    known = {} if base is None else base.peaks
    return [
        peak / known[source][at]
        for source, peaks in cell.peaks.items()
        if source != "simulated" and source in known
        for at, peak in sorted(peaks.items())
        if at in known[source]
    ]


def _probe_rows(a: Cell, b: Cell, left_out: LeftOut) -> Iterable[Row]:
    """For a search: peaks at the common batch sizes, and a batch that no longer fits."""
    rows = []
    for source in a.peaks.keys() & b.peaks.keys():
        first, second = ({size: peak for (_, size), peak in cell.peaks[source].items()} for cell in (a, b))
        if shared := sorted(first.keys() & second.keys()):
            ratios = [second[size] / first[size] for size in shared]
            found, largest = compare_exact([1.0] * len(shared), ratios), shared[-1]
            row = _compared(a, "peak", found, memory=source, batch_size=largest, sizes=len(shared))
            rows.append(replace(row, a=first[largest], b=second[largest]))
    bad = [size for size, outcome in a.sizes.items() if outcome == "ok" and b.sizes.get(size, "ok") != "ok"]
    good = [size for size, outcome in b.sizes.items() if outcome == "ok" and a.sizes.get(size, "ok") != "ok"]
    for verdict, sizes in (("failed", bad), ("fixed", good)):
        if sizes:
            size = min(sizes)
            rows.append(_row(a, "outcome", verdict, a.sizes[size], b.sizes[size], batch_size=size))
    if not rows and (a.failure not in (None, *DOES_NOT_FIT) or b.failure not in (None, *DOES_NOT_FIT)):
        left_out["of cells that failed in both"] += a.outcomes.total() + b.outcomes.total()
    return rows


def _compared(cell: Cell, quantity: str, found: Comparison, far: tuple[int, int] = (0, 0), **extra: Any) -> Row:
    verdict = found.verdict if quantity.startswith("time") else _MEMORY_WORDS.get(found.verdict, found.verdict)
    row = _row(cell, quantity, verdict, found.a, found.b, **extra)
    numbers: dict[str, Any] = {name: getattr(found, name) for name in ("ratio", "low", "high", "interval")}
    return replace(row, rounds=(found.rounds_a, found.rounds_b), outliers=far, **numbers)


def _row(cell: Cell, quantity: str, verdict: str, a: float | str, b: float | str, **extra: Any) -> Row:
    shown = ("kind", "device", "model", "backend", "batch_size")
    known: dict[str, Any] = {name: cell.identity.get(name) for name in shown}
    known |= {name: value for name, value in extra.items() if name in shown}
    setting = {k: v for k, v in (dict(cell.identity) | extra).items() if k not in shown}
    return Row(**known, quantity=quantity, verdict=verdict, a=a, b=b, setting=setting)


def _order(row: Row) -> tuple[Any, ...]:
    names = list(BACKENDS)
    backend = names.index(row.backend) if row.backend in names else len(names)
    return row.kind, row.device, row.model, row.batch_size if row.kind != "peak" else 0, backend, row.backend


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Verdict -> number of rows, in the order of `VERDICTS`.

    Args:
        rows: of a comparison.
    """
    found = Counter(row.verdict for row in rows)
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}
