"""Formats tables for people: units, signs and words in place of base units, as Markdown."""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from dpbench.report import style
from dpbench.report.style import missing

#: The beginning of a tag or an entity, but not a comparison.
_MARKUP = re.compile(r"<(?=[A-Za-z/!?])|&(?=#?\w+;)")


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


#: Utilisation by ordinary training's operations; 100 % is the device's peak.
_UTILISATION: dict[str, Callable[[Any], str]] = {"MFU": lambda r: _or(r.model_flops_utilisation, "{:.1%}".format)}


def no_html(text: str) -> str:
    """Escape tags and entities in Markdown text, since records may contain any.

    Args:
        text: any.
    """
    return _MARKUP.sub(lambda sign: "&lt;" if sign[0] == "<" else "&amp;", text)


def max_batch_throughput(frame: pd.DataFrame) -> pd.DataFrame:
    """`tables.max_batch_throughput` for people."""
    return texts(
        frame,
        {
            **_NAMES,
            "Memory": lambda r: _or(r.memory, str, "–"),
            "Maximum batch": max_batch,
            **(_FORETOLD if frame.foretold_max_batch_size.notna().any() else {}),
            "Published": lambda r: _or(r.published_max_batch_size, "{:,g}".format),
            "Images/s": lambda r: _or(r.images_per_second, style.number, r.throughput_note),
            "Range": lambda r: _range(r.images_per_second_low, r.images_per_second_high, style.number),
            **(_UTILISATION if frame.model_flops_utilisation.notna().any() else {}),
            "Rounds": lambda r: _or(r.rounds, str),
            "Time ratio": lambda r: _or(r.time_ratio, style.times),
            "At B": lambda r: _or(r.batch_size, str),
            "Published images/s": lambda r: _or(r.published_images_per_second, "{:,g}".format),
            **_EXACTNESS,
        },
    )


def memory_speed(frame: pd.DataFrame) -> pd.DataFrame:
    """`tables.memory_speed` for people."""
    return texts(
        frame,
        {
            "Model": _NAMES["Model"],
            "B": lambda r: str(r.batch_size),
            "Backend": _NAMES["Backend"],
            "Time/step": lambda r: _or(r.step_seconds, style.duration, r.note),
            "Time ratio": lambda r: _or(r.time_ratio, style.times),
            "Range": lambda r: _range(r.time_ratio_low, r.time_ratio_high, style.times),
            "Rounds": lambda r: _or(r.rounds, str),
            "Published time ratio": lambda r: _or(r.published_time_ratio, _published),
            "Peak memory": lambda r: _or(r.peak_bytes, style.size),
            "Memory ratio": lambda r: _or(r.memory_ratio, style.times),
            "Published memory ratio": lambda r: _or(r.published_memory_ratio, _published),
            **_EXACTNESS,
        },
    )


#: Columns that tables of `paired` have only with numbers in them, beside published ones.
_OPTIONAL = ("Growth", "Pixels", "Its own plain step")


def paired(frame: pd.DataFrame, sizes: Mapping[str, Callable[[Any], str]]) -> pd.DataFrame:
    """`overhead.table` and `growth.table` for people.

    Args:
        sizes: name of a column between model and backend -> its text of a row.
    """
    columns: dict[str, Callable[[Any], str]] = {
        "Model": _NAMES["Model"],
        **sizes,
        "Backend": _NAMES["Backend"],
        "Time/step": lambda r: _or(r.step_seconds, style.duration, r.note),
        "Time ratio": lambda r: _or(r.time_ratio, style.times),
        "Range": lambda r: _range(r.time_ratio_low, r.time_ratio_high, style.times),
        "Its own plain step": lambda r: _or(getattr(r, "plain_step_seconds", None), style.duration),
        "Pairs": lambda r: _or(r.paired_rounds, str),
        **(_UTILISATION if frame.model_flops_utilisation.notna().any() else {}),
        "Growth": lambda r: _or(getattr(r, "growth", None), "{:.2f}".format),
        "Published time ratio": lambda r: _or(r.published_time_ratio, _published),
        "Peak memory": lambda r: _or(r.peak_bytes, style.size),
        "Memory ratio": lambda r: _or(r.memory_ratio, style.times),
        "Published memory ratio": lambda r: _or(r.published_memory_ratio, _published),
        **_EXACTNESS,
    }
    table = texts(frame, columns)
    optional = [name for name in columns if name.startswith("Published") or name in _OPTIONAL]
    empty = [name for name in optional if name in columns and not table[name].any()]
    return table.drop(columns=empty)


