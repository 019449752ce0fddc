"""Every accountant over (q, σ, T, δ): how far above the lower bound, how slow, and where it has no answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.report import privacy, style
from dpbench.report.curves import box
from dpbench.report.figures import WIDTH, sheet
from dpbench.report.style import missing


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A row for each accountant: the worst ratio to the lower bound, and the longest time, at each σ and q."""
    names = [name for name in dict.fromkeys(frame.accountant) if name != privacy.LOWER]
    rates, sigmas = sorted(set(frame.sample_rate)), sorted(set(frame.noise_multiplier))
    across = min(2, max(1, len(names)))
    down = math.ceil(len(names) / across) or 1
    cell, top, left, between = 0.2, 0.62, 0.62, 0.66
    depth = len(rates) * cell
    figure, height = sheet(down * (top + depth) + 0.55, caption)
    share = (WIDTH - 0.12) / across
    width = (share - left - between) / 2
    for index, name in enumerate(names):
        own = frame[frame.accountant == name]
        x, y = (index % across) * share, top + (index // across) * (top + depth)
        for side, column in enumerate(("ratio", "compute_seconds")):
            axes = figure.add_axes(box(x + left + side * (width + 0.12), y, width, depth, height))
            _cells(axes, own, column, rates, sigmas, labelled=side == 0, last=index // across == down - 1)
            if side == 0:
                words = style.accountant(name).name
                axes.set_title(f"{words}: ε over the lower bound", pad=4, fontsize=8.5)
            else:
                axes.set_title("longest time", pad=4, fontsize=8.5)
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
    for row, q in enumerate(rates):
        for place, sigma in enumerate(sigmas):
            own = frame[(frame.sample_rate == q) & (frame.noise_multiplier == sigma)]
            values = [float(v) for v in own[column] if not missing(v)]
            failed = int(own.epsilon.isna().sum())
            shade, text = _cell_look(column, values, own)
            axes.fill_between([place - 0.48, place + 0.48], row - 0.46, row + 0.46, color=shade, linewidth=0)
            marked = text + (f" {failed}✕" if failed else "")
            axes.text(place, row, marked.strip(), ha="center", va="center", fontsize=6.2, color=style.INK)
    axes.set_xticks(range(len(sigmas)), [style.plain(sigma) for sigma in sigmas], fontsize=7)
    axes.set_yticks(range(len(rates)), [style.plain(q) for q in rates] if labelled else [""] * len(rates), fontsize=7)
    if last:
        axes.set_xlabel("σ", labelpad=1)
    if labelled:
        axes.set_ylabel("q", rotation=0, labelpad=4)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _cell_look(column: str, values: Sequence[float], own: pd.DataFrame) -> tuple[str, str]:
    """(shade, number): the darker, the further from the lower bound, or the longer."""
    if not values:
        infinite = column == "ratio" and own.epsilon.map(lambda e: not missing(e) and math.isinf(e)).any()
        return "#F3F3F3", "∞" if infinite else ""
    if column == "compute_seconds":
        worst = max(values)
        level = min(max((math.log10(max(worst, 1e-6)) + 4) / 4.5, 0.0), 1.0)
        return _mix((1, 1, 1), (0.87, 0.67, 0.2), level), style.duration(worst).replace(" ", "")
    if min(values) < 1.0 - 1e-9:
        return "#E8B4B0", f"{min(values):.2g}"
    worst = max(values)
    level = min(math.log10(max(worst, 1.0)) / 2.0, 1.0)
    text = (
        f"{worst:.3f}" if worst < 1.0995 else f"{worst:.2f}" if worst < 10 else f"{worst:.0f}" if worst < 1e3 else "≫"
    )
    return _mix((1, 1, 1), (0.13, 0.4, 0.67), 0.75 * level), text


def _mix(one: tuple[float, float, float], other: tuple[float, float, float], share: float) -> str:
    parts = [round(255 * (a + (b - a) * share)) for a, b in zip(one, other, strict=True)]
    return "#" + "".join(f"{part:02X}" for part in parts)
