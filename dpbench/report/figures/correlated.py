"""Test loss with correlated noise, bands and BLT: a panel for each ε, a line for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.report import captions, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.data.statistics import losses_of_seeds
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import box, plain_log
from dpbench.report.parts import FigureKind

_TOP, _DEPTH, _LEFT, _GAP = 0.36, 2.3, 0.62, 0.45
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
        if "accuracy" not in result:
            left_out[f"ε {trial['target_epsilon']}, {trial['noise']}: {record.outcome}"] += 1
            continue
        name, _, sampling = trial["noise"].partition("@")
        count = int(name.partition(":")[2] or name.startswith("gaussian"))
        place = (int(sampling == "one_pass"), count + name.startswith("blt"))
        row = {name: trial[name] for name in (*_SAME[:-1], "lr")} | {name: result.get(name) for name in _MEDIANS}
        rows.append({**row, "place": place, "loss": float(result["test_losses"][-1])})
    columns = [*_SAME, "noise", "lr", "seeds", "loss", "least", "greatest", *_MEDIANS]
    if not rows:
        return pd.DataFrame(columns=columns)
    found = losses_of_seeds(rows, [*_SAME, "lr"], _MEDIANS)
    found["noise"] = found.place.map(_name)
    best = found[columns].sort_values("loss", kind="stable").drop_duplicates(_SAME)
    return best.sort_values(_SAME, ignore_index=True)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people."""
    shown = frame.drop(columns="place")
    shown["accuracy"] = [f"{100 * value:.1f} %" for value in frame.accuracy]
    for name, digits in (("loss", 4), ("least", 4), ("greatest", 4), ("epsilon", 4), ("noise_multiplier", 4)):
        shown[name] = [f"{value:.{digits}g}" for value in frame[name]]
    return shown


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The source of ε, and what it excludes."""
    deltas = sorted({record.trial["delta"] for record in records})
    said = [
        "Loss on held-out images, median and range of the seeds at the best of the learning rates by that loss (a",
        f"choice that is not accounted), at the same ε in each panel; δ = {', '.join(map(style.plain, deltas))}, an",
        "upper bound by prv. One band is DP-SGD with Poisson batches; of more bands batches come from as many groups",
        "of records in turn. At the right, batches in the same order each epoch, which amplify nothing: DP-SGD (one",
        "pass) and BLT, for neighbours of whom one has a record's gradient made zero. Noise is seeded here, so that",
        "training can be repeated.",
    ]
    return captions.caption(said, records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each ε."""
    figure, height = sheet(_TOP + _DEPTH + AXIS + 0.2, caption)
    targets, sizes = sorted(frame.target_epsilon.unique()), sorted(frame.batch_size.unique())
    places = sorted(frame.place.unique())
    count = max(1, len(targets))
    wide = (WIDTH - _LEFT - 0.15 - _GAP * (count - 1)) / count
    for i, target in enumerate(targets):
        axes = figure.add_axes(box(_LEFT + i * (wide + _GAP), _TOP, wide, _DEPTH, height))
        for j, size in enumerate(sizes):
            part = frame[(frame.target_epsilon == target) & (frame.batch_size == size)].sort_values("place")
            color, marker = _LOOKS[j % len(_LOOKS)]
            for passes in (0, 1):
                of = part[part.place.str[0] == passes]  # not by a list: an empty one would choose columns
                at = [places.index(place) + 0.12 * j for place in of.place]
                look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.2}
                look |= {"linestyle": "none"} if passes else {"label": f"batches of {size}"}
                axes.errorbar(at, of.loss, [of.loss - of.least, of.greatest - of.loss], capsize=2, **look)
        axes.set_xticks(range(len(places)), [_TICKS.get(place, _tick(place)) for place in places])
        axes.tick_params("x", labelsize=7)
        axes.set_xlabel("bands (1: DP-SGD)")
        axes.set_yscale("log")
        plain_log(axes.yaxis, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7))
        axes.set_title(f"ε = {target:g}", fontsize=9)
        axes.grid(color=style.GRID, linewidth=0.5)
        if i == 0:
            axes.set_ylabel("test loss")
            axes.legend(fontsize=7.6, frameon=False)
    return figure


def finding(frame: pd.DataFrame) -> str:
    """At the largest ε: the smallest batches with and without bands, and the best result of independent noise."""
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


def _tick(place: tuple[int, int]) -> str:
    return "BLT" if place[0] else str(place[1])


FIGURE = FigureKind(
    doc="test loss at one ε by the steps that noise is correlated over, and in one pass with a BLT",
    kinds=("correlated",),
    cell=lambda r: r.id,
    facets={"experiment": ("correlated_noise",)},
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    finding=finding,
    place=215,
)
