"""Draws rows of bars, one panel a quantity; the caption is part of the picture.

A row is a model and a backend, named beside its bars, with the numbers in a column at the right of each panel: nothing
overlaps at any number of backends, and nothing depends on colour. Lengths are in inches, from the top down, so that the
type size is the same at any number of rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox, ScaledTranslation

from dpbench.report import style

WIDTH = 9.4
_MARGIN, _NUMBERS, _DETAILS, _GAP = 0.12, 0.58, 0.52, 0.2
_ROW, _HEADING, _LEGEND, _TITLE, AXIS, _CAPTION_LINE = 0.19, 0.25, 0.27, 0.33, 0.55, 0.145
_NAMES, _CHARACTER, _BOLD, _LONGEST = (1.1, 2.3), 0.068, 0.082, 26
_CAPTION_CHARACTERS = 152
_CAPTION = "caption"
# The axis is logarithmic if the largest length over the smallest exceeds this.
LOG_FROM = 25.0
_SIMULATED = "//////"
# From the end of a bar of unknown length to the edge of the axes.
_GOES_ON: dict[str, Any] = {
    "linestyle": (0, (1, 2)),
    "linewidth": 1.4,
    "marker": ">",
    "markersize": 5,
    "markevery": [-1],
}
PUBLISHED: dict[str, Any] = {
    "marker": "D",
    "markersize": 4.6,
    "markerfacecolor": "white",
    "markeredgecolor": style.INK,
    "markeredgewidth": 1.0,
    "linestyle": "",
    "zorder": 5,
}


@dataclass(frozen=True)
class Bar:
    """One quantity of one row: a value with its range, or a note on why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    published: float | None = None
    text: str = ""
    detail: str = ""
    note: str = ""
    simulated: bool = False
    at_least: bool = False


@dataclass(frozen=True)
class Panel:
    """A column of bars; `reference` is a value to mark with a line (1 for ratios).

    `beside`: bars of other panels that share the scale.
    """

    title: str
    label: str
    bars: Sequence[Bar]
    reference: float | None = None
    beside: Sequence[Bar] = ()


@dataclass(frozen=True)
class Row:
    """Rows of one `group` stand together under its name; `label` names the row, `backend` gives its colour."""

    group: str
    backend: str
    label: str


@dataclass(frozen=True)
class Block:
    """Panels side by side over the same rows, with the rows' names at the left of the first."""

    rows: Sequence[Row]
    panels: Sequence[Panel]

    def headings(self) -> list[int]:
        """The rows that begin a group."""
        return [i for i, row in enumerate(self.rows) if i == 0 or row.group != self.rows[i - 1].group]

    def depth(self) -> float:
        """The height of its rows, in inches."""
        return max(_ROW, _ROW * len(self.rows) + _HEADING * len(self.headings()))


def bars(
    rows: Sequence[Row], panels: Sequence[Panel], caption: str, ranges: str = "rounds", below: Sequence[Block] = ()
) -> Figure:
    """Panels of horizontal bars side by side over the same rows, with a legend of the signs used and a caption.

    Args:
        rows: from the top down.
        panels: from the left.
        ranges: what the whiskers are the range of.
        below: blocks of further rows and panels beneath these.
    """
    strips = [[Block(rows, panels)], *([list(below)] if below else [])]
    depths = [max(block.depth() for block in strip) for strip in strips]
    signs = _signs([panel for strip in strips for block in strip for panel in block.panels], ranges)
    top = _LEGEND if signs else 0.0
    figure, height = sheet(top + sum(depths) + (_TITLE + AXIS) * len(strips), caption)
    for strip, depth in zip(strips, depths, strict=True):
        width = (WIDTH - 2 * _MARGIN - (len(strip) - 1) * _GAP) / len(strip)
        for index, block in enumerate(strip):
            _draw(figure, block, _MARGIN + index * (width + _GAP), width, top + _TITLE, height)
        top += _TITLE + depth + AXIS
    if signs:
        corner = (1 - _MARGIN / WIDTH, 1 - 0.04 / height)
        figure.legend(
            handles=signs,
            loc="upper right",
            bbox_to_anchor=corner,
            ncols=len(signs),
            frameon=False,
            fontsize=8,
            handlelength=1.6,
            borderpad=0.2,
        )
    return figure


