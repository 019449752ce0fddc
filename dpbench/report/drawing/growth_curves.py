"""Draws `growth`: a row of panels for each model, with time ratio, memory ratio and seconds against size.

Every line has its backend's marker. The panel of seconds also shows the slopes of simple laws.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dpbench.report import style
from dpbench.report.drawing.bars import WIDTH, sheet
from dpbench.report.style import missing

_MARGIN, _LEFT, _GAP, _LEGEND, _HEAD, _DEPTH, _AXIS = 0.12, 0.36, 0.56, 0.27, 0.46, 2.15, 0.52
_TICKS = [digit * 10.0**power for power in range(-2, 4) for digit in (1, 1.5, 2, 3, 5, 7)]


class Across(NamedTuple):
    """The quantity along the x axis.

    size: its column in the table; words: of the axis; unit, sample: what it counts, and in what.
    laws: (exponent, words) of the lines to compare the seconds with.
    rate: the third panel shows samples per second instead of seconds per sample.
    """

    size: str
    words: str
    unit: str
    sample: str
    laws: tuple[tuple[float, str], ...]
    rate: bool = False

    @property
    def third(self) -> str:
        """The quantity of the third panel."""
        return f"Throughput ({self.sample}s per second)" if self.rate else f"Time per {self.sample}"

    @property
    def third_words(self) -> str:
        """The same, in a sentence."""
        return f"{self.sample}s per second" if self.rate else f"seconds per {self.sample}"


def plot(frame: pd.DataFrame, caption: str, across: Across) -> Figure:
    """Three panels a model, all against size.

    Args:
        across: the quantity along the x axis.
    """
    models = list(dict.fromkeys(frame.model))
    drawn = frame if frame.step_seconds.isna().all() else frame[frame.step_seconds.notna()]
    figure, height = sheet(_LEGEND + len(models) * (_HEAD + _DEPTH + _AXIS), caption)
    share = (WIDTH - 2 * _MARGIN - _LEFT - 2 * (_GAP + 0.04)) / 3
    titles = ("Time ratio to non-private", "Peak memory ratio to non-private", across.third)
    for index, model in enumerate(models):
        own = frame[frame.model == model]
        top = _LEGEND + index * (_HEAD + _DEPTH + _AXIS)
        heading = style.model(model)
        figure.text(_MARGIN / WIDTH, 1 - (top + 0.14) / height, heading, fontsize=9.5, weight="bold", va="center")
        for place, title in enumerate(titles):
            left = _MARGIN + _LEFT + place * (share + _GAP + 0.04)
            bottom = height - top - _HEAD - _DEPTH
            axes = figure.add_axes((left / WIDTH, bottom / height, share / WIDTH, _DEPTH / height))
            axes.set_title(title, pad=6, fontsize=8.6, weight="normal")
            _sizes(axes, own, across)
            if place == 2:
                _seconds(axes, own, across)
            else:
                _ratios(axes, own, ("time_ratio", "memory_ratio")[place], across.size)
    figure.legend(
        handles=[_sign(name) for name in sorted(set(drawn.backend), key=style.backend_key)],
        loc="upper right",
        bbox_to_anchor=(1 - _MARGIN / WIDTH, 1 - 0.02 / height),
        ncols=9,
        frameon=False,
        fontsize=7.8,
        handlelength=1.6,
        columnspacing=1.0,
        handletextpad=0.5,
        borderpad=0.2,
    )
    return figure


def _sizes(axes: Axes, own: pd.DataFrame, across: Across) -> None:
    sizes = sorted(set(own[across.size]))
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    )
    axes.set_xlabel(across.words, labelpad=2)
    axes.grid(color=style.GRID, linewidth=0.7)
    axes.tick_params(length=0, labelsize=7.8)


def _ratios(axes: Axes, own: pd.DataFrame, column: str, size: str) -> None:
    ends = [float(v) for name in (column, f"{column}_low", f"{column}_high", f"published_{column}")
            for v in own.get(name, ()) if not missing(v)]  # fmt: skip
    axes.set_yscale("log")
    low, high = min([0.9, *ends]) / 1.06, max([1.5, *ends]) * 1.12
    failed = _failed(own)
    if len(failed):  # leave room above the lines for their names
        high *= (high / low) ** (0.07 * failed[size].value_counts().max())
    axes.set_ylim(low, high)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks if len(ticks) < 9 else [t for t in ticks if t not in (1.5, 7)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.axhline(1, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2)
    for backend, line in own.groupby("backend", sort=False):
        if backend != "nonprivate":
            _line(axes, str(backend), line, column, size)
    _failures(axes, own, size)


def _seconds(axes: Axes, own: pd.DataFrame, across: Across) -> None:
    axes.set_yscale("log")
    column = "samples_per_second" if across.rate else "seconds_per_sample"
    seconds = [float(value) for value in own[column] if not missing(value)] or [1.0]
    low, high = min(seconds) / 2, max(seconds) * 1.5
    axes.set_ylim(low, high)
    digits = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [digit * 10.0**power for power in range(-7, 6) for digit in digits]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: f"{value:g}" if across.rate else f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"
        )
    )
    for backend, line in own.groupby("backend", sort=False):
        _line(axes, str(backend), line, column, across.size)
    base = own[(own.backend == "nonprivate") & own.seconds_per_sample.notna()]
    if len(base) < 2:
        return
    start, end = float(base[across.size].iloc[0]), float(base[across.size].iloc[-1])
    last = 0.6 * float(base.seconds_per_sample.iloc[-1])
    for exponent, words in across.laws:
        first = max(start, end * (low / last) ** (1 / exponent))
        ends, at = [first, end], first * (end / first) ** 0.4
        axes.plot(
            ends,
            [last * (x / end) ** exponent for x in ends],
            color=style.FAINT,
            linewidth=0.9,
            linestyle=(0, (1, 1.6)),
            zorder=1.5,
        )
        axes.annotate(
            words,
            (at, last * (at / end) ** exponent),
            (3, -2),
            textcoords="offset points",
            fontsize=7.2,
            color=style.FAINT,
            va="top",
        )


def _line(axes: Axes, backend: str, line: pd.DataFrame, column: str, size: str) -> None:
    look = style.backend(backend)
    # include sizes at which it failed, as gaps in the line
    sizes, values = line[size].astype(float), line[column].astype(float)
    axes.plot(sizes, values, color=look.color, linewidth=1.5, marker=look.marker, markersize=5, zorder=3)
    if f"{column}_low" in line:
        lows, highs = line[f"{column}_low"].astype(float), line[f"{column}_high"].astype(float)
        axes.vlines(sizes, lows, highs, color=look.color, linewidth=1.0, zorder=2.8)
    told = line[line[f"published_{column}"].notna()] if f"published_{column}" in line else line[:0]
    axes.plot(
        told[size].astype(float),
        told.get(f"published_{column}", pd.Series(dtype=float)).astype(float),
        color=look.color,
        linestyle="",
        marker=look.marker,
        markersize=7,
        markerfacecolor="white",
        zorder=3.5,
    )


def _failed(own: pd.DataFrame) -> pd.DataFrame:
    measured = set(own.backend[own.step_seconds.notna()])
    return own[own.step_seconds.isna() & own.backend.isin(measured)]


def _failures(axes: Axes, own: pd.DataFrame, size: str) -> None:
    """Name backends at the sizes where they failed, at the top (the caption names those that always failed)."""
    for at, here in _failed(own).groupby(size, sort=False):
        for index, backend in enumerate(here.backend):
            last = at == max(own[size])
            axes.annotate(
                f"✕ {style.backend(backend).name}",
                (float(str(at)), 1),
                (6 if last else 0, -9 - 9 * index),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                fontsize=6.8,
                color=style.FAILURE,
                ha="right" if last else "center",
            )


def _sign(name: str) -> Line2D:
    look = style.backend(name)
    return Line2D([], [], color=look.color, marker=look.marker, markersize=5, linewidth=1.5, label=look.name)
