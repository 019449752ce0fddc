"""Turns records into tables: one row a cell, in base units (seconds, bytes, images/s), empty without a number.

Every cell that was tried has a row; a note explains a missing number. Statistics: the median of a round's steps, then
the median and range of the rounds; ratios are taken within each round first, so that drift cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import pandas as pd

from dpbench.report import style
from dpbench.report.data import published
from dpbench.report.data.foretold import as_peaks, joined
from dpbench.report.data.paired import entries, paired_row, turns
from dpbench.report.data.peaks import utilisation
from dpbench.report.data.select import LeftOut, Record, grouped, newest_trial
from dpbench.report.data.statistics import (
    Row,
    batch,
    count_failures,
    exactness,
    frame_of,
    good_rounds,
    in_order,
    is_probe,
    peaks_by_round,
    seconds_by_round,
    spread,
    why,
)
from dpbench.trials.outcome import DOES_NOT_FIT

Cell = tuple[str, str]
# The paper's figure is for 16 GB: any budget from 16e9 bytes to 16 GiB matches.
_PAPER_BUDGET = range(16_000_000_000, 16 * 2**30 + 1)

MAX_BATCH_THROUGHPUT = (
    *("model", "backend", "memory", "budget_bytes", "max_batch_size", "fails_at", "max_batch_note", "peak_bytes"),
    *("foretold_max_batch_size", "foretold_peak_error"),
    *("published_max_batch_size", "batch_size", "images_per_second", "images_per_second_low"),
    *("images_per_second_high", "rounds", "throughput_note", "published_images_per_second"),
    *("time_ratio", "time_ratio_low", "time_ratio_high"),
    *("max_norm_error", "max_grad_error", "ghost", "instantiated", "fallback", "model_flops_utilisation"),
)
_SIZES = MAX_BATCH_THROUGHPUT.index("batch_size")  # columns of the largest batch, including the first two
MEMORY_SPEED = (
    *("model", "batch_size", "backend", "rounds", "step_seconds", "step_seconds_low", "step_seconds_high"),
    *("time_ratio", "time_ratio_low", "time_ratio_high", "paired_rounds", "published_time_ratio"),
    *("peak_bytes", "memory", "memory_ratio", "published_memory_ratio"),
    *("max_norm_error", "max_grad_error", "tolerance", "ghost", "instantiated", "fallback", "note"),
)
EPSILON = (
    *("accountant", "kind", "sample_rate", "noise_multiplier", "delta", "steps", "epochs", "epsilon"),
    *("compute_seconds", "note"),
)


def max_batch_applies(records: Sequence[Record]) -> bool:
    """True if there is a timed step, or a probe of a search."""
    return any(r.kind == "step" or r.trial.get("memory_budget") is not None for r in records)


def max_batch_cell(record: Record) -> tuple[object, ...]:
    """The key of records that add to the same number: all interleaved backends, or one backend."""
    if record.kind == "overhead":
        return record.kind, record.trial["model"]
    return record.kind, *record.cell, record.trial.get("simulated")


def max_batch_throughput(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """Figure 3 of arXiv:2205.10683: the largest batch in the memory budget, and images per second.

    Args:
        records: `peak`, `step` and `overhead` records of one device and one setting (so of one memory budget at most).

    Returns:
        A row for each (model, backend, memory), where `memory` is 'simulated', 'measured', 'confirmed' (predicted, and
        confirmed by real steps), or empty without a search. `foretold_peak_error`: predicted / measured - 1. A time
        ratio is to ordinary training in the same process, if they were interleaved.
    """
    records = as_peaks(entries(records))
    models = {r.trial["model"] for r in records if is_probe(r)}
    if models:  # steps of other models belong to another figure
        others = [r for r in records if r.trial["model"] not in models]
        left_out["of a model without a search"] += len(others)
        records = [r for r in records if r.trial["model"] in models]
    wrong = {r.cell for r in records if r.outcome == "mismatch"}
    searched = {r.cell for r in records if r.kind == "peak"}
    # A search's own probes decide; a timed step shows that its batch fits only if there was no search.
    probes = grouped(
        (r for r in records if is_probe(r) and (r.kind == "peak" or r.cell not in searched)),
        lambda r: (r.cell, bool(r.trial.get("simulated"))),
    )
    found = [_max_batch(cell, group, simulated, cell in wrong) for (cell, simulated), group in probes.items()]
    sizes = joined(found, probes.values())
    steps = grouped((r for r in records if r.kind in ("step", "overhead")), lambda r: r.cell)
    speeds = [
        _throughput(cell, group, steps.get((cell[0], "nonprivate"), []), left_out) for cell, group in steps.items()
    ]
    count_failures(records, left_out)
    keys = ["model", "backend"]
    frame = frame_of(sizes, MAX_BATCH_THROUGHPUT[:_SIZES]).merge(
        frame_of(speeds, (*keys, *MAX_BATCH_THROUGHPUT[_SIZES:])), on=keys, how="outer"
    )
    return in_order(frame, "model", "backend", "memory")


def _max_batch(cell: Cell, probes: list[Record], simulated: bool, wrong: bool) -> Row:
    """The search's result: the largest batch that fits below the smallest one that does not."""
    budget = probes[0].trial["memory_budget"]
    row: Row = {"model": cell[0], "backend": cell[1], "budget_bytes": budget}
    row["memory"] = "simulated" if simulated else "measured"
    if budget in _PAPER_BUDGET and probes[0].trial.get("image_size") == 32:
        row["published_max_batch_size"] = published.value("Figure 3", "max_batch_size_16GB", *cell)
    if wrong:  # wrong elsewhere in these records: its memory is not that of a clipped gradient
        return row | {"max_batch_note": style.OUTCOMES["mismatch"]}
    too_large = [r for r in probes if r.outcome in DOES_NOT_FIT]
    fails_at = min((batch(r) for r in too_large), default=math.inf)
    fits = [r for r in probes if r.outcome == "ok" and batch(r) < fails_at]
    failures = [r for r in probes if r.outcome not in ("ok", *DOES_NOT_FIT)]
    if too_large:
        row["fails_at"] = fails_at
    if not fits:
        return row | {"max_batch_note": why(failures or [r for r in too_large if batch(r) == fails_at])}
    best = max(fits, key=batch)
    size = batch(best)
    row |= {"max_batch_size": size, "peak_bytes": best.result["memory"]["peak_bytes"]}
    if failures:
        row["max_batch_note"] = f"search ended: {why(failures)}"
    elif not too_large:
        row["max_batch_note"] = "not limited by memory up to there"
    elif fails_at - size > max(1, 0.02 * size):
        row["max_batch_note"] = f"search unfinished: {fails_at} does not fit"
    return row


