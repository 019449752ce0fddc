"""Time and memory relative to ordinary training (Table 4 of arXiv:2205.10683), each backend in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import Record
from dpbench.report import captions, findings, style
from dpbench.report.data import published
from dpbench.report.drawing import bars
from dpbench.report.drawing.bars import Bar, Panel
from dpbench.report.figures import overhead
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing


def _compared(frame: pd.DataFrame) -> pd.Series[bool]:
    """True for rows with ordinary training at the same batch size, in a group of more than one."""
    groups = frame.groupby(["model", "batch_size"]).backend
    return groups.transform(lambda names: "nonprivate" in set(names)) & (groups.transform("nunique") > 1)


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    pairs = _compared(frame).any()
    beside = " beside ordinary training of the same model in the same round" if pairs else ""
    sizes = sorted(set(frame.batch_size))
    said = [
        f"After Table 4 of {published.PAPER}: time and peak memory of one training step{beside}; "
        f"{captions.rounds(frame.paired_rounds if pairs or 'rounds' not in frame else frame['rounds'])}.",
        f"Batch size {captions.join(sizes)}." if len(sizes) <= 4 else f"Batch sizes {captions.span(sizes)}.",
    ]
    if pairs and not _compared(frame).all():
        said.append("Cells without such a pair stand in the table only.")
    sources = [style.SOURCES.get(source, source) for source in sorted(set(frame.memory.dropna()))]
    if sources:
        said.append(f"Memory: {captions.join(sources)}" + (" (not measured)." if sources == ["simulated"] else "."))
    if frame.published_time_ratio.notna().any():
        said.append("Published: that table, CIFAR10 at B=256 on its GPU, active memory.")
    return said


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Time and memory as ratios to ordinary training, with the absolute numbers beside them.

    Cells without ordinary training are only in the table; if there are no others, absolute numbers are drawn.
    """
    sources = set(frame.memory.dropna())
    taken = f" ({style.SOURCES.get(sources.pop(), 'measured')})" if len(sources) == 1 else ""
    compared = frame[_compared(frame)]
    rows: list[Any] = list((compared if len(compared) else frame).itertuples(index=False))
    if len(compared):
        many = compared.groupby("model").batch_size.nunique().max() > 1
        names = [style.model(r.model) + (f", B={r.batch_size}" if many else "") for r in rows]
        labels = [style.backend(r.backend).name for r in rows]
        time = [_ratio_bar(r, "time_ratio", r.step_seconds, style.duration) for r in rows]
        memory = [_ratio_bar(r, "memory_ratio", r.peak_bytes, style.size) for r in rows]
        units, reference = ("times non-private", "times non-private"), 1.0
    else:
        names = [style.model(r.model) for r in rows]
        labels = [f"{style.backend(r.backend).name}, B={r.batch_size}" for r in rows]
        time = [bars.bar(r, "step_seconds", style.duration) for r in rows]
        memory = [bars.bar(r, "peak_bytes", style.size, unit=2.0**20, simulated=r.memory == "simulated") for r in rows]
        units, reference = ("seconds", "MiB"), None
    panels = [
        Panel("Time per step", units[0], time, reference),
        Panel(f"Peak memory{taken}", units[1], memory, reference),
    ]
    backends = [r.backend for r in rows]
    return bars.bars([bars.Row(*each) for each in zip(names, backends, labels, strict=True)], panels, caption)


def _ratio_bar(row: Any, column: str, absolute: Any, text: Callable[[float], str]) -> Bar:
    drawn = bars.bar(row, column, style.times, simulated=column == "memory_ratio" and row.memory == "simulated")
    if missing(absolute):
        return drawn
    return replace(drawn, text=drawn.text or "–", detail=text(absolute), note="")  # –: no round with ordinary training


FIGURE = FigureKind(
    doc="time and memory beside ordinary training (Table 4 of arXiv:2205.10683)",
    kinds=("step",),
    cell=lambda r: (*r.cell, r.trial["batch_size"]),
    by=("experiment", "precision", "image_size", "memory_budget", "threads"),
    table=overhead.table,
    text=overhead.text,
    caption=_caption,
    plot=plot,
    finding=findings.paired,
    setting=True,
    place=20,
)
