"""Accuracy during training against epochs by ε, and the difference of exact backends from the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from dpbench.report import captions, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import box
from dpbench.report.parts import FigureKind

#: Colours of budgets, from the smallest, repeated if needed.
_COLORS = ("#CC3311", "#EE7733", "#DDAA33", "#117733", "#2266AA")
_TOP, _DEPTH, _LEFT, _GAP, _BETWEEN = 0.36, 2.1, 0.72, 0.62, 0.92
_SAME = ["data", "network", "clip", "backend", "target_epsilon"]
#: Drawn for equal trajectories on a logarithmic axis.
_NONE = 1e-9


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each setting and epoch: accuracies of the seeds, and the difference from microbatch's test loss.

    `loss_difference`: relative, for equal seeds, the largest of those with a microbatch run; None without one.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if "accuracy" not in record.result:
            left_out[f"{record.trial['network']} {record.trial['backend']}: {record.outcome}"] += 1
            continue
        private = record.trial["target_epsilon"] is not None
        named = record.trial if private else {**record.trial, "clip": "none", "backend": "ordinary"}
        groups.setdefault(tuple(named[name] for name in _SAME), []).append(record)
    rows = []
    for key, group in sorted(groups.items(), key=lambda item: tuple(map(str, item[0]))):
        oracle = groups.get((*key[:3], "microbatch", key[4]), [])
        losses = {record.trial["seed"]: record.result["test_losses"] for record in oracle}
        for epoch in range(min(len(record.result["curve"]) for record in group)):
            points = [record.result["curve"][epoch] for record in group]
            found = [point["accuracy"] for point in points]
            apart = [
                abs(r.result["test_losses"][epoch] / losses[r.trial["seed"]][epoch] - 1)
                for r in group
                if r.trial["seed"] in losses and key[3] != "microbatch"
            ]
            rows.append(
                dict(zip(_SAME, key, strict=True))
                | {
                    "epoch": epoch + 1,
                    "steps": points[0]["steps"],
                    "seeds": len(group),
                    "accuracy": median(found),
                    "least": min(found),
                    "greatest": max(found),
                    "loss_difference": max(apart, default=None),
                }
            )
    columns = [*_SAME, "epoch", "steps", "seeds", "accuracy", "least", "greatest", "loss_difference"]
    return pd.DataFrame(rows, columns=columns)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """Each setting half-way and at the end; the largest difference so far."""
    rows = []
    for _, part in frame.groupby(_SAME, dropna=False, sort=False):
        for at in sorted({max(0, len(part) // 2 - 1), len(part) - 1}):
            row = part.iloc[at]
            apart = part.loss_difference.iloc[: at + 1].max()
            rows.append(
                {name: row[name] for name in ("data", "network", "clip", "backend")}
                | {"ε": "" if pd.isna(row.target_epsilon) else f"{row.target_epsilon:g}", "epoch": row.epoch}
                | {"seeds": row.seeds, "accuracy": f"{100 * row.accuracy:.1f} %"}
                | {"range": f"{100 * row.least:.1f} to {100 * row.greatest:.1f} %"}
                | {"test loss from microbatch's": "" if pd.isna(apart) else f"{apart:.1e}"}
            )
    return pd.DataFrame(rows)


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The meaning of the lines."""
    said = [
        "Above: accuracy on held-out images after each epoch, median and range of the seeds; flat clipping, bk_mixed;",
        "grey is ordinary training of the same model on the same batches.",
    ]
    apart = frame.loss_difference.max()
    if not pd.isna(apart):
        said.append(
            "Below: the test loss of every other exact backend beside microbatch's (the definition) after the same "
            f"steps with the same seed, batches and noise: the largest relative difference so far, {apart:.1e} at "
            "the end; lines at the lower edge do not differ. What differs is rounding, which jumps where it changes "
            "the winner of a max-pooling; in float64 they agree to 1e-13 (a test holds it)."
        )
    return captions.caption([" ".join(said)], records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A column for each data set and model: accuracy, with the differences, if any, beneath."""
    columns = list(dict.fromkeys(zip(frame.data, frame.network, strict=True)))
    rows = 2 if frame.loss_difference.notna().any() else 1
    figure, height = sheet(_TOP + rows * _DEPTH + (rows - 1) * _BETWEEN + AXIS, caption)
    wide = (WIDTH - _LEFT - 0.15 - _GAP * (len(columns) - 1)) / max(1, len(columns))
    for i, (data, network) in enumerate(columns):
        part = frame[(frame.data == data) & (frame.network == network)]
        left = _LEFT + i * (wide + _GAP)
        axes = figure.add_axes(box(left, _TOP, wide, _DEPTH, height))
        axes.set_title(f"{network} on {data.partition(':')[0]}: accuracy")
        _accuracies(axes, part)
        below = part[part.loss_difference.notna()]
        if len(below):
            axes = figure.add_axes(box(left, _TOP + _DEPTH + _BETWEEN, wide, _DEPTH, height))
            axes.set_title(f"{network}, ε = {below.target_epsilon.iloc[0]:g}: test loss beside microbatch's")
            _differences(axes, below)
    return figure


def _accuracies(axes: Axes, part: pd.DataFrame) -> None:
    flat = part[((part["clip"] == "flat") & (part.backend == "bk_mixed")) | (part.backend == "ordinary")]
    budgets = sorted(flat.target_epsilon.dropna().unique(), reverse=True)
    looks = {budget: _COLORS[-1 - i % len(_COLORS)] for i, budget in enumerate(budgets)}
    for budget in [None, *budgets]:
        line = flat[flat.target_epsilon.isna()] if budget is None else flat[flat.target_epsilon == budget]
        if not len(line):
            continue
        color, label = ("#555555", "ordinary training") if budget is None else (looks[budget], f"ε = {budget:g}")
        axes.plot(line.epoch, line.accuracy, color=color, linewidth=1.4, label=label)
        axes.fill_between(line.epoch, line.least, line.greatest, color=color, alpha=0.16, linewidth=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(max(0.0, flat.accuracy.min() - 0.05) if len(flat) else 0.0, 1.0)
    if len(flat):
        axes.legend(fontsize=7.6, frameon=False, loc="lower right")
    _finish(axes)


def _differences(axes: Axes, below: pd.DataFrame) -> None:
    for name in sorted(set(below.backend), key=style.backend_key):
        line, look = below[below.backend == name], style.backend(name)
        axes.plot(
            line.epoch,
            line.loss_difference.cummax().clip(lower=_NONE),
            color=look.color,
            marker=look.marker,
            markersize=3.5,
            markevery=max(1, len(line) // 10),
            linewidth=1.0,
            label=look.name,
        )
    axes.set_yscale("log")
    axes.set_ylim(_NONE, 1e-1)
    axes.axhline(2.0**-23, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.annotate("one step of float32", (1, 2.0**-23), xycoords=axes.get_yaxis_transform(), xytext=(-2, -9),
                  textcoords="offset points", ha="right", fontsize=7.4, color=style.FAINT)  # fmt: skip
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(fontsize=7.6, frameon=False, loc="upper right", ncols=3)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.set_xlabel("epochs", labelpad=2)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(color=style.GRID, linewidth=0.5)
    axes.tick_params(length=0, labelsize=7.8)


FIGURE = FigureKind(
    doc="accuracy against epochs by ε, and the distance of each exact backend from the oracle on the way",
    kinds=("utility",),
    cell=lambda r: r.id,
    facets={"experiment": ("utility",)},
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    place=220,
)
