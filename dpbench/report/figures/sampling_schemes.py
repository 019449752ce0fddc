"""Ε of each sampling scheme and adjacency, at equal records, batch size, noise and epochs."""

from __future__ import annotations

from dpbench.report import findings, privacy
from dpbench.report.drawing import scheme_plot
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="ε of each sampling scheme and adjacency, at equal records, batch size, noise and epochs",
    kinds=("epsilon_scheme",),
    cell=lambda r: r.id,
    facets=dict.fromkeys(("experiment", "sample_rate", "steps", "delta"), ("epsilon_scheme",)),
    table=privacy.schemes,
    text=privacy.schemes_text,
    caption=privacy.schemes_caption,
    plot=scheme_plot.plot,
    finding=findings.schemes,
    place=60,
)
