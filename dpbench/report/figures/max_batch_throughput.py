"""Maximum batch size in a memory budget, and throughput (Figure 3 of arXiv:2205.10683)."""

from __future__ import annotations

from dpbench.report import captions, findings, readable
from dpbench.report.data import tables
from dpbench.report.drawing import model_plots
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="maximum batch size in a memory budget, and throughput (Figure 3 of arXiv:2205.10683)",
    kinds=("peak", "largest", "confirm", "step", "overhead"),
    cell=tables.max_batch_cell,
    facets={
        **dict.fromkeys(
            ("experiment", "precision", "image_size", "memory_budget"),
            ("peak", "largest", "confirm", "step", "overhead"),
        ),
        "threads": ("step", "overhead"),
    },
    table=tables.max_batch_throughput,
    text=readable.max_batch_throughput,
    caption=captions.max_batch_throughput,
    plot=model_plots.max_batch_throughput,
    applies=tables.max_batch_applies,
    finding=findings.max_batch,
    place=10,
)
