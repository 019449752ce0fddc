"""Writes the files of one figure: the picture as PNG, SVG and PDF, its table as CSV, Markdown and LaTeX."""

from pathlib import Path
from typing import Any

import pandas as pd

from clipping import cache
from dpbench.report import readable
from dpbench.report.drawing.pictures import Pictures
from dpbench.report.output import latex
from dpbench.report.parts import VERDICTS, Part

TABLES = ("csv", "md", "tex")
#: A spreadsheet reads text with these first characters as a formula.
_FORMULA = ("=", "+", "-", "@")
FORMATS = ("png", "svg", "pdf", *TABLES)


def write(part: Part, folder: Path, pictures: Pictures) -> list[Path]:
    """Write `part` into `folder`; returns the files, including pictures that `pictures` may still be writing."""
    folder.mkdir(parents=True, exist_ok=True)
    suffixes = FORMATS if part.figure is not None else TABLES
    paths = {suffix: folder / f"{part.name}.{suffix}" for suffix in suffixes}
    if part.figure is not None:
        pictures.save(part.figure, paths)
    texts = {"csv": _as_data(part.frame).to_csv(index=False, lineterminator="\n")}
    claims = [f"\n{VERDICTS[c.verdict]} {c.verdict}: {c.statement} ({c.source}) {c.finding}" for c in part.claims]
    said = [part.caption.replace("\n", "\n\n"), *claims, *part.causes]
    lines = [readable.markdown(part.text), *map(readable.no_html, said)]
    texts["md"] = "\n".join(lines) + "\n"
    texts["tex"] = latex.table(part.text, part.caption, part.name)
    for suffix, text in texts.items():
        write_text(paths[suffix], text)
    return list(paths.values())


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
