"""The parts of a private step: time, launches and waits of each, against the plain step."""

from __future__ import annotations

from dpbench.report.figures import evidence

FIGURE = evidence.table_of(
    "parts",
    "a private step taken apart: time, launches and waits of each part, beside the plain step",
    table=evidence.parts_table,
    text=evidence.parts_text,
    caption=evidence.parts_caption,
    place=280,
)
