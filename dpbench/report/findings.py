"""The sentence of figures that compare backends: the best one, beside the best of the libraries.

Two backends are compared over cells (a model, at a size) that both have; the sentence is empty without numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpbench.report import style
from dpbench.report.summary import several
from dpbench.trials.backends import PEERS

#: It needs one sample's memory at any batch size, so it would win every comparison of memory, and none of time.
_ONE_BY_ONE = "microbatch"
#: Clips something else than each sample's gradient, so it is not compared with backends that do.
_OTHER_MECHANISM = "tf_microbatch"
#: Why a private step can take less time than the ordinary one.
_LESS = (
    " A time below 1× is not less work: the C library requests less memory anew than in the ordinary step, or oneDNN "
    "multiplies faster than torch's own products."
)

Cells = dict[tuple[Any, ...], float]


def paired(frame: pd.DataFrame) -> str:
    """For tables with times and memory relative to ordinary training of the same framework."""
    if "plain_step_seconds" in frame:
        frame = frame[frame.plain_step_seconds.isna()]
    keys = [name for name in ("model", "image_size", "tokens", "batch_size") if name in frame]
    ratios = _cells(frame, keys, "time_ratio")
    counts = Counter(cell for cells in ratios.values() for cell in cells)
    rivals = max(counts.values(), default=0) > 1
    if rivals:  # a single private backend cannot be compared
        ratios = {name: {c: r for c, r in cells.items() if counts[c] > 1} for name, cells in ratios.items()}
    ours = {name: cells for name, cells in ratios.items() if name not in PEERS and cells}
    if not ours:
        return ""
    most = max(map(len, ours.values()))
    best = min((name for name in ours if len(ours[name]) == most), key=lambda name: _median(ours[name]))
    nearest = _nearest(ratios, ours[best], largest=False)
    place = "the fastest private backend" if nearest is None or not nearest[2] else "the fastest of our backends"
    told = frame[(frame.backend == best) & frame.time_ratio.notna()]
    told = told[[tuple(row) in ours[best] for row in told[keys].itertuples(index=False)]]
    pairs = _span(told.paired_rounds, "{:.0f}".format, "to")
    said = (
        f"{style.backend(best).name} is {place if rivals else 'the only private backend'} on {_settings(told, keys)}: "
        f"{_ratios(ours[best])} the time of ordinary training ({pairs} pair{'' if pairs == '1' else 's'} of rounds each"
    )
    known = told[told.memory_ratio.notna()]
    if len(known):
        memory = {tuple(row): float(value) for *row, value in known[[*keys, "memory_ratio"]].itertuples(index=False)}
        said += f") and {_ratios(memory)} its peak memory ({_taken(known.memory)}"
    return said + ")" + _peer(nearest, ours[best]) + "." + (_LESS if min(ours[best].values()) < 1 else "")


def max_batch(frame: pd.DataFrame) -> str:
    """For the largest batches in a memory budget."""
    known = frame[frame.max_batch_size.notna() & frame.fails_at.notna()]
    if known.empty:
        return ""
    memory = known.memory.mode().iloc[0]
    known = known[known.memory == memory]
    base = dict(known[known.backend == "nonprivate"][["model", "max_batch_size"]].itertuples(index=False))
    known = known[known.model.isin(list(base)) & (known.backend != _ONE_BY_ONE)]
    known = known.assign(ratio=[float(row.max_batch_size) / float(base[row.model]) for row in known.itertuples()])
    ratios = _cells(known, ["model"], "ratio")
    ours = {name: cells for name, cells in ratios.items() if name not in PEERS}
    if not ours:
        return ""
    most = max(map(len, ours.values()))
    best = max((name for name in ours if len(ours[name]) == most), key=lambda name: _median(ours[name]))
    budget = style.size(known.budget_bytes.iloc[0])
    return (
        f"Apart from one sample at a time, {style.backend(best).name} takes the largest batches in {budget} "
        f"({memory} memory): {_ratios(ours[best])} ordinary training's over {several(len(ours[best]), 'model')}"
        + _peer(_nearest(ratios, ours[best], largest=True), ours[best])
        + "."
    )


def _cells(frame: pd.DataFrame, keys: Sequence[str], column: str) -> dict[str, Cells]:
    """Per-sample clipping backend -> cell -> its ratio to ordinary training."""
    found: dict[str, Cells] = {}
    for row in frame[frame[column].notna() & (frame.backend != "nonprivate")].itertuples(index=False):
        if str(row.backend).startswith(_OTHER_MECHANISM):
            continue
        cell = tuple(getattr(row, name) for name in keys)
        found.setdefault(str(row.backend), {})[cell] = float(getattr(row, column))
    return found


def _nearest(ratios: dict[str, Cells], ours: Cells, largest: bool) -> tuple[str, Cells, bool] | None:
    """(the best library, its ratios in cells of `ours`, whether it is ahead of `ours` at the median), if any.

    A quotient of the two ratios only ranks: they may be of two processes.
    """
    shared = {
        name: {c: cells[c] for c in cells.keys() & ours.keys()} for name, cells in ratios.items() if name in PEERS
    }
    medians = {
        name: _median({cell: ratio / ours[cell] for cell, ratio in cells.items()})
        for name, cells in shared.items()
        if cells and 2 * len(cells) >= len(ours)
    }
    if not medians:
        return None
    best = (max if largest else min)(medians, key=lambda name: medians[name])
    return best, shared[best], medians[best] > 1 if largest else medians[best] < 1


def _peer(nearest: tuple[str, Cells, bool] | None, ours: Cells) -> str:
    if nearest is None:
        return ""
    name, cells, _ = nearest
    where = f" on {len(cells)} of them" if len(cells) < len(ours) else ""
    return f"; the best of the libraries is {style.backend(name).name}: {_ratios(cells)}{where}"


def _median(cells: Cells) -> float:
    return float(pd.Series(list(cells.values())).median())


def _ratios(cells: Cells) -> str:
    """'1.17× (1.09× to 1.33×)': the median and the range of the cells."""
    values = pd.Series(list(cells.values()))
    middle, span = style.times(values.median()), _span(values, style.times, "to")
    return middle if middle == span else f"{middle} ({span})"


def _span(values: Any, text: Any, between: str) -> str:
    low, high = text(float(values.min())), text(float(values.max()))
    return low if low == high else f"{low} {between} {high}"


def _settings(frame: pd.DataFrame, keys: Sequence[str]) -> str:
    models, cells = frame.model.nunique(), len(frame.drop_duplicates(list(keys)))
    return several(models, "model") + (f" in {cells} settings" if cells > models else "")


def _taken(memory: pd.Series[Any]) -> str:
    sources = sorted(set(memory.dropna()))
    return ", ".join("simulated" if s == "simulated" else f"measured, {style.SOURCES.get(s, s)}" for s in sources)
