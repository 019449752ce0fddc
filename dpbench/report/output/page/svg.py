"""Converts a matplotlib figure to an SVG element for a page with other figures.

Text stays text (small, searchable, copyable). The page shows the caption. Metadata, ids of groups and a style for every
element of the page are left out.
"""

import html
import io
import re

import matplotlib
from matplotlib.figure import Figure

from dpbench.report.drawing.sheet import without_caption

#: Figures are laid out with DejaVu Sans, which has Verdana's widths.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_ATTRIBUTE = re.compile(r' (?:d|x|y|transform|points|width|height)="[^"]*"')
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
#: Text cannot have a "<" of its own, so these are elements of matplotlib's.
_SHORTER = {
    re.compile(r'<g id="[^"]*"'): "<g",
    re.compile(r"<use xlink:href="): "<use href=",
    re.compile(r"(?<=px; )font-family: 'DejaVu Sans'; (?:text-anchor: start; )?"): "",
    re.compile(r' transform="rotate\(-?0 [^"]*"'): "",
    re.compile(r"(?<=>)\n\s*"): "",  # between elements
}


def inline(figure: Figure, prefix: str, title: str, description: str) -> str:
    """The figure as ``<svg>``, with a title and a description for screen readers.

    Args:
        figure: drawn under the current style.
        prefix: unique on the page; every id in the figure depends on it.
        title: one line.
        description: for readers who do not see the figure.
    """
    caption, above = without_caption(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        buffer = io.StringIO()
        if caption is not None:
            caption.set_visible(False)
        figure.savefig(buffer, format="svg", bbox_inches=above, metadata={"Date": None, "Creator": None})
        if caption is not None:
            caption.set_visible(True)
    saved = buffer.getvalue()
    box = saved.partition('viewBox="')[2].partition('"')[0]
    drawn = saved[saved.index('<g id="figure_1">') : saved.rindex("</svg>")]
    drawn = _ATTRIBUTE.sub(lambda found: _NUMBER.sub(_rounded, found[0].replace("\n", "")), drawn)
    for pattern, instead in _SHORTER.items():
        drawn = pattern.sub(instead, drawn)
    return (
        f'<svg viewBox="{box}" role="img" aria-labelledby="{prefix}-title {prefix}-desc" '
        f'style="stroke-linejoin: round; stroke-linecap: butt; font-family: {_FONTS}">'
        f'<title id="{prefix}-title">{html.escape(title)}</title>'
        f'<desc id="{prefix}-desc">{html.escape(description)}</desc>{drawn}</svg>'
    )


def _rounded(number: re.Match[str]) -> str:
    """A coordinate to a hundredth of a point."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
