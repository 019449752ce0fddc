"""The cost of clipping relative to ordinary training: time and memory of each model and backend.

`overhead` and `training_step` have a panel a model and a row a backend, with the value beside each mark: filled for
time, hollow for memory. `memory_speed_table` (Table 4 of arXiv:2205.10683) has bars, of backends that each had its own
process. Nothing depends on colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpbench.records.reader import LeftOut, Record, entries, grouped, newest_trial
from dpbench.report import captions, findings, readable, style
from dpbench.report.captions import span
from dpbench.report.data import published
from dpbench.report.data.statistics import PAIRED_COLUMNS, batch, frame_of, in_order, paired_row, utilisation_said
from dpbench.report.drawing import bars
from dpbench.report.drawing.bars import Bar, Panel
from dpbench.report.drawing.sheet import MARGIN, REFERENCE, beside, grid, legend, logarithmic
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing

# Inches: the least width of the names, the depth of a row, the width of the column of numbers at the right of a panel,
# and the ends of the two numbers in it.
_NAMES, _ROW, _NUMBERS, _AT = 1.12, 0.165, 0.92, {"time": 0.42, "memory": 0.89}
# Smaller ratios appear as an arrow at the edge: only `microbatch` needs so little memory.
_LOWEST = 0.6
_TICKS = (1, 2, 4, 8, 16, 32, 64)
#: How ordinary training and the others run -> a sentence.
_WAYS = {
    "eager": "Every step runs eagerly.",
    "traced": "Every step runs the operations of one graph as they were traced.",
    "replayed": "Every step replays the operations of one graph as a CUDA graph.",
    "compiled": "Every step runs as one graph compiled by TorchInductor.",
}
_TIME: dict[str, Any] = {"marker": "o", "markersize": 4.4, "linestyle": "", "zorder": 4}
_MEMORY = _TIME | {"marker": "D", "markersize": 5.8, "markerfacecolor": "white", "markeredgewidth": 1.2, "zorder": 3}
_RANGE: dict[str, Any] = {"color": style.INK, "linewidth": 1.0, "marker": "|", "markersize": 4.5, "zorder": 4.5}
_PANEL = ["model", "image_size", "batch_size"]


def cell(record: Record) -> tuple[Any, ...]:
    """The key of records measured together: model, batch size, input size."""
    return record.trial["model"], batch(record), record.trial.get("image_size")


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each (model, batch size, input size, backend), from its latest trial; see `statistics.paired_row`.

    Args:
        records: of one device and one setting, of trials with several backends; or `step` records, which are compared
            with ordinary training's in the same round.
    """
    rows = []
    for (model, batch_size, size), group in grouped(records, cell).items():
        by_backend = grouped(entries(group), lambda r: r.trial["backend"])
        ordinary = by_backend.get("nonprivate", [])
        for backend, own in by_backend.items():
            found = newest_trial(own, left_out if backend != "nonprivate" else LeftOut())
            base = newest_trial(ordinary, LeftOut()) if ordinary and found[0].kind == "step" else ordinary
            row = {"model": model, "batch_size": batch_size, "image_size": size, "backend": backend}
            row |= paired_row(found, [r for r in base if r.kind == "step" or r.id == found[0].id])
            if size == 32 and found[0].trial["precision"] == "float32" and backend != "nonprivate":
                row["published_time_ratio"] = published.ratio("time_per_epoch", model, backend)
                row["published_memory_ratio"] = published.ratio("active_memory", model, backend)
            rows.append(row)
    its_own = [name for name in ("rounds", "plain_step_seconds") if any(name in row for row in rows)]
    columns = ("model", "batch_size", "image_size", "backend", *PAIRED_COLUMNS, *its_own)
    return in_order(frame_of(rows, columns), "model", "image_size", "batch_size", "backend")


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people."""
    return readable.paired(frame, {"Pixels": readable.of("image_size"), **readable.BATCH})


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    said = [
        "Time and peak memory of one training step beside ordinary training of the same model: all backends take turns "
        f"in one process, and a ratio is of two turns of one round; {pairs(frame)}. The axes are logarithmic.",
        *_conditions(records, frame),
    ]
    if frame.published_time_ratio.notna().any():
        said.append(f"Published ({published.PAPER}, Table 4, B=256 on its GPU) stands in the table.")
    return said


def _conditions(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    """Sentences on how steps ran, the source of the memory, and what has no panel or no number."""
    said = ways(records) + memory_source(frame)
    alone = [key for key, own in _groups(frame) if len(_private(own)) < _rivals(frame)]
    if alone:
        names = "; ".join(f"{style.model(model)}, B={batch_size}" for model, _, batch_size in alone)
        said.append(f"In the table alone, for one private backend was run there: {names}.")
    said += utilisation_said(records, frame)
    if frame.step_seconds.notna().any():
        absent = [
            f"{style.backend(str(name)).name} ({', '.join(dict.fromkeys(own.note.dropna()))})"
            for name, own in frame.groupby("backend", sort=False)
            if own.step_seconds.isna().all()
        ]
        said += [f"No number on any model: {', '.join(absent)}."] if absent else []
    return said


def _groups(frame: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
    return list(frame.groupby(_PANEL, sort=False, dropna=False))


def _private(own: pd.DataFrame) -> set[str]:
    return set(own.backend) - {"nonprivate"}


def _rivals(frame: pd.DataFrame) -> int:
    """How many private backends a panel has at least: a model with one is only in the table, if another has more."""
    return min(2, max((len(_private(own)) for _, own in _groups(frame)), default=0))


def pairs(frame: pd.DataFrame) -> str:
    """'median of 3 to 7 pairs, whiskers their range'."""
    return captions.rounds(frame.paired_rounds[frame.backend != "nonprivate"], "pairs", " (fewer of slow backends)")


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
    models = [(key, own) for key, own in _groups(frame) if len(_private(own)) >= _rivals(frame)]
    frame = pd.concat([own for _, own in models]) if models else frame
    shown = frame if frame.step_seconds.isna().all() else frame[frame.step_seconds.notna()]
    backends = sorted(_private(shown), key=style.backend_key)
    names = [style.backend(backend).name for backend in backends]
    left = MARGIN + max(_NAMES, 0.061 * max(map(len, names), default=0))
    room: dict[str, float] = {"head": 0.52, "foot": 0.36, "right": MARGIN + _NUMBERS, "gap": 0.14 + _NUMBERS}
    figure, panels = grid(caption, len(models), 3, _ROW * max(len(backends), 1), left=left, above=0.3, **room)
    drawn = frame[["time_ratio", "time_ratio_high", "memory_ratio"]].astype(float).stack()
    highest = 1.25 * float(max(2.0, *drawn))
    ticks = [tick for tick in _TICKS if tick < highest]
    several = frame.image_size.nunique() > 1
    for index, (axes, (key, own)) in enumerate(zip(panels, models, strict=True)):
        logarithmic(axes.xaxis, form="{x:g}×", at=ticks if len(ticks) <= 6 else ticks[::2])  # more would overlap
        axes.set(xlim=(_LOWEST, highest), ylim=(len(backends) - 0.5, -0.5))
        axes.set_yticks(range(len(backends)), names if index % 3 == 0 else [""] * len(names))
        axes.tick_params(labelsize=7.8)
        axes.yaxis.grid(False)
        axes.axvline(1, **REFERENCE)
        _head(axes, key, own, several)
        rows = {row.backend: row for row in readable.rows(own)}
        for y, backend in enumerate(backends):
            _row(axes, y, backend, rows.get(backend))
    gray: dict[str, Any] = {"color": "#555555"}
    signs = [
        (True, Line2D([], [], label="time", **gray | _TIME)),
        ((frame.time_ratio_high > frame.time_ratio_low).any(), Line2D([], [], label="range of pairs", **_RANGE)),
        (True, Line2D([], [], label="peak memory", **gray | _MEMORY)),
        ((drawn < _LOWEST).any(), Line2D([], [], label=f"below {_LOWEST}×", **gray | _MEMORY | {"marker": "<"})),
    ]
    legend(figure, [line for is_used, line in signs if is_used], at=left - 0.1)
    return figure


def _head(axes: Axes, key: tuple[Any, ...], own: pd.DataFrame, with_size: bool) -> None:
    """The model, its ordinary training's time and memory, and the headings of the numbers."""
    model, size, batch_size = key
    base = next(iter(readable.rows(own[own.backend == "nonprivate"])), None)
    if base is None or missing(base.step_seconds):
        words = "no ordinary training" if base is None else f"non-private: {base.note}"
    else:
        words = f"1× = {style.duration(base.step_seconds)}"
        words += "" if missing(base.peak_bytes) else f", {style.size(base.peak_bytes)}"
    after = (f", {size:g} px" if with_size and not missing(size) else "") + f", B={batch_size}"
    axes.set_title(style.shortened(style.model(model), 32 - len(after)) + after, pad=17, fontsize=8.8)
    looks: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "color": style.FAINT}
    axes.annotate(words, (0, 1), (0, 5), fontsize=7.4, **looks)
    for word, at in _AT.items():
        axes.annotate(word, (1, 1), (72 * at, 5), fontsize=7.4, ha="right", **looks)


