"""Throughput, and time and memory relative to ordinary training, against batch size."""

from __future__ import annotations

from dpbench.report import findings
from dpbench.report.figures import growth, overhead
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="throughput, and time and memory beside ordinary training, against the batch size",
    kinds=("overhead",),
    cell=overhead.cell,
    facets=dict.fromkeys(("experiment", "precision", "threads", "image_size"), ("overhead",)),
    table=growth.THROUGHPUT.table,
    text=growth.THROUGHPUT.text,
    caption=growth.THROUGHPUT.caption,
    plot=growth.THROUGHPUT.plot,
    applies=growth.THROUGHPUT.applies,
    finding=findings.paired,
    place=130,
)
