"""A paper's figure with our numbers beside its published values, for each model and method.

Time ratios are measured; simulated peaks and largest batches are hatched. The published values come from another
machine and mostly another batch size, so they are compared as ratios to that paper's own ordinary training, except for
the largest batch.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record, entries, grouped, newest_trial
from dpbench.report import captions, readable, style
from dpbench.report.captions import span
from dpbench.report.data import published, statistics
from dpbench.report.data.statistics import PAIRED_COLUMNS, Row
from dpbench.report.drawing import bars
from dpbench.report.drawing.bars import Bar, Panel
from dpbench.report.figures import max_batch_throughput as largest
from dpbench.report.figures import overhead
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of
from dpbench.report.style import missing

#: 40 GB and 40 GiB are the same budget.
_NEAR = 0.08
_LARGEST = ("memory", "budget_bytes", "max_batch_size", "fails_at", "max_batch_note")
_COLUMNS = (
    *("model", "image_size", "backend", "published_in", "batch_size", *PAIRED_COLUMNS),
    *(name if name.startswith("max") else f"max_batch_{name}" for name in _LARGEST),
    "published_max_batch_size",
)


def cell(record: Record) -> Hashable:
    """The key of records that add to the same numbers."""
    trial = record.trial
    budget = trial.get("memory_budget")
    backend = trial.get("backend")
    if record.kind == "peak" and budget is not None:
        return record.kind, trial["model"], trial.get("image_size"), backend, budget
    return record.kind, trial["model"], trial.get("image_size"), backend, trial["batch_size"]


def _applies(records: Sequence[Record]) -> bool:
    return any(
        published.beside(r.trial["model"], r.trial.get("image_size"), backend) is not None
        for r in records
        for backend in captions.backends_of(r)
    )


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each (model, image size, backend) of models in one of the figures.

    Args:
        records: `overhead`, `peak` and `step` records of one device and one setting. Peaks with a budget are probes of
            a search for the largest batch; others are compared with ordinary training's at the same batch.
    """
    rows: list[Row] = []
    by_model = grouped(records, lambda r: (r.trial["model"], r.trial.get("image_size")))
    for (model, size), group in by_model.items():
        if not _applies(group):
            left_out["of a model that is not in those figures"] += len(group)
            continue
        own: dict[str, Row] = {}
        for part in (_timed(group, left_out), _peaks(group), _largest(group, left_out)):
            for backend, row in part.items():
                own[backend] = own.get(backend, {}) | row
        for backend, row in own.items():
            row |= {"model": model, "image_size": size, "backend": backend}
            told = published.beside(model, size, backend)
            if told is not None:
                budget = row.get("max_batch_budget_bytes")
                near = budget is not None and abs(budget / published.BUDGET - 1) < _NEAR
                row |= {"published_in": told.figure, "published_max_batch_size": told.max_batch if near else None}
                ordinary = backend == "nonprivate"
                row["published_time_ratio"] = None if ordinary else told.time_ratio
                row["published_memory_ratio"] = None if ordinary else told.memory_ratio
            rows.append(row)
    frame = statistics.frame_of(rows, _COLUMNS)
    whole = dict.fromkeys(("max_batch_fails_at", "max_batch_budget_bytes"), "Int64")
    return statistics.in_order(frame.astype(whole), "model", "image_size", "backend")


def _timed(group: Sequence[Record], left_out: LeftOut) -> dict[str, Row]:
    trials = [r for r in group if r.kind == "overhead"]
    if not trials:
        return {}
    by_backend = grouped(entries(newest_trial(trials, left_out)), lambda r: r.trial["backend"])
    base = by_backend.get("nonprivate", [])
    return {
        name: {"batch_size": statistics.batch(found[0])} | statistics.paired_row(found, base)
        for name, found in by_backend.items()
    }


def _peaks(group: Sequence[Record]) -> dict[str, Row]:
    """Simulated peaks at one batch size, in place of those of the smaller batches that are timed."""
    peaks = [r for r in group if r.kind == "peak" and r.trial.get("simulated") and r.trial["memory_budget"] is None]
    last = {r.trial["backend"]: r for r in peaks}
    good = {name: r.result["memory"]["peak_bytes"] for name, r in last.items() if r.outcome == "ok"}
    base = good.get("nonprivate")
    return {
        name: {"memory": "simulated", "peak_bytes": good[name], "memory_ratio": good[name] / base if base else None}
        if name in good
        else {"note": statistics.why([record], at_batch=False)}
        for name, record in last.items()
    }


