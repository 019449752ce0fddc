"""The sentence of figures that compare backends: the best one, beside the best of the libraries.

Two backends are compared over cells (a model, at a size) that both have; the sentence is empty without numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpbench.report import style
from dpbench.report.captions import span_of
from dpbench.report.summary import several
from dpbench.trials.backends import PEERS

#: It needs one sample's memory at any batch size, so it would win every comparison of memory, and none of time.
_ONE_BY_ONE = "microbatch"
#: Why a private step can take less time than the ordinary one.
_LESS = (
    " A time below 1× is not less work: the C library requests less memory anew than in the ordinary step, or oneDNN "
    "multiplies faster than torch's own products."
)


def paired(frame: pd.DataFrame) -> str:
    """For tables with times and memory relative to ordinary training of the same framework."""
    if "plain_step_seconds" in frame:
        frame = frame[frame.plain_step_seconds.isna()]
    keys = [name for name in ("model", "image_size", "tokens", "batch_size") if name in frame]
    known, wide = _cells(frame, keys, "time_ratio")
    counts = wide.notna().sum(axis=1)
    rivals = counts.max() > 1
    if rivals:  # a single private backend cannot be compared
        wide = wide[counts > 1]
    best = _best(wide, largest=False)
    if best is None:
        return ""
    ours = wide[best].dropna()
    said, is_ahead = _peer(wide, ours, largest=False)
    place = "the fastest of our backends" if is_ahead else "the fastest private backend"
    told = known[(known.backend == best) & known.cell.isin(list(ours.index))]
    pairs = span_of(told.paired_rounds, "{:.0f}".format)
    models = told.model.nunique()
    settings = f" in {len(ours)} settings" if len(ours) > models else ""
    text = (
        f"{style.backend(best).name} is {place if rivals else 'the only private backend'} on "
        f"{several(models, 'model')}{settings}: {_ratios(ours)} the time of ordinary training "
        f"({pairs} pair{'' if pairs == '1' else 's'} of rounds each"
    )
    memory = told[told.memory_ratio.notna()]
    if len(memory):
        sources = sorted(set(memory.memory.dropna()))
        taken = ["simulated" if s == "simulated" else f"measured, {style.SOURCES.get(s, s)}" for s in sources]
        text += f") and {_ratios(memory.memory_ratio.astype(float))} its peak memory ({', '.join(taken)}"
    return f"{text}){said}." + (_LESS if ours.min() < 1 else "")


def max_batch(frame: pd.DataFrame) -> str:
    """For the largest batches in a memory budget."""
    known = frame[frame.max_batch_size.notna() & frame.fails_at.notna()]
    if known.empty:
        return ""
    memory = known.memory.mode().iloc[0]
    known = known[(known.memory == memory) & (known.backend != _ONE_BY_ONE)]
    base = known[known.backend == "nonprivate"].set_index("model").max_batch_size.astype(float)
    _, wide = _cells(known.assign(ratio=known.max_batch_size.astype(float) / known.model.map(base)), ["model"], "ratio")
    best = _best(wide, largest=True)
    if best is None:
        return ""
    ours = wide[best].dropna()
    return (
        f"Apart from one sample at a time, {style.backend(best).name} takes the largest batches in "
        f"{style.size(known.budget_bytes.iloc[0])} ({memory} memory): {_ratios(ours)} ordinary training's over "
        f"{several(len(ours), 'model')}{_peer(wide, ours, largest=True)[0]}."
    )


def _cells(frame: pd.DataFrame, keys: Sequence[str], column: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the rows of per-sample clipping backends with their `cell`, ratios to ordinary training by cell and backend)."""
    other = (frame.backend == "nonprivate") | frame.backend.map(style.is_other_mechanism)
    known = frame[frame[column].notna() & ~other.astype(bool)]
    cells: list[Any] = list(zip(*(known[name] for name in keys), strict=True))
    known = known.assign(cell=cells)
    wide = known[column].astype(float).groupby([known.cell, known.backend]).last().unstack()
    return known, wide.reindex(columns=list(dict.fromkeys(known.backend)))


def _best(wide: pd.DataFrame, largest: bool) -> str | None:
    """Our backend with the best median, of those with the most cells; none with an optimisation left out."""
    counts = wide[[name for name in wide if name not in PEERS and ":without_" not in str(name)]].notna().sum()
    if not counts.any():
        return None
    medians = wide[counts[counts == counts.max()].index].median()
    return str(medians.idxmax() if largest else medians.idxmin())


def _peer(wide: pd.DataFrame, ours: pd.Series[float], largest: bool) -> tuple[str, bool]:
    """(words on the best library in cells of `ours`, whether it is ahead of `ours` at the median), if any.

    A quotient of the two ratios only ranks: they may be of two processes.
    """
    shared = wide.loc[ours.index, [name for name in wide if name in PEERS]]
    counts = shared.notna().sum()
    medians = shared.div(ours, axis=0).median()[(counts > 0) & (2 * counts >= len(ours))]
    if medians.empty:
        return "", False
    name: Any = medians.idxmax() if largest else medians.idxmin()
    theirs = shared[name].dropna()
    where = f" on {len(theirs)} of them" if len(theirs) < len(ours) else ""
    is_ahead = medians[name] > 1 if largest else medians[name] < 1
    return f"; the best of the libraries is {style.backend(name).name}: {_ratios(theirs)}{where}", bool(is_ahead)


def _ratios(values: pd.Series[float]) -> str:
    """'1.17× (1.09× to 1.33×)': the median and the range of the cells."""
    middle, ends = style.times(values.median()), span_of(values, style.times)
    return middle if middle == ends else f"{middle} ({ends})"
