"""Formats tables for people: units, signs and words in place of base units, as Markdown."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from accounting.base import rounded
from dpbench.report import style
from dpbench.report.style import missing

#: Name of a column -> its text of a row.
Columns = Mapping[str, Callable[[Any], str]]
#: The beginning of a tag or an entity, but not a comparison.
_MARKUP = re.compile(r"<(?=[A-Za-z/!?])|&(?=#?\w+;)")


def rows(frame: pd.DataFrame) -> list[Any]:
    """The rows of a table, with its columns as attributes."""
    return list(frame.itertuples(index=False))


def unlike(names: Iterable[str], mark: str = " ") -> list[str]:
    """The names, each unlike those before it: a second "loss" becomes "loss 2".

    Args:
        mark: before the number.
    """
    found: dict[str, None] = {}
    for name in names:
        others = (f"{name}{mark}{number}" for number in itertools.count(2))
        found[next(each for each in itertools.chain([name], others) if each not in found)] = None
    return list(found)


def markdown(frame: pd.DataFrame) -> str:
    """A frame of texts as a Markdown table, padded to be readable as text."""
    rows = [[str(column) for column in frame.columns], *frame.astype(str).values.tolist()]
    rows = [[no_html(text).replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(frame.columns))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def no_html(text: str) -> str:
    """Escape tags and entities in Markdown text, since records may contain any."""
    return _MARKUP.sub(lambda sign: "&lt;" if sign[0] == "<" else "&amp;", text)


def texts(frame: pd.DataFrame, columns: Columns, optional: tuple[str, ...] = ()) -> pd.DataFrame:
    """A table of texts.

    Args:
        columns: name -> its text of a row.
        optional: columns to leave out if they are empty.
    """
    lines = rows(frame)
    shown = {header: [text(line) for line in lines] for header, text in columns.items()}
    return pd.DataFrame({n: own for n, own in shown.items() if n not in optional or any(own)}, dtype=object)


def of(column: str, text: Callable[[Any], str] = str, instead: str = "") -> Callable[[Any], str]:
    """A function from a row to the text of one cell.

    Args:
        column: of the table, which may lack it.
        text: from a number to its text.
        instead: the column of the words for an empty cell, or its text where there is no such column.
    """

    def told(row: Any) -> str:
        value = getattr(row, column, None)
        if not missing(value):
            return text(value)
        other = getattr(row, instead, instead) if instead else ""
        return "" if missing(other) else str(other)

    return told


def between(low: str, high: str, text: Callable[[Any], str]) -> Callable[[Any], str]:
    """A function from a row to '1.02–1.35'; empty without a range.

    Args:
        low, high: columns.
        text: from a number to its text.
    """

    def told(row: Any) -> str:
        ends = getattr(row, low), getattr(row, high)
        return "" if missing(ends[0]) or ends[0] == ends[1] else "–".join(map(text, ends))

    return told


def _coverage(row: Any) -> str:
    """'100 % instantiated', '62 % ghost, 38 % instantiated': the share of the parameters under each route."""
    routes = {name: getattr(row, name) for name in ("ghost", "instantiated", "fallback")}
    return ", ".join(
        f"{share:.0%} {name}" if share >= 0.005 else f"<1% {name}"
        for name, share in routes.items()
        if not missing(share) and share > 0
    )


MODEL: Columns = {"Model": of("model", style.model)}
BATCH: Columns = {"B": of("batch_size")}
BACKEND: Columns = {"Backend": of("backend", lambda name: style.backend(name).name)}
EXACTNESS: Columns = {
    "Norm error": of("max_norm_error", "{:.0e}".format),
    "Gradient error": of("max_grad_error", "{:.0e}".format),
    "Coverage": _coverage,
}
#: Utilisation by ordinary training's operations; 100 % is the device's peak.
UTILISATION: Columns = {"MFU": of("model_flops_utilisation", "{:.1%}".format)}


def paired(frame: pd.DataFrame, sizes: Columns) -> pd.DataFrame:
    """A table of times and peaks beside ordinary training's.

    Args:
        sizes: columns between model and backend.
    """
    columns: Columns = {
        **MODEL,
        **sizes,
        **BACKEND,
        "Time/step": of("step_seconds", style.duration, "note"),
        "Time ratio": of("time_ratio", style.times),
        "Range": between("time_ratio_low", "time_ratio_high", style.times),
        "Its own plain step": of("plain_step_seconds", style.duration),
        "Rounds": of("rounds"),
        "Pairs": of("paired_rounds"),
        **UTILISATION,
        "Growth": of("growth", "{:.2f}".format),
        "Published time ratio": of("published_time_ratio", _published),
        "Peak memory": of("peak_bytes", style.size),
        "Memory ratio": of("memory_ratio", style.times),
        "Published memory ratio": of("published_memory_ratio", _published),
        **EXACTNESS,
    }
    optional = ("Pixels", "Its own plain step", "Rounds", "Pairs", "MFU", "Growth")
    return texts(frame, columns, (*optional, "Published time ratio", "Published memory ratio"))


def epsilon(instead: str = "note") -> Callable[[Any], str]:
    """A function from a row to its ε, rounded by its kind.

    Args:
        instead: the column of the words for an empty cell.
    """
    return lambda row: of("epsilon", lambda value: rounded(value, row.kind), instead)(row)


def _published(value: float | str) -> str:
    return value if isinstance(value, str) else style.times(value)


def as_percent(value: float) -> str:
    """'94.0 %'."""
    return f"{100 * value:.1f} %"


def digits(count: int) -> Callable[[float], str]:
    """A function from a number to its text with so many significant digits."""
    return f"{{:.{count}g}}".format
