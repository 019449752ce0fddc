"""Draws sampling schemes side by side: a bar for each scheme and adjacency, and the tightest bound over σ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpbench.report import style
from dpbench.report.drawing.curves import SHADE
from dpbench.report.drawing.privacy_plots import ADJACENCIES
from dpbench.report.drawing.sheet import AXIS, WIDTH, beside, logarithmic, place, sheet

_MARKERS = "oDsv^P*X"
_COLORS = ("#2266AA", "#117733", "#44BB99", "#DDAA33", "#CC3311", "#AA4499", "#7F7F7F", "#882255")
_LOWER = SHADE | {"linewidth": 0.6}


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Left: a bar for each scheme and adjacency at one σ. Right: the tightest bound over σ."""
    several = frame[~frame.accountant.isin(["prv", "prv:lower", "shuffled"])]
    sigma = float((several if len(several) else frame).noise_multiplier.mode().iloc[0])
    at = frame[(frame.noise_multiplier == sigma) & frame.epsilon.notna()]
    rows = list(dict.fromkeys(zip(at.scheme, at.adjacency, strict=True)))
    rows.sort(key=lambda row: list(ADJACENCIES).index(row[1]))
    depth, top, names, numbers, gap, legend = 0.235 * len(rows) + 0.5, 0.36, 1.65, 0.5, 0.6, 0.5
    figure, height = sheet(top + depth + AXIS + legend, caption)
    wide = 3.75
    left = place(figure, names, top, wide, depth)
    right_at = names + wide + numbers + gap
    right = place(figure, right_at, top, WIDTH - right_at - 0.12, depth)
    _bars(left, at, rows, sigma)
    lines = _over_sigma(right, frame)
    bars = [
        Patch(facecolor=style.accountant("moments").color, label="tightest valid upper bound here"),
        Patch(label="spent for certain (lower bound)", **_LOWER),
        *(
            Line2D([], [], linestyle="", marker=look.marker, color=look.color, label=f"bound by {look.name}")
            for look in (style.accountant(name) for name in dict.fromkeys(several.accountant))
        ),
    ]
    y = 1 - (top + depth + AXIS - 0.1) / height
    looks: dict[str, Any] = {"loc": "upper left", "borderpad": 0, "borderaxespad": 0}
    figure.legend(handles=bars, bbox_to_anchor=(0.12 / WIDTH, y), ncols=2, **looks)
    figure.legend(handles=lines, bbox_to_anchor=((right_at - 0.75) / WIDTH, y), ncols=2, handlelength=2.6, **looks)
    return figure


def _bars(axes: Axes, at: pd.DataFrame, rows: Sequence[tuple[str, str]], sigma: float) -> None:
    shown = [float(v) for v in at.epsilon if math.isfinite(v) and v > 0]
    low, high = min(shown, default=0.5) / 1.6, max(shown, default=2.0) * 1.2
    logarithmic(axes.xaxis, (1.0, 3.0), "{x:,g}")
    axes.set_xlim(low, high)
    positions, y, previous = [], 0.0, None
    for _, adjacency in rows:
        if adjacency != previous:
            y += 1.05
            beside(axes, 0, y - 0.95, -6, ADJACENCIES[adjacency], ha="right", fontsize=8.5, weight="bold")
        previous = adjacency
        positions.append(y)
        y += 1.0
    axes.set_ylim(y - 0.4, -0.5)
    axes.set_yticks(positions, [scheme for scheme, _ in rows])
    for (scheme, adjacency), y in zip(rows, positions, strict=True):
        own = at[(at.scheme == scheme) & (at.adjacency == adjacency)]
        upper = own[(own.kind == "upper_bound") & own.epsilon.map(math.isfinite)]
        if len(upper):
            best = float(upper.epsilon.min())
            axes.barh([y], [best - low], left=[low], height=0.7, color=style.accountant("moments").color, zorder=2)
            beside(axes, 1, y, 6, style.number(best), fontsize=8.2)
            for row in upper[upper.epsilon > best * 1.02].itertuples(index=False):
                look, value = style.accountant(str(row.accountant)), float(str(row.epsilon))
                axes.plot([value], [y], marker=look.marker, color=look.color, markersize=5, zorder=4)
        for value in own[own.kind == "lower_bound"].epsilon:
            axes.barh([y], [float(value) - low], left=[low], height=0.34, zorder=3, **_LOWER)
    axes.set_title(f"ε at σ = {style.plain(sigma)}")
    axes.set_xlabel("ε, logarithmic")
    axes.yaxis.grid(False)


def _over_sigma(axes: Axes, frame: pd.DataFrame) -> list[Line2D]:
    """The tightest upper bound of each scheme over σ, except for replace-one; coinciding curves share one name."""
    part = frame[(frame.adjacency != "replace_one") & frame.epsilon.notna()]
    found: list[tuple[list[str], str, pd.Series[float]]] = []
    for scheme, own in part.groupby("scheme", sort=False):
        for kind, suffix in (("upper_bound", ""), ("lower_bound", ", at least")):
            finite = own[(own.kind == kind) & own.epsilon.map(lambda e: math.isfinite(e) and e > 0)]
            best = finite.groupby("noise_multiplier").epsilon.min().astype(float)
            if len(best) < 2 or (kind == "lower_bound" and scheme == "Poisson"):  # equals the upper bound
                continue
            alike = [entry for entry in found if entry[1] == kind and _agree(entry[2], best)]
            if alike:
                alike[0][0].append(str(scheme))
            else:
                found.append(([f"{scheme}{suffix}"], kind, best))
    handles = []
    for index, (names, kind, best) in enumerate(found):
        place = index % len(_MARKERS)
        looks: dict[str, Any] = {"marker": _MARKERS[place], "color": _COLORS[place], "label": ", ".join(names)}
        dash = "-" if kind == "upper_bound" else ":"
        handles += axes.plot(best.index.to_numpy(float), best.to_numpy(float), dash, linewidth=1.5, **looks)
    axes.set_title("over σ, remove one or make it zero")
    axes.set_xlabel("noise multiplier σ, logarithmic")
    logarithmic(axes.xaxis, (1.0, 2.0, 5.0), "{x:,g}")
    logarithmic(axes.yaxis, (1.0, 3.0), "{x:,g}")
    return handles


def _agree(one: pd.Series[float], other: pd.Series[float]) -> bool:
    """True if two curves agree within 2 %."""
    return list(one.index) == list(other.index) and bool(((one / other - 1.0).abs() < 0.02).all())
