"""Lines of ε against epochs. Only a valid upper bound is drawn solid; every accountant has a marker of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpbench.report import published, style
from dpbench.report.figures import AXIS, LOG_FROM, PUBLISHED, WIDTH, sheet


@dataclass(frozen=True)
class Line:
    """ε of one accountant against epochs."""

    accountant: str
    kind: str
    epochs: Sequence[float]
    epsilons: Sequence[float]
    note: str = ""


def lines(curves: Sequence[Line], points: Sequence[published.EpsilonPoint], caption: str) -> Figure:
    """ε against epochs, one line an accountant; `points` are published values, drawn hollow."""
    depth, names, left, top = 3.8, 2.45, 0.62, 0.36
    figure, height = sheet(depth + top + AXIS, caption)
    axes = figure.add_axes((left / WIDTH, 1 - (top + depth) / height, (WIDTH - left - names) / WIDTH, depth / height))
    shown = [e for c in curves for e in c.epsilons if 0 < e < math.inf] + [p.epsilon for p in points]
    if shown and max(shown) / min(shown) > LOG_FROM / 2:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    if not shown:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.set_title("Privacy spent, ε, as training goes on", pad=7)
    axes.set_xlabel("epochs (steps × sample rate)")
    axes.set_ylabel("ε", rotation=0, labelpad=8, fontsize=11)
    axes.grid(color=style.GRID, linewidth=0.7)
    axes.tick_params(length=0)
    handles: list[Artist] = []
    for curve in sorted(curves, key=_last, reverse=True):
        look, (dash, words) = style.accountant(curve.accountant), style.KINDS.get(curve.kind, ("--", curve.kind))
        label = f"{look.name}\n{curve.note or words}"
        if curve.epsilons and not any(map(math.isfinite, curve.epsilons)):
            label += ", infinite"
        finite = [(x, e) for x, e in zip(curve.epochs, curve.epsilons, strict=True) if math.isfinite(e)]
        handles += axes.plot(
            [x for x, _ in finite],
            [e for _, e in finite],
            color=look.color,
            linestyle=dash if finite else "",
            linewidth=1.8,
            marker=look.marker,
            markersize=4.5,
            markevery=max(1, len(finite) // 8),
            label=label,
        )
    for point in points:
        axes.plot([point.epochs], [point.epsilon], **PUBLISHED | {"markersize": 6.5})
        axes.annotate(
            point.label, (point.epochs, point.epsilon), (-5, 6), textcoords="offset points", ha="right", fontsize=8.5
        )
    if points:
        handles.append(Line2D([], [], label="printed in Abadi et al. 2016", **PUBLISHED))
    if handles:
        side = ((WIDTH - names + 0.1) / WIDTH, 1 - top / height)
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=side,
            frameon=False,
            handlelength=3.4,
            labelspacing=0.75,
            borderaxespad=0,
        )
    return figure


def _last(curve: Line) -> float:
    return max((e for e in curve.epsilons if math.isfinite(e)), default=math.inf)
