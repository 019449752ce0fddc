"""Tables of accountants' results: along σ, q and δ, under each sampling scheme, at a target ε, and over a grid.

One row a record, with its numbers; an accountant without a result has a row with the reason. `lower_bound` is the
certified one at the same (q, σ, T, δ), and `ratio` is ε over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from accounting.sampling import PROVED
from dpbench.report import readable, style
from dpbench.report.captions import caption
from dpbench.report.data.select import LeftOut, Record, grouped
from dpbench.report.data.statistics import Row, count_failures, frame_of

SETTING = ("sample_rate", "noise_multiplier", "steps", "delta")
POINTS = ("accountant", "kind", *SETTING, "epsilon", "lower_bound", "ratio", "compute_seconds", "note")
SCHEMES = (
    *("scheme", "adjacency", "accountant", "kind", "sampling", *SETTING, "dataset_size", "max_batch_size"),
    *("epsilon", "how", "compute_seconds", "note"),
)
PRICES = ("unknown", "target_epsilon", "accountant", "kind", "value", "ratio", "epsilon", "note")
TUNED = ("distribution", "runs", "accountant", "kind", *SETTING, "epsilon", "ratio", "compute_seconds", "note")
#: The accountant of the lower bound, and the one to compare prices with.
LOWER, BASE = "prv:lower", "moments"
ADJACENCIES = {"add_remove": "add or remove one", "zero_out": "make one zero", "replace_one": "replace one"}


def points(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """ε of each accountant at each (q, σ, T, δ)."""
    rows = [_row(record, ("accountant", *SETTING), ("epsilon", "kind", "compute_seconds")) for record in _last(records)]
    lower = {_setting(row): row["epsilon"] for row in rows if row["accountant"] == LOWER and "epsilon" in row}
    for row in rows:
        bound, own = lower.get(_setting(row)), row.get("epsilon")
        row["lower_bound"] = bound
        if bound and own is not None and math.isfinite(own):
            row["ratio"] = own / bound
    count_failures(records, left_out)
    return frame_of(sorted(rows, key=_order), POINTS)


def schemes(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """ε under each scheme, in the order of declaration (and so of the first record by label)."""
    fields = ("scheme", "adjacency", "accountant", "sampling", *SETTING, "dataset_size", "max_batch_size")
    rows = []
    for record in _last(records):
        row = _row(record, fields, ("epsilon", "kind", "compute_seconds"))
        proved = PROVED.get(row["sampling"], ())
        # old records call "zero_out" "add_remove", under which fixed batches have no bound
        if proved and row["adjacency"] not in proved:
            row["adjacency"] = proved[0]
        rows.append(row | {"how": (record.result.get("detail") or {}).get("bound")})
    count_failures(records, left_out)

    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        cap = row.get("max_batch_size")
        place = list(_SAMPLINGS).index(row["sampling"]) if row["sampling"] in _SAMPLINGS else len(_SAMPLINGS)
        return place, cap or 0, row["scheme"], row["adjacency"], *_order(row)

    return frame_of(sorted(rows, key=order), SCHEMES)


def tuned(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """ε of the best of several runs, and its ratio to that of one run by the same accountant."""
    fields = ("distribution", "runs", "accountant", *SETTING)
    rows = [_row(record, fields, ("epsilon", "kind", "compute_seconds")) for record in _last(records)]
    one = {_setting(row): row["epsilon"] for row in rows if not row["distribution"] and row.get("epsilon")}
    for row in rows:
        if (beside := one.get(_setting(row))) and row.get("epsilon"):
            row["ratio"] = row["epsilon"] / beside
    count_failures(records, left_out)
    return frame_of(sorted(rows, key=lambda r: (*_setting(r), r["distribution"], r["runs"])), TUNED)


#: From the least ε to the most, except for truncation, which may be near either end.
_SAMPLINGS = ("balls_and_bins", "poisson", "truncated_poisson", "without_replacement", "shuffled", "one_pass")


def prices(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """Each accountant's steps or noise at each target ε, and the ratio to the `moments` accountant of 2016."""
    fields = ("unknown", "target_epsilon", "accountant")
    rows = [_row(record, fields, ("value", "epsilon", "kind")) for record in _last(records)]
    base = {(r["unknown"], r["target_epsilon"]): r["value"] for r in rows if r["accountant"] == BASE and "value" in r}
    for row in rows:
        beside = base.get((row["unknown"], row["target_epsilon"]))
        if beside and row.get("value"):
            row["ratio"] = row["value"] / beside
    count_failures(records, left_out)
    return frame_of(sorted(rows, key=lambda r: (r["unknown"], *_order(r), r["target_epsilon"])), PRICES)


def _last(records: Sequence[Record]) -> list[Record]:
    """One record a trial, the last: the result is the same in every round, the time is not."""
    groups = grouped(records, lambda r: r.id).values()
    return [max(group, key=lambda r: (r.outcome == "ok", r.utc)) for group in groups]


def _row(record: Record, fields: Sequence[str], numbers: Sequence[str]) -> Row:
    row: Row = {name: record.trial.get(name) for name in fields}
    if record.outcome == "ok":
        found = {name: record.result.get(name) for name in numbers}
        return row | {n: float(v) if n in ("epsilon", "value") and v is not None else v for n, v in found.items()}
    reason = record.evidence.strip().splitlines() if record.outcome == "unsupported" else []
    return row | {"note": reason[0] if reason else style.OUTCOMES.get(record.outcome, record.outcome)}


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in SETTING)


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    known = list(style.ACCOUNTANTS)
    name = row["accountant"]
    return known.index(name) if name in known else len(known), *(row.get(field) or 0.0 for field in SETTING)


