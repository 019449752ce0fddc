"""Statistics of a cell's records that several tables use: rounds, medians, and reasons for missing numbers.

Functions take:
    good: successful records of one cell.
    group, base: entries of a backend, and of ordinary training in the same cell.
"""

import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import pandas as pd

from dpbench.records.reader import LeftOut, Record, newest, newest_version, turns_of
from dpbench.report import style
from dpbench.trials.outcome import DOES_NOT_FIT

Row = dict[str, Any]


def is_probe(record: Record) -> bool:
    """True if the record tells whether a batch fits in a memory budget."""
    return record.kind in ("peak", "step") and record.trial.get("memory_budget") is not None


def did_not_fit(record: Record) -> bool:
    """True for a probe beyond its budget, which is a search's result and no failure."""
    return is_probe(record) and record.outcome in DOES_NOT_FIT


def failed(record: Record) -> bool:
    """True if a record has no number that it should have."""
    return record.outcome != "ok" and not did_not_fit(record)


def batch(record: Record) -> int:
    """The batch size B."""
    return int(record.trial["batch_size"])


def good_rounds(records: Sequence[Record]) -> list[Record]:
    """The valid rounds: none if any was a mismatch, since a backend that is wrong once is wrong."""
    wrong = any(r.outcome == "mismatch" for r in records)
    return [] if wrong else [r for r in records if r.outcome == "ok"]


def peaks_by_round(records: Iterable[Record]) -> dict[tuple[tuple[int, str], str], int]:
    """((round, node), source) -> peak bytes."""
    memories = {r.place: r.result["memory"] for r in records if r.result.get("memory")}
    return {(place, memory["source"]): memory["peak_bytes"] for place, memory in memories.items()}


def spread(name: str, values: Collection[float]) -> Row:
    """The median of the rounds and their range."""
    return {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)} if values else {}


def exactness(good: Sequence[Record]) -> Row:
    """The largest errors of all rounds against the oracle, and the shares of the parameters by route."""
    checks = [r.result["verification"] for r in good if r.result.get("verification")]
    row: Row = {
        name: max((float(check[name]) for check in checks if check.get(name) is not None), default=None)
        for name in ("max_norm_error", "max_grad_error", "tolerance")
    }
    coverage = (good[-1].result.get("coverage") or {}) if good else {}
    return row | {name: coverage.get(name) for name in ("ghost", "instantiated", "fallback")}


def why(failures: Sequence[Record], at_batch: bool = True) -> str | None:
    """A few words on why there is no number; a mismatch comes first, then the latest in `OUTCOMES`.

    Args:
        failures: records of one cell.
        at_batch: whether to give the batch size.
    """
    if not failures:
        return None
    rank = {name: index for index, name in enumerate(style.OUTCOMES)} | {"mismatch": len(style.OUTCOMES)}
    worst = max(failures, key=lambda r: (rank.get(r.outcome, 0), -r.trial.get("batch_size", 0)))
    word = style.outcome(worst.outcome)
    return f"{word} at B={batch(worst)}" if at_batch and worst.outcome not in ("unsupported", "mismatch") else word


#: The setting of a training, apart from its seed.
TRAINING = ["data", "network", "clip", "backend", "target_epsilon"]


def trained(record: Record) -> dict[str, Any] | None:
    """The setting of a training (`TRAINING`); ordinary training is one backend and clips nothing. None if it failed."""
    if "accuracy" not in record.result:
        return None
    named = {name: record.trial[name] for name in TRAINING}
    return named if named["target_epsilon"] is not None else named | {"clip": "none", "backend": "ordinary"}


def test_losses(record: Record) -> list[float]:
    """A training's test loss after each epoch; a record has "inf" or "nan" as text."""
    return [float(loss) for loss in record.result["test_losses"]]


def over_seeds(
    rows: Sequence[Mapping[str, Any]],
    same: Sequence[str],
    value: str,
    medians: Sequence[str] = (),
    most: Sequence[str] = (),
) -> pd.DataFrame:
    """A row for each setting: the number of seeds, median, least and greatest value, and other columns.

    Args:
        same: columns that define a setting.
        medians, most: other numeric columns, of which the median or the greatest counts.
    """
    of = {"seeds": (value, "size"), value: (value, "median"), "least": (value, "min"), "greatest": (value, "max")}
    of |= {name: (name, "median") for name in medians} | {name: (name, "max") for name in most}
    if not rows:
        return pd.DataFrame(columns=[*same, *of])
    frame = pd.DataFrame(rows).astype(dict.fromkeys((*medians, *most), float))
    return frame.groupby([*same], dropna=False).agg(**of).reset_index()


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Make a frame that keeps integers as integers beside empty cells."""
    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
    whole = {"budget_bytes", "max_batch_size", "fails_at", "peak_bytes", "batch_size", "rounds", "paired_rounds"}
    whole |= {"foretold_max_batch_size"}
    return frame.astype({column: "Int64" for column in columns if column in whole})


def in_order(frame: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Sort by these columns: models and backends in their own orders, numbers by size."""
    keys: dict[Any, Any] = {"model": style.model_key, "backend": style.backend_key}
    key = lambda column: column.map(keys[column.name]) if column.name in keys else column  # noqa: E731
    return frame.sort_values(list(by), key=key, na_position="first", ignore_index=True)


