"""The decision map: ghost norm or instantiated gradient for each use of a weight, by the papers' rule and by ours.

The papers' rule (arXiv:2205.10683) is 2T² ≤ pd: above the line at 1 it instantiates, below it takes the ghost norm. A
mark's place depends on the shape of the use alone. Its look is the choice of `bk_mixed`'s planner: filled for the ghost
norm, hollow for the instantiated gradient, with a ring if the papers' rule decides otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from dpbench.report import captions, readable, style
from dpbench.report.data.select import LeftOut, Record, grouped
from dpbench.report.data.statistics import Row, frame_of
from dpbench.report.drawing.bars import WIDTH, sheet
from dpbench.report.drawing.curves import box
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing

_ACROSS, _MARGIN, _LEFT, _GAP = 2, 0.12, 0.62, 0.62
_LEGEND, _HEAD, _DEPTH, _AXIS = 0.3, 0.36, 1.75, 0.42
_GHOST, _INSTANTIATE = "#2266AA", "#CC3311"
_KINDS = {"ghost": _GHOST, "instantiate": _INSTANTIATE}
COLUMNS = (
    *("model", "inputs", "batch_size", "use", "parameter", "operation", "T", "d", "p", "two_T_squared", "p_times_d"),
    *("paper", "ours", "plan", "ghost_bytes", "instantiate_bytes", "ghost_flops", "instantiate_flops"),
)


def applies(records: Sequence[Record]) -> bool:
    """True if a model was explained."""
    return any(r.result.get("rows") for r in records)


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each use of a weight by a linear operation or convolution, in the order of the forward pass."""
    rows: list[Row] = []
    models = grouped(records, lambda r: (r.trial["model"], r.trial.get("image_size")))
    for key, group in sorted(models.items(), key=lambda item: (style.model_key(item[0][0]), item[0][1] or 0)):
        found = group[-1].result.get("rows")
        if not found:
            said = group[-1].result.get("problems") or group[-1].result.get("usage")
            left_out["model that cannot be explained" if said else style.OUTCOMES.get(group[-1].outcome, "error")] += 1
            continue
        linear = [row for row in found if row["two_T_squared"] is not None and row["plan"] is not None]
        left_out["uses that have one route only (biases, normalisations, sums)"] += len(found) - len(linear)
        for number, row in enumerate(linear, 1):
            rows.append(
                {
                    "model": key[0],
                    "inputs": _inputs(group[-1]),
                    "batch_size": group[-1].result["summary"]["batch_size"],
                    "use": number,
                    "operation": row["op"],
                    "paper": row["paper_choice"],
                    "ours": "ghost" if row["plan"].startswith("ghost") else "instantiate",
                    **{name: row[name] for name in ("parameter", "T", "d", "p", "two_T_squared", "p_times_d", "plan")},
                    **{f"{route}_{unit}": row[unit][route] for route in _KINDS for unit in ("bytes", "flops")},
                }
            )
    return frame_of(rows, COLUMNS)


def _inputs(record: Record) -> str:
    """'224 px', '128 tokens'."""
    tokens = style.without_length(record.trial["model"])[1]
    if tokens is not None:
        return f"{tokens} tokens"
    return f"{record.result['summary']['inputs'][0][-1]} px"


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people."""
    return readable.texts(
        frame,
        {
            "Model": lambda r: _name(r.model),
            "Inputs": lambda r: r.inputs,
            "Parameter": lambda r: r.parameter,
            "Operation": lambda r: r.operation,
            "T": lambda r: f"{r.T:,}",
            "d": lambda r: f"{r.d:,}",
            "p": lambda r: f"{r.p:,}",
            "2T²": lambda r: f"{r.two_T_squared:,}",
            "pd": lambda r: f"{r.p_times_d:,}",
            "Papers' rule": lambda r: r.paper,
            "Ours": lambda r: r.ours + ("" if r.ours == r.paper else " ≠"),
            "Plan": lambda r: r.plan,
            "Ghost bytes": lambda r: "" if missing(r.ghost_bytes) else style.size(r.ghost_bytes),
            "Instantiated bytes": lambda r: "" if missing(r.instantiate_bytes) else style.size(r.instantiate_bytes),
            "Ghost flops": lambda r: "" if missing(r.ghost_flops) else f"{r.ghost_flops:.2g}",
            "Instantiated flops": lambda r: "" if missing(r.instantiate_flops) else f"{r.instantiate_flops:.2g}",
        },
    )


def finding(frame: pd.DataFrame) -> str:
    """How often the two rules differ."""
    if not len(frame):
        return ""
    other = frame[frame.paper != frame.ours]
    kept = int((other.ours == "instantiate").sum())
    models = frame.groupby(["model", "inputs"]).ngroups
    return (
        f"Of {len(frame)} uses of a weight in {models} models, ours and the papers' rule differ in {len(other)}: "
        f"{kept} are instantiated where the rule takes the ghost norm, {len(other) - kept} the other way round."
    )


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The meaning of the marks."""
    said = [
        "Each mark is a use of a weight, in the order of the forward pass, at 2T² over pd: the papers' rule "
        "(arXiv:2205.10683) takes the ghost norm up to 1 and instantiates above. Filled: bk_mixed's planner takes the "
        "ghost norm; hollow: the instantiated gradient; a ring: it differs from that rule.",
        "By formulas on shapes under fake tensors; nothing was timed. bk_mixed minimises predicted time within the "
        "memory of ordinary training and a little more, where the rule minimises space.",
        finding(frame),
    ]
    return captions.caption(said, records, left_out, setting=False)


