"""The decision map: ghost norm or instantiated gradient for each use of a weight, by the papers' rule and by ours.

The papers' rule (arXiv:2205.10683) is 2T² ≤ pd: above the line at 1 it instantiates, below it takes the ghost norm. A
mark's place depends on the shape of the use alone. Its look is the choice of `bk_mixed`'s planner: filled for the ghost
norm, hollow for the instantiated gradient, with a ring if the papers' rule decides otherwise.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dpbench.records.reader import LeftOut, Record, grouped
from dpbench.report import readable, style
from dpbench.report.data.statistics import Row, frame_of
from dpbench.report.drawing.sheet import MARGIN, REFERENCE, grid, legend, logarithmic
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of

_GHOST, _INSTANTIATE = "#2266AA", "#CC3311"
COLUMNS = (
    *("model", "inputs", "batch_size", "use", "parameter", "operation", "T", "d", "p", "two_T_squared", "p_times_d"),
    *("paper", "ours", "plan", "ghost_bytes", "instantiate_bytes", "ghost_flops", "instantiate_flops"),
)


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each use of a weight by a linear operation or convolution, in the order of the forward pass."""
    rows: list[Row] = []
    models = grouped(records, lambda r: (r.trial["model"], r.trial.get("image_size")))
    for key, group in sorted(models.items(), key=lambda item: (style.model_key(item[0][0]), item[0][1] or 0)):
        found = group[-1].result.get("rows")
        if not found:
            left_out["model that cannot be explained"] += group[-1].outcome == "ok"
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
                    **{
                        f"{route}_{unit}": row[unit][route]
                        for route in ("ghost", "instantiate")
                        for unit in ("bytes", "flops")
                    },
                }
            )
    return frame_of(rows, COLUMNS)


def _inputs(record: Record) -> str:
    """'224 px', '128 tokens'."""
    tokens = style.without_length(record.trial["model"])[1]
    if tokens is not None:
        return f"{tokens} tokens"
    return f"{record.result['summary']['inputs'][0][-1]} px"


_TEXT: readable.Columns = {
    "Model": lambda r: style.model(style.without_length(r.model)[0]),
    "Inputs": of("inputs"),
    "Parameter": of("parameter"),
    "Operation": of("operation"),
    **{name: of(name, "{:,}".format) for name in ("T", "d", "p")},
    "2T²": of("two_T_squared", "{:,}".format),
    "pd": of("p_times_d", "{:,}".format),
    "Papers' rule": of("paper"),
    "Ours": lambda r: r.ours + ("" if r.ours == r.paper else " ≠"),
    "Plan": of("plan"),
    "Ghost bytes": of("ghost_bytes", style.size),
    "Instantiated bytes": of("instantiate_bytes", style.size),
    "Ghost flops": of("ghost_flops", "{:.2g}".format),
    "Instantiated flops": of("instantiate_flops", "{:.2g}".format),
}


def _finding(frame: pd.DataFrame) -> str:
    other = frame[frame.paper != frame.ours]
    kept = int((other.ours == "instantiate").sum())
    models = frame.groupby(["model", "inputs"]).ngroups
    return (
        f"Of {len(frame)} uses of a weight in {models} models, ours and the papers' rule differ in {len(other)}: "
        f"{kept} are instantiated where the rule takes the ghost norm, {len(other) - kept} the other way round."
    )


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        "Each mark is a use of a weight, in the order of the forward pass, at 2T² over pd: the papers' rule "
        "(arXiv:2205.10683) takes the ghost norm up to 1 and instantiates above. Filled: bk_mixed's planner takes the "
        "ghost norm; hollow: the instantiated gradient; a ring: it differs from that rule.",
        "By formulas on shapes under fake tensors; nothing was timed. bk_mixed minimises predicted time within the "
        "memory of ordinary training and a little more, where the rule minimises space.",
        _finding(frame),
    ]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel a model and input size."""
    models: list[Any] = list(frame.groupby(["model", "inputs", "batch_size"], sort=False))
    figure, panels = grid(caption, len(models), 2, 1.75, foot=0.42, right=MARGIN, gap=0.62, above=0.3)
    for index, (axes, ((model, inputs, batch_size), own)) in enumerate(zip(panels, models, strict=True)):
        differ = int((own.paper != own.ours).sum())
        said = f"{differ} of {len(own)} differ" if differ else f"alike in all {len(own)}"
        axes.set_title(f"{style.model(style.without_length(model)[0])}, {inputs}, B={batch_size}", pad=5, fontsize=8.8)
        axes.set_title(said, loc="right", pad=5, fontsize=7.6, weight="normal", color=style.FAINT)
        _panel(axes, own)
        if index % 2 == 0:
            axes.set_ylabel("2T² / pd")
    signs = [
        Line2D([], [], label="ours: ghost norm", **_LOOKS["ghost"]),
        Line2D([], [], label="ours: instantiated", **_LOOKS["instantiate"]),
        Line2D([], [], label="differs from the papers' rule", **_RING),
        Line2D([], [], label="2T² = pd (shaded: ghost)", **REFERENCE),
    ]
    legend(figure, signs, at=0.52, handlelength=1.4, columnspacing=1.6)
    return figure


def _panel(axes: Axes, own: pd.DataFrame) -> None:
    own = own.assign(ratio=own.two_T_squared.astype(float) / own.p_times_d.astype(float))
    low = min(0.1, own.ratio.min()) / 3
    logarithmic(axes.yaxis, form=lambda value, _: style.power(value, 0.01, 1001), most=7)
    axes.set(ylim=(low, max(10.0, own.ratio.max()) * 3), xlim=(0.3, len(own) + 0.7))
    axes.axhline(1, **REFERENCE)
    axes.axhspan(low, 1, color=_GHOST, alpha=0.06, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.grid(False)
    axes.tick_params(labelsize=7.6)
    axes.set_xlabel("use of a weight, in the order of the forward pass", labelpad=1, fontsize=7.8)
    for part, look in (
        (own[own.ours != own.paper], _RING),
        *((own[own.ours == choice], look) for choice, look in _LOOKS.items()),
    ):
        axes.plot(part.use, part.ratio, **look)


_MARK: dict[str, Any] = {"linestyle": "", "markersize": 4.6, "markeredgewidth": 1.2, "zorder": 4}
_RING = _MARK | {"marker": "o", "markersize": 9.5, "markerfacecolor": "none", "markeredgecolor": style.INK}
_RING |= {"markeredgewidth": 0.8, "zorder": 3}
_LOOKS = {
    "ghost": _MARK | {"marker": "o", "color": _GHOST},
    "instantiate": _MARK | {"marker": "s", "color": _INSTANTIATE, "markerfacecolor": "white"},
}


FIGURE = FigureKind(
    ("explain",), table, _TEXT, _caption, plot, _finding, applies=lambda rs: any(r.result.get("rows") for r in rs)
)