def _draw(figure: Figure, block: Block, left: float, width: float, top: float, height: float) -> None:
    """Draw a block with its rows beginning at `top`, in a figure of height `height`."""
    positions: list[float] = []
    headings: list[tuple[str, float]] = []
    depth, first = 0.0, set(block.headings())
    for index, row in enumerate(block.rows):
        if index in first:
            headings.append((_shortened(row.group), depth + 0.6 * _HEADING))
            depth += _HEADING
        positions.append(depth + _ROW / 2)
        depth += _ROW
    widths = [_CHARACTER * len(row.label) for row in block.rows] + [_BOLD * len(name) for name, _ in headings]
    names = min(max(_NAMES[0], max(widths, default=0.0) + 0.12), _NAMES[1])
    if not block.panels:  # nothing to compare: the caption and the table give the reason
        return
    share = (width - names - (len(block.panels) - 1) * _GAP) / len(block.panels)
    depth = block.depth()
    for index, panel in enumerate(block.panels):
        at = left + names + index * (share + _GAP)
        numbers = _NUMBERS + (_DETAILS if any(bar.detail for bar in panel.bars) else 0)
        axes = figure.add_axes((at / WIDTH, 1 - (top + depth) / height, (share - numbers) / WIDTH, depth / height))
        _scale(axes, panel)
        axes.set_ylim(depth, 0)
        if index == 0:
            axes.set_yticks(positions, [row.label for row in block.rows])
        else:
            axes.set_yticks([])
        for row, y, bar in zip(block.rows, positions, panel.bars, strict=True):
            _bar(axes, row, y, bar)
        for heading, y in headings if index == 0 else ():
            _beside(axes, 0, y, -3.5, heading, size=8.5, ha="right", weight="bold")


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 14]}…{name[-13:]}"


