"""Ε along σ, q and δ by each accountant, and its ratio to the certified lower bound."""

from __future__ import annotations

from dpbench.report import findings, privacy
from dpbench.report.drawing import privacy_plots
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="ε along σ, q and δ by each accountant, and how far each is from the certified lower bound",
    kinds=("epsilon_sweep",),
    cell=lambda r: r.id,
    facets={"experiment": ("epsilon_sweep",)},
    table=privacy.points,
    text=privacy.points_text,
    caption=privacy.sweeps_caption,
    plot=privacy_plots.sweeps,
    finding=findings.points,
    place=50,
)
