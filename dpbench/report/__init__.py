"""Turns records into figures and tables. Reads JSON lines, draws with matplotlib, and imports no torch.

For each device, each kind of figure and each setting (precision, way, input size, budget, threads) there is one figure
as PNG, SVG and PDF, with its table as CSV (base units), Markdown (for people, with the caption) and LaTeX. One page,
``report.html``, has them all. The same records give the same bytes, so committed figures change only with the data.

Functions take:
    records, record: of one device, after filtering; one of them.
    left_out: reason -> number of records left out; changed in place.
    frame: the numbers, a row each, in base units: seconds, bytes, ε.
    caption: the text below the picture, a paragraph a line.
    axes: to draw in.
    looks: further arguments of matplotlib.
    row, rows, column, columns: of a table.
    name, names, kind, model, backend: names, as in trials, in records or in `FIGURES`.
    chosen: name -> kind of figure.
    cell: from a record to the key of its cell.
    value, values, count, seconds: numbers, in base units.
    text, words, said: texts.
    part, parts: figures with their texts.
    source: a folder of records.
    output, folder, path: where to write, created if missing; an OSError says that it cannot be.
    again: the command that makes the page again.
    tell: receives the progress, in words.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.style import context

from dpbench.errors import one_of
from dpbench.records.reader import PAIRED, LeftOut, Record, by_device, entries, read
from dpbench.records.store import slug
from dpbench.report import plain, style
from dpbench.report.data.failures import grouped_failures
from dpbench.report.data.statistics import facets, failed, kept
from dpbench.report.figures import found
from dpbench.report.output import files, page
from dpbench.report.parts import FigureKind, Part
from dpbench.report.readable import unlike

__all__ = ["FIGURES", "FigureKind", "LeftOut", "Part", "find_figures", "parts_of", "write_report"]

#: Name -> figure, in the order of a page.
FIGURES = found()


def find_figures(names: Sequence[str]) -> dict[str, FigureKind]:
    """The figures of these names.

    Raises:
        UsageError: for an unknown name.
    """
    return {name: FIGURES[one_of("a figure", name, FIGURES)] for name in names}


def write_report(
    source: Path,
    output: Path,
    figures: Sequence[str] = tuple(FIGURES),
    again: str | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> list[Path]:
    """Draw the named figures from the records (``*.jsonl``) below `source`, into ``output/<device>/``, and the page.

    Records that no named figure uses get a table for each kind.

    Args:
        source: a folder; runs in a folder ``*-smoke`` below it are skipped.
        output: the page of all figures is its ``report.html``.
        figures: names from `FIGURES`; a figure without records is skipped.

    Returns:
        The files written, the page last. Empty if there are no records.

    Raises:
        UsageError: for an unknown figure.
    """
    chosen = find_figures(figures)
    tell("reading records")
    records = read(source)
    if not records:
        return []
    again = again or f"python -m dpbench report {shlex.quote(str(source))}"
    # figures must not depend on the user's matplotlibrc
    with context(style.RC, after_reset=True):
        parts = files.write(_told(parts_of(records, chosen), tell), output)
        others = {r.kind for r in records} - {r.kind for part in parts for r in part.records}
        # a record's author chooses the kind: it must not lead to another folder
        names = [kind if kind.isidentifier() and len(kind) < 80 else slug(kind) for kind in sorted(others)]
        named = dict(zip(unlike(names, "-"), sorted(others), strict=True))
        tables = {f"trials-{name}": plain.kind_of(kind) for name, kind in named.items()}
        parts += files.write(parts_of(records, tables), output)
        output.mkdir(parents=True, exist_ok=True)
        tell("the page")
        path = page.write(output / "report.html", parts, again, source)
    return [*(output / name for part in parts for name in part.files.values()), path]


def _told(parts: Iterable[Part], tell: Callable[[str], None]) -> Iterator[Part]:
    for number, part in enumerate(parts, start=1):
        tell(f"figure {number}, {part.name} on {part.device}")
        yield part
    tell("the pictures")


def parts_of(records: Sequence[Record], chosen: Mapping[str, FigureKind]) -> Iterator[Part]:
    """The figures of these kinds: by device, the latest measured first, then in the order of `chosen`."""
    for own_device in by_device(records).values():
        present = {record.kind for record in own_device}
        for name, kind in chosen.items():
            own = [] if present.isdisjoint(kind.kinds) else [r for r in own_device if r.kind in kind.kinds]
            for setting, part in facets(own, {**dict.fromkeys(kind.by, kind.kinds), **kind.facets, "way": PAIRED}):
                if kind.applies(part):
                    yield _part(part, kind, name, setting)


def _part(records: Sequence[Record], kind: FigureKind, name: str, setting: Mapping[str, Any]) -> Part:
    """The figure and the table of one setting, with their texts."""
    labels = [slug(f"{field}-{style.setting(field, value).replace(' ', '')}") for field, value in setting.items()]
    left_out: LeftOut = LeftOut()
    own = kept(records, kind.cell, left_out)
    frame = kind.table(own, left_out)
    results = entries(own)
    if kind.with_causes:
        marks = [r for r in results if failed(r) and not r.result.get("rows")]  # a wrong row is a number, too
        left_out.update(style.outcome(record.outcome) for record in marks)
    caption = kind.words(own, frame, left_out)
    return Part(
        name="-".join([name, *labels]),
        kind=name,
        title=kind.doc,
        device=records[0].device,
        setting=setting,
        records=own,
        frame=frame,
        text=kind.texts(frame),
        caption=caption,
        finding=kind.finding(frame) if len(frame) else "",
        failures=grouped_failures(results) if kind.with_causes else (),
        figure=kind.plot(frame, caption) if kind.plot is not None else None,
    )