def _throughput(cell: Cell, steps: list[Record], ordinary: list[Record], left_out: LeftOut) -> Row:
    """Images per second at the largest timed batch, and the ratio to ordinary training if interleaved."""
    row: Row = {"model": cell[0], "backend": cell[1], "rounds": 0}
    good = good_rounds(steps)
    if not good:
        return row | {"throughput_note": why([r for r in steps if r.outcome != "ok"])}
    latest = max(good, key=lambda r: r.utc).kind  # alone or interleaved, as timed last
    size = max(batch(r) for r in good if r.kind == latest)
    good = newest_trial([r for r in good if batch(r) == size], left_out)
    if good[0].trial["device"] == "cuda" and good[0].trial.get("image_size") == 32:
        row["published_images_per_second"] = published.value("Figure 3", "max_throughput", *cell)
    if latest == "overhead":
        paired = paired_row(good, [r for r in ordinary if r.id == good[0].id])
        row |= {name: paired.get(name) for name in ("time_ratio", "time_ratio_low", "time_ratio_high")}
        rates = [size / seconds for seconds in turns(good).values()]
    else:
        rates = [size / seconds for seconds in seconds_by_round(good).values()]
    exact = {name: value for name, value in exactness(good).items() if name != "tolerance"}
    row["model_flops_utilisation"] = utilisation(good, size / median(rates))
    return row | {"batch_size": size, "rounds": len(rates)} | spread("images_per_second", rates) | exact