def _row(axes: Axes, y: int, backend: str, row: Any) -> None:
    if row is None or missing(row.time_ratio):
        failed = row is not None and not missing(row.note)
        words = f"✕ {row.note}" if failed else "not run" if row is None else "no ordinary training beside it"
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the grid and the line at 1
        beside(axes, 0, y, 4, words, color=style.FAILURE if failed else style.FAINT, fontsize=7.4, bbox=ground)
        return
    if row.time_ratio_high > row.time_ratio_low:
        axes.add_line(Line2D([max(row.time_ratio_low, _LOWEST), row.time_ratio_high], [y, y], **_RANGE))
    for value, looks, at in ((row.memory_ratio, _MEMORY, "memory"), (row.time_ratio, _TIME, "time")):
        beside(axes, 1, y, 72 * _AT[at], "–" if missing(value) else style.times(value), fontsize=7.6, ha="right")
        if not missing(value):
            drawn: dict[str, Any] = looks | ({"marker": "<"} if value < _LOWEST else {})
            color = style.backend(backend).color
            axes.add_line(Line2D([max(value, _LOWEST)], [y], color=color, clip_on=False, **drawn))


def step_cell(record: Record) -> tuple[Any, ...]:
    """As for `overhead`, plus the engines, since ours and the others' are two trials."""
    return *cell(record), *record.trial["backends"]