def epsilon(frame: pd.DataFrame) -> pd.DataFrame:
    """`tables.epsilon` for people."""
    return texts(
        frame,
        {
            "Accountant": lambda r: style.accountant(r.accountant).name,
            "Kind": lambda r: _or(r.kind, lambda kind: style.KINDS[kind][1] if kind in style.KINDS else kind),
            "q": lambda r: style.plain(r.sample_rate),
            "σ": lambda r: style.plain(r.noise_multiplier),
            "δ": lambda r: style.plain(r.delta),
            "Steps": lambda r: f"{r.steps:,}",
            "Epochs": lambda r: f"{r.epochs:g}",
            "ε": lambda r: _or(r.epsilon, lambda value: rounded_epsilon(value, r.kind), r.note),
        },
    )


def max_batch(row: Any) -> str:
    """'1,500', '≥ 16,384, not limited by memory up to there', or the reason for a missing number.

    Args:
        row: of the table.
    """
    if missing(row.max_batch_size):
        return _or(row.max_batch_note, str, "–")
    sign = "≥ " if missing(row.fails_at) else ""
    return f"{sign}{row.max_batch_size:,}" + _or(row.max_batch_note, lambda note: f", {note}")


_FORETOLD: dict[str, Callable[[Any], str]] = {
    "Foretold": lambda r: _or(r.foretold_max_batch_size, "{:,}".format),
    "Its peak": lambda r: _or(r.foretold_peak_error, "{:+.1%}".format),
}
_NAMES: dict[str, Callable[[Any], str]] = {
    "Model": lambda r: style.model(r.model),
    "Backend": lambda r: style.backend(r.backend).name,
}


def texts(frame: pd.DataFrame, columns: dict[str, Callable[[Any], str]]) -> pd.DataFrame:
    """A table of texts.

    Args:
        columns: name -> its text of a row.
    """
    rows = list(frame.itertuples(index=False))
    return pd.DataFrame({header: [text(row) for row in rows] for header, text in columns.items()}, dtype=object)


def _or(value: Any, text: Callable[[Any], str], otherwise: Any = None) -> str:
    if not missing(value):
        return text(value)
    return "" if missing(otherwise) else str(otherwise)


def _range(low: Any, high: Any, text: Callable[[Any], str]) -> str:
    return "" if missing(low) or low == high else f"{text(low)}–{text(high)}"


def _coverage(row: Any) -> str:
    """'100 % instantiated', '62 % ghost, 38 % instantiated': the share of the parameters under each route."""
    routes = {name: getattr(row, name) for name in ("ghost", "instantiated", "fallback")}
    return ", ".join(
        f"{share:.0%} {name}" if share >= 0.005 else f"<1% {name}"
        for name, share in routes.items()
        if not missing(share) and share > 0
    )


_EXACTNESS: dict[str, Callable[[Any], str]] = {
    "Norm error": lambda r: _or(r.max_norm_error, "{:.0e}".format),
    "Gradient error": lambda r: _or(r.max_grad_error, "{:.0e}".format),
    "Coverage": _coverage,
}


#: Kind of an accountant's result -> how its ε is rounded, so that a bound remains one.
_ROUNDING = {"upper_bound": decimal.ROUND_CEILING, "lower_bound": decimal.ROUND_FLOOR}


def rounded_epsilon(value: float, kind: str, digits: int = 4) -> str:
    """An upper bound is rounded up and a lower bound down, so that they remain bounds.

    Args:
        value: ε.
        kind: of the accountant's result.
        digits: significant ones.
    """
    context = decimal.Context(prec=digits, rounding=_ROUNDING.get(kind, decimal.ROUND_HALF_EVEN))
    return f"{context.create_decimal(value):g}" if math.isfinite(value) else "inf"


def _published(value: float | str) -> str:
    return value if isinstance(value, str) else style.times(value)
