"""Writes the HTML page of a report: one file that loads nothing else, and is readable without its script.

Jinja2 escapes every text, but for the style sheet and the script beside this module, and figures serialised by
`svg.inline`.
"""

import html
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.experiment import experiment_names, load_experiment
from dpbench.records.conditions import MOMENTS, flat, pooled
from dpbench.records.reader import Record, by_device, entries
from dpbench.report import style
from dpbench.report.data import failures
from dpbench.report.data.statistics import did_not_fit
from dpbench.report.output import PAGES
from dpbench.report.output.files import write_text
from dpbench.report.output.page import svg
from dpbench.report.parts import Part
from dpbench.report.summary import days, join, several, where

#: The most rows of a table on the page; the CSV has all.
ROWS = 1500
_NUMBER = re.compile(r"[^\w–-]{0,4}(?:\w+ = )?-?\d[\d.,]*(?:e[-+]?\d+)?(?:\s?[\w×%µ/]{1,5})?(?:–.*)?")
_OWNER = re.compile('<meta name="dpbench-records" content="([^"]*)">')
_STRONG = re.compile(r"\*\*(.+)\*\*")


@dataclass(frozen=True)
class Table:
    """A table for the template: columns {name, look}, rows of cells {text, strong}, and a note on omitted rows."""

    columns: Sequence[Mapping[str, Any]]
    rows: Sequence[Sequence[Mapping[str, Any]]]
    more: str = ""


def owner(path: Path) -> str | None:
    """The folder of records named on an existing page; None if there is no page."""
    if not path.exists():
        return None
    found = _OWNER.search(path.read_text(encoding="utf-8", errors="replace"))
    return html.unescape(found[1]) if found else "."


def beside(folder: Path, source: Path) -> str:
    """The relative path from a page's folder to its records; "." for the same folder."""
    return os.path.relpath(source.resolve(), folder.resolve())


def write(path: Path, parts: Sequence[Part], again: str, source: Path) -> Path:
    """Write the page, which describes the records of its figures, without superseded ones.

    Its summary and its open sections are of the latest device with a finding; other devices follow in closed sections.
    """
    records = list({id(record): record for part in parts for record in part.records}.values())
    devices = by_device(records)
    first = next((part.device for part in parts if part.finding), next(iter(devices)))
    experiments = sorted({record.experiment for record in records})
    docs = {name: load_experiment(name).doc for name in experiments if name in experiment_names()}
    results = entries(records)
    failed = failures.grouped_failures(results)
    unfit = sum(map(did_not_fit, results))
    sections: dict[str, list[dict[str, Any]]] = {device: [] for device in sorted(devices, key=lambda d: d != first)}
    for number, part in enumerate(parts, start=1):
        sections[part.device].append(_section(part, number))
    machines = [
        {"id": f"device-{number}", "sections": theirs, **_machine(device, devices[device])}
        for number, (device, theirs) in enumerate(sections.items())
    ]
    said = [f"{several(len(devices[first]), 'trial')} on {where(devices[first])}."]
    said += [part.finding for part in parts if part.device == first and part.finding][:1]
    folder = beside(path.parent, source)
    text = PAGES.get_template("page/page.html.j2").render(
        title=join(experiments) if len(experiments) <= 3 else f"{len(experiments)} experiments",
        about=[doc if len(docs) == 1 else f"{name}: {doc}" for name, doc in docs.items()],
        summary=said,
        failures=failed,
        failures_said=f"{several(sum(cause['count'] for cause in failed), 'result')} without a number, "
        f"for {several(len(failed), 'cause')}; causes that differ in numbers only are one.",
        unfit=f"{several(unfit, 'probe')} of a search did not fit in the memory budget: a result, not a failure."
        if unfit
        else "",
        machines=machines,
        again=again,
        source=folder if folder != "." else "",
        measure=[f"python -m dpbench run {shlex.quote(name)}" for name in docs],
    )
    write_text(path, text)
    return path


def _section(part: Part, number: int) -> dict[str, Any]:
    first = part.title[0]
    heading = (first.upper() if first.isascii() else first) + part.title[1:]  # no capital for ε
    prefix = f"f{number}"
    caption = part.caption.splitlines()
    warnings = sum(line.startswith("Warning:") for line in caption)
    return {
        "id": f"{prefix}-{part.name}",
        "heading": heading,
        "device": part.device,
        "setting": [(name.replace("_", " "), style.setting(name, value)) for name, value in part.setting.items()],
        "finding": part.finding,
        "svg": svg.inline(part.figure, prefix, heading, part.caption) if part.figure is not None else "",
        "caption": caption,
        "warnings": several(warnings, "warning") if warnings else "",
        "table": table(part.text),
        "files": list(part.files.items()),
    }


def table(frame: pd.DataFrame) -> Table:
    """A frame of texts without its empty columns; `**wrong**` becomes bold."""
    told = [name for name in frame.columns if not frame.empty and not frame[name].isin(["", "–"]).all()]
    frame = frame[told]
    texts = [[str(cell) for cell in row] for row in frame.head(ROWS).itertuples(index=False)]
    columns = [
        {"name": str(name), "look": _look([row[index] for row in texts])} for index, name in enumerate(frame.columns)
    ]
    rows = [[_cell(text) for text in row] for row in texts]
    more = len(frame) - len(rows)
    return Table(columns, rows, f"The other {more:,} rows are in the CSV file." if more > 0 else "")


def _cell(text: str) -> dict[str, Any]:
    strong = _STRONG.fullmatch(text)
    return {"text": strong[1] if strong else text, "strong": bool(strong)}


def _look(texts: Sequence[str]) -> str:
    """The class of a column: 'w' (wide) if it holds sentences, 'n' if most cells are numbers, else ''."""
    known = [text for text in texts if text and text != "–"]
    if max(map(len, known), default=0) > 40:
        return "w"
    numbers = sum(_NUMBER.fullmatch(text) is not None for text in known)
    return "n" if 2 * numbers > len(known) else ""


def _machine(device: str, records: Sequence[Record]) -> dict[str, Any]:
    """Facts that a device's runs share, and facts in which they differ."""
    differing = dict(pooled(records))
    environments = list({record.run: record.environment for record in records}.values())
    facts = {
        name: differing.get(name, style.size(value) if name == "memory_total" else str(value))
        for environment in environments
        for name, value in flat(environment, MOMENTS)
        if value not in (None, "")
    }
    rows = [(name, value, "differs between runs" if name in differing else "") for name, value in facts.items()]
    ended = sorted(record.utc for record in records)
    runs = several(len(environments), "run")
    shown = pd.DataFrame(rows, columns=["Fact", "Value", "Note"], dtype=object)
    return {
        "device": device,
        "said": f"{several(len(records), 'trial')}, {days(records)}",
        "runs": f"{runs}, the first trial ended {ended[0][:19]}Z and the last {ended[-1][:19]}Z."
        + (f" They differ in {join(sorted(differing))}." if differing else ""),
        "facts": table(shown if differing else shown.drop(columns="Note")),
    }
