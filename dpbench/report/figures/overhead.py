"""The cost of clipping relative to ordinary training: a panel a model, a row a backend, with time and memory.

The number beside each mark is its value. A filled mark is time, a hollow one memory, and the row has the backend's
name: nothing depends on colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dpbench.report import captions, findings, readable, style
from dpbench.report.data import peaks, published
from dpbench.report.data.paired import COLUMNS, entries, paired_row
from dpbench.report.data.select import LeftOut, Record, grouped, newest_trial
from dpbench.report.data.statistics import batch, count_failures, frame_of, in_order
from dpbench.report.drawing.bars import WIDTH, sheet
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing

_PANELS, _MARGIN, _NAMES, _GAP = 3, 0.12, 1.12, 0.14
_ROW, _TITLE, _AXIS, _LEGEND = 0.165, 0.52, 0.36, 0.3
# The column of numbers beside the panel: its width, and the places of the two, in inches from the panel's right edge.
_NUMBERS, _AT = 0.92, (0.42, 0.89)
# Smaller ratios appear as an arrow at the edge: only `microbatch` needs so little memory.
_LOWEST = 0.6
_CHARACTER, _LETTER = 0.083, 0.061  # inches, of a heading and of a name
_TICKS = (1, 2, 4, 8, 16, 32, 64)
#: How ordinary training and the others run -> a sentence.
_WAYS = {
    "eager": "Every step runs eagerly.",
    "traced": "Every step runs the operations of one graph as they were traced.",
    "replayed": "Every step replays the operations of one graph as a CUDA graph.",
    "compiled": "Every step runs as one graph compiled by TorchInductor.",
}
_TIME: dict[str, Any] = {"marker": "o", "markersize": 4.4, "linestyle": "", "zorder": 4}
_MEMORY: dict[str, Any] = {
    "marker": "D",
    "markersize": 5.8,  # around the other mark if they coincide
    "linestyle": "",
    "markerfacecolor": "white",
    "markeredgewidth": 1.2,
    "zorder": 3,
}


def cell(record: Record) -> tuple[Any, ...]:
    """The key of records measured together: model, batch size, input size."""
    return record.trial["model"], batch(record), record.trial.get("image_size")


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each (model, batch size, input size, backend), from its latest trial; see `paired.paired_row`.

    Args:
        records: `overhead` records of one device and one setting.
    """
    rows = []
    for (model, batch_size, size), group in grouped(records, cell).items():
        by_backend = grouped(entries(group), lambda r: r.trial["backend"])
        ordinary = by_backend.get("nonprivate", [])
        for backend, own in by_backend.items():
            found = newest_trial(own, left_out if backend != "nonprivate" else LeftOut())
            count_failures(found, left_out)
            row = {"model": model, "batch_size": batch_size, "image_size": size, "backend": backend}
            row |= paired_row(found, [r for r in ordinary if r.id == found[0].id])
            if size == 32 and found[0].trial["precision"] == "float32" and backend != "nonprivate":
                row["published_time_ratio"] = published.ratio("time_per_epoch", model, backend)
                row["published_memory_ratio"] = published.ratio("active_memory", model, backend)
            rows.append(row)
    its_own = ("plain_step_seconds",) if any("plain_step_seconds" in row for row in rows) else ()
    columns = ("model", "batch_size", "image_size", "backend", *COLUMNS, *its_own)
    return in_order(frame_of(rows, columns), "model", "image_size", "batch_size", "backend")


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people."""
    sizes = {"Pixels": lambda r: "" if missing(r.image_size) else str(r.image_size), "B": lambda r: str(r.batch_size)}
    return readable.paired(frame, sizes)


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The meaning of the ratios."""
    said = [
        "Time and peak memory of one training step beside ordinary training of the same model: all backends take turns "
        f"in one process, and a ratio is of two turns of one round; {pairs(frame)}. The axes are logarithmic."
    ]
    said += ways(records) + memory_source(frame) + alone(frame) + peaks.said(records, frame)
    if absent := nowhere(frame):
        said.append(f"No number on any model: {', '.join(absent)}.")
    if frame.published_time_ratio.notna().any():
        said.append(f"Published ({published.PAPER}, Table 4, B=256 on its GPU) stands in the table.")
    return captions.caption(said, records, left_out)


def nowhere(frame: pd.DataFrame) -> list[str]:
    """Backends without a number on any model although others have some, with the reason: "fastDP (unsupported)"."""
    if frame.step_seconds.isna().all():
        return []
    return [
        f"{style.backend(str(name)).name} ({', '.join(dict.fromkeys(own.note.dropna()))})"
        for name, own in frame.groupby("backend", sort=False)
        if own.step_seconds.isna().all()
    ]


