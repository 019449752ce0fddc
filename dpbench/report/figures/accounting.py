"""Accountants' results: over epochs, along σ, q and δ, over a grid, under each sampling scheme, and at a target ε.

One row a trial, with its numbers; an accountant without a result has a row with the reason. `lower_bound` is the
certified one at the same (q, σ, T, δ), and `ratio` is ε over it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from accounting.base import rounded
from dpbench.records.reader import LeftOut, Record, grouped
from dpbench.report import readable, style
from dpbench.report.captions import join
from dpbench.report.data.statistics import Row, frame_of
from dpbench.report.drawing import privacy_plots
from dpbench.report.drawing.privacy_plots import ADJACENCIES, BASE, LOWER, SETTING
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of
from dpbench.report.summary import several

#: Bounds composed of the others, so never worse than them.
_COMPOSED = ("best",)
#: From the least ε to the most, except for truncation, which may be near either end.
_SAMPLINGS = ("balls_and_bins", "poisson", "truncated_poisson", "without_replacement", "shuffled", "one_pass")
_SIGNS = {"sample_rate": "q", "noise_multiplier": "σ", "steps": "T", "delta": "δ"}


def _rows(records: Sequence[Record], fields: Sequence[str], numbers: Sequence[str] = ("epsilon",)) -> list[Row]:
    """A row for each trial, from its last record: the result is the same in every round, the time is not."""
    groups = grouped(records, lambda r: r.id).values()
    return [_row(max(group, key=lambda r: (r.outcome == "ok", r.utc)), fields, numbers) for group in groups]


def _row(record: Record, fields: Sequence[str], numbers: Sequence[str]) -> Row:
    row: Row = {name: record.trial.get(name) for name in fields}
    if record.outcome == "ok":
        found = record.result
        row |= {n: None if found.get(n) is None else float(found[n]) for n in numbers}
        row |= {"kind": found.get("kind"), "compute_seconds": found.get("compute_seconds")}
        return row | {"how": (found.get("detail") or {}).get("bound")}
    reason = record.evidence.strip().splitlines() if record.outcome == "unsupported" else []
    return row | {"note": reason[0] if reason else style.outcome(record.outcome)}


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in SETTING)


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return style.accountant_key(row["accountant"]), *(row.get(field) or 0.0 for field in SETTING)


def _compared(rows: list[Row], key: Callable[[Row], Any], base: Callable[[Row], bool], name: str, at: str) -> None:
    """Add the ratio of `name` to that of the row `base` with the same key, which is told as `at`."""
    known = {key(row): row[name] for row in rows if base(row) and row.get(name)}
    for row in rows:
        row[at] = known.get(key(row))
        if row[at] and row.get(name) and math.isfinite(row[name]):
            row["ratio"] = row[name] / row[at]


def epochs(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """Figure 2 of Abadi et al. 2016: ε of each accountant against epochs (steps × sample rate).

    Args:
        records: `epsilon` records of one (sample rate, noise multiplier, δ).

    Returns:
        A row for each (accountant, steps); ε may be inf, and is empty if the accountant gave none.
    """
    rows = _rows(records, ("accountant", *SETTING))
    for row in rows:
        row["epochs"] = row["steps"] * row["sample_rate"]
    columns = ("accountant", "kind", "sample_rate", "noise_multiplier", "delta", "steps", "epochs", "epsilon")
    return frame_of(sorted(rows, key=_order), (*columns, "compute_seconds", "note"))


def points(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """ε of each accountant at each (q, σ, T, δ)."""
    rows = _rows(records, ("accountant", *SETTING))
    _compared(rows, _setting, lambda row: row["accountant"] == LOWER, "epsilon", "lower_bound")
    columns = ("accountant", "kind", *SETTING, "epsilon", "lower_bound", "ratio", "compute_seconds", "note")
    return frame_of(sorted(rows, key=_order), columns)


def schemes(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """ε under each scheme, in the order of declaration (and so of the first record by label)."""
    fields = ("scheme", "adjacency", "accountant", "sampling", *SETTING, "dataset_size", "max_batch_size")
    rows = _rows(records, fields)

    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        place = _SAMPLINGS.index(row["sampling"]) if row["sampling"] in _SAMPLINGS else len(_SAMPLINGS)
        return place, row.get("max_batch_size") or 0, row["scheme"], row["adjacency"], *_order(row)

    columns = (*fields[:3], "kind", *fields[3:], "epsilon", "how", "compute_seconds", "note")
    return frame_of(sorted(rows, key=order), columns)


def tuned(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """ε of the best of several runs, and its ratio to that of one run by the same accountant."""
    rows = _rows(records, ("distribution", "runs", "accountant", *SETTING))
    _compared(rows, _setting, lambda row: not row["distribution"], "epsilon", "one")
    rows.sort(key=lambda r: (*_setting(r), r["distribution"], r["runs"]))
    columns = ("distribution", "runs", "accountant", "kind", *SETTING, "epsilon", "ratio", "compute_seconds", "note")
    return frame_of(rows, columns)


def prices(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """Each accountant's steps or noise at each target ε, and the ratio to the `moments` accountant of 2016."""
    rows = _rows(records, ("unknown", "target_epsilon", "accountant"), ("value", "epsilon"))
    target = lambda row: (row["unknown"], row["target_epsilon"])  # noqa: E731
    _compared(rows, target, lambda row: row["accountant"] == BASE, "value", "base")
    rows.sort(key=lambda r: (r["unknown"], *_order(r), r["target_epsilon"]))
    return frame_of(rows, ("unknown", "target_epsilon", "accountant", "kind", "value", "ratio", "epsilon", "note"))


