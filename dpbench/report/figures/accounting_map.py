"""Every accountant over (q, σ, T, δ): its ratio to the lower bound, its time, and where it fails."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dpbench.report import findings, privacy, style
from dpbench.report.drawing.bars import WIDTH, sheet
from dpbench.report.drawing.curves import box
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing

_ACROSS, _CELL, _TITLE, _HEADING, _TICKS = 4, 0.21, 0.28, 0.3, 0.34
_LEFT, _BETWEEN, _RIGHT = 0.62, 0.14, 0.1


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Two bands of maps over σ and q, one map an accountant: worst ratio to the lower bound, and longest time."""
    names = [name for name in dict.fromkeys(frame.accountant) if name != privacy.LOWER]
    rates, sigmas = sorted(set(frame.sample_rate)), sorted(set(frame.noise_multiplier))
    lines = math.ceil(len(names) / _ACROSS) or 1
    depth = len(rates) * _CELL
    band = _HEADING + lines * (_TITLE + depth) + _TICKS
    figure, height = sheet(2 * band + 0.1, caption)
    width = (WIDTH - _LEFT - _RIGHT - (_ACROSS - 1) * _BETWEEN) / _ACROSS
    headings = {"ratio": "ε over the certified lower bound, at most", "compute_seconds": "Time, at most"}
    for number, (column, heading) in enumerate(headings.items()):
        top = number * band
        figure.text(0.12 / WIDTH, 1 - (top + 0.2) / height, heading, fontsize=9.5, weight="bold")
        for index, name in enumerate(names):
            line, place = divmod(index, _ACROSS)
            y = top + _HEADING + line * (_TITLE + depth) + _TITLE
            axes = figure.add_axes(box(_LEFT + place * (width + _BETWEEN), y, width, depth, height))
            below = index + _ACROSS >= len(names)
            _cells(axes, frame[frame.accountant == name], column, rates, sigmas, labelled=place == 0, last=below)
            axes.set_title(style.accountant(name).name, pad=3, fontsize=8.2, fontweight="normal")
    return figure


def _cells(
    axes: Axes,
    frame: pd.DataFrame,
    column: str,
    rates: Sequence[float],
    sigmas: Sequence[float],
    labelled: bool,
    last: bool,
) -> None:
    axes.set_xlim(-0.5, len(sigmas) - 0.5)
    axes.set_ylim(len(rates) - 0.5, -0.5)
    shades: list[str] = []
    looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.3}
    own: dict[Any, list[Any]] = {}
    for cell in frame.itertuples(index=False):
        own.setdefault((cell.sample_rate, cell.noise_multiplier), []).append(cell)
    places = list(itertools.product(enumerate(rates), enumerate(sigmas)))
    for (row, q), (place, sigma) in places:
        found = own.get((q, sigma), [])
        values = [float(v) for cell in found if not missing(v := getattr(cell, column))]
        failed = sum(missing(cell.epsilon) for cell in found)
        shade, text = _cell_look(column, values, found)
        shades.append(shade)
        axes.text(place, row, text, color=style.INK, **looks)
        if failed and values:
            beside: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 4.8}
            axes.text(place + 0.46, row - 0.44, f"✕{failed}", color=style.FAILURE, **beside)
        elif failed:
            axes.text(place, row, f"✕ {failed}", color=style.FAILURE, **looks)
    cells = [Rectangle((place - 0.48, row - 0.46), 0.96, 0.92) for (row, _), (place, _) in places]
    axes.add_collection(PatchCollection(cells, facecolors=shades, linewidths=0), autolim=False)
    named = [style.plain(sigma) for sigma in sigmas] if last else [""] * len(sigmas)
    axes.set_xticks(range(len(sigmas)), named, fontsize=7)
    axes.set_yticks(range(len(rates)), [style.plain(q) for q in rates] if labelled else [""] * len(rates), fontsize=7)
    if last:
        axes.set_xlabel("σ", labelpad=0)
    if labelled:
        axes.set_ylabel("q", rotation=0, labelpad=5)
    axes.tick_params(length=0, pad=1.5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _cell_look(column: str, values: Sequence[float], found: Sequence[Any]) -> tuple[str, str]:
    """(shade, number): darker for a larger ratio or time; red below the lower bound."""
    if not values:
        infinite = column == "ratio" and any(not missing(c.epsilon) and math.isinf(c.epsilon) for c in found)
        return "#F3F3F3", "∞" if infinite else ""
    worst = max(values)
    if column == "compute_seconds":
        level = min(max((math.log10(max(worst, 1e-6)) + 4) / 4.5, 0.0), 1.0)
        return _mix((1, 1, 1), (0.87, 0.67, 0.2), level), _time(worst)
    if min(values) < 1.0 - 1e-9:
        return "#E8B4B0", _ratio(min(values))
    return _mix((1, 1, 1), (0.13, 0.4, 0.67), 0.75 * min(math.log10(max(worst, 1.0)) / 2.0, 1.0)), _ratio(worst)


def _ratio(value: float) -> str:
    if value >= 9.95:
        return f"{value:.0f}" if value < 999.5 else "≥1000"
    return (
        f"{value:.2g}" if value < 0.995 else f"{value:.4f}" if value < 1.0 else f"{value:.{3 if value < 1.1 else 1}f}"
    )


def _time(seconds: float) -> str:
    """Two digits: '42 ms'."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            digits = 0 if seconds / factor >= 9.95 else 1
            return f"{seconds / factor:.{digits}f} {unit}"
    return f"{seconds / 1e-6:.0f} µs"


def _mix(one: tuple[float, float, float], other: tuple[float, float, float], share: float) -> str:
    parts = [round(255 * (a + (b - a) * share)) for a, b in zip(one, other, strict=True)]
    return "#" + "".join(f"{part:02X}" for part in parts)


FIGURE = FigureKind(
    doc="time, failures and distance from the lower bound of each accountant over (q, σ, T, δ)",
    kinds=("epsilon_map",),
    cell=lambda r: r.id,
    facets={"experiment": ("epsilon_map",)},
    table=privacy.points,
    text=privacy.points_text,
    caption=privacy.map_caption,
    plot=plot,
    finding=findings.points,
    place=80,
)
