"""The table of a kind of trial without a figure: settings that differ, and results."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpbench.records.reader import LeftOut, Record
from dpbench.report import style
from dpbench.report.parts import FigureKind
from dpbench.report.readable import unlike
from dpbench.report.style import missing

#: Columns of every record, whatever its trial and result have under these names.
_OWN = ("round", "outcome")


def kind_of(kind: str) -> FigureKind:
    """The `FigureKind` for a table of all trials of `kind`."""
    return FigureKind(
        doc=f"every trial of kind {kind}: its settings and what came out",
        kinds=(kind,),
        table=table,
        text=text,
        caption="One row a trial and round; settings that are the same in all are left out.",
    )


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row a record: the settings that differ between trials, the outcome, and results that are texts or numbers."""
    settings = pd.DataFrame([dict(r.trial) for r in records], dtype=object)
    differing = settings.loc[:, settings.astype(str).nunique() > 1].drop(columns="timeout", errors="ignore")
    told = [{n: v for n, v in r.result.items() if isinstance(v, str | int | float)} for r in records]
    results = pd.DataFrame(told, index=differing.index, dtype=object)
    own = pd.DataFrame({name: [getattr(r, name) for r in records] for name in _OWN}, dtype=object)
    shared = {*_OWN, *results.columns}
    parts = [
        differing.map(lambda v: v if isinstance(v, str | int | float | None) else str(v)).rename(
            columns=lambda name: f"{name} of the trial" if name in shared else name
        ),
        own,
        results.rename(columns=lambda name: f"{name} of the result" if name in _OWN else name),
    ]
    frame = pd.concat(parts, axis=1)
    frame.columns = unlike(frame.columns)
    order = [*frame.columns[: len(differing.columns)], "round"]
    return frame.sort_values(order, key=lambda values: values.map(_sortable), ignore_index=True)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people: names with spaces, numbers of five digits."""
    shown = frame.astype(object).map(_words).assign(outcome=frame.outcome.replace(style.OUTCOMES))
    shown.columns = unlike(name.replace("_", " ").capitalize() for name in frame.columns)
    return shown


def _sortable(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, "" if number else str(value)


def _words(value: Any) -> str:
    return "" if missing(value) else f"{value:.5g}" if isinstance(value, float) else str(value)
