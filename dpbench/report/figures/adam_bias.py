"""Test loss by learning rate of SGD, Adam and AdamBC, and the spread of Adam's denominators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpbench.report import captions, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.data.statistics import losses_of_seeds
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import box, plain_log
from dpbench.report.parts import FigureKind

#: optimizer -> (colour, marker)
LOOKS = {"SGD": ("#0077BB", "o"), "Adam": ("#EE7733", "s"), "AdamBC": ("#009988", "^")}
#: the same with a fixed floor
FLOORS = (("#AA3377", "v"), ("#BBBBBB", "D"))
_TOP, _DEPTH, _FLAT, _LEFT, _GAP, _BETWEEN = 0.3, 1.6, 0.85, 0.62, 0.42, 0.15
_LEGEND = 0.25
_SAME = ["data", "network", "target_epsilon", "optimizer", "lr"]
_MEDIANS = ["accuracy", "spread", "epsilon", "noise_multiplier"]
#: A panel omits losses above its least by this factor.
_MOST = 4.0


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each model, ε (None for ordinary training), optimizer and learning rate: medians over the seeds."""
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "accuracy" not in result:
            left_out[f"{trial['network']} {trial['optimizer']}: {record.outcome}"] += 1
            continue
        found = {name: result.get(name) for name in _MEDIANS}
        rows.append({name: trial[name] for name in _SAME} | {"loss": float(result["test_losses"][-1])} | found)
    if not rows:
        return pd.DataFrame(columns=[*_SAME, "seeds", "loss", "least", "greatest", *_MEDIANS])
    return losses_of_seeds(rows, _SAME, _MEDIANS)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people."""
    shown = frame.copy()
    shown["accuracy"] = [f"{100 * value:.1f} %" for value in frame.accuracy]
    for name in ("target_epsilon", "loss", "least", "greatest", "spread", "epsilon", "noise_multiplier"):
        shown[name] = ["" if pd.isna(value) else f"{value:.4g}" for value in frame[name].astype(float)]
    return shown


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The panels, and the source of ε."""
    deltas = sorted({record.trial["delta"] for record in records})
    sizes = sorted({record.trial["batch_size"] for record in records})
    said = [
        "Above: loss on held-out images, median and range of the seeds. Below: the 90 % over the 10 % quantile of what",
        "the optimizer divides the entries by after the last step; 1 is SGD with momentum. AdamBC's floor is its own,",
        "or the number times Φ. Uneven: pixels of scales that differ up to ten times. Ordinary training: one seed, and",
        f"AdamBC is Adam. δ = {', '.join(map(style.plain, deltas))}, Poisson batches of {', '.join(map(str, sizes))}",
        "expected, ε an upper bound by prv. Choosing the learning rate is not accounted. Noise is seeded here, so that",
        "training can be repeated.",
    ]
    return captions.caption(said, records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """For each model two rows, loss and spread; a column for ordinary training and for each ε, the largest first."""
    networks = sorted(set(frame.network), key=lambda name: (name == "cnn", name))
    targets = frame.target_epsilon.astype(float).fillna(math.inf)
    columns = sorted(targets.unique(), reverse=True)
    deep = _TOP + _DEPTH + _BETWEEN + _FLAT + AXIS
    figure, height = sheet(_LEGEND + max(1, len(networks)) * deep + 0.1, caption)
    wide = (WIDTH - _LEFT - 0.15 - _GAP * (len(columns) - 1)) / max(1, len(columns))
    looks = _looks(frame)
    for i, network in enumerate(networks):
        of, top = frame[frame.network == network], _LEGEND + _TOP + i * deep
        for j, target in enumerate(columns):
            left = _LEFT + j * (wide + _GAP)
            above = figure.add_axes(box(left, top, wide, _DEPTH, height))
            below = figure.add_axes(box(left, top + _DEPTH + _BETWEEN, wide, _FLAT, height))
            part = of[targets == target]
            _panel(above, below, part, looks)
            for axes in (above, below):
                axes.set_xlim(0.8 * of.lr.min(), 1.25 * of.lr.max())
            if len(part):
                above.set_ylim(
                    0.9 * part.least.min(),
                    max(1.1 * part.loss.min(), min(_MOST * part.loss.min(), 1.1 * part.greatest.max())),
                )
            below.set_ylim(0.85, 1.3 * of.spread.max(skipna=True) if of.spread.notna().any() else 2.0)
            budget = "ordinary training" if target == math.inf else f"ε = {target:g}"
            above.set_title(f"{network}, {budget}", fontsize=9)
            above.tick_params(labelbottom=False)
            below.set_xlabel("learning rate")
            if j == 0:
                above.set_ylabel("test loss")
                below.set_ylabel("spread")
    handles = [Line2D([], [], label=name.replace(":", ", floor "), **look) for name, look in looks.items()]
    if handles:
        corner = (0.12 / WIDTH, 1 - 0.06 / height)
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=len(handles), frameon=False, fontsize=8
        )
    return figure


def _looks(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Optimizer -> its line."""
    found = set(frame.optimizer)
    by_hand = sorted(name for name in found if ":" in name)
    every = {name: look for name, look in LOOKS.items() if name in found} | dict(zip(by_hand, FLOORS, strict=False))
    return {
        name: {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.2}
        for name, (color, marker) in every.items()
    }


def _panel(above: Any, below: Any, part: pd.DataFrame, looks: dict[str, dict[str, Any]]) -> None:
    for optimizer, look in looks.items():
        line = part[part.optimizer == optimizer].sort_values("lr")
        if not len(line):
            continue
        errors = [line.loss - line.least, line.greatest - line.loss]
        above.errorbar(line.lr, line.loss, errors, capsize=2, **look)
        if line.spread.notna().any():
            below.plot(line.lr, line.spread, **look)
    for axes in (above, below):
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain_log(axes.xaxis, (1.0,))
        plain_log(axes.yaxis, (1.0, 1.5, 2.0, 3.0, 5.0) if axes is above else (1.0, 2.0, 5.0))
        axes.grid(color=style.GRID, linewidth=0.5)


def finding(frame: pd.DataFrame) -> str:
    """For each model and ε the least test loss of each optimizer, each at its best learning rate."""
    private = frame.dropna(subset="target_epsilon")
    best = private.sort_values("loss", kind="stable").drop_duplicates(["network", "target_epsilon", "optimizer"])
    said = []
    for (network, target), part in best.groupby(["network", "target_epsilon"], sort=False):
        by = {row.optimizer: row for row in part.itertuples()}
        if {"Adam", "AdamBC", "SGD"} <= by.keys():
            losses = ", ".join(f"{name} {by[name].loss:.3f}" for name in ("SGD", "Adam", "AdamBC"))
            said.append(f"{network} at ε = {target:g}: {losses}")
    return f"Least test loss, {'; '.join(sorted(said))}." if said else ""


FIGURE = FigureKind(
    doc="test loss by learning rate of Adam with and without the noise in its second moment, and of SGD",
    kinds=("adam_bias",),
    cell=lambda r: r.id,
    facets={"experiment": ("adam_bias",)},
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    finding=finding,
    place=216,
)
