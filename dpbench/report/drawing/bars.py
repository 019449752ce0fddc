"""Draws rows of bars, one panel a quantity; the caption is part of the picture.

A row is a model and a backend, named beside its bars, with the numbers in a column at the right of each panel: nothing
overlaps at any number of backends, and nothing depends on colour. Lengths are in inches, from the top down, so that the
type size is the same at any number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator

from dpbench.report import style
from dpbench.report.drawing.sheet import AXIS, MARGIN, REFERENCE, WIDTH, beside, legend, logarithmic, place, sheet
from dpbench.report.style import missing

_NUMBERS, _DETAILS, _GAP = 0.58, 0.52, 0.2
_ROW, _HEADING, _LEGEND, _TITLE = 0.19, 0.25, 0.27, 0.33
_NAMES, _CHARACTER, _BOLD, _LONGEST = (1.1, 2.3), 0.068, 0.082, 26
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
_RANGE: dict[str, Any] = {"color": style.INK, "linewidth": 1.1, "marker": "|", "markersize": 5, "zorder": 3}
_OUTLINE: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": style.INK, "markeredgewidth": 1.0}
PUBLISHED: dict[str, Any] = {"marker": "D", "markersize": 4.6, "linestyle": "", "zorder": 5} | _OUTLINE


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

    @property
    def is_range(self) -> bool:
        """True if there are whiskers."""
        return self.low is not None and self.high is not None and self.high > self.low


def bar(row: Any, column: str, text: Callable[[Any], str], note: str = "note", unit: float = 1.0, **more: Any) -> Bar:
    """The bar of one cell of a table, with its range and its published value if the table has them.

    Args:
        column: with the length of the bar.
        text: from a number to its text.
        note: the column of the words for an empty cell.
        unit: of the axis, in the table's.
        more: further fields of `Bar`.
    """
    value, low, high, told = (
        _number(getattr(row, name, None)) for name in (column, f"{column}_low", f"{column}_high", f"published_{column}")
    )
    if value is None:
        words = getattr(row, note)
        return Bar(published=told, note="" if missing(words) else str(words))
    ends = [None if end is None else end / unit for end in (low, high)]
    return Bar(value / unit, ends[0], ends[1], told, **{"text": text(getattr(row, column))} | more)


def _number(value: Any) -> float | None:
    return None if missing(value) or isinstance(value, str) else float(value)


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
        panels: from the left.
        ranges: what the whiskers are the range of.
        below: blocks of further rows and panels beneath these.
    """
    strips = [[Block(rows, panels)], *([list(below)] if below else [])]
    depths = [max(block.depth() for block in strip) for strip in strips]
    signs = _signs([bar for strip in strips for block in strip for panel in block.panels for bar in panel.bars], ranges)
    top = _LEGEND if signs else 0.0
    figure, _ = sheet(top + sum(depths) + (_TITLE + AXIS) * len(strips), caption)
    for strip, depth in zip(strips, depths, strict=True):
        width = (WIDTH - 2 * MARGIN - (len(strip) - 1) * _GAP) / len(strip)
        for index, block in enumerate(strip):
            _draw(figure, block, MARGIN + index * (width + _GAP), width, top + _TITLE)
        top += _TITLE + depth + AXIS
    legend(figure, signs, right=True, handlelength=1.6)
    return figure


def _draw(figure: Figure, block: Block, left: float, width: float, top: float) -> None:
    """Draw a block with its rows beginning at `top`."""
    positions: list[float] = []
    headings: list[tuple[str, float]] = []
    depth, first = 0.0, set(block.headings())
    for index, row in enumerate(block.rows):
        if index in first:
            headings.append((style.shortened(row.group, _LONGEST), depth + 0.6 * _HEADING))
            depth += _HEADING
        positions.append(depth + _ROW / 2)
        depth += _ROW
    widths = [_CHARACTER * len(row.label) for row in block.rows] + [_BOLD * len(name) for name, _ in headings]
    names = min(max(_NAMES[0], max(widths, default=0.0) + 0.12), _NAMES[1])
    if not block.panels:  # nothing to compare: the caption and the table give the reason
        return
    share = (width - names - (len(block.panels) - 1) * _GAP) / len(block.panels)
    for index, panel in enumerate(block.panels):
        numbers = _NUMBERS + (_DETAILS if any(bar.detail for bar in panel.bars) else 0)
        axes = place(figure, left + names + index * (share + _GAP), top, share - numbers, block.depth())
        _scale(axes, panel)
        axes.set_ylim(block.depth(), 0)
        axes.set_yticks(positions if index == 0 else [], [row.label for row in block.rows] if index == 0 else [])
        for row, y, bar in zip(block.rows, positions, panel.bars, strict=True):
            _bar(axes, row, y, bar)
        for heading, y in headings if index == 0 else ():
            beside(axes, 0, y, -3.5, heading, fontsize=8.5, ha="right", weight="bold")


