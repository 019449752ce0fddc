"""Time and memory relative to ordinary training (Table 4 of arXiv:2205.10683), each backend in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record, grouped, newest_trial
from dpbench.report import captions, findings, readable, style
from dpbench.report.data import published
from dpbench.report.data.statistics import (
    Row,
    batch,
    exactness,
    frame_of,
    good_rounds,
    in_order,
    peaks_by_round,
    seconds_by_round,
    spread,
    why,
)
from dpbench.report.drawing import bars
from dpbench.report.drawing.bars import Bar, Panel
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing

_KEYS = ("model", "batch_size", "backend")
COLUMNS = (
    *(*_KEYS, "rounds", "step_seconds", "step_seconds_low", "step_seconds_high"),
    *("time_ratio", "time_ratio_low", "time_ratio_high", "paired_rounds", "published_time_ratio"),
    *("peak_bytes", "memory", "memory_ratio", "published_memory_ratio"),
    *("max_norm_error", "max_grad_error", "tolerance", "ghost", "instantiated", "fallback", "note"),
)


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each (model, batch size, backend): time and memory of a step, and ratios within rounds.

    Statistics: the median of a round's steps, then the median and range of the rounds; ratios to ordinary training are
    taken within each round first, so that drift cancels.

    Args:
        records: `step` records of one device and one setting.
    """
    groups = grouped(records, lambda r: (r.trial["model"], batch(r), r.trial["backend"]))
    cells = {key: newest_trial(group, left_out) for key, group in groups.items()}
    rows = [
        dict(zip(_KEYS, key, strict=True)) | _row(group, good_rounds(cells.get((*key[:2], "nonprivate"), [])))
        for key, group in cells.items()
    ]
    return in_order(frame_of(rows, COLUMNS), *_KEYS)


def _row(group: list[Record], base: list[Record]) -> Row:
    good = good_rounds(group)
    if not good:
        return {"rounds": 0, "paired_rounds": 0, "note": why([r for r in group if r.outcome != "ok"], at_batch=False)}
    seconds, base_seconds = seconds_by_round(good), seconds_by_round(base)
    peaks, base_peaks = peaks_by_round(good), peaks_by_round(base)
    ratios = [seconds[r] / base_seconds[r] for r in seconds.keys() & base_seconds.keys()]
    # A ratio needs two peaks from the same source.
    memory_ratios = [peaks[r] / base_peaks[r] for r in peaks.keys() & base_peaks.keys()]
    row: Row = {"rounds": len(seconds), "paired_rounds": len(ratios)}
    row |= spread("step_seconds", seconds.values()) | spread("time_ratio", ratios)
    if peaks:
        row |= {"memory": next(iter(peaks))[1], "peak_bytes": median(peaks.values())}
    if memory_ratios:
        row["memory_ratio"] = median(memory_ratios)
    trial = good[0].trial
    if trial.get("image_size") == 32 and trial["precision"] == "float32":
        row["published_time_ratio"] = published.ratio("time_per_epoch", *good[0].cell)
        row["published_memory_ratio"] = published.ratio("active_memory", *good[0].cell)
    return row | exactness(good)


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
        f"{captions.rounds(frame.paired_rounds if pairs else frame['rounds'])}.",
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
    if row.backend == "nonprivate":
        drawn = replace(drawn, published=None)
    if missing(absolute):
        return drawn
    return replace(drawn, text=drawn.text or "–", detail=text(absolute), note="")  # –: no round with ordinary training


FIGURE = FigureKind(
    doc="time and memory beside ordinary training (Table 4 of arXiv:2205.10683)",
    kinds=("step",),
    cell=lambda r: (*r.cell, r.trial["batch_size"]),
    by=("experiment", "precision", "image_size", "memory_budget", "threads"),
    table=table,
    text=lambda frame: readable.paired(frame, readable.BATCH),
    caption=_caption,
    plot=plot,
    finding=findings.paired,
    setting=True,
    place=20,
)
