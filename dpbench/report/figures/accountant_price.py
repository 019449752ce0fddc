"""The steps that each accountant allows, and the noise that it requires, at a target ε."""

from __future__ import annotations

from dpbench.report import findings, privacy
from dpbench.report.drawing import privacy_plots
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="the steps that each accountant allows, and the noise that it asks for, at a target ε",
    kinds=("calibration",),
    cell=lambda r: r.id,
    facets=dict.fromkeys(("experiment", "sample_rate", "delta"), ("calibration",)),
    table=privacy.prices,
    text=privacy.prices_text,
    caption=privacy.prices_caption,
    plot=privacy_plots.prices,
    finding=findings.prices,
    place=70,
)