def _scale(axes: Axes, panel: Panel) -> None:
    shown = [*panel.bars, *panel.beside]
    ends = [v for b in shown for v in (b.value, b.low, b.high, b.published, panel.reference) if v]
    is_log = bool(ends) and max(ends) / min(ends) > LOG_FROM
    if is_log:
        logarithmic(axes.xaxis, (1.0, 3.0) if max(ends) / min(ends) < 300 else (1.0,), "{x:,g}")
        axes.set_xlim(min(ends) / 1.8, max(ends) * 1.3)
    else:
        axes.set_xlim(0, max(ends, default=1.0) * 1.06)
        axes.xaxis.set_major_locator(MaxNLocator(5) if ends else NullLocator())
        axes.xaxis.set_major_formatter("{x:,g}")
    axes.set(title=panel.title, xlabel=panel.label + (", logarithmic" if is_log else ""))
    axes.yaxis.grid(False)
    if panel.reference:
        axes.axvline(panel.reference, **REFERENCE | {"zorder": 2.5})


def _bar(axes: Axes, row: Row, y: float, bar: Bar) -> None:
    color, left = style.backend(row.backend).color, axes.get_xlim()[0]
    if bar.value is not None:
        fill: dict[str, Any] = {"facecolor": "white", "hatch": _SIMULATED} if bar.simulated else {"facecolor": color}
        corner = (left, y - _ROW * 0.37)
        # the axes' own methods rescan all artists at each call
        axes.add_patch(
            Rectangle(corner, bar.value - left, _ROW * 0.74, edgecolor=color, linewidth=0.8, zorder=2, **fill)
        )
        if bar.is_range:
            axes.add_line(Line2D([bar.low or 0.0, bar.high or 0.0], [y, y], **_RANGE))
        if bar.at_least:
            ends = [bar.value, axes.get_xlim()[1]]
            axes.add_line(Line2D(ends, [y, y], color=color, zorder=3, clip_on=False, **_GOES_ON))
    if bar.published is not None:
        axes.add_line(Line2D([bar.published], [y], **PUBLISHED))
    if bar.value is None and not bar.text:
        words = f"✕ {bar.note}" if bar.note else "not measured"
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the grid and the reference line
        looks: dict[str, Any] = {"fontsize": 7.6, "color": style.FAILURE if bar.note else style.FAINT, "bbox": ground}
        beside(axes, 0, y, _clear_of(axes, bar.published, words), words, **looks)
    beside(axes, 1, y, 7, bar.text)
    beside(axes, 1, y, 7 + 72 * (_NUMBERS - 0.12), bar.detail, fontsize=7.4, color=style.FAINT)


def _clear_of(axes: Axes, marker: float | None, words: str) -> float:
    """Where words in an empty row begin, in points from the left edge, to leave a marker visible."""
    if marker is None:
        return 5
    position = axes.transData.transform((marker, 0))[0] - axes.transAxes.transform((0, 0))[0]
    position *= 72 / axes.figure.dpi
    return 5 if 5 + 4.4 * len(words) < position - 5 else position + 7


def _signs(drawn: Sequence[Bar], ranges: str) -> list[Artist]:
    """Legend entries for the signs in use."""
    simulated = {bar.simulated for bar in drawn if bar.value is not None}
    outline: dict[str, Any] = {"edgecolor": style.INK}
    signs: list[tuple[bool, Artist]] = [
        (True in simulated, Patch(facecolor="white", hatch=_SIMULATED, label="simulated memory", **outline)),
        (len(simulated) == 2, Patch(facecolor=style.FAINT, label="measured", **outline)),
        (any(bar.is_range for bar in drawn), Line2D([], [], label=f"range of {ranges}", **_RANGE)),
        (
            any(bar.at_least for bar in drawn),
            Line2D([], [], color=style.INK, label="not limited by memory", **_GOES_ON),
        ),
        (any(bar.published is not None for bar in drawn), Line2D([], [], label="published", **PUBLISHED)),
    ]
    return [artist for is_used, artist in signs if is_used]
