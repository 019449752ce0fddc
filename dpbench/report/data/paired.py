"""Splits overhead records into one backend each, with ratios taken within rounds of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import median

from dpbench.records.reader import Record, entries
from dpbench.report.data.peaks import utilisation
from dpbench.report.data.statistics import Row, exactness, good_rounds, peaks_by_round, spread, why

__all__ = ["COLUMNS", "entries", "paired_row", "turns"]

#: Columns of every table of overhead records, from the number of pairs on.
COLUMNS = (
    *("paired_rounds", "step_seconds", "step_seconds_low", "step_seconds_high"),
    *("time_ratio", "time_ratio_low", "time_ratio_high", "published_time_ratio"),
    *("peak_bytes", "memory", "memory_ratio", "published_memory_ratio"),
    *("max_norm_error", "max_grad_error", "tolerance", "ghost", "instantiated", "fallback", "note"),
    "model_flops_utilisation",
)


def turns(records: Iterable[Record]) -> dict[tuple[tuple[int, str], int], float]:
    """((round of the run, node), round within the trial) -> the median step of that turn, in seconds."""
    return {(r.place, turn["round"]): median(turn["step_seconds"]) for r in records for turn in r.result["turns"]}


def paired_row(group: Sequence[Record], base: Sequence[Record]) -> Row:
    """The numbers of one backend and their ratios to ordinary training in the same cell.

    A time ratio compares two turns of one round on one node; all rounds give the median and range. A memory ratio needs
    two peaks from the same source. An engine of another framework is compared with its own plain step, whose seconds
    are ``plain_step_seconds``.

    Args:
        group: entries of the backend.
        base: entries of ordinary training.
    """
    good = good_rounds(group)
    own = [dataclasses.replace(r, result=r.result["plain"]) for r in good if "plain" in r.result]
    base = own or good_rounds(base)
    if not good:
        return {"paired_rounds": 0, "note": why([r for r in group if r.outcome != "ok"], at_batch=False)}
    seconds, base_seconds = turns(good), turns(base)
    ratios = [seconds[at] / base_seconds[at] for at in sorted(seconds.keys() & base_seconds.keys())]
    peaks, base_peaks = peaks_by_round(good), peaks_by_round(base)
    memory_ratios = [peaks[at] / base_peaks[at] for at in peaks.keys() & base_peaks.keys()]
    row: Row = {"paired_rounds": len(ratios)}
    row["model_flops_utilisation"] = utilisation(good, median(seconds.values()))
    if own:
        row["plain_step_seconds"] = median(base_seconds.values())
    row |= spread("step_seconds", seconds.values()) | spread("time_ratio", ratios)
    if peaks:
        row |= {"memory": next(iter(peaks))[1], "peak_bytes": round(median(peaks.values()))}
    if memory_ratios:
        row["memory_ratio"] = median(memory_ratios)
    return row | exactness(good)
