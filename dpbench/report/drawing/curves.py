"""Draws panels of accountants' curves: upper bounds solid, heuristics dashed, estimates dotted.

The area below a certified lower bound is shaded. Every accountant has its own marker; a curve hidden by others is drawn
wider beneath them. The legend stands beneath the panels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpbench.report import style
from dpbench.report.drawing.bars import PUBLISHED, WIDTH, sheet

_LEFT, _BETWEEN, _RIGHT, _TOP, _BELOW = 0.66, 0.55, 0.14, 0.36, 0.48
# Legend, in inches: a line's height, a character's and a handle's width.
_LEGEND_LINE, _CHARACTER, _HANDLE = 0.185, 0.058, 0.62
# Width of a line, and increase for each curve on it; curves within _NEAR (relative) coincide.
_WIDTH, _WIDER, _NEAR = 1.6, 2.4, 0.02
#: The area that no valid bound reaches.
SHADE: dict[str, Any] = {"facecolor": "#DDDDDD", "edgecolor": "#9A9A9A", "hatch": "....", "linewidth": 0.0}


@dataclass(frozen=True)
class Curve:
    """One accountant; x and y of the same length, y may be infinite. `note` replaces its kind in the legend."""

    accountant: str
    kind: str
    x: Sequence[float]
    y: Sequence[float]
    note: str = ""


@dataclass(frozen=True)
class Mark:
    """A point with its label, `offset` points beside it."""

    x: float
    y: float
    label: str
    offset: tuple[float, float] = (-5.0, 5.0)


@dataclass(frozen=True)
class Panel:
    """Curves over one axis. `marks` are published points; `note` is at the right, at the "top" or the "bottom".

    `above` and `below` limit the y axis; None: by the curves themselves.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    x_log: bool = False
    y_log: bool = True
    above: float | None = None
    below: float | None = None
    reference: float | None = None
    note: tuple[str, str] | None = None


def panels(rows: Sequence[Sequence[Panel]], caption: str, height: float = 2.75, published: str = "") -> Figure:
    """Rows of panels of equal size.

    Args:
        rows: of panels.
        height: inches of each.
        published: what the marks are, or "".
    """
    legend = _legend([panel for row in rows for panel in row], published)
    widest = max((len(str(handle.get_label())) for handle in legend), default=1)
    columns = max(1, min(4, int((WIDTH - 0.2) / (_CHARACTER * widest + _HANDLE))))
    lines = math.ceil(len(legend) / columns)
    depth = len(rows) * (_TOP + height + _BELOW) + lines * _LEGEND_LINE + 0.1
    figure, total = sheet(depth, caption)
    for index, row in enumerate(rows):
        width = (WIDTH - _LEFT - _RIGHT - (len(row) - 1) * _BETWEEN) / len(row)
        bottom = total - (index + 1) * (_TOP + height) - index * _BELOW
        for place, panel in enumerate(row):
            left = _LEFT + place * (width + _BETWEEN)
            axes = figure.add_axes((left / WIDTH, bottom / total, width / WIDTH, height / total))
            _draw(axes, panel)
    if legend:
        figure.legend(
            handles=legend,
            loc="lower left",
            bbox_to_anchor=(0.1 / WIDTH, (total - depth + 0.04) / total),
            ncols=columns,
            frameon=False,
            fontsize=7.6,
            handlelength=3.0,
            columnspacing=1.3,
            labelspacing=0.45,
            borderpad=0,
        )
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    low, high = _reach(panel)
    axes.set_title(panel.title, pad=7)
    axes.set_xlabel(panel.x_label, labelpad=3)
    axes.set_ylabel(panel.y_label, rotation=0 if len(panel.y_label) < 3 else 90, labelpad=5)
    axes.grid(color=style.GRID, linewidth=0.7)
    axes.tick_params(length=0)
    for axis, log in ((axes.xaxis, panel.x_log), (axes.yaxis, panel.y_log)):
        axis.set_major_formatter(FuncFormatter(_tick))
        if log:
            axes.set_xscale("log") if axis is axes.xaxis else axes.set_yscale("log")
            axis.set_major_formatter(FuncFormatter(_tick))
            axis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high)
    if panel.y_log and high / low < 1000:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 40 else (1.0, 3.0)))
    xs = [x for curve in panel.curves for x in curve.x if x > _LEAST or not panel.x_log]
    if not xs:
        axes.set_xticks([])
        axes.set_yticks([])
    elif panel.x_log:
        axes.set_xlim(min(xs) / 1.08, max(xs) * 1.08)
        if max(xs) / min(xs) < 1000:
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if max(xs) / min(xs) < 60 else (1.0, 3.0)))
    if panel.reference is not None:
        axes.axhline(panel.reference, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1.5)
    for index, curve in enumerate(panel.curves):
        covered = sum(_coincide(curve, later) for later in panel.curves[index + 1 :])
        _curve(axes, curve, index, low, _WIDTH + _WIDER * covered)
    for mark in panel.marks:
        axes.plot([mark.x], [mark.y], **PUBLISHED | {"markersize": 6.0})
        ha = "left" if mark.offset[0] > 0 else "right"
        axes.annotate(mark.label, (mark.x, mark.y), mark.offset, textcoords="offset points", ha=ha, fontsize=7.8)
    if panel.note:
        text, end = panel.note
        place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": end}
        axes.text(0.98, 0.96 if end == "top" else 0.04, text, fontsize=8.2, linespacing=1.3, **place)


