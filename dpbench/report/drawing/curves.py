"""Draws panels of accountants' curves: upper bounds solid, heuristics dashed, estimates dotted.

The area below a certified lower bound is shaded. Every accountant has its own marker; a curve hidden by others is drawn
wider beneath them. The legend stands beneath the panels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpbench.report import style
from dpbench.report.drawing.bars import PUBLISHED
from dpbench.report.drawing.sheet import REFERENCE, WIDTH, grid, logarithmic

# Legend, in inches: a line's height, a character's and a handle's width.
_LEGEND_LINE, _CHARACTER, _HANDLE = 0.185, 0.058, 0.62
# Width of a line, and increase for each curve on it; curves within _NEAR (relative) coincide.
_WIDTH, _WIDER, _NEAR = 1.6, 2.4, 0.02
#: The area that no valid bound reaches.
SHADE: dict[str, Any] = {"facecolor": "#DDDDDD", "edgecolor": "#9A9A9A", "hatch": "....", "linewidth": 0.0}
#: The least value for a logarithmic axis, with room below.
_LEAST = 1e-250


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
    offset: tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """Curves over one axis. `marks` are published points.

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


def panels(drawn: Sequence[Panel], caption: str, *, height: float, across: int = 2, published: str = "") -> Figure:
    """Rows of panels of equal size.

    Args:
        drawn: the panels, from the left and from the top.
        across: number of them in a row.
        height: inches of each.
        published: what the marks are, or "".
    """
    entries = _legend(drawn, published)
    widest = max((len(str(handle.get_label())) for handle in entries), default=1)
    columns = max(1, min(4, int((WIDTH - 0.2) / (_CHARACTER * widest + _HANDLE))))
    depth = math.ceil(len(entries) / columns) * _LEGEND_LINE + 0.1
    figure, axes = grid(caption, len(drawn), across, height, foot=0.48, left=0.66, gap=0.55, below=depth)
    for own, panel in zip(axes, drawn, strict=True):
        _draw(own, panel)
    if entries:
        bottom = axes[-1].get_position().y0 - (0.48 + depth - 0.04) / figure.get_figheight()
        looks: dict[str, Any] = {"handlelength": 3.0, "columnspacing": 1.3, "labelspacing": 0.45, "borderpad": 0}
        figure.legend(handles=entries, loc="lower left", bbox_to_anchor=(0.1 / WIDTH, bottom), ncols=columns, **looks)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    low, high = _reach(panel)
    axes.set(title=panel.title, xlabel=panel.x_label)
    axes.set_ylabel(panel.y_label, rotation=0 if len(panel.y_label) < 3 else 90)
    axes.yaxis.set_major_formatter(_tick)
    axes.xaxis.set_major_formatter(_tick)
    if panel.y_log:
        steps = (1.0, 2.0, 5.0) if high / low < 40 else (1.0, 3.0) if high / low < 1000 else (1.0,)
        logarithmic(axes.yaxis, steps, _tick)
    axes.set_ylim(low, high)
    xs = [x for curve in panel.curves for x in curve.x if x > _LEAST or not panel.x_log]
    if not xs:
        axes.set(xticks=[], yticks=[])
    elif panel.x_log:
        reach = max(xs) / min(xs)
        steps = (1.0, 2.0, 5.0) if reach < 60 else (1.0, 3.0) if reach < 1000 else (1.0,)
        logarithmic(axes.xaxis, steps, _tick)
        axes.set_xlim(min(xs) / 1.08, max(xs) * 1.08)
    if panel.reference is not None:
        axes.axhline(panel.reference, **REFERENCE)
    for index, curve in enumerate(panel.curves):
        covered = sum(_coincide(curve, later) for later in panel.curves[index + 1 :])
        _curve(axes, curve, index, low, _WIDTH + _WIDER * covered)
    for mark in panel.marks:
        axes.plot([mark.x], [mark.y], **PUBLISHED | {"markersize": 6.0})
        ha = "left" if mark.offset[0] > 0 else "right"
        axes.annotate(mark.label, (mark.x, mark.y), mark.offset, textcoords="offset points", ha=ha, fontsize=7.8)


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
    looks: dict[str, Any] = {
        "linestyle": dash if points else "",
        "linewidth": width,
        "markevery": (index % every, every),  # keeps markers of coinciding curves apart
        "zorder": (2.2 if curve.kind == "upper_bound" else 2.6) + 0.01 * index,
    }
    axes.plot(xs, ys, label=look.name, color=look.color, marker=look.marker, **looks)


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
            line: dict[str, Any] = {"color": look.color, "marker": look.marker, "linewidth": _WIDTH}
            line["linestyle"] = dash if len(curve.x) else ""
            handles[label] = Line2D([], [], label=label, **line)
    entries = list(handles.values())
    if published and any(panel.marks for panel in drawn):
        entries.append(Line2D([], [], label=published, **PUBLISHED))
    return entries


def _tick(value: float, _: object) -> str:
    return style.power(value, 0.005, 1e6)
