"""A table of reasons why a backend is not exact on a popular model, or why the model does not build."""

from __future__ import annotations

from dpbench.report import captions
from dpbench.report.figures import coverage
from dpbench.report.parts import FigureKind

FIGURE = FigureKind(
    doc="why a backend is not exact on a model that people load, or the model is not built",
    kinds=("coverage",),
    cell=captions.libraries,
    facets={"experiment": ("coverage",)},
    table=coverage.reasons,
    text=coverage.reasons_text,
    caption=coverage.reasons_caption,
    plot=None,
    with_causes=False,
    place=190,
)
