"""Converts a matplotlib figure to an SVG element for a page with other figures.

Text stays text (small, searchable, copyable). The page shows the caption. Every id gets a unique prefix, and parts that
only a file needs (namespaces, metadata, a style for every element of the page) are removed.
"""

import io
import re
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from dpbench.report.drawing.sheet import without_caption

_REFERENCE = re.compile(r"url\(#([^)]+)\)")
#: Figures are laid out with DejaVu Sans, which has Verdana's widths.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_NO_TURN, _AROUND = re.compile(r"rotate\(-?0 [^)]*\)"), re.compile(r"\s*([A-Za-z])\s*")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def inline(figure: Figure, prefix: str, title: str, description: str) -> str:
    """The figure as ``<svg>``, with a title and a description for screen readers.

    Args:
        figure: drawn under the current style.
        prefix: of every id in it, unique on the page.
        title: one line.
        description: for readers who do not see the figure.
    """
    root = ElementTree.fromstring(_saved(figure))
    for parent in list(root.iter()):
        for child in list(parent):
            if _plain(child.tag) in ("metadata", "style"):
                parent.remove(child)
    text = " ".join(value for element in root.iter() for value in element.attrib.values() if "#" in value)
    used = set(re.findall(r"#([\w.-]+)", text))
    for element in root.iter():
        if element.attrib.get("id") not in used:
            element.attrib.pop("id", None)
        if not (element.text or "").strip():
            element.text = None
        element.tail = None
        element.tag = _plain(element.tag)
        told = {_plain(name): _own(_plain(name), text, prefix) for name, text in element.attrib.items()}
        element.attrib = {name: text for name, text in told.items() if text}
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-labelledby": f"{prefix}-title {prefix}-desc",
        "style": f"stroke-linejoin: round; stroke-linecap: butt; font-family: {_FONTS}",
    }
    for name, words in (("desc", description), ("title", title)):
        element = ElementTree.Element(name, {"id": f"{prefix}-{name}"})
        element.text = words
        root.insert(0, element)
    return ElementTree.tostring(root, encoding="unicode")


def _saved(figure: Figure) -> str:
    caption, above = without_caption(figure)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        buffer = io.StringIO()
        if caption is not None:
            caption.set_visible(False)
        figure.savefig(buffer, format="svg", bbox_inches=above, metadata={"Date": None, "Creator": None})
        if caption is not None:
            caption.set_visible(True)
    return buffer.getvalue()


def _plain(name: str) -> str:
    return name.rpartition("}")[2]


def _own(name: str, text: str, prefix: str) -> str:
    """An attribute's text: ids and references with the prefix, coordinates to a hundredth of a point.

    Empty for an attribute at its default.
    """
    if name == "style":
        for said in ("font-family: 'DejaVu Sans'; ", "text-anchor: start; "):
            text = text.replace(said, "")
        text = text.replace("; ", ";").replace(": ", ":")
    if name == "d":
        text = _AROUND.sub(r"\1", text)
    if name == "transform" and _NO_TURN.fullmatch(text):
        return ""
    if name == "id":
        return f"{prefix}-{text}"
    if name == "href" and text.startswith("#"):
        return f"#{prefix}-{text[1:]}"
    if name in ("d", "x", "y", "transform", "points", "width", "height"):
        text = _NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text)
    return _REFERENCE.sub(rf"url(#{prefix}-\1)", text)
