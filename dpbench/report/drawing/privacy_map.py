"""Draws maps of accountants over σ and q: the ratio to the lower bound, the time, and where they fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dpbench.report import style
from dpbench.report.drawing.privacy_plots import LOWER
from dpbench.report.drawing.sheet import WIDTH, grid

_ACROSS, _CELL, _TITLE, _HEADING, _TICKS = 4, 0.21, 0.28, 0.3, 0.34
_BANDS = {"ratio": "ε over the certified lower bound, at most", "compute_seconds": "Time, at most"}
_BLUE, _OCHRE = (0.13, 0.4, 0.67), (0.87, 0.67, 0.2)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Two bands of maps over σ and q, one map an accountant: worst ratio to the lower bound, and longest time."""
    names = [name for name in dict.fromkeys(frame.accountant) if name != LOWER]
    rates, sigmas = sorted(set(frame.sample_rate)), sorted(set(frame.noise_multiplier))
    lines = max(1, -(-len(names) // _ACROSS))
    room = {"head": _TITLE, "foot": _TICKS, "left": 0.62, "right": 0.1, "gap": 0.14, "above": _HEADING}
    figure, panels = grid(caption, 2 * lines * _ACROSS, _ACROSS, len(rates) * _CELL, **room)
    height, band = figure.get_figheight(), lines * (_TITLE + len(rates) * _CELL + _TICKS)
    for number, (column, heading) in enumerate(_BANDS.items()):
        own = panels[number * lines * _ACROSS :]
        top = _HEADING + number * band - 0.1
        figure.text(0.12 / WIDTH, 1 - top / height, heading, fontsize=9.5, weight="bold")
        for index, (axes, name) in enumerate(zip(own, names, strict=False)):
            _cells(axes, frame[frame.accountant == name], column, rates, sigmas, first=index % _ACROSS == 0)
            axes.set_title(style.accountant(name).name, pad=3, fontsize=8.2, fontweight="normal")
        for axes in own[len(names) : lines * _ACROSS]:
            axes.remove()
    return figure


def _cells(
    axes: Axes, frame: pd.DataFrame, column: str, rates: Sequence[float], sigmas: Sequence[float], first: bool
) -> None:
    axes.set(xlim=(-0.5, len(sigmas) - 0.5), ylim=(len(rates) - 0.5, -0.5))
    shades: list[str] = []
    looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.3}
    own = {key: part for key, part in frame.groupby(["sample_rate", "noise_multiplier"])}
    places = list(itertools.product(enumerate(rates), enumerate(sigmas)))
    for (row, q), (place, sigma) in places:
        found = own.get((q, sigma), frame[:0])
        values, failed = found[column].dropna().astype(float), int(found.epsilon.isna().sum())
        infinite = column == "ratio" and bool((found.epsilon == math.inf).any())
        shade, text = _look(column, values) if len(values) else ("#F3F3F3", "∞" if infinite else "")
        shades.append(shade)
        axes.text(place, row, text, color=style.INK, **looks)
        if failed and len(values):
            beside: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 4.8}
            axes.text(place + 0.46, row - 0.44, f"✕{failed}", color=style.FAILURE, **beside)
        elif failed:
            axes.text(place, row, f"✕ {failed}", color=style.FAILURE, **looks)
    cells = [Rectangle((place - 0.48, row - 0.46), 0.96, 0.92) for (row, _), (place, _) in places]
    axes.add_collection(PatchCollection(cells, facecolors=shades, linewidths=0), autolim=False)
    axes.set_xticks(range(len(sigmas)), [style.plain(sigma) for sigma in sigmas], fontsize=7)
    axes.set_yticks(range(len(rates)), [style.plain(q) if first else "" for q in rates], fontsize=7)
    axes.set_xlabel("σ", labelpad=0)
    if first:
        axes.set_ylabel("q", rotation=0, labelpad=5)
    axes.tick_params(pad=1.5)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _look(column: str, values: pd.Series[float]) -> tuple[str, str]:
    """(shade, number): darker for a larger ratio or time; red below the lower bound."""
    least, worst = values.min(), values.max()
    if column == "compute_seconds":
        level = (math.log10(max(worst, 1e-6)) + 4) / 4.5
        return _mix(_OCHRE, min(max(level, 0.0), 1.0)), _time(worst)
    if least < 1.0 - 1e-9:
        return "#E8B4B0", _ratio(least)
    return _mix(_BLUE, 0.75 * min(math.log10(max(worst, 1.0)) / 2.0, 1.0)), _ratio(worst)


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


def _mix(color: tuple[float, float, float], share: float) -> str:
    red, green, blue = (1 + (part - 1) * share for part in color)
    return to_hex((red, green, blue))
