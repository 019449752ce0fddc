"""The scorecard of all experiments: a row for each backend, and the claims of papers; every cell names its records.

Functions take:
    records: of a folder of results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from clipping import BACKENDS
from dpbench.records.reader import entries
from dpbench.report import style
from dpbench.report.data.claims import NOT_MEASURED
from dpbench.report.data.select import LeftOut, Record, by_device, newest, newest_version
from dpbench.report.figures import claims, coverage, overhead, sensitivity, training_step
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing, times
from dpbench.report.summary import several

#: Without a row of its own: ordinary training is the unit.
_ORDINARY = "nonprivate"
#: kind of trial -> (heading, experiment that measures it)
_STEPS = {
    "training_step": ("Whole step with noise and optimizer", "training_step"),
    "overhead": ("Forward, backward and clipping alone", "overhead"),
}


@dataclass
class Cell:
    """One cell: its words ("" if not measured), further words, and the files of its records."""

    text: str = ""
    more: str = ""
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Column:
    """A heading, the method and machine, a cell for each backend that has one, and the command that measures it."""

    heading: str
    about: str
    cells: dict[str, Cell]
    command: str

    def of(self, backend: str) -> Cell:
        """The cell of a backend.

        Args:
            backend: its name.
        """
        return self.cells.get(backend, Cell())


def columns(records: Sequence[Record]) -> list[Column]:
    """The columns: exact cases, exact models, moves of the sum, times and memory by device, refusals."""
    exact, refused = _conformance([r for r in records if r.kind == "conformance"])
    return [
        exact,
        _coverage([r for r in records if r.experiment == "coverage"]),
        _moves([r for r in records if r.experiment == "sensitivity"]),
        *(_step(records, kind, device) for kind in _STEPS for device in ("cpu", "cuda")),
        refused,
    ]


def backends(found: Iterable[Column]) -> list[str]:
    """The backends with a cell, in the usual order.

    Args:
        found: the columns.
    """
    return sorted({name for column in found for name in column.cells if name in BACKENDS}, key=style.backend_key)


def judged(records: Sequence[Record]) -> list[tuple[Any, list[tuple[str, Any, list[Path]]]]]:
    """Each claim with (device, its row, its files) of the devices that measured it, the latest first."""
    found: dict[str, list[tuple[str, Any, list[Path]]]] = {}
    stated: dict[str, Any] = {}
    for device, own in by_device(records).items():
        kept = _kept([r for r in own if r.kind in claims.FIGURE.kinds], claims.FIGURE)
        if not kept or not claims.applies(kept):
            continue
        frame = claims.table(kept, LeftOut(), every=True)
        rows: list[Any] = list(frame.itertuples(index=False))
        for row, claim in zip(rows, claims.claims(kept, frame), strict=True):
            stated.setdefault(row.claim, row)
            if row.verdict != NOT_MEASURED:
                found.setdefault(row.claim, []).append((device, row, [Path(file) for file in claim.files]))
    return [(row, found.get(name, [])) for name, row in stated.items()]


def _kept(records: Sequence[Record], kind: FigureKind) -> list[Record]:
    """The records that the figure of this kind would use."""
    uncounted: LeftOut = LeftOut()
    return newest_version(newest(records, uncounted), kind.cell, uncounted)


def _files(records: Iterable[Record]) -> list[Path]:
    return sorted({record.path for record in records if record.path is not None})


def _latest(records: Sequence[Record], of: Callable[[Record], Iterable[str]]) -> tuple[str, list[Record]]:
    """The device with the most backends (the latest measured of several), and its records."""
    groups = list(by_device(records).items())  # the latest first
    if not groups:
        return "", []
    return max(groups, key=lambda group: len({name for record in group[1] for name in of(record)}))


def _conformance(records: Sequence[Record]) -> tuple[Column, Column]:
    device, own = _latest(records, lambda r: [r.trial["backend"]])
    exact, refused = {}, {}
    for record in newest(own, LeftOut()):
        rows = record.result.get("rows") or []
        counts = Counter(row["result"] for row in rows)
        backend, files = record.trial["backend"], _files([record])
        if not rows:
            continue
        wrong = [row["case"] for row in rows if row["result"] == "wrong"]
        exact[backend] = Cell(
            f"{counts['exact']} of {len(rows)}, {counts['wrong']} wrong",
            f"Wrong: {', '.join(wrong)}" if wrong else "",
            files,
        )
        names = [row["case"] for row in rows if row["result"] == "refuses"]
        refused[backend] = Cell(f"{len(names)} of {len(rows)} cases", ", ".join(names), files)
    command = "dpbench run conformance"
    return (
        Column("Exact in hard cases", f"verification of the first batch is off; {device}", exact, command),
        Column("Refuses", f"of the hard cases; {device}", refused, command),
    )


def _coverage(records: Sequence[Record]) -> Column:
    device, own = _latest(records, lambda r: r.trial["backends"])
    kept = _kept(own, coverage.FIGURE)
    frame = coverage.table(kept, LeftOut()) if kept else pd.DataFrame(columns=["library"])
    rows: list[Any] = list(frame[frame.library == coverage.ALL].itertuples(index=False))
    cells = {
        row.backend: Cell(
            f"{row.exact / row.built:.1%} of {row.built}" if row.built else "",
            f"{row.refused} refused, {row.wrong} wrong, {row.crash} crashed",
            _files(kept),
        )
        for row in rows
    }
    return Column("Exact on public models", f"timm, torchvision, transformers; {device}", cells, "dpbench run coverage")


def _moves(records: Sequence[Record]) -> Column:
    device, own = _latest(records, lambda r: [r.trial["backend"]])
    kept = _kept(own, sensitivity.FIGURE)
    frame = sensitivity.table(kept, LeftOut()) if kept else pd.DataFrame(columns=["backend", "dtype", "excess"])
    cells = {}
    for backend, group in frame.groupby("backend"):
        furthest = {str(dtype): part.excess.dropna().astype(float).max() for dtype, part in group.groupby("dtype")}
        texts = {dtype: f"{value:.4g} C" for dtype, value in furthest.items() if not missing(value)}
        files = _files(record for record in kept if record.trial["backend"] == backend)
        first = texts.pop("float32", "")
        cells[str(backend)] = Cell(first, ", ".join(f"{dtype}: {said}" for dtype, said in texts.items()), files)
    about = f"float32; should be at most 1 C; {device}"
    return Column("The furthest that one record moves the sum", about, cells, "dpbench run sensitivity")


def _step(records: Sequence[Record], kind: str, device_type: str) -> Column:
    """Time and memory beside ordinary training: medians over the models that a backend ran, eager, in float32."""
    heading, experiment = _STEPS[kind]
    figure = training_step.FIGURE if kind == "training_step" else overhead.FIGURE
    chosen = [
        r
        for r in records
        if r.kind == kind
        and r.experiment in (experiment, "evidence")
        and r.trial.get("device") == device_type
        and r.trial.get("precision") == "float32"
        and r.trial.get("way", "eager") == "eager"
    ]
    device, own = _latest(chosen, lambda r: r.trial["backends"])
    kept = _kept(own, figure)
    frame = overhead.table(kept, LeftOut()) if kept else pd.DataFrame(columns=["backend", "time_ratio"])
    known = frame[frame.time_ratio.notna() & (frame.backend != _ORDINARY)]
    cells = {}
    for backend, group in known.groupby("backend"):
        ratios = [float(value) for value in group.time_ratio]
        memory = [float(value) for value in group.memory_ratio if not missing(value)]
        span = f"{times(min(ratios))} to {times(max(ratios))} in time"
        if memory:
            span += f", {times(min(memory))} to {times(max(memory))} in memory"
        files = _files(r for r in entries(kept) if r.trial["backend"] == backend and r.outcome == "ok")
        text = times(median(ratios)) + (f", {times(median(memory))}" if memory else "")
        cells[str(backend)] = Cell(text, f"{span}, on {several(len(ratios), 'model')}", files)
    for backend, group in frame.groupby("backend"):
        if backend not in cells and backend != _ORDINARY:
            files = _files(r for r in entries(kept) if r.trial["backend"] == backend)
            cells[str(backend)] = Cell("no number", ", ".join(dict.fromkeys(group.note.dropna())), files)
    name = {"cpu": "CPU", "cuda": "GPU"}[device_type]
    about = f"time, peak memory × ordinary training's; median over models; {device or name}"
    return Column(f"{heading}, {name}", about, cells, f"dpbench run {experiment} --device {device_type}")
