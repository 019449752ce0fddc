"""The parts of a report: for each figure, its table and its texts.

Every format comes from a `Part`: the files (PNG, SVG, PDF, CSV, Markdown, LaTeX) and the page.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record
from dpbench.report import captions, readable, style


@dataclass(frozen=True)
class FigureKind:
    """How to make one kind of figure.

    Args:
        kinds: the kinds of trial that it uses.
        table: from records to numbers. It counts what it leaves out, but for failures.
        text: the numbers for people: column -> its text of a row, or a function of the table.
        caption: the sentences of its own, or a function of records and numbers that returns them; if that returns one
            text, it is the whole caption.
        plot: draws numbers and caption; None for a table alone.
        finding: one sentence with the main numbers of a table with rows; '' if there are none.
        cell: a key of a record; records with the same key add to the same number.
        by: fields of the trial; there is a figure for each of their values.
        facets: as `by`, for fields of some kinds of trial: field -> these kinds.
        applies: whether such records make this figure at all.
        setting: whether the numbers depend on torch, threads and inputs.
        with_causes: whether to count failed trials and list their reasons; not if the table or another figure does.
        doc: the heading on the page, one line; of ours, that of `dpbench.report.figures.CONTENTS`.
    """

    kinds: tuple[str, ...]
    table: Callable[[Sequence[Record], LeftOut], pd.DataFrame]
    text: readable.Columns | Callable[[pd.DataFrame], pd.DataFrame]
    caption: str | Callable[[Sequence[Record], pd.DataFrame], str | Sequence[str]]
    plot: Callable[[pd.DataFrame, str], Figure] | None = None
    finding: Callable[[pd.DataFrame], str] = lambda frame: ""
    cell: Callable[[Record], Hashable] = lambda record: record.id
    by: tuple[str, ...] = ("experiment",)
    facets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    applies: Callable[[Sequence[Record]], bool] = lambda records: True
    setting: bool = False
    with_causes: bool = True
    doc: str = ""

    def texts(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The numbers for people."""
        return self.text(frame) if callable(self.text) else readable.texts(frame, self.text)

    def words(self, records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
        """The whole caption, with the sentences that all figures have."""
        if "model" in frame:  # the table may leave out models
            known = set(frame.model)
            found = [r for r in records if {m := r.trial.get("model", ""), style.without_length(m)[0]} & known]
            records = found or records
        own = [self.caption] if isinstance(self.caption, str) else self.caption(records, frame)
        return own if isinstance(own, str) else captions.whole(own, records, left_out, self.setting)


@dataclass(frozen=True)
class Part:
    """One figure of a report, with all its texts.

    Args:
        name: the stem of its files, unique for each device.
        title: the heading on the page.
        device: of the records: 'cpu AMD EPYC, 2 CPUs'.
        setting: distinguishes it from other figures of its kind: field -> value.
        records: its source, after filtering.
        frame: the numbers, in base units (CSV).
        text: the numbers for people (Markdown, LaTeX, the page).
        caption: paragraphs, one a line.
        finding: a sentence, or ''.
        failures: why trials failed (`dpbench.report.data.failures`).
        figure: the picture; None for a table alone.
        files: suffix -> path below the report's folder.
        kind: the name of the figure, which several parts of a report may have.
    """

    name: str
    title: str
    device: str
    setting: Mapping[str, Any]
    records: Sequence[Record]
    frame: pd.DataFrame
    text: pd.DataFrame
    caption: str
    finding: str = ""
    failures: Sequence[Mapping[str, Any]] = ()
    figure: Figure | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
