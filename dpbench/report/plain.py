"""The table of a kind of trial without a figure: settings that differ, and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from dpbench.records.reader import LeftOut, Record, grouped
from dpbench.report import style
from dpbench.report.data.statistics import Row, frame_of, why
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing


def kind_of(kind: str) -> FigureKind:
    """The `FigureKind` for a table of all trials of `kind`."""
    return FigureKind(
        doc=f"every trial of kind {kind}: its settings and what came out",
        kinds=(kind,),
        table=table,
        text=text,
        caption="One row a trial; settings that are the same in all are left out; numbers are medians of the rounds.",
    )


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row a trial: the settings that differ between trials, and its results, numbers as medians of the rounds."""
    trials = list(grouped(records, lambda r: r.id).values())
    settings = [name for name in _names(group[0].trial for group in trials) if name not in ("kind", "timeout")]
    differing = [name for name in settings if len({str(group[0].trial.get(name)) for group in trials}) > 1]
    shown = {name: f"{name} of the trial" if name in _ENDS else name for name in differing}
    rows = [_row(group, shown) for group in trials]
    first = list(shown.values())
    rows.sort(key=lambda row: [_sortable(row.get(name)) for name in first])
    columns = [*first, "outcome", "rounds", *(n for n in _names(rows) if n not in (*first, *_ENDS)), "note"]
    return frame_of(rows, columns)


_ENDS = ("outcome", "rounds", "note")


def _row(group: Sequence[Record], settings: Mapping[str, str]) -> Row:
    """A row of the table; `settings`: field -> name of its column."""
    row: Row = {
        called: value if isinstance(value := group[0].trial.get(name), str | int | float | None) else str(value)
        for name, called in settings.items()
    }
    good = [record for record in group if record.outcome == "ok"]
    failures = [record for record in group if record.outcome != "ok"]
    row |= {"outcome": failures[-1].outcome if failures else "ok", "rounds": len(good)}
    row["note"] = why(failures, at_batch=False)
    told = good or failures  # a mismatch keeps its result too
    for name in _names(record.result for record in told):
        values = [record.result[name] for record in told if name in record.result]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            row.setdefault(name, median(values))
        elif isinstance(values[-1], str | bool):
            row.setdefault(name, values[-1])
    return row


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people: names with spaces, numbers of five digits."""
    columns = {name: str(name).replace("_", " ").capitalize() for name in frame.columns}
    shown = {label: [_words(value) for value in frame[name]] for name, label in columns.items()}
    if "outcome" in frame:
        shown["Outcome"] = [style.OUTCOMES.get(outcome, outcome) for outcome in frame.outcome]
    found = pd.DataFrame(shown, dtype=object)
    return found.drop(columns=[label for label in ("Note",) if label in found and not found[label].any()])


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _sortable(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, "" if number else str(value)


def _words(value: Any) -> str:
    return "" if missing(value) else f"{value:.5g}" if isinstance(value, float) else str(value)