def panels(frame: pd.DataFrame) -> tuple[list[tuple[Any, pd.DataFrame]], list[str]]:
    """((model, size, batch size) and rows of each panel to draw, names of models that are only in the table).

    A model with only one private backend compares nothing; it is drawn only if no model has more.

    Args:
        frame: of `table`.
    """
    keys = ["model", "image_size", "batch_size"]
    found = [(key, own) for key, own in frame.groupby(keys, sort=False, dropna=False)]
    tried = [own.backend[own.backend != "nonprivate"].nunique() for _, own in found]
    least = min(2, max(tried, default=0))
    drawn = [each for each, count in zip(found, tried, strict=True) if count >= least]
    alone = [key for (key, _), count in zip(found, tried, strict=True) if count < least]
    return drawn, [f"{style.model(str(model))}, B={batch_size}" for model, _, batch_size in alone]


def alone(frame: pd.DataFrame) -> list[str]:
    """A sentence that names the models without a panel; empty if there are none."""
    names = panels(frame)[1]
    return [f"In the table alone, for one private backend was run there: {'; '.join(names)}."] if names else []


def pairs(frame: pd.DataFrame) -> str:
    """ "median of 3 to 7 pairs, whiskers their range"."""
    counts = sorted(set(frame.paired_rounds[(frame.backend != "nonprivate") & (frame.paired_rounds > 0)]))
    if not counts:
        return "no pair gave a number"
    many = f"{counts[0]} pairs" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} pairs (fewer of slow backends)"
    return "one pair" if counts == [1] else f"median of {many}, whiskers their range"


def ways(records: Sequence[Record]) -> list[str]:
    """A sentence on how steps ran, ordinary training's and the others' alike; [] for eager ones on a CPU."""
    way, device = records[0].setting("way"), records[0].setting("device")
    if way != "best":
        return [_WAYS[way]] if way in _WAYS and (way, device) != ("eager", "cpu") else []
    found = [entry for record in records for entry in record.result.get("backends", {}).values()]
    counts = Counter(str(entry["way"]) for entry in found if "way" in entry)
    named = ", ".join(f"{way} {count}" for way, count in sorted(counts.items()))
    return [
        "Best: ordinary training and ours run as one graph a shape, each in its fastest way (eager, its operations as "
        f"they were traced, these replayed as a CUDA graph, compiled by TorchInductor): {named}."
    ]


def memory_source(frame: pd.DataFrame) -> list[str]:
    """A sentence on the source of the memory; [] without memory."""
    sources = [style.SOURCES.get(source, source) for source in sorted(set(frame.memory.dropna()) - {style.PLANNED})]
    return [f"Memory: measured, peak by the {', '.join(sources)}."] if sources else []


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Panels of models over the same rows of backends."""
    models, _ = panels(frame)
    frame = pd.concat([own for _, own in models]) if models else frame
    shown = frame if frame.step_seconds.isna().all() else frame[frame.step_seconds.notna()]  # see `nowhere`
    backends = sorted(set(shown.backend) - {"nonprivate"}, key=style.backend_key)
    across = min(_PANELS, len(models))
    down = -(-len(models) // across)
    depth = _ROW * max(len(backends), 1)
    figure, height = sheet(_LEGEND + down * (_TITLE + depth + _AXIS), caption)
    names = [style.backend(backend).name for backend in backends]
    aside = max(_NAMES, _LETTER * max(map(len, names), default=0))
    share = (WIDTH - 2 * _MARGIN - aside - (across - 1) * _GAP) / across
    highest = max([2.0, *_drawn(frame)]) * 1.25
    for index, (key, own) in enumerate(models):
        column, line = index % across, index // across
        left = _MARGIN + aside + column * (share + _GAP)
        bottom = height - _LEGEND - line * (_TITLE + depth + _AXIS) - _TITLE - depth
        axes = figure.add_axes((left / WIDTH, bottom / height, (share - _NUMBERS) / WIDTH, depth / height))
        axes.set_xscale("log")
        axes.set_xlim(_LOWEST, highest)
        axes.set_ylim(len(backends) - 0.5, -0.5)
        ticks = [tick for tick in _TICKS if tick < highest]
        axes.xaxis.set_major_locator(FixedLocator(ticks if len(ticks) <= 6 else ticks[::2]))  # more would overlap
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        if column == 0:
            axes.set_yticks(range(len(backends)), names)
        else:
            axes.set_yticks([])
        axes.tick_params(length=0, labelsize=7.8)
        axes.grid(axis="x", color=style.GRID, linewidth=0.7)
        axes.axvline(1, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2)
        several = len({size for (_, size, _), _ in models if not missing(size)}) > 1
        _head(axes, key, own, with_size=several)
        rows = {row.backend: row for row in own.itertuples(index=False)}
        for y, backend in enumerate(backends):
            _row(axes, y, backend, rows.get(backend))
    figure.legend(
        handles=_signs(frame),
        loc="upper left",
        bbox_to_anchor=((_MARGIN + aside - 0.1) / WIDTH, 1 - 0.02 / height),
        ncols=4,
        frameon=False,
        fontsize=8,
        handlelength=1.8,
        borderpad=0.2,
    )
    return figure


def _drawn(frame: pd.DataFrame) -> list[float]:
    columns = frame[["time_ratio", "time_ratio_high", "memory_ratio"]]
    return [float(value) for value in columns.to_numpy().ravel() if not missing(value)]


def _head(axes: Axes, key: tuple[Any, ...], own: pd.DataFrame, with_size: bool) -> None:
    """The model, its ordinary training's time and memory, and the headings of the numbers."""
    model, size, batch_size = key
    base: Any = next(own[own.backend == "nonprivate"].itertuples(index=False), None)
    if base is None or missing(base.step_seconds):
        beside = "no ordinary training" if base is None else f"non-private: {base.note}"
    else:
        beside = f"1× = {style.duration(base.step_seconds)}"
        beside += "" if missing(base.peak_bytes) else f", {style.size(base.peak_bytes)}"
    after = (f", {size:g} px" if with_size and not missing(size) else "") + f", B={batch_size}"
    name = style.model(model)
    longest = int(axes.get_window_extent().width / axes.figure.dpi / _CHARACTER) + 6 - len(after)
    name = name if len(name) <= longest else f"{name[: longest - 9]}…{name[-8:]}"
    _note(axes, (0, 1), (0, 17), name + after, fontsize=8.8, fontweight="bold", va="bottom")
    _note(axes, (0, 1), (0, 5), beside, fontsize=7.4, color=style.FAINT, va="bottom")
    for at, word in zip(_AT, ("time", "memory"), strict=True):
        _note(axes, (1, 1), (72 * at, 5), word, fontsize=7.4, color=style.FAINT, ha="right", va="bottom")