_COLUMNS: dict[str, Callable[[Any], str]] = {
    "Accountant": lambda r: style.accountant(r.accountant).name,
    "Kind": lambda r: "" if style.missing(r.kind) else style.KINDS.get(r.kind, ("", r.kind))[1],
}
_SETTING: dict[str, Callable[[Any], str]] = {
    "q": lambda r: f"{r.sample_rate:.4g}".replace("e-0", "e-"),
    "σ": lambda r: style.plain(r.noise_multiplier),
    "Steps": lambda r: f"{r.steps:,}",
    "δ": lambda r: style.plain(r.delta),
}
_EPSILON: dict[str, Callable[[Any], str]] = {
    "ε": lambda r: str(r.note) if style.missing(r.epsilon) else readable.rounded_epsilon(r.epsilon, r.kind),
}
_SECONDS: dict[str, Callable[[Any], str]] = {
    "Time": lambda r: "" if style.missing(r.compute_seconds) else style.duration(r.compute_seconds),
}


def points_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`points` for people."""
    ratio = {"ε over the lower bound": lambda r: "" if style.missing(r.ratio) else f"{r.ratio:.4g}"}
    return readable.texts(frame, _COLUMNS | _SETTING | _EPSILON | ratio | _SECONDS)


def schemes_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`schemes` for people."""
    first = {"Scheme": lambda r: r.scheme, "Neighbours": lambda r: ADJACENCIES.get(r.adjacency, r.adjacency)}
    how = {"Bound by": lambda r: "" if style.missing(r.how) else str(r.how)}
    return readable.texts(frame, first | _COLUMNS | _SETTING | _EPSILON | how | _SECONDS)


def tuned_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`tuned` for people."""
    first = {
        "Runs": lambda r: f"{r.runs:,} on average" if r.distribution else "1",
        "Their number": lambda r: r.distribution,
    }
    ratio = {"Beside one run": lambda r: "" if style.missing(r.ratio) else style.times(r.ratio)}
    return readable.texts(frame, first | _COLUMNS | _SETTING | _EPSILON | ratio | _SECONDS)


def prices_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`prices` for people."""

    def value(row: Any) -> str:
        if style.missing(row.value):
            return str(row.note)
        return f"{row.value:,.0f} steps" if row.unknown == "steps" else f"σ = {row.value:.5g}"

    columns = {
        "At ε": lambda r: style.plain(r.target_epsilon),
        **_COLUMNS,
        "Allows or asks for": value,
        "Beside the moments": lambda r: "" if style.missing(r.ratio) else style.times(r.ratio),
        "ε reached": lambda r: "" if style.missing(r.epsilon) else readable.rounded_epsilon(r.epsilon, r.kind),
    }
    return readable.texts(frame, columns)


_KINDS_SAID = (
    "Solid: a valid upper bound. Dashed: a heuristic. Dotted: an estimate. Shaded: below the certified lower bound."
)


def sweeps_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The varied and the fixed settings."""
    base = " ".join(f"{sign} = {style.plain(_common(frame[name]))}," for name, sign in _SIGNS.items())[:-1]
    said = [f"ε along one of σ, q and δ, and its ratio to the certified lower bound; the others: {base}.", _POISSON]
    return caption([*said, _KINDS_SAID], records, left_out, setting=False)


def schemes_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """How batches are drawn, and the meaning of the marks."""
    first = frame.iloc[0]
    said = [
        f"ε at δ = {style.plain(first.delta)} after {first.steps:,} steps at q = {first.sample_rate:.4g}; right, the "
        "tightest bound here of each scheme over σ. In one pass, shuffled or not, a record's gradient is made zero: to "
        "remove it would shift all batches after it, and has no such bound. Of Poisson samples both cost the same.",
        "Bars: the tightest valid upper bound here; marks: other valid bounds. Dotted: what the scheme spends for "
        "certain (of shuffled batches by Chua et al. 2024, over the epochs that end).",
    ]
    return caption(said, records, left_out, setting=False)


def prices_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The quantities, and the reference."""
    first = records[0].trial
    said = [
        f"What an accountant allows or asks for at a target ε, q = {style.plain(first['sample_rate'])}, "
        f"δ = {style.plain(first['delta'])}, over what the moments accountant of 2016 (orders to 32) does: steps at "
        "the same noise, noise for the same steps; every ε was evaluated at the number found and is within the target.",
        _POISSON,
        "Solid: by a valid upper bound. Dotted: by an estimate, which promises nothing. What is far off: in the table.",
    ]
    return caption(said, records, left_out, setting=False)


def tuned_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """What is published after how many runs."""
    first = records[0].trial
    said = [
        f"ε at δ = {style.plain(first['delta'])} of the best of several runs, which alone is published, by Rényi "
        f"divergences (Papernot and Steinke 2022); each run has {first['steps']:,} steps at q = "
        f"{first['sample_rate']:.4g}. The number of runs is drawn before the first. Dashed: of one run, its settings "
        "not tuned on the data.",
        _POISSON,
    ]
    return caption(said, records, left_out, setting=False)


def map_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The meaning of a map's cells."""
    said = [
        f"Over T of {_several(frame.steps)} and δ of {_several(frame.delta)}, at each σ and q: the largest ε over the "
        "certified lower bound, and the longest time. ✕: settings without an answer. Red: below it somewhere.",
        _POISSON,
    ]
    return caption(said, records, left_out, setting=False)


_POISSON = "Poisson sampling, add or remove one."
_SIGNS = {"sample_rate": "q", "noise_multiplier": "σ", "steps": "T", "delta": "δ"}


def _common(values: pd.Series[Any]) -> float:
    """The most frequent value."""
    return float(values.mode().iloc[0])


def _several(values: pd.Series[Any]) -> str:
    return ", ".join(f"{value:,}" if value > 1 else style.plain(value) for value in sorted(set(values)))
