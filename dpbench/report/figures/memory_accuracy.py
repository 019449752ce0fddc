"""Simulated against measured peaks: model × backend, for each part of a step.

The picture has one mark a cell: simulated over measured for the whole step, with a row a backend and a panel of all
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpbench.report import captions, readable, style
from dpbench.report.data.select import LeftOut, Record, grouped
from dpbench.report.data.statistics import batch, count_failures, frame_of, good_rounds, in_order, why
from dpbench.report.drawing.bars import WIDTH, sheet
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing

PARTS = ("model", "forward", "backward", "step")
_TITLES = {"model": "Parameters and buffers"}
WITHIN = 0.05
"""The target error."""
_COLUMNS = (
    "model",
    "batch_size",
    "backend",
    *(f"{part}_{how}_bytes" for part in PARTS for how in ("simulated", "measured")),
    "reserved_bytes",
    "error",
    "note",
)
_ROW, _TOP, _AXIS, _NAMES, _NUMBERS = 0.24, 0.62, 0.45, 1.3, 1.05


def cell(record: Record) -> tuple[Any, ...]:
    """The compared setting, and the source of the peak."""
    return (*record.cell, batch(record), record.trial["simulated"])


def applies(records: Sequence[Record]) -> bool:
    """True if there are peaks of both kinds, except for probes of a search."""
    return {bool(r.trial["simulated"]) for r in records if _is_own(r)} == {False, True}


def _is_own(record: Record) -> bool:
    return record.trial.get("memory_budget") is None


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each (model, batch size, backend); `error` is simulated / measured - 1 of the whole step."""
    own = [record for record in records if _is_own(record)]
    left_out["probe of a search"] += len(records) - len(own)
    count_failures(own, left_out)
    rows = []
    for (model, size, backend), group in grouped(
        own, lambda r: (r.trial["model"], batch(r), r.trial["backend"])
    ).items():
        row: dict[str, Any] = {"model": model, "batch_size": size, "backend": backend}
        for record in good_rounds(group):
            how = "simulated" if record.trial["simulated"] else "measured"
            phases = record.result["memory"].get("phases", {}) | {"step": record.result["memory"]["peak_bytes"]}
            row |= {f"{part}_{how}_bytes": phases.get(part) for part in PARTS}
            if "reserved_bytes" in record.result["memory"]:
                row["reserved_bytes"] = record.result["memory"]["reserved_bytes"]
        if "step_simulated_bytes" in row and "step_measured_bytes" in row:
            row["error"] = row["step_simulated_bytes"] / row["step_measured_bytes"] - 1
        row["note"] = why([r for r in group if r.outcome != "ok"], at_batch=False)
        rows.append(row)
    return in_order(frame_of(rows, _COLUMNS), "model", "batch_size", "backend")


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people: measured bytes, and simulated ones as a difference; on CUDA also reserved ones."""

    def of(part: str, r: Any) -> str:
        measured, simulated = getattr(r, f"{part}_measured_bytes"), getattr(r, f"{part}_simulated_bytes")
        if missing(measured):
            return "–"
        return style.size(measured) if missing(simulated) else f"{style.size(measured)} {simulated / measured - 1:+.1%}"

    reserved = {"Reserved": lambda r: "" if missing(r.reserved_bytes) else style.size(r.reserved_bytes)}
    return readable.texts(
        frame,
        {
            "Model": lambda r: style.model(r.model),
            "B": lambda r: str(r.batch_size),
            "Backend": lambda r: style.backend(r.backend).name,
            **{_TITLES.get(part, part.capitalize()): partial(of, part) for part in PARTS},
            **(reserved if frame.reserved_bytes.notna().any() else {}),
            "Note": lambda r: "" if missing(r.note) else r.note,
        },
    )


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The comparison, and the cell with the largest error."""
    said = [
        "Peak memory of one step, simulated on fake tensors and measured by the allocator: simulated over measured."
    ]
    said.append(finding(frame) or "No cell has both.")
    return captions.caption(said, records, left_out)


def finding(frame: pd.DataFrame) -> str:
    """How many simulated peaks are within the target, and the cell with the largest error."""
    errors = frame[frame.error.notna()]
    if errors.empty:
        return ""
    sizes = errors.error.astype(float).abs()
    worst: Any = errors.iloc[int(sizes.to_numpy().argmax())]
    return (
        f"Simulated peaks of {int((sizes <= WITHIN).sum())} of {len(errors)} cells are within {WITHIN:.0%} of the "
        f"measured ones; the median error is {sizes.median():.2%}, the largest {worst.error:+.1%} "
        f"({style.model(worst.model)}, {style.backend(worst.backend).name})."
    )


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A row a backend, a mark a model, and the range in numbers."""
    backends = list(dict.fromkeys(sorted(frame.backend, key=style.backend_key)))
    depth = _ROW * max(len(backends), 1)
    figure, height = sheet(_TOP + depth + _AXIS, caption)
    left, bottom = (0.12 + _NAMES) / WIDTH, 1 - (_TOP + depth) / height
    axes = figure.add_axes((left, bottom, 1 - left - _NUMBERS / WIDTH, depth / height))
    found = [float(error) for error in frame.error.dropna()]
    reach = 1.15 * max([WITHIN, *map(abs, found)])
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(backends) - 0.5, -0.5)
    axes.fill_betweenx(axes.get_ylim(), -WITHIN, WITHIN, color=style.GRID, linewidth=0, zorder=0)
    axes.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    for y, backend in enumerate(backends):
        errors = [float(error) for error in frame[frame.backend == backend].error.dropna()]
        axes.plot(
            errors, [y] * len(errors), "|", color=style.backend(backend).color, markersize=11, markeredgewidth=1.8
        )
        notes = [note for note in frame[frame.backend == backend].note if not missing(note)]
        words = f"{min(errors):+.1%} to {max(errors):+.1%}" if errors else notes[0] if notes else "not run"
        looks: dict[str, Any] = {"va": "center", "fontsize": 7.4}
        axes.annotate(words, (1, y), (6, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points", **looks)
    axes.set_yticks(range(len(backends)), [style.backend(name).name for name in backends])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("simulated beside measured peak of a step", fontsize=8)
    handles = [Line2D([], [], marker="|", linestyle="", color=style.INK, markersize=11, label="one model")]
    handles.append(Line2D([], [], color=style.GRID, linewidth=7, label=f"within {WITHIN:.0%}"))
    at = (left, 1 - 0.08 / height)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=at, ncols=2, frameon=False, fontsize=8)
    return figure


FIGURE = FigureKind(
    doc="simulated beside measured peak memory of a step, by model, backend and part of the step",
    kinds=("peak",),
    cell=cell,
    facets=dict.fromkeys(("experiment", "precision", "image_size"), ("peak",)),
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    finding=finding,
    applies=applies,
    place=30,
)