def _largest(group: Sequence[Record], left_out: LeftOut) -> dict[str, Row]:
    """The largest batch in a budget; if it was timed and nothing else was, the time of a sample there."""
    probes = [r for r in group if r.kind in ("peak", "step") and r.trial.get("memory_budget") is not None]
    if not probes:
        return {}
    lines = readable.rows(largest.table(probes, left_out))
    base = next((line.images_per_second for line in lines if line.backend == "nonprivate"), None)
    rows: dict[str, Row] = {}
    for line in lines:
        values: dict[str, Any] = {n if n.startswith("max") else f"max_batch_{n}": getattr(line, n) for n in _LARGEST}
        rows[line.backend] = {name: None if missing(value) else value for name, value in values.items()}
        if all(r.kind != "overhead" for r in group) and not missing(base) and not missing(line.images_per_second):
            rows[line.backend]["time_ratio"] = base / line.images_per_second
            steps = [r for r in probes if r.kind == "step" and r.trial["backend"] == line.backend]
            rows[line.backend] |= statistics.exactness(statistics.good_rounds(steps))
    return rows


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people."""

    def most(row: Any) -> str:
        how = f" ({row.max_batch_memory})"
        none = missing(row.max_batch_size) and missing(row.max_batch_note)
        return "" if none else largest.max_batch(row.max_batch_size, row.max_batch_fails_at, row.max_batch_note, how)

    timed = readable.paired(frame, {"Pixels": of("image_size"), **readable.BATCH})
    more: readable.Columns = {
        "Maximum batch": most,
        "Published maximum batch": of("published_max_batch_size", "{:,g}".format),
        "Published in": of("published_in"),
    }
    return pd.concat([timed, readable.texts(frame, more, tuple(more))], axis=1)


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    sources = sorted(set(frame.published_in.dropna()))
    said = [f"After {' and '.join(sources)}: published values (diamonds) are of that paper's GPU."]
    sizes = sorted(set(frame.batch_size.dropna()))
    if sizes:
        at = f"batch size{'s' if len(sizes) > 1 else ''} {span(sizes)}"
        said.append(f"Time: measured here at {at}, all backends in one process; {overhead.pairs(frame)}.")
    if (frame.batch_size.isna() & frame.time_ratio.notna()).any():
        said.append("Where no batch size is named, time is that of a sample at the largest batch.")
    if (frame.memory == "simulated").any():
        batches = sorted(
            {statistics.batch(r) for r in records if r.kind == "peak" and r.trial["memory_budget"] is None}
        )
        said.append(f"Peak memory: simulated under fake tensors at B={captions.join(batches)}, not measured.")
    kinds = set(frame.max_batch_memory.dropna())
    if kinds:
        budget = style.size(frame.max_batch_budget_bytes.dropna().iloc[0])
        said.append(f"Largest batch in {budget}: {' and '.join(sorted(kinds))}.")
    tokens = sorted({size for size in (style.without_length(m)[1] for m in frame.model) if size is not None})
    if tokens:
        said.append(
            f"Sequences of {captions.join(tokens)} tokens; the figure does not print the length of its own, so "
            "compare the backends with each other there."
        )
    if any("crossvit" in model for model in frame.model):
        said.append("CrossViT reads 240×240 pixels here.")
    return said


def _finding(frame: pd.DataFrame) -> str:
    both = frame[frame.time_ratio.notna() & frame.published_time_ratio.notna()]
    if not len(both):
        return ""
    ours, theirs = both.time_ratio.astype(float), both.published_time_ratio.astype(float)
    return (
        f"Time beside ordinary training is {style.times(ours.min())} to {style.times(ours.max())} here where the "
        f"papers have {style.times(theirs.min())} to {style.times(theirs.max())} ({len(both)} pairs of numbers)."
    )


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A row a model and backend; a panel for each kind of number."""
    searched = frame.max_batch_size.notna().any() or frame.max_batch_note.notna().any()
    if not searched:  # next to ratios, ordinary training's own row adds nothing
        frame = frame[frame.backend != "nonprivate"]
    cells = readable.rows(frame)
    sized = frame[["model", "image_size"]].drop_duplicates().groupby("model").size().max() > 1
    rows = [
        bars.Row(
            style.model(c.model) + (f", {c.image_size:g} px" if sized and not missing(c.image_size) else ""),
            c.backend,
            style.backend(c.backend).name,
        )
        for c in cells
    ]
    panels = [Panel("Time, measured", "times non-private", [_time_bar(c) for c in cells], 1.0)]
    if frame.memory_ratio.notna().any() and not searched:
        found = [bars.bar(c, "memory_ratio", style.times, simulated=c.memory == "simulated") for c in cells]
        taken = "simulated" if (frame.memory == "simulated").any() else "measured"
        panels.append(Panel(f"Peak memory, {taken}", "times non-private", found, 1.0))
    if searched:
        budget = style.size(frame.max_batch_budget_bytes.dropna().iloc[0])
        kinds = captions.join(sorted(set(frame.max_batch_memory.dropna())))
        panels.append(Panel(f"Maximum batch in {budget}, {kinds}", "samples", [_batch_bar(c) for c in cells]))
    return bars.bars(rows, panels, caption)


def _time_bar(row: Any) -> Bar:
    if row.backend == "nonprivate":
        return Bar(text="–" if missing(row.step_seconds) else style.duration(row.step_seconds))
    return bars.bar(row, "time_ratio", style.times)


def _batch_bar(row: Any) -> Bar:
    at_least, simulated = missing(row.max_batch_fails_at), row.max_batch_memory == "simulated"
    text = ("≥ {:,}" if at_least else "{:,}").format
    return bars.bar(row, "max_batch_size", text, "max_batch_note", simulated=simulated, at_least=at_least)


FIGURE = FigureKind(
    kinds=("overhead", "peak", "step"),
    cell=cell,
    by=("experiment", "precision"),
    facets={"memory_budget": ("peak", "step"), "threads": ("overhead",)},
    table=table,
    text=text,
    caption=_caption,
    plot=plot,
    applies=_applies,
    finding=_finding,
    setting=True,
)
