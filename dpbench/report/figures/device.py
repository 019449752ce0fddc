"""The device's best performance: bandwidth, rates of matrix products, latencies, versions."""

from __future__ import annotations

from dpbench.report.figures import evidence

FIGURE = evidence.table_of(
    "device",
    "what the device can do at best: bandwidth, rates of matrix products, latencies, versions",
    table=evidence.device_table,
    text=evidence.device_text,
    caption=evidence.device_caption,
    place=260,
)
