"""Sheets of figures: the caption below the drawing, places in inches, and details that several figures share.

Functions take:
    caption: paragraphs, one a line.
    figure: of `sheet`.
    depth: of the drawing or of each axes, in inches.
    look: name, colour and marker.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
from matplotlib.transforms import Bbox, ScaledTranslation

from dpbench.report import style

#: In inches: of a sheet, and below axes for the ticks and the name of the x axis.
WIDTH, AXIS = 9.4, 0.55
MARGIN, _CAPTION_LINE, _CAPTION_CHARACTERS = 0.12, 0.145, 152
_CAPTION = "caption"
#: The look of a line that marks a value: 1 for ratios.
REFERENCE: dict[str, Any] = {"color": style.INK, "linewidth": 0.9, "linestyle": (0, (4, 2)), "zorder": 1.5}


def sheet(depth: float, caption: str) -> tuple[Figure, float]:
    """Create a figure `depth` inches deep with the caption below: (figure, its height in inches)."""
    text = "\n".join(textwrap.fill(paragraph, _CAPTION_CHARACTERS) for paragraph in caption.splitlines())
    height = depth + _CAPTION_LINE * (text.count("\n") + 1) + MARGIN
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    looks: dict[str, Any] = {"fontsize": 7.4, "color": "#444444", "va": "bottom", "linespacing": 1.35}
    figure.text(MARGIN / WIDTH, MARGIN / height, text, label=_CAPTION, **looks)
    return figure, height


def without_caption(figure: Figure) -> tuple[Artist | None, Bbox]:
    """(the caption or None, the part of the sheet above it in inches): for pages that show the caption as text."""
    width, height = map(float, figure.get_size_inches())
    caption = next((text for text in figure.texts if text.get_label() == _CAPTION), None)
    below = _CAPTION_LINE * (caption.get_text().count("\n") + 1) if caption is not None else 0.0
    return caption, Bbox([[0.0, below], [width, height]])


def place(figure: Figure, left: float, top: float, width: float, depth: float) -> Axes:
    """Add axes to a sheet.

    Args:
        left, top: of the axes, in inches from the sheet's corner.
        width, depth: of the axes, in inches.
    """
    height = figure.get_figheight()
    return figure.add_axes((left / WIDTH, 1 - (top + depth) / height, width / WIDTH, depth / height))


def grid(
    caption: str,
    count: int,
    across: int,
    depth: float,
    *,
    head: float = 0.36,
    foot: float = AXIS,
    left: float = 0.62,
    right: float = 0.15,
    gap: float = 0.45,
    above: float = 0.0,
    below: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """A sheet with axes of equal size, from the left and from the top. All lengths are in inches.

    Args:
        count, across: number of axes, and of those in a row.
        head, foot: room above and below each.
        left, right: of the first, and of the last in a row.
        gap: between two in a row.
        above, below: room for legends.
    """
    across = max(1, min(across, count))
    down = max(1, -(-count // across))
    figure, _ = sheet(above + down * (head + depth + foot) + below, caption)
    width = (WIDTH - left - right - (across - 1) * gap) / across
    places = [divmod(index, across) for index in range(count)]
    return figure, [
        place(figure, left + column * (width + gap), above + row * (head + depth + foot) + head, width, depth)
        for row, column in places
    ]


def legend(figure: Figure, handles: Sequence[Artist], at: float = MARGIN, right: bool = False, **looks: Any) -> None:
    """Add a line of legend entries above a drawing; nothing without entries.

    Args:
        handles: the entries.
        at: inches from the left edge, or from the right one.
        right: whether it ends at the right.
    """
    if handles:
        corner = (1 - at / WIDTH if right else at / WIDTH, 1 - 0.04 / figure.get_figheight())
        place: dict[str, Any] = {"loc": f"upper {'right' if right else 'left'}", "bbox_to_anchor": corner}
        figure.legend(handles=handles, **{"ncols": len(handles), "borderaxespad": 0} | place | looks)


def beside(axes: Axes, x: float, y: float, points: float, words: str, **looks: Any) -> None:
    """Write words in the row at `y`.

    Args:
        x: 0 for the left edge of the axes, 1 for the right one.
        y: in data.
        points: to the right of the edge.
    """
    if words:
        offset = ScaledTranslation(points / 72, -0.5 / 72, axes.figure.dpi_scale_trans)
        usual: dict[str, Any] = {"va": "center", "fontsize": 8.0, "zorder": 5}
        axes.text(x, y, words, transform=axes.get_yaxis_transform() + offset, **usual | looks)


def logarithmic(
    axis: Axis,
    steps: Sequence[float] = (1.0,),
    form: Any = "{x:g}",
    at: Sequence[float] | None = None,
    most: int | None = None,
) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks.

    Args:
        axis: of the axes.
        steps: multiples of each power of ten with a tick.
        form: of a tick's label.
        at: the ticks, instead of `steps`.
        most: the number of ticks at most.
    """
    axis.axes.set(**{"xscale" if axis is axis.axes.xaxis else "yscale": "log"})
    axis.set_major_locator(LogLocator(subs=steps, numticks=most) if at is None else FixedLocator(at))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(form)


def spread(axes: Axes, x: Any, part: Any, value: str, **looks: Any) -> None:
    """Draw a line of medians with the range of the seeds.

    Args:
        x: of each row.
        part: a table with columns `value`, "least" and "greatest".
    """
    axes.errorbar(x, part[value], [part[value] - part.least, part.greatest - part[value]], capsize=2, **looks)


def sign(look: style.Look, **looks: Any) -> Line2D:
    """The legend entry of a line with a marker."""
    return Line2D([], [], label=look.name, color=look.color, marker=look.marker, **looks)
