"""Computes model FLOPs utilisation, the used share of a device's peak (arXiv:2204.02311, appendix B)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from dpbench.records.reader import Record

_FORMATS = {"float32": 0, "tf32": 1, "bfloat16": 2, "bfloat16-autocast": 2}
#: part of a device's name -> dense teraflop/s in float32 (no tensor cores), TF32 and bfloat16, and their source; the
#: first match counts. Other cards, and CPUs, which have no published peak, have no utilisation.
PEAKS: dict[str, tuple[tuple[float, float, float], str]] = {
    r"H200(?! NVL)": ((67.0, 494.5, 989.5), "NVIDIA H200 datasheet, 2024; half of what it states with sparsity"),
    r"H100 PCIe": ((51.2, 378.0, 756.0), "NVIDIA H100 Tensor Core GPU Architecture, v1.04, table 2"),
    r"H100.* HBM3": ((66.9, 494.7, 989.4), "NVIDIA H100 Tensor Core GPU Architecture, v1.04, table 2"),
    r"A100": ((19.5, 156.0, 312.0), "NVIDIA A100 Tensor Core GPU Architecture, v1.0, table 4"),
}


def _peak(record: Record) -> tuple[float, str] | None:
    """(operations a second, source) of the record's device in its precision."""
    for name, (rates, source) in PEAKS.items():
        place = _FORMATS.get(record.trial.get("precision", ""))
        if place is not None and re.search(name, record.device):
            return rates[place] * 1e12, source
    return None


def utilisation(records: Sequence[Record], seconds: float) -> float | None:
    """Ordinary training's operations in a step over the device's peak in that time; None if one is not known.

    Args:
        records: successful ones of one cell.
        seconds: of a step.
    """
    flops, peak = (records[0].result.get("model_flops"), _peak(records[0])) if records else (None, None)
    return flops / seconds / peak[0] if flops and peak else None


def said(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    """A sentence that explains the utilisation; [] without any.

    Args:
        frame: with a column of utilisations.
    """
    found = sorted({peak[1] for record in records if (peak := _peak(record))})
    if not frame.model_flops_utilisation.notna().any():
        return []
    return [
        "MFU: operations of ordinary training's forward and backward pass (torch's counter), over the device's dense "
        f"peak in this precision in the time of a step ({'; '.join(found)})."
    ]