def _coincide(one: Curve, other: Curve) -> bool:
    """True if the second would hide the first: at half of their common points they are within `_NEAR`."""
    if not one.kind == other.kind == "upper_bound":  # dotted and dashed lines hide nothing
        return False
    there = dict(zip(other.x, other.y, strict=True))
    pairs = [(y, there[x]) for x, y in zip(one.x, one.y, strict=True) if x in there and math.isfinite(y)]
    near = sum(abs(first - second) <= _NEAR * abs(first) for first, second in pairs)
    return bool(pairs) and 2 * near >= len(pairs)


def _curve(axes: Axes, curve: Curve, index: int, low: float, width: float) -> None:
    look, dash = style.accountant(curve.accountant), style.KINDS.get(curve.kind, ("--", ""))[0]
    points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if dash == "shade":
        axes.fill_between(xs, [low] * len(xs), ys, zorder=1, **SHADE)
        axes.plot(xs, ys, color="#9A9A9A", linewidth=0.9, zorder=1.2)
        return
    every = max(2, len(points) // 6) if len(points) > 5 else 1
    axes.plot(
        xs,
        ys,
        label=look.name,
        color=look.color,
        linestyle=dash if points else "",
        linewidth=width,
        marker=look.marker,
        markersize=4.3,
        markevery=(index % every, every),  # keeps markers of coinciding curves apart
        zorder=(2.2 if curve.kind == "upper_bound" else 2.6) + 0.01 * index,
    )


#: The least value for a logarithmic axis, with room below.
_LEAST = 1e-250


def _reach(panel: Panel) -> tuple[float, float]:
    """Limits of the y axis, with a little room."""
    least = _LEAST if panel.y_log else -math.inf
    shown = [y for c in panel.curves for y in c.y if math.isfinite(y) and y > least]
    shown += [mark.y for mark in panel.marks]
    high = panel.above if panel.above is not None else max(shown, default=1.0)
    low = panel.below if panel.below is not None else min(shown, default=0.1)
    if panel.y_log:
        room = (high / low) ** 0.05 if high > low else 1.5
        return low / (1.0 if panel.below is not None else room), high * (1.0 if panel.above is not None else room)
    low = 0.0 if panel.below is None else low
    return low, high if panel.above is not None else high + 0.05 * (high - low)


def _legend(drawn: Sequence[Panel], published: str) -> list[Artist]:
    """Entries for each accountant, with its kind if it is no upper bound, for the shade, and for the marks."""
    handles: dict[str, Artist] = {}
    for curve in (curve for panel in drawn for curve in panel.curves):
        look, (dash, words) = style.accountant(curve.accountant), style.KINDS.get(curve.kind, ("--", curve.kind))
        about = curve.note or ("" if curve.kind == "upper_bound" else words.partition(" (")[0])
        label = f"{look.name} ({about})" if about else look.name
        if label in handles:
            continue
        if dash == "shade":
            handles[label] = Patch(label=f"below the {look.name}", **SHADE)
        else:
            line: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 4.3, "linewidth": _WIDTH}
            line["linestyle"] = dash if len(curve.x) else ""
            handles[label] = Line2D([], [], label=label, **line)
    entries = list(handles.values())
    if published and any(panel.marks for panel in drawn):
        entries.append(Line2D([], [], label=published, **PUBLISHED))
    return entries


def _tick(value: float, _: object) -> str:
    if value and not 0.005 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,g}"


def box(left: float, top: float, width: float, depth: float, height: float) -> tuple[float, float, float, float]:
    """The place of axes in a figure of this height, in inches from the left and from the top.

    Args:
        left, top: of the axes, in inches.
        width, depth: of the axes, in inches.
        height: of the figure, in inches.
    """
    return left / WIDTH, 1 - (top + depth) / height, width / WIDTH, depth / height


def plain_log(axis: Axis, steps: Sequence[float]) -> None:
    """Label the ticks of a logarithmic axis as plain numbers.

    Args:
        axis: of the axes.
        steps: multiples of each power of ten with a tick.
    """
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
