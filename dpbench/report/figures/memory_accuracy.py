"""Simulated against measured peaks: model × backend, for each part of a step.

The picture has one mark a cell: simulated over measured for the whole step, with a row a backend and a panel of all
models.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpbench.records.reader import LeftOut, Record, grouped
from dpbench.report import readable, style
from dpbench.report.data.statistics import batch, frame_of, good_rounds, in_order, is_probe, why
from dpbench.report.drawing.sheet import MARGIN, beside, grid, legend
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of
from dpbench.report.style import missing

PARTS = ("model", "forward", "backward", "step")
_TITLES = {"model": "Parameters and buffers"}
WITHIN = 0.05
"""The target error."""
_COLUMNS = (
    *("model", "batch_size", "backend"),
    *(f"{part}_{how}_bytes" for part in PARTS for how in ("simulated", "measured")),
    *("reserved_bytes", "error", "note"),
)
_ROW, _TOP, _AXIS, _NAMES, _NUMBERS = 0.24, 0.62, 0.45, 1.3, 1.05


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each (model, batch size, backend); `error` is simulated / measured - 1 of the whole step."""
    own = [record for record in records if not is_probe(record)]
    left_out["probe of a search"] += len(records) - len(own)
    rows = []
    for (model, size, backend), group in grouped(own, lambda r: (r.cell[0], batch(r), r.cell[1])).items():
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


def _peaks(part: str, row: Any) -> str:
    """The measured bytes, and the simulated ones as a difference."""
    measured, simulated = getattr(row, f"{part}_measured_bytes"), getattr(row, f"{part}_simulated_bytes")
    if missing(measured):
        return "–"
    return style.size(measured) if missing(simulated) else f"{style.size(measured)} {simulated / measured - 1:+.1%}"


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people; on CUDA also reserved bytes."""
    columns: readable.Columns = {
        **readable.MODEL,
        **readable.BATCH,
        **readable.BACKEND,
        **{_TITLES.get(part, part.capitalize()): partial(_peaks, part) for part in PARTS},
        "Reserved": of("reserved_bytes", style.size),
        "Note": of("note"),
    }
    return readable.texts(frame, columns, ("Reserved",))


def _finding(frame: pd.DataFrame) -> str:
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
    depth, left = _ROW * max(len(backends), 1), MARGIN + _NAMES
    figure, (axes,) = grid(caption, 1, 1, depth, head=_TOP, foot=_AXIS, left=left, right=_NUMBERS)
    reach = 1.15 * max([WITHIN, *frame.error.dropna().astype(float).abs()])
    axes.set(xlim=(-reach, reach), ylim=(max(len(backends), 1) - 0.5, -0.5))
    axes.fill_betweenx(axes.get_ylim(), -WITHIN, WITHIN, color=style.GRID, linewidth=0, zorder=0)
    axes.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    for y, backend in enumerate(backends):
        own = frame[frame.backend == backend]
        errors, notes = own.error.dropna().astype(float), own.note.dropna()
        look: dict[str, Any] = {"color": style.backend(backend).color, "markersize": 11, "markeredgewidth": 1.8}
        axes.plot(errors, [y] * len(errors), "|", **look)
        words = f"{min(errors):+.1%} to {max(errors):+.1%}" if len(errors) else [*notes, "not run"][0]
        beside(axes, 1, y, 6, words, fontsize=7.4)
    axes.set_yticks(range(len(backends)), [style.backend(name).name for name in backends])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    axes.tick_params(labelsize=8)
    axes.grid(False)
    axes.set_xlabel("simulated beside measured peak of a step", fontsize=8)
    one = Line2D([], [], marker="|", linestyle="", color=style.INK, markersize=11, label="one model")
    legend(figure, [one, Patch(color=style.GRID, label=f"within {WITHIN:.0%}")], at=left)
    return figure


FIGURE = FigureKind(
    kinds=("peak",),
    cell=lambda r: (*r.cell, batch(r), r.trial["simulated"]),
    by=("experiment", "precision", "image_size"),
    table=table,
    text=text,
    caption=lambda records, frame: [
        "Peak memory of one step, simulated on fake tensors and measured by the allocator: simulated over measured.",
        _finding(frame) or "No cell has both.",
    ],
    plot=plot,
    finding=_finding,
    applies=lambda records: {bool(r.trial["simulated"]) for r in records if not is_probe(r)} == {False, True},
    setting=True,
)
