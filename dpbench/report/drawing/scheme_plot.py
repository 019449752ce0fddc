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
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpbench.report import privacy, style
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import SHADE, box


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Left: a bar for each scheme and adjacency at one σ. Right: the tightest bound over σ."""
    several = frame[~frame.accountant.isin(["prv", "prv:lower", "shuffled"])]
    sigma = float((several if len(several) else frame).noise_multiplier.mode().iloc[0])
    at = frame[(frame.noise_multiplier == sigma) & frame.epsilon.notna()]
    rows = list(dict.fromkeys(zip(at.scheme, at.adjacency, strict=True)))
    rows.sort(key=lambda row: list(privacy.ADJACENCIES).index(row[1]))
    depth, top, names, numbers, gap, legend = 0.235 * len(rows) + 0.5, 0.36, 1.65, 0.5, 0.6, 0.5
    figure, height = sheet(top + depth + AXIS + legend, caption)
    wide = 3.75
    left = figure.add_axes(box(names, top, wide, depth, height))
    right_at = names + wide + numbers + gap
    right = figure.add_axes(box(right_at, top, WIDTH - right_at - 0.12, depth, height))
    _bars(left, at, rows, sigma)
    lines = _over_sigma(right, frame)
    bars = [
        Patch(facecolor=style.accountant("moments").color, label="tightest valid upper bound here"),
        Patch(label="spent for certain (lower bound)", **SHADE | {"linewidth": 0.6}),
        *(
            Line2D([], [], linestyle="", marker=look.marker, color=look.color, label=f"bound by {look.name}")
            for look in (style.accountant(name) for name in dict.fromkeys(several.accountant))
        ),
    ]
    y = 1 - (top + depth + AXIS - 0.1) / height
    looks: dict[str, Any] = {"loc": "upper left", "frameon": False, "fontsize": 7.6, "borderpad": 0, "borderaxespad": 0}
    figure.legend(handles=bars, bbox_to_anchor=(0.12 / WIDTH, y), ncols=2, **looks)
    figure.legend(handles=lines, bbox_to_anchor=((right_at - 0.75) / WIDTH, y), ncols=2, handlelength=2.6, **looks)
    return figure


def _bars(axes: Axes, at: pd.DataFrame, rows: Sequence[tuple[str, str]], sigma: float) -> None:
    shown = [float(v) for v in at.epsilon if math.isfinite(v) and v > 0]
    low, high = min(shown, default=0.5) / 1.6, max(shown, default=2.0) * 1.2
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    positions, place, previous = [], 0.0, None
    for _, adjacency in rows:
        if adjacency != previous:
            place += 1.05
            axes.annotate(
                privacy.ADJACENCIES[adjacency],
                (0, place - 0.95),
                xycoords=axes.get_yaxis_transform(),
                xytext=(-6, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8.5,
                weight="bold",
                annotation_clip=False,
            )
        previous = adjacency
        positions.append(place)
        place += 1.0
    axes.set_ylim(place - 0.4, -0.5)
    axes.set_yticks(positions, [scheme for scheme, _ in rows])
    for (scheme, adjacency), y in zip(rows, positions, strict=True):
        own = at[(at.scheme == scheme) & (at.adjacency == adjacency)]
        upper = own[(own.kind == "upper_bound") & own.epsilon.map(math.isfinite)]
        best = float(upper.epsilon.min()) if len(upper) else None
        if best is not None:
            axes.barh([y], [best - low], left=[low], height=0.7, color=style.accountant("moments").color, zorder=2)
            axes.annotate(
                style.number(best),
                (1, y),
                xycoords=axes.get_yaxis_transform(),
                xytext=(6, -0.5),
                textcoords="offset points",
                va="center",
                fontsize=8.2,
                annotation_clip=False,
            )
            others = upper[upper.epsilon > best * 1.02]
            for row in others.itertuples(index=False):
                look, value = style.accountant(str(row.accountant)), float(str(row.epsilon))
                axes.plot([value], [y], marker=look.marker, color=look.color, markersize=5, zorder=4)
        for value in own[own.kind == "lower_bound"].epsilon:
            axes.barh([y], [float(value) - low], left=[low], height=0.34, zorder=3, **SHADE | {"linewidth": 0.6})
    axes.set_title(f"ε at σ = {style.plain(sigma)}", pad=7)
    axes.set_xlabel("ε, logarithmic", labelpad=3)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="x", color=style.GRID, linewidth=0.7)
    axes.tick_params(length=0)


_MARKERS = "oDsv^P*X"
_COLORS = ("#2266AA", "#117733", "#44BB99", "#DDAA33", "#CC3311", "#AA4499", "#7F7F7F", "#882255")


def _over_sigma(axes: Axes, frame: pd.DataFrame) -> list[Line2D]:
    """The tightest upper bound of each scheme over σ, except for replace-one; coinciding curves share one name."""
    part = frame[(frame.adjacency != "replace_one") & frame.epsilon.notna()]
    axes.set_xscale("log")
    axes.set_yscale("log")
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
        handles += axes.plot(
            best.index.to_numpy(float),
            best.to_numpy(float),
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=3.8,
            linewidth=1.5,
            linestyle="-" if kind == "upper_bound" else ":",
            color=_COLORS[index % len(_COLORS)],
            label=", ".join(names),
        )
    axes.set_title("over σ, remove one or make it zero", pad=7)
    axes.set_xlabel("noise multiplier σ, logarithmic", labelpad=3)
    axes.grid(color=style.GRID, linewidth=0.7)
    axes.tick_params(length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if axis is axes.xaxis else (1.0, 3.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    return handles


def _agree(one: pd.Series[float], other: pd.Series[float]) -> bool:
    """True if two curves agree within 2 %."""
    return list(one.index) == list(other.index) and bool(((one / other - 1.0).abs() < 0.02).all())
