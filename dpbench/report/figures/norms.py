"""Every way to compute a per-sample norm against float64, by precision."""

from __future__ import annotations

from dpbench.report.figures import evidence

FIGURE = evidence.table_of(
    "norms",
    "every way to a per-sample norm beside float64, by precision",
    table=evidence.norms_table,
    text=evidence.norms_text,
    caption=evidence.norms_caption,
    finding=evidence.norms_finding,
    place=270,
)
