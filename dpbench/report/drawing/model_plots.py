"""Maps tables to bar plots: the columns for bars, for numbers beside them, and for signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.report import captions, style
from dpbench.report.drawing import bars as figures
from dpbench.report.drawing.bars import Bar, Block, Panel, Row
from dpbench.report.style import missing


def max_batch_throughput(frame: pd.DataFrame, caption: str) -> Figure:
    """The panels of Figure 3 that have records; below, models with memory alone."""
    frame = frame.assign(again=frame.duplicated(["model", "backend"]), unfinished=captions.unfinished(frame))
    sized = frame.max_batch_size.notna() | frame.max_batch_note.notna()
    timed = frame[frame.images_per_second.notna() | frame.throughput_note.notna()].model
    both = frame.model.isin(timed if len(timed) else frame.model)
    sizes = [_size_bar(cell) for cell in frame.itertuples(index=False)]

    def block(chosen: pd.Series[bool], *, speeds: bool) -> Block:
        cells: list[Any] = list(frame[chosen].itertuples(index=False))
        panels = []
        if sized.any() or not speeds:  # without numbers, a panel gives the reason
            own = [_size_bar(cell) for cell in cells]
            known = frame.budget_bytes.dropna()
            budget = f" in {style.size(known.iloc[0])}" if len(known) else ""
            panels.append(Panel(f"Maximum batch size{budget}", "samples", own, beside=sizes))
        if speeds:
            one_batch = captions.one_batch(frame)
            at = f" at batch size {frame.batch_size.dropna().iloc[0]}" if one_batch else ""
            speed = [_speed_bar(cell, with_batch=not one_batch) for cell in cells]
            panels.append(Panel(f"Throughput{at}", "images per second", speed))
        labelled = frame.memory.nunique() > 1
        labels = [_memory_label(cell) if labelled else style.backend(cell.backend).name for cell in cells]
        rows = [Row(style.model(c.model), c.backend, label) for c, label in zip(cells, labels, strict=True)]
        return Block(rows, panels)

    above = block(both, speeds=bool(len(timed)))
    others = list(dict.fromkeys(frame[~both].model))
    middle = len(others) - len(others) // 2
    halves = [others[:middle], others[middle:]]
    below = [block(frame.model.isin(half), speeds=False) for half in halves if half]
    return figures.bars(above.rows, above.panels, caption, below=below)


def _memory_label(cell: Any) -> str:
    """The label of a row with its own source of memory; a backend's second row has the sign alone."""
    if cell.again:
        return str(cell.memory)
    return style.backend(cell.backend).name + (f" ({cell.memory})" if cell.memory == "simulated" else "")


def _size_bar(cell: Any) -> Bar:
    if missing(cell.max_batch_size):
        return Bar(note=_text(cell.max_batch_note), published=_number(cell.published_max_batch_size))
    at_least = missing(cell.fails_at) and not cell.unfinished
    return Bar(
        value=float(cell.max_batch_size),
        published=_number(cell.published_max_batch_size),
        text=("≥ " if at_least else "") + f"{cell.max_batch_size:,}" + (" †" if cell.unfinished else "") + _told(cell),
        simulated=cell.memory == "simulated",
        at_least=at_least,
    )


def _told(cell: Any) -> str:
    """The predicted batch, if it differs."""
    told = cell.foretold_max_batch_size
    return "" if missing(told) or told == cell.max_batch_size else f" (foretold {told:,})"


def _speed_bar(cell: Any, with_batch: bool) -> Bar:
    if cell.again:  # the row above has the same timing, with another kind of memory
        return Bar(text=" ")
    if missing(cell.images_per_second):
        return Bar(note=_text(cell.throughput_note), published=_number(cell.published_images_per_second))
    beside = "" if missing(cell.time_ratio) else style.times(cell.time_ratio)
    return Bar(
        value=float(cell.images_per_second),
        low=float(cell.images_per_second_low),
        high=float(cell.images_per_second_high),
        published=_number(cell.published_images_per_second),
        text=style.number(cell.images_per_second),
        detail=f"B={cell.batch_size}" if with_batch else beside,
    )


def memory_speed(frame: pd.DataFrame, caption: str) -> Figure:
    """Time and memory as ratios to ordinary training, with the absolute numbers beside them.

    Cells without ordinary training are only in the table; if there are no others, absolute numbers are drawn.
    """
    sources = set(frame.memory.dropna())
    taken = f" ({style.SOURCES.get(sources.pop(), 'measured')})" if len(sources) == 1 else ""
    compared = frame[captions.compared(frame)]
    cells: list[Any] = list((compared if len(compared) else frame).itertuples(index=False))
    if len(compared):
        many = compared.groupby("model").batch_size.nunique().max() > 1
        rows = [
            Row(
                style.model(c.model) + (f", B={c.batch_size}" if many else ""), c.backend, style.backend(c.backend).name
            )
            for c in cells
        ]
        time = [_ratio_bar(c, "time_ratio", c.step_seconds, style.duration) for c in cells]
        memory = [_ratio_bar(c, "memory_ratio", c.peak_bytes, style.size) for c in cells]
        units, reference = ("times non-private", "times non-private"), 1.0
    else:
        rows = [
            Row(style.model(c.model), c.backend, f"{style.backend(c.backend).name}, B={c.batch_size}") for c in cells
        ]
        time = [_absolute_bar(c, "step_seconds", 1.0, style.duration) for c in cells]
        memory = [_absolute_bar(c, "peak_bytes", 2.0**20, style.size) for c in cells]
        units, reference = ("seconds", "MiB"), None
    panels = [
        Panel("Time per step", units[0], time, reference),
        Panel(f"Peak memory{taken}", units[1], memory, reference),
    ]
    return figures.bars(rows, panels, caption)


def _ratio_bar(cell: Any, column: str, absolute: Any, text: Callable[[float], str]) -> Bar:
    ratio = getattr(cell, column)
    beside = _number(getattr(cell, f"published_{column}")) if cell.backend != "nonprivate" else None
    if missing(absolute):
        return Bar(note=_text(cell.note), published=beside)
    if missing(ratio):  # no round with ordinary training
        return Bar(text="–", detail=text(absolute), published=beside)
    return Bar(
        value=float(ratio),
        low=_number(getattr(cell, f"{column}_low", None)),
        high=_number(getattr(cell, f"{column}_high", None)),
        published=beside,
        text=style.times(ratio),
        detail=text(absolute),
        simulated=column == "memory_ratio" and cell.memory == "simulated",
    )


def _absolute_bar(cell: Any, column: str, unit: float, text: Callable[[float], str]) -> Bar:
    value = getattr(cell, column)
    if missing(value):
        return Bar(note=_text(cell.note))
    low, high = (_number(getattr(cell, f"{column}_{end}", None)) for end in ("low", "high"))
    return Bar(
        value=float(value) / unit,
        low=None if low is None else low / unit,
        high=None if high is None else high / unit,
        text=text(value),
        simulated=column == "peak_bytes" and cell.memory == "simulated",
    )


def _text(value: Any) -> str:
    return "" if missing(value) else str(value)


def _number(value: Any) -> float | None:
    return None if missing(value) or isinstance(value, str) else float(value)
