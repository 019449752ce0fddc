"""One sentence for each kind of figure: the main numbers, the number of cells, and how they were measured.

A backend is compared over cells (a model, at a size) that both have; the sentence is empty without numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpbench.report import readable, style
from dpbench.report.privacy import ADJACENCIES
from dpbench.report.style import missing
from dpbench.report.summary import several
from dpbench.trials.backends import PEERS

#: It needs one sample's memory at any batch size, so it would win every comparison of memory, and none of time.
_ONE_BY_ONE = "microbatch"
#: Clips something else than each sample's gradient, so it is not compared with backends that do.
_OTHER_MECHANISM = "tf_microbatch"
#: Bounds composed of the others, so never worse than them.
_COMPOSED = ("best",)

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


def epsilon(frame: pd.DataFrame) -> str:
    """For ε against epochs: the tightest bound at the end."""
    last = frame[(frame.steps == frame.steps.max()) & frame.epsilon.notna()]
    valid = last[(last.kind == "upper_bound") & ~last.accountant.isin(_COMPOSED)]
    if valid.empty:
        return ""
    best: Any = next(valid[valid.epsilon == valid.epsilon.min()].itertuples(index=False))
    said = f"After {best.steps:,} steps ({best.epochs:g} epochs) the tightest valid bound is "
    said += f"ε = {_epsilon(best)}, by {style.accountant(best.accountant).name}"
    others = {"moments": "the moments accountant says", "simple": "simple composition says"}
    beside = [
        f"{words} {_epsilon(row)}"
        for name, words in others.items()
        for row in valid[valid.accountant == name].itertuples(index=False)
        if name != best.accountant
    ]
    lower: Any = next(last[last.kind == "lower_bound"].itertuples(index=False), None)
    if lower is not None:
        beside.append(f"it is at least {_epsilon(lower)}")
    return said + "".join(f"; {words}" for words in beside) + "."


def points(frame: pd.DataFrame) -> str:
    """For tables of ε over settings, with the certified lower bound."""
    known = frame[(frame.kind == "upper_bound") & frame.ratio.notna() & ~frame.accountant.isin(_COMPOSED)]
    if known.empty:
        return ""
    count = known.groupby("accountant").size()
    enough = known[known.accountant.isin(count[count >= 0.9 * count.max()].index)]
    best = enough.groupby("accountant").ratio.apply(lambda values: values.astype(float).median()).idxmin()
    own = known[known.accountant == best]
    asked = int((frame.accountant == best).sum())
    ratio = own.ratio.astype(float)
    seconds = own.compute_seconds.dropna().astype(float)
    took = f", in {style.duration(seconds.median())} at the median" if len(seconds) else ""
    return (
        f"Of {frame.accountant.nunique()} accountants {style.accountant(str(best)).name} is the tightest valid one: "
        f"{ratio.median():.4g} times the certified lower bound at the median and {ratio.max():.4g} times at most, over "
        f"{len(own):,} of {several(asked, 'setting')}{took}."
    )


def tuned(frame: pd.DataFrame) -> str:
    """For tuned runs: ε of one, and of the best of about ten."""
    sigma = frame.noise_multiplier.min()
    own = frame[(frame.noise_multiplier == sigma) & frame.epsilon.notna()]
    one, several = own[own.distribution == ""], own[own.distribution != ""]
    if one.empty or several.empty:
        return ""
    runs = min(several.runs.unique(), key=lambda count: abs(count - 10))
    some = several[several.runs == runs].sort_values("epsilon")
    return (
        f"At σ = {style.plain(sigma)} ε = {_epsilon(one.iloc[0])} of one run becomes {_epsilon(some.iloc[0])} "
        f"({some.iloc[0].distribution}) to {_epsilon(some.iloc[-1])} ({some.iloc[-1].distribution}) where the best of "
        f"{runs} runs on average is published."
    )


def schemes(frame: pd.DataFrame) -> str:
    """For sampling schemes: the least and the greatest ε at one noise multiplier."""
    valid = frame[(frame.kind == "upper_bound") & frame.epsilon.map(lambda e: not missing(e) and e < float("inf"))]
    if valid.empty:
        return ""
    sigma = valid.noise_multiplier.mode().iloc[0]
    valid = valid[valid.noise_multiplier == sigma].sort_values("epsilon", kind="stable")
    tight = valid.drop_duplicates(["scheme", "adjacency"])
    first, last = tight.iloc[0], tight.iloc[-1]
    if len(tight) == 1:
        return f"At σ = {style.plain(sigma)} the tightest valid ε is {_epsilon(first)} ({_scheme(first)})."
    return (
        f"At σ = {style.plain(sigma)} the tightest valid ε of {len(tight)} combinations of scheme and adjacency runs "
        f"from {_epsilon(first)} ({_scheme(first)}) to {_epsilon(last)} ({_scheme(last)})."
    )


def prices(frame: pd.DataFrame) -> str:
    """For accountants' steps and noise: the best valid one at the middle target ε."""
    valid = frame[(frame.kind == "upper_bound") & frame.ratio.notna() & ~frame.accountant.isin(_COMPOSED)]
    said: dict[str, list[str]] = {}
    forms = {"steps": ("allows", "steps at equal noise", False), "noise_multiplier": ("asks for", "noise", True)}
    for unknown, (verb, what, least) in forms.items():
        own = valid[valid.unknown == unknown]
        if own.empty:
            continue
        targets = sorted(set(own.target_epsilon))
        target = targets[len(targets) // 2]
        at = own[own.target_epsilon == target].sort_values("ratio", ascending=least, kind="stable")
        row: Any = at.iloc[0]
        which = f"at ε = {style.plain(target)} {style.accountant(row.accountant).name}"
        said.setdefault(which, []).append(f"{verb} {style.times(row.ratio)} the {what}")
    if not said:
        return ""
    told = [f"{which} {' and '.join(words)}" for which, words in said.items()]
    text = " and ".join(told) + " of the moments accountant of 2016."
    return text[0].upper() + text[1:]


def scorecard(frame: pd.DataFrame) -> str:
    """For conformance cases: the backends that are never wrong, and how often the others are."""
    cases, backends = frame[: list(frame["case"]).index("in all")], list(frame.columns[1:])
    if cases.empty or not backends:
        return ""
    wrong = {name: int((cases[name] == "wrong").sum()) for name in backends}
    never = sum(not count for count in wrong.values())
    worst = sorted((name for name in backends if wrong[name]), key=lambda name: -wrong[name])
    told = f"; wrong: {', '.join(f'{style.backend(n).name} in {wrong[n]}' for n in worst)}" if worst else ""
    of = f"Of {several(len(backends), 'backend')} {never or 'none'}"
    return f"{of} {'is' if never < 2 else 'are'} never wrong in {several(len(cases), 'case')}{told}."


def utility(frame: pd.DataFrame) -> str:
    """For accuracies: the best private one at the middle target ε, and ordinary training's."""
    private = frame[frame.target_epsilon.notna()]
    if private.empty:
        return ""
    targets = sorted(set(private.target_epsilon))
    target = targets[len(targets) // 2]
    best: Any = private[private.target_epsilon == target].sort_values("accuracy").iloc[-1]
    said = (
        f"At ε = {target:g} the best private model ({best.network}, {best['clip'].replace('_', '-')} clipping) reaches "
        f"{best.accuracy:.1%} on {best.data.partition(':')[0]} (median of {several(int(best.seeds), 'seed')})"
    )
    same = (frame.backend == "ordinary") & (frame.network == best.network) & (frame.data == best.data)
    ordinary = frame[same]
    return said + (f", ordinary training {ordinary.accuracy.iloc[0]:.1%}." if len(ordinary) else ".")


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


def _epsilon(row: Any) -> str:
    return readable.rounded_epsilon(float(row.epsilon), row.kind)


def _scheme(row: Any) -> str:
    return f"{row.scheme}, {ADJACENCIES.get(row.adjacency, row.adjacency)}"