def _row(axes: Axes, y: int, backend: str, row: Any) -> None:
    color = style.backend(backend).color
    across = axes.get_yaxis_transform()
    if row is None or missing(row.time_ratio):
        known = row is not None and not missing(row.note)
        words = f"✕ {row.note}" if known else "not run" if row is None else "no ordinary training beside it"
        looks = {"color": style.FAILURE if known else style.FAINT, "va": "center", "fontsize": 7.4}
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the grid and the line at 1
        _note(axes, (0, y), (4, 0), words, across, bbox=ground, **looks)
        return
    if row.time_ratio_high > row.time_ratio_low:
        ends = [max(row.time_ratio_low, _LOWEST), row.time_ratio_high]
        axes.add_line(Line2D(ends, [y, y], color=style.INK, linewidth=1.0, marker="|", markersize=4.5, zorder=4.5))
    for value, looks in ((row.memory_ratio, _MEMORY), (row.time_ratio, _TIME)):
        if not missing(value):
            drawn: dict[str, Any] = looks | {"marker": "<"} if value < _LOWEST else looks
            axes.add_line(Line2D([max(value, _LOWEST)], [y], color=color, clip_on=False, **drawn))
    for at, value in zip(_AT, (row.time_ratio, row.memory_ratio), strict=True):
        words = "–" if missing(value) else style.times(value)
        _note(axes, (1, y), (72 * at, -0.5), words, across, fontsize=7.6, ha="right", va="center")


def _note(axes: Axes, xy: Any, offset: Any, words: str, coordinates: Any = "axes fraction", **looks: Any) -> None:
    axes.annotate(
        words, xy, offset, xycoords=coordinates, textcoords="offset points", annotation_clip=False, zorder=5, **looks
    )


def _signs(frame: pd.DataFrame) -> list[Artist]:
    gray = "#555555"
    handles: list[Artist] = [Line2D([], [], color=gray, label="time", **_TIME)]
    if (frame.time_ratio_high > frame.time_ratio_low).any():
        handles.append(Line2D([], [], color=style.INK, linewidth=1, marker="|", markersize=5, label="range of pairs"))
    handles.append(Line2D([], [], color=gray, label="peak memory", **_MEMORY))
    if any(value < _LOWEST for value in _drawn(frame)):
        handles.append(Line2D([], [], color=gray, label=f"below {_LOWEST}×", **_MEMORY | {"marker": "<"}))
    return handles


FIGURE = FigureKind(
    doc="time and memory of every backend beside ordinary training, interleaved in one process",
    kinds=("overhead",),
    cell=cell,
    facets=dict.fromkeys(("experiment", "precision", "threads"), ("overhead",)),
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    finding=findings.paired,
    place=90,
)
