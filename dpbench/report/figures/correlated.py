"""Test loss with correlated noise, bands and BLT: a panel for each ε, a line for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record
from dpbench.report import readable
from dpbench.report.captions import settings
from dpbench.report.data.statistics import over_seeds
from dpbench.report.drawing.sheet import grid, logarithmic, spread
from dpbench.report.parts import FigureKind
from dpbench.report.readable import as_percent, digits, of

_LOOKS = (("#0077BB", "o"), ("#EE7733", "s"), ("#009988", "^"), ("#AA3377", "D"))
_SAME = ["data", "network", "target_epsilon", "batch_size", "place"]
_MEDIANS = ["accuracy", "epsilon", "noise_multiplier"]
_NAMES = {(0, 1): "DP-SGD", (1, 1): "DP-SGD, one pass"}
_TICKS = {(0, 1): "1", (1, 1): "one\npass"}


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each ε, batch size and noise, at its best learning rate: the one with the least median test loss.

    Losses and accuracies are medians over the seeds. `place` is (0, bands) for Poisson batches and those in turn, with
    bands 1 for independent noise; (1, 1) for independent noise in one ordered pass over the data, (1, 1 + buffers) for
    a BLT.
    """
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "accuracy" in result:
            name, _, sampling = trial["noise"].partition("@")
            count = int(name.partition(":")[2] or name.startswith("gaussian"))
            place = (int(sampling == "one_pass"), count + name.startswith("blt"))
            row = {name: trial[name] for name in (*_SAME[:-1], "lr")} | {name: result.get(name) for name in _MEDIANS}
            rows.append({**row, "place": place, "loss": float(result["test_losses"][-1])})
    found = over_seeds(rows, [*_SAME, "lr"], "loss", _MEDIANS)
    found["noise"] = found.place.map(_name)
    columns = [*_SAME, "noise", "lr", "seeds", "loss", "least", "greatest", *_MEDIANS]
    best = found[columns].sort_values("loss", kind="stable").drop_duplicates(_SAME)
    return best.sort_values(_SAME, ignore_index=True)


_TEXT: readable.Columns = {
    **{name: of(name) for name in (*_SAME[:-1], "noise", "lr", "seeds")},
    **{name: of(name, digits(4)) for name in ("loss", "least", "greatest")},
    "accuracy": of("accuracy", as_percent),
    **{name: of(name, digits(4)) for name in ("epsilon", "noise_multiplier")},
}


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        "Loss on held-out images, median and range of the seeds at the best of the learning rates by that loss (a "
        f"choice that is not accounted), at the same ε in each panel; δ = {settings(records, 'delta')}, an "
        "upper bound by prv. One band is DP-SGD with Poisson batches; of more bands batches come from as many groups "
        "of records in turn. At the right, batches in the same order each epoch, which amplify nothing: DP-SGD (one "
        "pass) and BLT, for neighbours of whom one has a record's gradient made zero. Noise is seeded here, so that "
        "training can be repeated."
    ]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each ε."""
    targets, sizes = sorted(frame.target_epsilon.unique()), sorted(frame.batch_size.unique())
    places = sorted(frame.place.unique())
    figure, panels = grid(caption, len(targets), max(1, len(targets)), 2.3)
    for axes, target in zip(panels, targets, strict=True):
        for j, size in enumerate(sizes):
            part = frame[(frame.target_epsilon == target) & (frame.batch_size == size)].sort_values("place")
            color, marker = _LOOKS[j % len(_LOOKS)]
            for passes in (0, 1):
                line = part[part.place.str[0] == passes]  # not by a list: an empty one would choose columns
                at = [places.index(place) + 0.12 * j for place in line.place]
                look: dict[str, Any] = {"linestyle": "none"} if passes else {"label": f"batches of {size}"}
                spread(axes, at, line, "loss", color=color, marker=marker, **look)
        logarithmic(axes.yaxis, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7))
        axes.set_xticks(range(len(places)), [_TICKS.get(p, "BLT" if p[0] else str(p[1])) for p in places], fontsize=7)
        axes.set_xlabel("bands (1: DP-SGD)")
        axes.set_title(f"ε = {target:g}")
    if panels:
        panels[0].set_ylabel("test loss")
        panels[0].legend()
    return figure


def _finding(frame: pd.DataFrame) -> str:
    part = frame[frame.target_epsilon == frame.target_epsilon.max()].sort_values("loss", kind="stable")
    small = part[part.batch_size == part.batch_size.min()]
    alone, banded = small[small.place == (0, 1)], small[[place > (0, 1) and not place[0] for place in small.place]]
    if alone.empty or banded.empty:
        return ""
    one, best = alone.iloc[0], banded.iloc[0]
    plain: Any = part[part.place == (0, 1)].iloc[0]
    said = (
        f"At ε = {best.target_epsilon:g}, {best.noise} take the test loss of batches of {best.batch_size} from "
        f"{one.loss:.4f} to {best.loss:.4f} (accuracy {one.accuracy:.1%} to {best.accuracy:.1%}); the best of "
        f"independent noise, batches of {plain.batch_size}, has {plain.loss:.4f} ({plain.accuracy:.1%})."
    )
    ordered = part[[place[0] == 1 for place in part.place]]
    blt, still = ordered[ordered.place > (1, 1)], ordered[ordered.place == (1, 1)]
    if blt.empty or still.empty:
        return said
    return (
        f"{said} In one pass an epoch a BLT has {blt.iloc[0].loss:.4f} (batches of {blt.iloc[0].batch_size}), and "
        f"independent noise {still.iloc[0].loss:.4f} (batches of {still.iloc[0].batch_size})."
    )


def _name(place: tuple[int, int]) -> str:
    return _NAMES.get(place) or (f"BLT of at most {place[1] - 1} buffers" if place[0] else f"{place[1]} bands")


FIGURE = FigureKind(
    doc="test loss at one ε by the steps that noise is correlated over, and in one pass with a BLT",
    kinds=("correlated",),
    table=table,
    text=_TEXT,
    caption=_caption,
    plot=plot,
    finding=_finding,
    place=215,
)