_ACCOUNTANT: readable.Columns = {
    "Accountant": of("accountant", lambda name: style.accountant(name).name),
    "Kind": of("kind", lambda kind: style.KINDS.get(kind, ("", kind))[1]),
}
_POINT: readable.Columns = {
    **_ACCOUNTANT,
    "q": lambda r: f"{r.sample_rate:.4g}".replace("e-0", "e-"),
    "σ": of("noise_multiplier", style.plain),
    "Steps": of("steps", "{:,}".format),
    "δ": of("delta", style.plain),
    "ε": readable.epsilon(),
}
_SECONDS: readable.Columns = {"Time": of("compute_seconds", style.duration)}
_POINTS: readable.Columns = {**_POINT, "ε over the lower bound": of("ratio", "{:.4g}".format), **_SECONDS}
_SCHEMES: readable.Columns = {
    "Scheme": of("scheme"),
    "Neighbours": of("adjacency", lambda name: ADJACENCIES.get(name, name)),
    **_POINT,
    "Bound by": of("how"),
    **_SECONDS,
}
_TUNED: readable.Columns = {
    "Runs": lambda r: f"{r.runs:,} on average" if r.distribution else "1",
    "Their number": of("distribution"),
    **_POINT,
    "Beside one run": of("ratio", style.times),
    **_SECONDS,
}


_PRICES: readable.Columns = {
    "At ε": of("target_epsilon", style.plain),
    **_ACCOUNTANT,
    "Allows or asks for": lambda r: of(
        "value", ("{:,.0f} steps" if r.unknown == "steps" else "σ = {:.5g}").format, "note"
    )(r),
    "Beside the moments": of("ratio", style.times),
    "ε reached": readable.epsilon(instead=""),
}

_POISSON = "Poisson sampling, add or remove one."


def _epochs_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    first = frame.iloc[0]
    said = [
        f"After Figure 2 of Abadi et al. 2016: ε at δ = {style.plain(first.delta)} of DP-SGD with sample rate "
        f"q = {style.plain(first.sample_rate)} and noise multiplier σ = {style.plain(first.noise_multiplier)}; "
        "Poisson sampling, add or remove one. Solid: a valid upper bound; any other line is not one."
    ]
    infinite = frame[frame.epsilon.map(lambda value: value == math.inf)]
    if len(infinite):
        names = dict.fromkeys(style.accountant(name).name for name in infinite.accountant)
        said.append(f"Infinite, and so not drawn, at some point: {join(names)}.")
    return said


def _sweeps_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    base = join(f"{sign} = {style.plain(float(frame[name].mode().iloc[0]))}" for name, sign in _SIGNS.items())
    return [
        f"ε along one of σ, q and δ, and its ratio to the certified lower bound; the others: {base}.",
        _POISSON,
        "Solid: a valid upper bound. Dashed: a heuristic. Dotted: an estimate. Shaded: below the certified lower "
        "bound.",
    ]


