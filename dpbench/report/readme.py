"""Writes the marked blocks of README.md and results/README.md from the records.

A block lies between ``<!-- EXPERIMENT: WHAT DEVICE -->`` and ``<!-- end -->``. WHAT is "results" (the findings and
tables of every device), "figure", "finding", or the name of one of the experiment's `excerpts`. DEVICE may be missing;
"cpu" or "cuda" chooses the newest such machine with enough numbers. Text outside of blocks stays.

Functions take:
    root: the folder of README.md.
    page: one of `PAGES`.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from dpbench.errors import UsageError, one_of
from dpbench.experiment import Excerpt, Experiment, load_experiment
from dpbench.records.reader import read
from dpbench.records.store import slug
from dpbench.report import FIGURES, find_figures, parts_of, readable
from dpbench.report.output.files import write_text
from dpbench.report.parts import Part
from dpbench.report.summary import where

RESULTS = "results"
PAGES = ("README.md", f"{RESULTS}/README.md")
_BLOCK = re.compile(r"(<!-- (\w+): (\w+)(?: (cpu|cuda))? -->\n).*?(?=<!-- end -->)", re.DOTALL)


def write_readme(root: Path, tell: Callable[[str], None] = lambda words: None) -> list[Path]:
    """Rewrite the blocks of the pages below `root` from the records in ``root/results``; returns the pages.

    Raises:
        UsageError: as `filled` does.
    """
    texts = [(root / page, filled(root, page, tell)) for page in PAGES]
    for path, text in texts:
        write_text(path, text)
    return [path for path, _ in texts]


def filled(root: Path, page: str, tell: Callable[[str], None] = lambda words: None) -> str:
    """The text of a page with its blocks written from the records in ``root/results``.

    Raises:
        UsageError: the page is missing, or a block names no experiment or excerpt, or one without records or figures.
    """
    path = root / page
    if not path.is_file():
        raise UsageError(f"{' and '.join(PAGES)} in the current folder", f"no {page}")
    results = _Results(root / RESULTS, path.parent, tell)
    return _BLOCK.sub(lambda found: f"{found[1]}{results.block(*found.group(2, 3, 4))}\n", path.read_text("utf-8"))


class _Results:
    """The records of every experiment, read once, for a page in the folder `beside`."""

    def __init__(self, folder: Path, beside: Path, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell
        self._way = os.path.relpath(folder, beside)
        self._of = functools.cache(self._parts)

    def _parts(self, name: str) -> tuple[Experiment, list[Part]]:
        self._tell(f"records of {name}")
        experiment = load_experiment(name)
        kinds = find_figures(experiment.figures)
        undrawn = {figure: dataclasses.replace(kind, plot=None) for figure, kind in kinds.items()}
        found = list(parts_of(read(self._folder / name), undrawn))
        if not found:
            raise UsageError(f"records in {self._folder / name} (`python -m dpbench run {name}` makes them)", "none")
        return experiment, found

    def block(self, name: str, what: str, device: str | None) -> str:
        """The text of a block; see the module."""
        experiment, parts = self._of(name)
        first = next(iter(experiment.excerpts.values()), None)
        machines = _machines(parts, device, first)
        if not machines:
            return f"Not measured on {device} yet."
        if what == "results":
            return "\n\n".join(self._machine(experiment.name, own, first) for own in machines)
        own = machines[0]
        if what == "figure":
            return self._picture(name, own)
        if what == "finding":
            return " ".join(readable.no_html(part.finding) for part in own if part.finding)
        excerpt = experiment.excerpts[one_of(f"a table of {name}", what, experiment.excerpts)]
        own = [part for part in own if part.kind == excerpt.figure]
        return f"{readable.markdown(table(own, excerpt))}\n{_where(own)}"

    def _machine(self, name: str, parts: Sequence[Part], excerpt: Excerpt | None) -> str:
        """The findings of one machine with links to the figures, and the table or the first picture."""
        said = [_where(parts)]
        others = []
        for part in parts:
            title = ", ".join([part.kind, *(f"{name} {value}" for name, value in part.setting.items())])
            link = f"[{title}]({self._link(name, part)})"
            said += [f"- {link}: {readable.no_html(part.finding)}"] if part.finding else []
            others += [] if part.finding else [link]
        said += [f"- {', '.join(others)}"] if others else []
        own = parts if excerpt is None else [part for part in parts if part.kind == excerpt.figure]
        if excerpt is not None and own:
            said += ["", readable.markdown(table(own, excerpt)).rstrip()]
        elif excerpt is None and FIGURES[parts[0].kind].plot is not None:
            said += ["", self._picture(name, parts)]
        warnings = [line for part in own for line in part.caption.splitlines() if line.startswith("Warning:")]
        said += ["", *(f"- {line}" for line in dict.fromkeys(warnings))] if warnings else []
        return "\n".join([said[0], "", *said[1:]])

    def _picture(self, name: str, parts: Sequence[Part]) -> str:
        """The picture of the part with the most rows of the first figure."""
        largest = max((part for part in parts if part.kind == parts[0].kind), key=lambda part: len(part.frame))
        return f"![{name.replace('_', ' ')}]({self._link(name, largest)})"

    def _link(self, name: str, part: Part) -> str:
        suffix = "png" if FIGURES[part.kind].plot is not None else "md"
        path = f"{name}/{slug(part.device)}/{part.name}.{suffix}"
        if not (self._folder / path).is_file():
            raise UsageError(f"figures of {name} (`python -m dpbench report {name}` draws them)", f"no {path}")
        return path if self._way == "." else f"{self._way}/{path}"


def table(parts: Sequence[Part], excerpt: Excerpt) -> pd.DataFrame:
    """The excerpt of one machine's figures, as texts; a setting that tells figures apart is a column.

    Args:
        excerpt: of one of the figures.

    Raises:
        UsageError: two numbers belong in one cell.
    """
    texts = []
    for part in (part for part in parts if part.kind == excerpt.figure):
        setting = {name.capitalize(): str(value) for name, value in part.setting.items()}
        texts.append(part.text.astype(str).assign(**setting))
    frame = pd.concat(texts, ignore_index=True).fillna("")
    texts_of = [dict(zip(frame.columns, row, strict=True)) for row in frame.itertuples(index=False)]
    frame = frame[[excerpt.where(row) for row in texts_of]]
    rows = [column for column in excerpt.rows if column in frame]
    if not excerpt.across:
        frame = frame[[*rows, *(excerpt.cells or frame.columns.drop(rows))]]
        return frame.set_index(rows).T.rename_axis(excerpt.turned).reset_index() if excerpt.turned else frame
    instead = frame[excerpt.instead] if excerpt.instead else ""
    frame = frame.assign(cell=[", ".join(filter(None, cells)) for cells in frame[list(excerpt.cells)].to_numpy()])
    frame.loc[frame.cell == "", "cell"] = instead
    frame = frame.drop_duplicates([*rows, excerpt.across, "cell"])  # a text has no image size, and is in all figures
    alike = frame[frame.duplicated([*rows, excerpt.across])]
    if len(alike):
        raise UsageError(f"`rows` of {excerpt.figure} that tell its records apart", ", ".join(alike[rows].iloc[0]))
    wide = frame.pivot(index=rows, columns=excerpt.across, values="cell").fillna("")
    order = frame.drop_duplicates(rows).set_index(rows).index
    return wide.reindex(index=order, columns=frame[excerpt.across].unique()).reset_index()


def _machines(parts: Sequence[Part], device: str | None, excerpt: Excerpt | None) -> list[list[Part]]:
    """The figures of each device, those with a table and then the latest first; of `device`, only with enough numbers.

    A machine has few if its table has less than half of the cells of the fullest.
    """

    def has_table(own: Sequence[Part]) -> bool:
        return excerpt is None or any(part.kind == excerpt.figure for part in own)

    def order(own: Sequence[Part]) -> tuple[bool, str]:
        return has_table(own), max(r.utc for part in own for r in part.records)

    names = {part.device for part in parts if device is None or part.device.startswith(f"{device} ")}
    found = [[part for part in parts if part.device == name] for name in sorted(names)]
    found.sort(key=order, reverse=True)
    if device is None or excerpt is None:
        return found
    found = list(filter(has_table, found))
    sizes = [int((table(own, excerpt) != "").to_numpy().sum()) for own in found]
    return [own for own, size in zip(found, sizes, strict=True) if 2 * size >= max(sizes)]


def _where(parts: Sequence[Part]) -> str:
    return f"*{where(record for part in parts for record in part.records)}.*"
