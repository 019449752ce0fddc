"""Ε of the best of several runs, beside that of one."""

from __future__ import annotations

from dpbench.report import findings, privacy
from dpbench.report.drawing import privacy_plots
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="ε of the best of several runs, beside that of one",
    kinds=("epsilon_tuned",),
    cell=lambda r: r.id,
    facets=dict.fromkeys(("experiment", "sample_rate", "steps", "delta"), ("epsilon_tuned",)),
    table=privacy.tuned,
    text=privacy.tuned_text,
    caption=privacy.tuned_caption,
    plot=privacy_plots.tuned,
    finding=findings.tuned,
    place=65,
)
