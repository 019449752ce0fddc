"""Draws times and peaks of an experiment's cells over versions, and marks the steps.

A version is a hash of the sources and libraries of a trial; each model's versions are numbered by their first records.
A cell has a step if `dpbench.records.comparison` calls it faster, slower, smaller or larger than at its last step, or
than in its first version. So a slow creep is a step, too, once it is beyond the noise.

Functions take:
    records: of one device.
    frame: of `table`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from dpbench.records.comparison import EFFORT, compare_records
from dpbench.records.reader import PAIRED, LeftOut, Record, by_device, grouped, read
from dpbench.report import readable, style
from dpbench.report.data.statistics import frame_of
from dpbench.report.drawing.sheet import grid, legend, logarithmic, sign
from dpbench.report.output import files
from dpbench.report.parts import Part
from dpbench.report.readable import BACKEND, BATCH, MODEL, of
from dpbench.report.summary import several
from dpbench.trials import canonical_json

COLUMNS = (
    *("model", "batch_size", "backend", "setting", "quantity", "number", "utc", "commit"),
    *("value", "ratio", "low", "high", "step"),
)
STEPS = ("faster", "slower", "smaller", "larger")
_TICKS = (0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16)


def table(records: Sequence[Record]) -> pd.DataFrame:
    """A row for each cell, quantity ("time ratio" or "peak", in bytes) and version, if there are two versions or more.

    `ratio`, `low` and `high` compare a version with that of the last step; `step` is one of `STEPS`, or "".
    """
    rows: list[dict[str, Any]] = []
    for group in grouped((r for r in records if r.kind in PAIRED), _cell).values():
        versions = list(grouped(group, lambda r: r.version or r.fingerprint).values())
        versions.sort(key=lambda own: min(record.utc for record in own))
        last: dict[tuple[str, str], int] = {}  # (backend, quantity) -> the version of the last step
        for now, own in enumerate(versions[1:], start=1):
            for then in range(now):
                for row in compare_records(versions[then], own, LeftOut())[0]:
                    key = row.backend, row.quantity
                    if row.quantity not in ("time ratio", "peak") or last.setdefault(key, then) != then:
                        continue
                    named = {"model": row.model, "batch_size": row.batch_size, "backend": row.backend}
                    named |= {"setting": _setting(group[0]), "quantity": row.quantity}
                    rows.append(named | _version(versions[then], then) | {"value": row.a, "step": ""})
                    step = row.verdict if row.verdict in STEPS else ""
                    found = {name: getattr(row, name) for name in ("ratio", "low", "high")}
                    rows.append(named | _version(own, now) | {"value": row.b, "step": step} | found)
                    if step:
                        last[key] = now
    frame = frame_of(rows, COLUMNS)
    keys = ["model", "batch_size", "setting", "quantity", "backend", "number"]
    return frame.drop_duplicates(keys).sort_values(keys, kind="stable", ignore_index=True)


def _cell(record: Record) -> str:
    fields = {name: value for name, value in record.trial.items() if name not in EFFORT}
    where = {name: record.environment.get(name) for name in ("cpu_model", "host")}
    return canonical_json(fields | where | {"kind": record.kind, "threads": record.setting("threads")})


def _setting(record: Record) -> str:
    known = [str(record.trial.get(name) or "") for name in ("precision", "optimizer")]
    known += [f"{record.trial['image_size']} px"] if record.trial.get("image_size") else []
    way = str(record.trial.get("way", "eager"))
    return ", ".join(filter(None, [*known, way if way != "eager" else ""]))


def _version(records: Sequence[Record], number: int) -> dict[str, Any]:
    first = min(records, key=lambda record: record.utc)
    return {"number": number + 1, "utc": first.utc, "commit": str(first.environment.get("git_sha") or "")[:10]}


_TEXT: readable.Columns = {
    **MODEL,
    **BATCH,
    "Setting": of("setting"),
    **BACKEND,
    "What": of("quantity"),
    "Version": of("number"),
    "Commit": of("commit"),
    "Value": lambda r: style.size(r.value) if r.quantity == "peak" else style.times(r.value),
    "Since the last step": lambda r: "" if style.missing(r.ratio) else f"{r.ratio:.3f} ({r.low:.3f}–{r.high:.3f})",
    "Step": of("step"),
}


def caption(records: Sequence[Record], frame: pd.DataFrame) -> str:
    """The rule for a step, the number of steps, and the device."""
    steps = frame[frame.step != ""]
    counts = [f"{int((steps.step == word).sum())} {word}" for word in STEPS if (steps.step == word).any()]
    cells = frame.drop_duplicates(["model", "batch_size", "setting", "backend"])
    return (
        "Time relative to ordinary training in the same rounds, by version of the sources and libraries; each panel "
        "numbers its own versions, and the table names their commits. A ring marks a step: a change since the last "
        "step by 2 % or more that the scatter of rounds does not explain (as `dpbench compare` judges). The table has "
        "every step, of peaks too; the CSV file has every version. Versions were measured at different times, in "
        "other processes: if backends of several libraries step together, suspect the machine or ordinary training.\n"
        f"{several(len(cells), 'cell')}; {several(len(steps), 'step')}{': ' if counts else ''}{', '.join(counts)}.\n"
        f"Device: {records[0].device}."
    )


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each model and setting, a line for each backend."""
    frame = frame[frame.quantity == "time ratio"]
    cells = list(frame.groupby(["model", "batch_size", "setting"], sort=False))
    figure, panels = grid(caption, len(cells), 3, 1.45, head=0.35, foot=0.4, left=0.5, gap=0.5, right=0.1, above=0.45)
    for axes, ((model, batch_size, setting), own) in zip(panels, cells, strict=True):
        for backend, row in own.groupby("backend", sort=False):
            look, values = style.backend(str(backend)), row.value.astype(float)
            axes.plot(row.number, values, color=look.color, marker=look.marker, markersize=3.5, linewidth=1.1)
            steps = row.step != ""
            ring: dict[str, Any] = {"s": 75, "facecolors": "none", "edgecolors": style.INK, "linewidths": 1.1}
            axes.scatter(row.number[steps], values[steps], zorder=5, **ring)
        low, high = float(own.value.min()) / 1.15, float(own.value.max()) * 1.15
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        logarithmic(axes.yaxis, form="{x:g}×", at=ticks if len(ticks) < 7 else ticks[::2])
        if len(ticks) < 3:
            axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylim(low, high)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=7)
        axes.set_xlabel("version", fontsize=7, labelpad=1)
        axes.set_title(f"{style.model(str(model))}, B={batch_size}\n{setting}", fontsize=7.6)
    names = sorted(set(frame.backend), key=style.backend_key)
    legend(figure, [sign(style.backend(name), markersize=3.5) for name in names], ncols=7)
    return figure


def write(source: Path, output: Path) -> list[Path]:
    """Write figure and table for each device with two versions of a cell; returns the files."""
    with context(style.RC, after_reset=True):
        parts = files.write(_parts(source), output)
    return [output / path for part in parts for path in part.files.values()]


def _parts(source: Path) -> Iterator[Part]:
    for device, records in by_device(read(source)).items():
        frame = table(records)
        if len(frame):
            words = caption(records, frame)
            told = readable.texts(frame[frame.step != ""], _TEXT)
            yield Part("history", "over versions", device, {}, records, frame, told, words, figure=plot(frame, words))
