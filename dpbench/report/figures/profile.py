"""The largest operations of a step, by backend."""

from __future__ import annotations

from dpbench.report.figures import evidence

FIGURE = evidence.table_of(
    "profile",
    "where the time of a step goes: its largest operations, by backend",
    table=evidence.profile_table,
    text=evidence.profile_text,
    caption=evidence.profile_caption,
    place=290,
)