def memory_speed(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """Table 4 of arXiv:2205.10683: time and memory of a step, and ratios to ordinary training in the same round.

    Args:
        records: `step` records of one device and one setting.

    Returns:
        A row for each (model, batch size, backend).
    """
    cells = {
        key: newest_trial(group, left_out)
        for key, group in grouped(
            (r for r in records if r.kind == "step"), lambda r: (r.trial["model"], batch(r), r.trial["backend"])
        ).items()
    }
    count_failures([record for group in cells.values() for record in group], left_out)
    rows = [
        dict(zip(("model", "batch_size", "backend"), key, strict=True))
        | _step_row(group, good_rounds(cells.get((*key[:2], "nonprivate"), [])))
        for key, group in cells.items()
    ]
    return in_order(frame_of(rows, MEMORY_SPEED), "model", "batch_size", "backend")


def _step_row(group: list[Record], base: list[Record]) -> Row:
    good = good_rounds(group)
    if not good:
        return {"rounds": 0, "paired_rounds": 0, "note": why([r for r in group if r.outcome != "ok"], at_batch=False)}
    seconds, base_seconds = seconds_by_round(good), seconds_by_round(base)
    peaks, base_peaks = peaks_by_round(good), peaks_by_round(base)
    ratios = [seconds[r] / base_seconds[r] for r in seconds.keys() & base_seconds.keys()]
    # A ratio needs two peaks from the same source.
    memory_ratios = [peaks[r] / base_peaks[r] for r in peaks.keys() & base_peaks.keys()]
    row: Row = {"rounds": len(seconds), "paired_rounds": len(ratios)}
    row |= spread("step_seconds", seconds.values()) | spread("time_ratio", ratios)
    if peaks:
        row |= {"memory": next(iter(peaks))[1], "peak_bytes": median(peaks.values())}
    if memory_ratios:
        row["memory_ratio"] = median(memory_ratios)
    trial = good[0].trial
    if trial.get("image_size") == 32 and trial["precision"] == "float32":
        row["published_time_ratio"] = published.ratio("time_per_epoch", *good[0].cell)
        row["published_memory_ratio"] = published.ratio("active_memory", *good[0].cell)
    return row | exactness(good)


def epsilon(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """Figure 2 of Abadi et al. 2016: ε of each accountant against epochs (steps × sample rate).

    Args:
        records: `epsilon` records of one (sample rate, noise multiplier, δ).

    Returns:
        A row for each (accountant, steps); ε may be inf, and is empty if the accountant gave none.
    """
    groups = grouped((r for r in records if r.kind == "epsilon"), lambda r: (r.trial["accountant"], r.trial["steps"]))
    rows: list[Row] = []
    for group in groups.values():
        last = max(group, key=lambda r: (r.outcome == "ok", r.utc))  # the same number in every round
        row: Row = {name: last.trial[name] for name in EPSILON if name in last.trial and name != "kind"}
        row["epochs"] = row["steps"] * row["sample_rate"]
        if last.outcome == "ok":
            row |= {"kind": last.result["kind"], "epsilon": float(last.result["epsilon"])}
            row["compute_seconds"] = last.result.get("compute_seconds")
        else:
            row["note"] = why([last], at_batch=False)
        rows.append(row)
        count_failures(group, left_out)
    order = list(style.ACCOUNTANTS)
    rows.sort(key=lambda r: (order.index(r["accountant"]) if r["accountant"] in order else len(order), r["steps"]))
    return frame_of(rows, EPSILON)
