"""Test loss by the number of bands that noise is correlated over: a panel for each ε, a line for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from dpbench.report import captions, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import box
from dpbench.report.parts import FigureKind

_TOP, _DEPTH, _LEFT, _GAP = 0.36, 2.3, 0.62, 0.45
_LOOKS = (("#0077BB", "o"), ("#EE7733", "s"), ("#009988", "^"), ("#AA3377", "D"))
_SAME = ["data", "network", "target_epsilon", "batch_size", "bands"]


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each ε, batch size and number of bands (1: independent noise), at its best learning rate.

    That is the one of the least median test loss over the seeds; losses and accuracies are medians of these seeds.
    """
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "accuracy" not in result:
            left_out[f"ε {trial['target_epsilon']}, {trial['noise']}: {record.outcome}"] += 1
            continue
        bands = int(trial["noise"].partition(":")[2] or 1)
        found = {name: result.get(name) for name in ("accuracy", "epsilon", "noise_multiplier")}
        row = {name: trial[name] for name in (*_SAME[:-1], "lr", "seed")}
        rows.append({**row, "bands": bands, "loss": float(result["test_losses"][-1]), **found})
    columns = [*_SAME, "lr", "seeds", "loss", "least", "greatest", "accuracy", "epsilon", "noise_multiplier"]
    if not rows:
        return pd.DataFrame(columns=columns)
    every = []
    for keys, part in pd.DataFrame(rows).groupby([*_SAME, "lr"]):
        of = {"seeds": len(part), "loss": part.loss.median(), "least": part.loss.min(), "greatest": part.loss.max()}
        of |= {"accuracy": part.accuracy.median(), "epsilon": part.epsilon.max()}
        of |= {"noise_multiplier": part.noise_multiplier.max()}
        every.append(dict(zip([*_SAME, "lr"], keys, strict=True)) | of)
    frame = pd.DataFrame(every, columns=columns).sort_values("loss", kind="stable").drop_duplicates(_SAME)
    return frame.sort_values(_SAME, ignore_index=True)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table to be read."""
    shown = frame.copy()
    shown["accuracy"] = [f"{100 * value:.1f} %" for value in frame.accuracy]
    for name, digits in (("loss", 4), ("least", 4), ("greatest", 4), ("epsilon", 4), ("noise_multiplier", 4)):
        shown[name] = [f"{value:.{digits}g}" for value in frame[name]]
    return shown


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """How ε was come by, and what it leaves out."""
    deltas = sorted({record.trial["delta"] for record in records})
    said = [
        "Loss on held-out images, median and range of the seeds at the best of the learning rates by that loss (a",
        f"choice that is not accounted), at the same ε in each panel; δ = {', '.join(map(style.plain, deltas))}, an",
        "upper bound by prv. One band is DP-SGD with Poisson batches; of more bands batches come from as many groups",
        "of records in turn. Noise is seeded here, so that training can be repeated.",
    ]
    return captions.caption(said, records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each ε."""
    figure, height = sheet(_TOP + _DEPTH + AXIS + 0.2, caption)
    targets, sizes = sorted(frame.target_epsilon.unique()), sorted(frame.batch_size.unique())
    count = max(1, len(targets))
    wide = (WIDTH - _LEFT - 0.15 - _GAP * (count - 1)) / count
    for i, target in enumerate(targets):
        axes = figure.add_axes(box(_LEFT + i * (wide + _GAP), _TOP, wide, _DEPTH, height))
        for j, size in enumerate(sizes):
            part = frame[(frame.target_epsilon == target) & (frame.batch_size == size)].sort_values("bands")
            color, marker = _LOOKS[j % len(_LOOKS)]
            look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.2}
            errors = [part.loss - part.least, part.greatest - part.loss]
            axes.errorbar(part.bands * 1.03**j, part.loss, errors, capsize=2, label=f"batches of {size}", **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(frame.bands.unique()))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("bands (1: DP-SGD)")
        axes.set_title(f"ε = {target:g}", fontsize=9)
        axes.grid(color=style.GRID, linewidth=0.5)
        if i == 0:
            axes.set_ylabel("test loss")
            axes.legend(fontsize=7.6, frameon=False)
    return figure


def finding(frame: pd.DataFrame) -> str:
    """At the largest ε: the smallest batches with and without bands, and the best that independent noise does."""
    part = frame[frame.target_epsilon == frame.target_epsilon.max()]
    small = part[part.batch_size == part.batch_size.min()]
    alone, banded = small[small.bands == 1], small[small.bands > 1].sort_values("loss")
    if alone.empty or banded.empty:
        return ""
    one, best = alone.iloc[0], banded.iloc[0]
    plain: Any = part[part.bands == 1].sort_values("loss").iloc[0]
    return (
        f"At ε = {best.target_epsilon:g}, {best.bands} bands take the test loss of batches of {best.batch_size} from "
        f"{one.loss:.4f} to {best.loss:.4f} (accuracy {one.accuracy:.1%} to {best.accuracy:.1%}); the best of "
        f"independent noise, batches of {plain.batch_size}, has {plain.loss:.4f} ({plain.accuracy:.1%})."
    )


FIGURE = FigureKind(
    doc="test loss at one ε by the number of steps that noise is correlated over",
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
