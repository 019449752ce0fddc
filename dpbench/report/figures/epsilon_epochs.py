"""Ε against epochs for the accountants (Figure 2 of Abadi et al. 2016)."""

from __future__ import annotations

from dpbench.report import captions, findings, readable
from dpbench.report.data import tables
from dpbench.report.drawing import privacy_plots
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="ε against epochs for the accountants (Figure 2 of Abadi et al. 2016)",
    kinds=("epsilon",),
    cell=lambda r: (r.trial["accountant"], r.trial["steps"]),
    facets=dict.fromkeys(("experiment", "sample_rate", "noise_multiplier", "delta"), ("epsilon",)),
    table=tables.epsilon,
    text=readable.epsilon,
    caption=captions.epsilon,
    plot=privacy_plots.epochs,
    finding=findings.epsilon,
    place=40,
)
