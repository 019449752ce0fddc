"""Time, memory and their growth against image size."""

from __future__ import annotations

from dpbench.report import findings
from dpbench.report.figures import growth, overhead
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="time, memory and their growth against the size of the images",
    kinds=("overhead",),
    cell=overhead.cell,
    facets=dict.fromkeys(("experiment", "precision", "threads"), ("overhead",)),
    table=growth.RESOLUTION.table,
    text=growth.RESOLUTION.text,
    caption=growth.RESOLUTION.caption,
    plot=growth.RESOLUTION.plot,
    applies=growth.RESOLUTION.applies,
    finding=findings.paired,
    place=110,
)
