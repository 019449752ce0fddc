"""Private and ordinary training in several processes: throughput and memory ratios, and their scaling."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from dpbench.report import captions, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import box
from dpbench.report.parts import FigureKind

BASELINE = "nonprivate"
SPREADS = {"ddp": "DDP", "fsdp": "FSDP2"}
_COLORS = ("#0077BB", "#EE7733", "#009988", "#CC3311", "#33BBEE", "#EE3377")
_MARKERS = "os^Dvp"
_TOP, _DEPTH, _LEFT, _GAP, _BETWEEN = 0.36, 1.9, 0.62, 0.45, 0.42
_SAME = ["model", "spread", "precision", "backend", "batch_size", "processes"]
_NUMBERS = ["samples_per_second", "throughput_ratio", "least", "greatest", "scaling", "peak_bytes", "memory_ratio"]
_COLUMNS = [*_SAME, "rounds", *_NUMBERS, "oversubscribed"]


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each backend of each trial.

    `throughput_ratio` is the median over rounds of ordinary training's seconds over the backend's in the same round;
    `scaling` is a process's samples a second relative to a single process; memory is the largest of any process.
    """
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "backends" not in result:
            left_out[f"{trial['model']} {trial['spread']} {trial['processes']}: {record.outcome}"] += 1
            continue
        seconds = {name: _rounds(entry) for name, entry in result["backends"].items()}
        base = seconds.get(BASELINE, {})
        peaks = {name: max(m["peak_bytes"] for m in entry["memory"]) for name, entry in result["backends"].items()}
        for name, own in seconds.items():
            ratios = [base[number] / own[number] for number in own if number in base]
            rows.append(
                {field: trial[field] for field in _SAME if field != "backend"}
                | {
                    "backend": name,
                    "rounds": len(own),
                    "samples_per_second": trial["batch_size"] * trial["processes"] / median(own.values()),
                    "throughput_ratio": median(ratios) if ratios else None,
                    "least": min(ratios, default=None),
                    "greatest": max(ratios, default=None),
                    "peak_bytes": peaks[name],
                    "memory_ratio": peaks[name] / peaks[BASELINE] if BASELINE in peaks else None,
                    "oversubscribed": result["oversubscribed"],
                }
            )
    frame = pd.DataFrame(rows, columns=[c for c in _COLUMNS if c != "scaling"])
    frame["scaling"] = [_scaling(frame, row) for _, row in frame.iterrows()]
    return frame[_COLUMNS].sort_values(_SAME, kind="stable").reset_index(drop=True)


def _rounds(entry: dict[str, Any]) -> dict[int, float]:
    """Median seconds of a step in each round."""
    return {turn["round"]: median(turn["step_seconds"]) for turn in entry["turns"]}


def _scaling(frame: pd.DataFrame, row: Any) -> float | None:
    alike = [name for name in _SAME if name != "processes"]
    alone = frame[(frame[alike] == row[alike]).all(axis=1) & (frame.processes == 1)]
    if not len(alone):
        return None
    return float(row.samples_per_second / row.processes / alone.samples_per_second.iloc[0])


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people."""
    shown = frame.copy()
    shown["samples_per_second"] = [f"{value:.3g} /s" for value in frame.samples_per_second]
    shown["peak_bytes"] = [style.size(int(value)) for value in frame.peak_bytes]
    for name in ("throughput_ratio", "least", "greatest", "scaling", "memory_ratio"):
        shown[name] = ["" if pd.isna(value) else f"{value:.3f}" for value in frame[name]]
    shown["oversubscribed"] = ["yes" if value else "" for value in frame.oversubscribed]
    return shown


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The parts of a step, and its communication."""
    libraries = sorted({r.result["communication"] for r in records if "communication" in r.result})
    rounds = sorted(set(frame["rounds"])) if len(frame) else []
    said = [
        "Training steps in several processes, each with as many samples (weak scaling): forward, backward,",
        "communication, noise and optimizer. Throughput beside ordinary training in the same processes and rounds,",
        f"median and range of {', '.join(map(str, rounds))} rounds; memory of the process that holds most, measured.",
        f"Communication by {', '.join(libraries) or 'none'}. Hollow: more processes than CPUs or GPUs, which share",
        "them.",
    ]
    return captions.caption(said, records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Throughput above, memory below, a column for DDP and one for FSDP2; a line a model and precision."""
    figure, height = sheet(_TOP + 2 * _DEPTH + _BETWEEN + AXIS + 0.2, caption)
    spreads = [name for name in SPREADS if name in set(frame.spread)] or ["ddp"]
    wide = (WIDTH - _LEFT - 0.15 - _GAP * (len(spreads) - 1)) / len(spreads)
    private = frame[frame.backend != BASELINE]
    lines = list(dict.fromkeys(zip(private.model, private.precision, private.backend, strict=True)))
    for column, spread in enumerate(spreads):
        for row, (field, label) in enumerate((("throughput_ratio", "throughput"), ("memory_ratio", "peak memory"))):
            place = (_LEFT + column * (wide + _GAP), _TOP + row * (_DEPTH + _BETWEEN))
            axes = figure.add_axes(box(*place, wide, _DEPTH, height))
            for i, key in enumerate(lines):
                own = private[(private.spread == spread)]
                own = own[(own.model == key[0]) & (own.precision == key[1]) & (own.backend == key[2])]
                _line(axes, own.sort_values("processes"), field, i, key)
            axes.axhline(1.0, color="#555555", linewidth=1.0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(frame.processes)) or [1])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            highest = frame["greatest" if row == 0 else field].max()
            axes.set_ylim(0.0, 1.1 * max(1.0, 0.0 if pd.isna(highest) else float(highest)))
            axes.grid(color=style.GRID, linewidth=0.5)
            if row == 0:
                axes.set_title(SPREADS[spread], fontsize=9)
            else:
                axes.set_xlabel("processes")
            if column == 0:
                axes.set_ylabel(f"{label} / ordinary")
            if (row, column) == (0, len(spreads) - 1) and lines:
                axes.legend(fontsize=6.8, frameon=False, loc="lower right")
    return figure


def _line(axes: Any, part: pd.DataFrame, field: str, i: int, key: tuple[str, str, str]) -> None:
    if not len(part):
        return
    color, marker = _COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)]
    style_of = "--" if key[1] == "mixed" else "-"
    name = key[0].partition("?")[0].rpartition(":")[2]
    label = f"{name}, {key[2]}" + (", mixed precision" if key[1] == "mixed" else "")
    axes.plot(part.processes, part[field], style_of, color=color, linewidth=1.2, label=label)
    for _, row in part.iterrows():
        face = "white" if row.oversubscribed else color
        axes.plot([row.processes], [row[field]], marker, color=color, markerfacecolor=face, markersize=4.5)
        if field == "throughput_ratio":
            axes.vlines(row.processes, row.least, row.greatest, color=color, linewidth=1.0)


FIGURE = FigureKind(
    doc="throughput and memory of private beside ordinary training in several processes, under DDP and FSDP2",
    kinds=("distributed",),
    cell=lambda r: r.id,
    facets=dict.fromkeys(("experiment", "threads"), ("distributed",)),
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    place=250,
)
