"""Statistics of a cell's records that several tables use: rounds, medians, and reasons for missing numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from dpbench.report import style
from dpbench.report.data.select import LeftOut, Record
from dpbench.trials.outcome import DOES_NOT_FIT

Row = dict[str, Any]


def is_probe(record: Record) -> bool:
    """True if the record tells whether a batch fits in a memory budget."""
    return record.kind in ("peak", "step") and record.trial.get("memory_budget") is not None


def batch(record: Record) -> int:
    """The batch size B."""
    return int(record.trial["batch_size"])


def good_rounds(records: Sequence[Record]) -> list[Record]:
    """The valid rounds: none if any was a mismatch, since a backend that is wrong once is wrong."""
    wrong = any(r.outcome == "mismatch" for r in records)
    return [] if wrong else [r for r in records if r.outcome == "ok"]


def seconds_by_round(records: Iterable[Record]) -> dict[tuple[int, str], float]:
    """(round, node) -> the median of its timed steps, in seconds."""
    return {r.place: median(r.result["step_seconds"]) for r in records}


def peaks_by_round(records: Iterable[Record]) -> dict[tuple[tuple[int, str], str], int]:
    """((round, node), source) -> peak bytes."""
    memories = {r.place: r.result["memory"] for r in records if r.result.get("memory")}
    return {(place, memory["source"]): memory["peak_bytes"] for place, memory in memories.items()}


def spread(name: str, values: Collection[float]) -> Row:
    """The median of the rounds and their range.

    Args:
        name: of the number.
        values: one a round.
    """
    return {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)} if values else {}


def exactness(good: Sequence[Record]) -> Row:
    """The largest errors of all rounds against the oracle, and the shares of the parameters by route.

    Args:
        good: successful rounds.
    """
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
    word = style.OUTCOMES.get(worst.outcome, worst.outcome)
    return f"{word} at B={batch(worst)}" if at_batch and worst.outcome not in ("unsupported", "mismatch") else word


def count_failures(records: Iterable[Record], left_out: LeftOut) -> None:
    """Count cells with a mark in place of a number. A probe that does not fit is a result, not a failure."""
    for record in records:
        if record.outcome != "ok" and not (is_probe(record) and record.outcome in DOES_NOT_FIT):
            left_out[style.OUTCOMES.get(record.outcome, record.outcome)] += 1


#: The setting of a training, apart from its seed.
TRAINING = ["data", "network", "clip", "backend", "target_epsilon"]


def trained(record: Record) -> dict[str, Any] | None:
    """The setting of a training (`TRAINING`); ordinary training is one backend and clips nothing. None if it failed."""
    if "accuracy" not in record.result:
        return None
    named = {name: record.trial[name] for name in TRAINING}
    return named if named["target_epsilon"] is not None else named | {"clip": "none", "backend": "ordinary"}


def over_seeds(
    rows: Sequence[Mapping[str, Any]],
    same: Sequence[str],
    value: str,
    medians: Sequence[str] = (),
    most: Sequence[str] = (),
) -> pd.DataFrame:
    """A row for each setting: the number of seeds, median, least and greatest value, and other columns.

    Args:
        rows: of a seed each.
        same: columns that define a setting.
        value: the main column.
        medians, most: other numeric columns, of which the median or the greatest counts.
    """
    of = {"seeds": (value, "size"), value: (value, "median"), "least": (value, "min"), "greatest": (value, "max")}
    of |= {name: (name, "median") for name in medians} | {name: (name, "max") for name in most}
    if not rows:
        return pd.DataFrame(columns=[*same, *of])
    frame = pd.DataFrame(rows).astype(dict.fromkeys((*medians, *most), float))
    return frame.groupby([*same], dropna=False).agg(**of).reset_index()


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Make a frame that keeps integers as integers beside empty cells.

    Args:
        rows: column -> value each.
        columns: in their order.
    """
    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
    whole = {"budget_bytes", "max_batch_size", "fails_at", "peak_bytes", "batch_size", "rounds", "paired_rounds"}
    whole |= {"foretold_max_batch_size"}
    return frame.astype({column: "Int64" for column in columns if column in whole})


def in_order(frame: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Sort by these columns: models and backends in their own orders, numbers by size.

    Args:
        by: names of columns.
    """
    keys = {"model": style.model_key, "backend": style.backend_key}
    order = sorted(frame.index, key=lambda i: [_sortable(keys, column, frame.at[i, column]) for column in by])
    return frame.loc[order].reset_index(drop=True)


def _sortable(keys: Mapping[str, Any], column: str, value: Any) -> Any:
    return keys[column](value) if column in keys else ("" if pd.isna(value) else value)