def _schemes_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    first = frame.iloc[0]
    return [
        f"ε at δ = {style.plain(first.delta)} after {first.steps:,} steps at q = {first.sample_rate:.4g}; right, the "
        "tightest bound here of each scheme over σ. In one pass, shuffled or not, a record's gradient is made zero: to "
        "remove it would shift all batches after it, and has no such bound. Of Poisson samples both cost the same.",
        "Bars: the tightest valid upper bound here; marks: other valid bounds. Dotted: what the scheme spends for "
        "certain (of shuffled batches by Chua et al. 2024, over the epochs that end).",
    ]


def _prices_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    first = records[0].trial
    return [
        f"What an accountant allows or asks for at a target ε, q = {style.plain(first['sample_rate'])}, "
        f"δ = {style.plain(first['delta'])}, over what the moments accountant of 2016 (orders to 32) does: steps at "
        "the same noise, noise for the same steps; every ε was evaluated at the number found and is within the target.",
        _POISSON,
        "Solid: by a valid upper bound. Dotted: by an estimate, which promises nothing. What is far off: in the table.",
    ]


def _tuned_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    first = records[0].trial
    return [
        f"ε at δ = {style.plain(first['delta'])} of the best of several runs, which alone is published, by Rényi "
        f"divergences (Papernot and Steinke 2022); each run has {first['steps']:,} steps at q = "
        f"{first['sample_rate']:.4g}. The number of runs is drawn before the first. Dashed: of one run, its settings "
        "not tuned on the data.",
        _POISSON,
    ]


def _map_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    steps, deltas = (sorted(set(frame[name])) for name in ("steps", "delta"))
    return [
        f"Over T of {join(f'{value:,}' for value in steps)} and δ of {join(map(style.plain, deltas))}, at each σ and "
        "q: the largest ε over the certified lower bound, and the longest time. ✕: settings without an answer. Red: "
        "below it somewhere.",
        _POISSON,
    ]


def _epochs_finding(frame: pd.DataFrame) -> str:
    last = frame[(frame.steps == frame.steps.max()) & frame.epsilon.notna()]
    valid = last[(last.kind == "upper_bound") & ~last.accountant.isin(_COMPOSED)]
    if valid.empty:
        return ""
    best: Any = valid[valid.epsilon == valid.epsilon.min()].iloc[0]
    said = f"After {best.steps:,} steps ({best.epochs:g} epochs) the tightest valid bound is "
    said += f"ε = {_epsilon(best)}, by {style.accountant(best.accountant).name}"
    others = {"moments": "the moments accountant says", "simple": "simple composition says"}
    beside = [
        f"{words} {_epsilon(row)}"
        for name, words in others.items()
        for _, row in valid[valid.accountant == name].iterrows()
        if name != best.accountant
    ]
    lower = last[last.kind == "lower_bound"]
    beside += [f"it is at least {_epsilon(lower.iloc[0])}"] if len(lower) else []
    return "; ".join([said, *beside]) + "."


def _points_finding(frame: pd.DataFrame) -> str:
    known = frame[(frame.kind == "upper_bound") & frame.ratio.notna() & ~frame.accountant.isin(_COMPOSED)]
    if known.empty:
        return ""
    count = known.groupby("accountant").size()
    enough = known[known.accountant.isin(count[count >= 0.9 * count.max()].index)]
    best = enough.ratio.astype(float).groupby(enough.accountant).median().idxmin()
    own = known[known.accountant == best]
    asked = int((frame.accountant == best).sum())
    ratio, seconds = own.ratio.astype(float), own.compute_seconds.dropna().astype(float)
    took = f", in {style.duration(seconds.median())} at the median" if len(seconds) else ""
    return (
        f"Of {frame.accountant.nunique()} accountants {style.accountant(str(best)).name} is the tightest valid one: "
        f"{ratio.median():.4g} times the certified lower bound at the median and {ratio.max():.4g} times at most, over "
        f"{len(own):,} of {several(asked, 'setting')}{took}."
    )