def _name(reference: str) -> str:
    return style.model(reference).partition(", T=")[0]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel a model and input size."""
    panels: list[Any] = [(key, own) for key, own in frame.groupby(["model", "inputs", "batch_size"], sort=False)]
    across = min(_ACROSS, max(1, len(panels)))
    down = max(1, -(-len(panels) // across))
    figure, height = sheet(_LEGEND + down * (_HEAD + _DEPTH + _AXIS), caption)
    share = (WIDTH - _MARGIN - _LEFT - (across - 1) * _GAP) / across
    for index, ((model, inputs, batch_size), own) in enumerate(panels):
        column, line = index % across, index // across
        top = _LEGEND + line * (_HEAD + _DEPTH + _AXIS) + _HEAD
        axes = figure.add_axes(box(_LEFT + column * (share + _GAP), top, share, _DEPTH, height))
        differ = int((own.paper != own.ours).sum())
        axes.set_title(f"{_name(model)}, {inputs}, B={batch_size}", pad=5, fontsize=8.8)
        said = f"{differ} of {len(own)} differ" if differ else f"alike in all {len(own)}"
        axes.set_title(said, loc="right", pad=5, fontsize=7.6, weight="normal", color=style.FAINT)
        _panel(axes, own, first=column == 0)
    figure.legend(
        handles=_signs(),
        loc="upper left",
        bbox_to_anchor=((_LEFT - 0.1) / WIDTH, 1 - 0.02 / height),
        ncols=4,
        frameon=False,
        fontsize=8,
        handlelength=1.4,
        columnspacing=1.6,
        borderpad=0.2,
    )
    return figure


def _panel(axes: Axes, own: pd.DataFrame, first: bool) -> None:
    ratios = own.two_T_squared.astype(float) / own.p_times_d.astype(float)
    low, high = min(0.1, ratios.min()) / 3, max(10.0, ratios.max()) * 3
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(0.3, len(own) + 0.7)
    axes.axhline(1, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1.5)
    axes.axhspan(low, 1, color=_GHOST, alpha=0.06, linewidth=0)
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(axis="y", color=style.GRID, linewidth=0.6)
    axes.tick_params(length=0, labelsize=7.6)
    axes.set_xlabel("use of a weight, in the order of the forward pass", labelpad=1, fontsize=7.8)
    if first:
        axes.set_ylabel("2T² / pd", labelpad=3)
    for row, ratio in zip(own.itertuples(index=False), ratios, strict=True):
        known: Any = row
        look = _look(known.ours)
        if known.ours != known.paper:
            axes.plot([known.use], [ratio], **_RING)
        axes.plot([known.use], [ratio], **look)


_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 9.5,
    "linestyle": "",
    "markerfacecolor": "none",
    "markeredgecolor": style.INK,
    "markeredgewidth": 0.8,
    "zorder": 3,
}


def _look(choice: str) -> dict[str, Any]:
    color = _KINDS[choice]
    face = color if choice == "ghost" else "white"
    shape: dict[str, Any] = {
        "marker": "o" if choice == "ghost" else "s",
        "markersize": 4.6,
        "linestyle": "",
        "zorder": 4,
    }
    return shape | {"markerfacecolor": face, "markeredgecolor": color, "markeredgewidth": 1.2}


def _signs() -> list[Line2D]:
    return [
        Line2D([], [], label="ours: ghost norm", **_look("ghost")),
        Line2D([], [], label="ours: instantiated", **_look("instantiate")),
        Line2D([], [], label="differs from the papers' rule", **_RING),
        Line2D([], [], color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), label="2T² = pd (shaded: ghost)"),
    ]


def _power(value: float) -> str:
    if 0.01 <= value <= 1000:
        return f"{value:g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


FIGURE = FigureKind(
    doc="ghost norm or instantiated gradient in each layer, by the papers' rule and by ours",
    kinds=("explain",),
    cell=lambda r: r.id,
    facets={"experiment": ("explain",)},
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    applies=applies,
    finding=finding,
    place=150,
)
