"""Time and memory relative to ordinary training (Table 4 of arXiv:2205.10683)."""

from __future__ import annotations

from dpbench.report import captions, findings, readable
from dpbench.report.data import tables
from dpbench.report.drawing import model_plots
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="time and memory beside ordinary training (Table 4 of arXiv:2205.10683)",
    kinds=("step",),
    cell=lambda r: (*r.cell, r.trial["batch_size"]),
    facets=dict.fromkeys(("experiment", "precision", "image_size", "memory_budget", "threads"), ("step",)),
    table=tables.memory_speed,
    text=readable.memory_speed,
    caption=captions.memory_speed,
    plot=model_plots.memory_speed,
    finding=findings.paired,
    place=20,
)