def _tuned_finding(frame: pd.DataFrame) -> str:
    sigma = frame.noise_multiplier.min()
    own = frame[(frame.noise_multiplier == sigma) & frame.epsilon.notna()]
    one, several = own[own.distribution == ""], own[own.distribution != ""]
    if one.empty or several.empty:
        return ""
    runs = min(several.runs.unique(), key=lambda count: abs(count - 10))
    some = several[several.runs == runs].sort_values("epsilon")
    least, most = some.iloc[0], some.iloc[-1]
    return (
        f"At σ = {style.plain(sigma)} ε = {_epsilon(one.iloc[0])} of one run becomes {_epsilon(least)} "
        f"({least.distribution}) to {_epsilon(most)} ({most.distribution}) where the best of "
        f"{runs} runs on average is published."
    )


def _schemes_finding(frame: pd.DataFrame) -> str:
    finite = frame.epsilon.astype(float).map(math.isfinite)
    valid = frame[(frame.kind == "upper_bound") & finite]
    if valid.empty:
        return ""
    sigma = valid.noise_multiplier.mode().iloc[0]
    valid = valid[valid.noise_multiplier == sigma].sort_values("epsilon", kind="stable")
    tight = valid.drop_duplicates(["scheme", "adjacency"])
    first, last = (
        f"{_epsilon(row)} ({row.scheme}, {ADJACENCIES.get(row.adjacency, row.adjacency)})"
        for row in (tight.iloc[0], tight.iloc[-1])
    )
    if len(tight) == 1:
        return f"At σ = {style.plain(sigma)} the tightest valid ε is {first}."
    return (
        f"At σ = {style.plain(sigma)} the tightest valid ε of {len(tight)} combinations of scheme and adjacency runs "
        f"from {first} to {last}."
    )


def _prices_finding(frame: pd.DataFrame) -> str:
    valid = frame[(frame.kind == "upper_bound") & frame.ratio.notna() & ~frame.accountant.isin(_COMPOSED)]
    said: dict[str, list[str]] = {}
    forms = {"steps": ("allows", "steps at equal noise", False), "noise_multiplier": ("asks for", "noise", True)}
    for unknown, (verb, what, least) in forms.items():
        own = valid[valid.unknown == unknown]
        if own.empty:
            continue
        target = style.middle(own.target_epsilon)
        row: Any = own[own.target_epsilon == target].sort_values("ratio", ascending=least, kind="stable").iloc[0]
        which = f"at ε = {style.plain(target)} {style.accountant(row.accountant).name}"
        said.setdefault(which, []).append(f"{verb} {style.times(row.ratio)} the {what}")
    if not said:
        return ""
    text = " and ".join(f"{which} {' and '.join(words)}" for which, words in said.items())
    return f"{text[0].upper()}{text[1:]} of the moments accountant of 2016."


def _epsilon(row: Any) -> str:
    return rounded(float(row.epsilon), row.kind)


_BY = ("experiment", "sample_rate", "steps", "delta")
_EPOCHS: readable.Columns = {
    **{name: text for name, text in _POINT.items() if name != "ε"},
    "Epochs": of("epochs", "{:g}".format),
    "ε": _POINT["ε"],
}
FIGURES = {
    "epsilon_epochs": FigureKind(
        kinds=("epsilon",),
        table=epochs,
        text=_EPOCHS,
        caption=_epochs_caption,
        plot=privacy_plots.epochs,
        finding=_epochs_finding,
        cell=lambda r: (r.trial["accountant"], r.trial["steps"]),
        by=("experiment", "sample_rate", "noise_multiplier", "delta"),
    ),
    "epsilon_sweeps": FigureKind(
        ("epsilon_sweep",), points, _POINTS, _sweeps_caption, privacy_plots.sweeps, _points_finding
    ),
    "sampling_schemes": FigureKind(
        ("epsilon_scheme",), schemes, _SCHEMES, _schemes_caption, privacy_plots.schemes, _schemes_finding, by=_BY
    ),
    "tuning": FigureKind(
        ("epsilon_tuned",), tuned, _TUNED, _tuned_caption, privacy_plots.tuned, _tuned_finding, by=_BY
    ),
    "accountant_price": FigureKind(
        kinds=("calibration",),
        table=prices,
        text=_PRICES,
        caption=_prices_caption,
        plot=privacy_plots.prices,
        finding=_prices_finding,
        by=("experiment", "sample_rate", "delta"),
    ),
    "accounting_map": FigureKind(("epsilon_map",), points, _POINTS, _map_caption, privacy_plots.maps, _points_finding),
}
