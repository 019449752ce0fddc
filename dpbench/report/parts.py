"""The parts of a report: for each figure, its table, its texts, and its verdicts on papers' claims.

Every format comes from a `Part`: the files (PNG, SVG, PDF, CSV, Markdown, LaTeX) and the page.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.report.data.select import LeftOut, Record

#: Verdict on a claim -> its sign.
VERDICTS = {"held": "✓", "not held": "✗", "not comparable": "…", "not measured": "–"}


@dataclass(frozen=True)
class Claim:
    """A paper's claim, and the verdict of these records.

    Args:
        statement: in a sentence, close to the paper's words.
        source: paper and place: 'arXiv:2205.10683, abstract'.
        verdict: one of `VERDICTS`; 'not measured' without records to judge by, 'not comparable' if they are of another
            size, or if a backend of the claim gave no number.
        finding: the reason, in a sentence or two: numbers, n, simulated or measured, on which device.
        files: of the records that it is judged by.
    """

    statement: str
    source: str
    verdict: str
    finding: str
    files: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"expected a verdict, one of {', '.join(VERDICTS)}, got {self.verdict!r}")


def _no_claims(records: Sequence[Record], frame: pd.DataFrame) -> Sequence[Claim]:
    return ()


def _no_finding(frame: pd.DataFrame) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    """How to make one kind of figure.

    Args:
        doc: one line; the heading on the page.
        kinds: the kinds of trial that it uses.
        cell: a key of a record; records with the same key add to the same number.
        facets: field of the trial -> the kinds it applies to; there is a figure for each of its values.
        table: from records to numbers.
        text: from numbers to words, for people.
        caption: from records and numbers to the caption.
        plot: draws them; None for a table alone.
        applies: whether such records make this figure at all.
        finding: one sentence with the main numbers; '' if there are none.
        claims: of papers, judged by these records and numbers.
        with_causes: whether to list the reasons of failed trials below; not if another figure lists them.
        place: its position on a page: the lowest comes first.
    """

    doc: str
    kinds: tuple[str, ...]
    cell: Callable[[Record], Hashable]
    facets: Mapping[str, tuple[str, ...]]
    table: Callable[[Sequence[Record], LeftOut], pd.DataFrame]
    text: Callable[[pd.DataFrame], pd.DataFrame]
    caption: Callable[[Sequence[Record], pd.DataFrame, LeftOut], str]
    plot: Callable[[pd.DataFrame, str], Figure] | None
    applies: Callable[[Sequence[Record]], bool] = lambda records: True
    finding: Callable[[pd.DataFrame], str] = _no_finding
    claims: Callable[[Sequence[Record], pd.DataFrame], Sequence[Claim]] = _no_claims
    with_causes: bool = True
    place: int = 1000


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
        claims: of papers.
        causes: lines of Markdown, why trials failed.
        figure: the picture; None for a table alone.
        files: suffix -> path below the report's folder.
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
    claims: Sequence[Claim] = ()
    causes: Sequence[str] = ()
    figure: Figure | None = None
    files: Mapping[str, str] = field(default_factory=dict)
