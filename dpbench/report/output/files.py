"""Writes the files of figures: the picture as PNG, SVG and PDF, the table as CSV, Markdown and LaTeX."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from clipping import cache
from dpbench.records.store import slug
from dpbench.report import readable
from dpbench.report.drawing.pictures import save_all
from dpbench.report.output import latex
from dpbench.report.parts import Part

PICTURES = ("png", "svg", "pdf")
#: A spreadsheet reads text with these first characters as a formula.
_FORMULA = ("=", "+", "-", "@")


def write(parts: Iterable[Part], output: Path) -> list[Part]:
    """Write tables and pictures of each part into ``output/<device>/``; returns the parts with their `files`."""
    written = [_with_tables(part, output) for part in parts]
    drawn = [(p.figure, {suffix: output / p.files[suffix] for suffix in PICTURES}) for p in written if p.figure]
    save_all(drawn)
    return written


def _with_tables(part: Part, output: Path) -> Part:
    stem = f"{slug(part.device)}/{part.name}"
    causes = ["- {where}: {word}. `{}`".format(f["cause"].replace("`", "'"), **f) for f in part.failures]
    said = [part.caption.replace("\n", "\n\n"), *([""] if causes else []), *causes]
    lines = [readable.markdown(part.text), *map(readable.no_html, said)]
    tables = {
        "csv": _as_data(part.frame).to_csv(index=False, lineterminator="\n"),
        "md": "\n".join(lines) + "\n",
        "tex": latex.table(part.text, part.caption, part.name),
    }
    (output / stem).parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in tables.items():
        write_text(output / f"{stem}.{suffix}", text)
    suffixes = [*(PICTURES if part.figure is not None else ()), *tables]
    return replace(part, files={suffix: f"{stem}.{suffix}" for suffix in suffixes})


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8; half a character, as in the name of a file that is not UTF-8, becomes an escape."""
    cache.replace(path, text.encode(errors="backslashreplace"), mode=0o666)


def _as_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Protect the texts of records in a frame from being read as formulas by a spreadsheet."""
    columns = {name: _quoted(name) for name in frame.columns}
    texts = {name: list(map(_quoted, frame[name])) for name in frame.columns if frame[name].dtype.kind not in "biufcM"}
    return frame.assign(**texts).rename(columns=columns)


def _quoted(value: Any) -> Any:
    """Put an apostrophe before a text that would begin a formula; numbers stay."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r", " ")  # it would end the row
    if not text.lstrip().startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
