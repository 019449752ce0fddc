"""Writes the scorecard as one HTML file, which loads nothing else."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import jinja2

from clipping import cache
from dpbench.report import scorecard, style
from dpbench.report.data.select import read
from dpbench.report.output import page
from dpbench.report.parts import VERDICTS


def write(source: Path, path: Path, again: str) -> Path | None:
    """Write the page of all records below a folder; None without records.

    Args:
        source: the folder of results.
        path: of the page.
        again: the command that makes it again.

    Raises:
        OSError: if it cannot be written.
    """
    records = read(source)
    if not records:
        return None
    found = scorecard.columns(records)
    template = (importlib.resources.files(__package__) / "scorecard.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = environment.from_string(template).render(
        columns=found,
        backends=scorecard.backends(found),
        name=lambda backend: style.backend(backend).name,
        claims=scorecard.judged(records),
        verdicts=VERDICTS,
        href=lambda file: page.beside(path.parent, file),
        css=(importlib.resources.files(page) / "page.css").read_text(encoding="utf-8"),
        again=again,
        source=page.beside(path.parent, source),
    )
    cache.replace(path, text.encode(errors="backslashreplace"), mode=0o666)
    return path