def _scale(axes: Axes, panel: Panel) -> None:
    shown = [*panel.bars, *panel.beside]
    ends = [v for b in shown for v in (b.value, b.low, b.high, b.published, panel.reference) if v]
    if ends and max(ends) / min(ends) > LOG_FROM:
        axes.set_xscale("log")
        axes.set_xlim(min(ends) / 1.8, max(ends) * 1.3)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if max(ends) / min(ends) < 300 else (1.0,)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(ends, default=1.0) * 1.06)
        axes.xaxis.set_major_locator(MaxNLocator(5) if ends else NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_title(panel.title, pad=7)
    axes.set_xlabel(panel.label + (", logarithmic" if axes.get_xscale() == "log" else ""), labelpad=3)
    axes.grid(axis="x", color=style.GRID, linewidth=0.7)
    axes.tick_params(length=0)
    if panel.reference:
        axes.axvline(panel.reference, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2.5)


def _bar(axes: Axes, row: Row, y: float, bar: Bar) -> None:
    color, left = style.backend(row.backend).color, axes.get_xlim()[0]
    if bar.value is not None:
        drawn = Rectangle(
            (left, y - _ROW * 0.37),
            bar.value - left,
            _ROW * 0.74,
            facecolor="white" if bar.simulated else color,
            edgecolor=color,
            linewidth=0.8,
            hatch=_SIMULATED if bar.simulated else None,
            zorder=2,
        )
        axes.add_patch(drawn)  # the axes' own methods rescan all artists at each call
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            axes.add_line(
                Line2D([bar.low, bar.high], [y, y], color=style.INK, linewidth=1.1, marker="|", markersize=5, zorder=3)
            )
        if bar.at_least:
            ends = [bar.value, axes.get_xlim()[1]]
            axes.add_line(Line2D(ends, [y, y], color=color, zorder=3, clip_on=False, **_GOES_ON))
    if bar.published is not None:
        axes.add_line(Line2D([bar.published], [y], **PUBLISHED))
    if bar.value is None and not bar.text:
        words = f"✕ {bar.note}" if bar.note else "not measured"
        start = _clear_of(axes, bar.published, words)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the grid and the reference line
        _beside(axes, 0, y, start, words, size=7.6, color=style.FAILURE if bar.note else style.FAINT, bbox=ground)
    _beside(axes, 1, y, 7, bar.text, size=8)
    _beside(axes, 1, y, 7 + 72 * (_NUMBERS - 0.12), bar.detail, size=7.4, color=style.FAINT)


def _clear_of(axes: Axes, marker: float | None, words: str) -> float:
    """Where words in an empty row begin, in points from the left edge, to leave a marker visible."""
    if marker is None:
        return 5
    position = axes.transData.transform((marker, 0))[0] - axes.transAxes.transform((0, 0))[0]
    position *= 72 / axes.figure.dpi
    return 5 if 5 + 4.4 * len(words) < position - 5 else position + 7


def _beside(axes: Axes, x: float, y: float, points: float, text: str, size: float, **looks: Any) -> None:
    """Text in the row at `y`, `points` to the right of the axes' left (x=0) or right (x=1) edge."""
    if text:
        offset = ScaledTranslation(points / 72, -0.5 / 72, axes.figure.dpi_scale_trans)
        place = axes.get_yaxis_transform() + offset
        axes.text(x, y, text, transform=place, va="center", fontsize=size, zorder=4, **looks)


def _signs(panels: Sequence[Panel], ranges: str) -> list[Artist]:
    """Legend entries for the signs in use."""
    drawn = [bar for panel in panels for bar in panel.bars]
    handles: list[Artist] = []
    if any(bar.simulated and bar.value is not None for bar in drawn):
        handles.append(Patch(facecolor="white", edgecolor=style.INK, hatch=_SIMULATED, label="simulated memory"))
        if any(bar.value is not None and not bar.simulated for bar in drawn):
            handles.append(Patch(facecolor=style.FAINT, edgecolor=style.INK, label="measured"))
    if any(bar.high is not None and bar.low is not None and bar.high > bar.low for bar in drawn):
        handles.append(
            Line2D([], [], color=style.INK, linewidth=1.1, marker="|", markersize=5, label=f"range of {ranges}")
        )
    if any(bar.at_least for bar in drawn):
        handles.append(Line2D([], [], color=style.INK, label="not limited by memory", **_GOES_ON))
    if any(bar.published is not None for bar in drawn):
        handles.append(Line2D([], [], label="published", **PUBLISHED))
    return handles


def sheet(depth: float, caption: str) -> tuple[Figure, float]:
    """Create a figure `depth` inches deep with the caption below: (figure, its height in inches).

    Args:
        depth: inches of the drawing.
    """
    text = "\n".join(textwrap.fill(paragraph, _CAPTION_CHARACTERS) for paragraph in caption.splitlines())
    height = depth + _CAPTION_LINE * (text.count("\n") + 1) + _MARGIN
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    looks: dict[str, Any] = {"fontsize": 7.4, "color": "#444444", "va": "bottom", "linespacing": 1.35}
    figure.text(_MARGIN / WIDTH, _MARGIN / height, text, label=_CAPTION, **looks)
    return figure, height


def without_caption(figure: Figure) -> tuple[Artist | None, Bbox]:
    """(the caption artist or None, the part of the sheet above it in inches): for pages that show the caption as text.

    Args:
        figure: of `sheet`.
    """
    width, height = map(float, figure.get_size_inches())
    caption = next((text for text in figure.texts if text.get_label() == _CAPTION), None)
    below = _CAPTION_LINE * (caption.get_text().count("\n") + 1) if caption is not None else 0.0
    return caption, Bbox([[0.0, below], [width, height]])