def _step_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    optimizer = ", ".join(sorted({str(record.trial["optimizer"]) for record in records}))
    energy = sorted({str(record.result["energy"]) for record in records if "energy" in record.result})
    said = [
        "Time and peak memory of one whole training step, forward to optimizer, each library's noise included, beside "
        f"the plain step of the same optimizer ({optimizer}): an engine takes turns with that in one process, and "
        f"a ratio is of two turns of one round; {pairs(frame)}. Backends stand for their engines: ours is "
        "dpbench.PrivacyEngine. The axes are logarithmic.",
        *_conditions(records, frame),
        *_other_framework(records, frame),
    ]
    return said + ([f"Energy: {', '.join(energy)}."] if energy else [])


def _other_framework(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    """Sentences on engines that are compared with their own framework's plain step; [] if there are none."""
    if "plain_step_seconds" not in frame:
        return []
    at = ["model", "image_size", "batch_size"]
    torchs = frame.loc[frame.backend == "nonprivate", [*at, "step_seconds"]]
    both = frame[frame.plain_step_seconds.notna()].merge(torchs, "left", at, suffixes=("", "_torch"))
    steps = [
        f"{style.model(row.model)} {style.duration(row.plain_step_seconds)} "
        f"(torch {'not timed' if style.missing(row.step_seconds_torch) else style.duration(row.step_seconds_torch)})"
        for row in readable.rows(both)
    ]
    found = [e.result for e in entries(records) if "plain" in e.result and "compile_seconds" in e.result]
    versions = sorted({" ".join(pair) for result in found for pair in result.get("versions", {}).items()})
    compiling = sorted(float(result["compile_seconds"]["private"]) for result in found)
    took = span(map(style.duration, compiling)) if compiling else "an unknown time"
    return [
        "§ The same model in jax, its gradients compared with the oracle's; jitted, and beside jax's jitted plain "
        f"step, not beside torch's. That step takes {', '.join(steps)}. Compiling the private one took {took}, not "
        "counted; samples go through vmap at once or one by one, whichever is faster; memory is what XLA plans, "
        f"not measured ({', '.join(versions)})."
    ]


def _compared(frame: pd.DataFrame) -> pd.Series[bool]:
    """True for rows with ordinary training at the same batch size, in a group of more than one."""
    groups = frame.groupby(["model", "batch_size"]).backend
    return groups.transform(lambda names: "nonprivate" in set(names)) & (groups.transform("nunique") > 1)


def _alone_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
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


def alone_plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Bars of ratios to ordinary training, with the absolute numbers beside them.

    Cells without ordinary training are only in the table; if there are no others, absolute numbers are drawn.
    """
    sources = set(frame.memory.dropna())
    taken = f" ({style.SOURCES.get(sources.pop(), 'measured')})" if len(sources) == 1 else ""
    compared = frame[_compared(frame)]
    if len(compared):
        rows = readable.rows(compared)
        many = compared.groupby("model").batch_size.nunique().max() > 1
        names = [(f", B={r.batch_size}" if many else "", "") for r in rows]
        time = [_ratio_bar(r, "time_ratio", r.step_seconds, style.duration) for r in rows]
        memory = [_ratio_bar(r, "memory_ratio", r.peak_bytes, style.size) for r in rows]
        units, reference = ["times non-private"] * 2, 1.0
    else:
        rows = readable.rows(frame)
        names = [("", f", B={r.batch_size}") for r in rows]
        time = [bars.bar(r, "step_seconds", style.duration) for r in rows]
        memory = [bars.bar(r, "peak_bytes", style.size, unit=2.0**20, simulated=r.memory == "simulated") for r in rows]
        units, reference = ["seconds", "MiB"], None
    titles = ("Time per step", f"Peak memory{taken}")
    panels = [Panel(*each, reference) for each in zip(titles, units, (time, memory), strict=True)]
    named = [
        bars.Row(style.model(r.model) + of_model, r.backend, style.backend(r.backend).name + of_row)
        for r, (of_model, of_row) in zip(rows, names, strict=True)
    ]
    return bars.bars(named, panels, caption)


def _ratio_bar(row: Any, column: str, absolute: Any, text: Callable[[float], str]) -> Bar:
    drawn = bars.bar(row, column, style.times, simulated=column == "memory_ratio" and row.memory == "simulated")
    if missing(absolute):
        return drawn
    return replace(drawn, text=drawn.text or "–", detail=text(absolute), note="")  # –: no round with ordinary training


def _figure(kind: str, key: Any, caption: Any, plot: Any, *by: str) -> FigureKind:
    by = ("experiment", "precision", *by)
    return FigureKind((kind,), table, text, caption, plot, findings.paired, key, by, setting=True)


FIGURES = {
    "memory_speed_table": _figure(
        "step", lambda r: (*r.cell, batch(r)), _alone_caption, alone_plot, "image_size", "memory_budget", "threads"
    ),
    "overhead": _figure("overhead", cell, _caption, plot, "threads"),
    "training_step": _figure("training_step", step_cell, _step_caption, plot, "threads", "optimizer"),
}
