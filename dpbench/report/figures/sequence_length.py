"""Time, memory and their growth against sequence length."""

from __future__ import annotations

from dpbench.report import findings
from dpbench.report.figures import growth, overhead
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="time, memory and their growth against the length of the sequences",
    kinds=("overhead",),
    cell=overhead.cell,
    facets=dict.fromkeys(("experiment", "precision", "threads"), ("overhead",)),
    table=growth.SEQUENCE_LENGTH.table,
    text=growth.SEQUENCE_LENGTH.text,
    caption=growth.SEQUENCE_LENGTH.caption,
    plot=growth.SEQUENCE_LENGTH.plot,
    applies=growth.SEQUENCE_LENGTH.applies,
    finding=findings.paired,
    place=120,
)