def kept(records: Sequence[Record], cell: Callable[[Record], Hashable], left_out: LeftOut) -> list[Record]:
    """The records of a figure: the newest of each trial and round, of the newest version of each cell."""
    return newest_version(newest(records, left_out), cell, left_out)


def facets(
    records: Sequence[Record], fields: Mapping[str, Sequence[str]]
) -> Iterator[tuple[dict[str, Any], list[Record]]]:
    """Split records so that each part has one value of every field: (the part's distinguishing values, its records).

    A record of a kind to which a field does not apply, or with None in that field, belongs to every part. Only fields
    with several values appear in the dict.

    Args:
        fields: field -> kinds of trial to which it applies.
    """
    settings = [tuple(r.setting(f) if r.kind in kinds else None for f, kinds in fields.items()) for r in records]
    distinct = set(settings)
    columns = [{setting[place] for setting in distinct} - {None} for place in range(len(fields))]
    values = [sorted(found, key=lambda value: (str(type(value)), value)) or [None] for found in columns]
    parts: dict[frozenset[Any], dict[str, Any]] = {}
    for chosen in itertools.product(*values):
        part = frozenset(s for s in distinct if all(own in (None, one) for own, one in zip(s, chosen, strict=True)))
        if part and not any(part < other for other in parts):
            parts = {other: label for other, label in parts.items() if not other < part}
            named = zip(fields, chosen, values, strict=True)
            parts.setdefault(part, {field: one for field, one, several in named if len(several) > 1})
    for part, label in parts.items():
        yield label, [record for record, setting in zip(records, settings, strict=True) if setting in part]


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
    """Ordinary training's operations in a step over the device's peak in that time; None if one is not known."""
    flops, peak = (records[0].result.get("model_flops"), _peak(records[0])) if records else (None, None)
    return flops / seconds / peak[0] if flops and peak else None


def utilisation_said(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    """A sentence that explains the utilisation; [] without any."""
    found = sorted({peak[1] for record in records if (peak := _peak(record))})
    if not frame.model_flops_utilisation.notna().any():
        return []
    return [
        "MFU: operations of ordinary training's forward and backward pass (torch's counter), over the device's dense "
        f"peak in this precision in the time of a step ({'; '.join(found)})."
    ]


#: Columns of every table of overhead records, from the number of pairs on.
PAIRED_COLUMNS = (
    *("paired_rounds", "step_seconds", "step_seconds_low", "step_seconds_high"),
    *("time_ratio", "time_ratio_low", "time_ratio_high", "published_time_ratio"),
    *("peak_bytes", "memory", "memory_ratio", "published_memory_ratio"),
    *("max_norm_error", "max_grad_error", "tolerance", "ghost", "instantiated", "fallback", "note"),
    "model_flops_utilisation",
)


def turns(records: Iterable[Record]) -> dict[tuple[tuple[int, str], int], float]:
    """((round of the run, node), round within the trial) -> the median step of that turn, in seconds."""
    return {at: median(seconds) for r in records for at, seconds in turns_of(r, r.result).items()}


def paired_row(group: Sequence[Record], base: Sequence[Record]) -> Row:
    """The numbers of one backend and their ratios to ordinary training in the same cell.

    A time ratio compares two turns of one round on one node; all rounds give the median and range. A memory ratio needs
    two peaks from the same source. An engine of another framework is compared with its own plain step, whose seconds
    are ``plain_step_seconds``.
    """
    good = good_rounds(group)
    own = [msgspec.structs.replace(r, result=r.result["plain"]) for r in good if "plain" in r.result]
    base = own or good_rounds(base)
    if not good:
        return {"paired_rounds": 0, "note": why([r for r in group if r.outcome != "ok"], at_batch=False)}
    seconds, base_seconds = turns(good), turns(base)
    ratios = [seconds[at] / base_seconds[at] for at in sorted(seconds.keys() & base_seconds.keys())]
    peaks, base_peaks = peaks_by_round(good), peaks_by_round(base)
    memory_ratios = [peaks[at] / base_peaks[at] for at in peaks.keys() & base_peaks.keys()]
    row: Row = {"paired_rounds": len(ratios)}
    row["model_flops_utilisation"] = utilisation(good, median(seconds.values()))
    if good[0].kind == "step":
        row["rounds"] = len(seconds)
    if own:
        row["plain_step_seconds"] = median(base_seconds.values())
    row |= spread("step_seconds", seconds.values()) | spread("time_ratio", ratios)
    if peaks:
        row |= {"memory": next(iter(peaks))[1], "peak_bytes": round(median(peaks.values()))}
    if memory_ratios:
        row["memory_ratio"] = median(memory_ratios)
    return row | exactness(good)
