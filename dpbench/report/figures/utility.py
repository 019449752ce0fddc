"""Accuracy against ε: a panel a network, a line a clipping function, ordinary training as a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from dpbench.report import captions, findings, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import box
from dpbench.report.parts import FigureKind

#: clipping function -> (colour, marker, factor that moves it beside ε)
LOOKS = {"flat": ("#0077BB", "o", 1.0), "automatic": ("#EE7733", "s", 1.035), "per_layer": ("#009988", "^", 0.965)}
_TOP, _DEPTH, _LEFT, _GAP = 0.36, 2.3, 0.62, 0.3
_SAME = ["data", "network", "clip", "backend", "target_epsilon"]


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each setting: median, least and greatest accuracy of its seeds, and the training's cost."""
    rows = []
    for record in records:
        if "accuracy" not in record.result:
            left_out[f"{record.trial['network']} {record.trial['backend']}: {record.outcome}"] += 1
            continue
        private = record.trial["target_epsilon"] is not None
        named = {name: record.trial[name] for name in _SAME}
        named |= {} if private else {"clip": "none", "backend": "ordinary"}
        result = record.result
        best = max(point["accuracy"] for point in result["curve"])
        reached = next(point["seconds"] for point in result["curve"] if point["accuracy"] >= 0.98 * best)
        rows.append(
            named
            | {
                "accuracy": result["accuracy"],
                "epsilon": result.get("epsilon"),
                "noise_multiplier": result.get("noise_multiplier"),
                "seconds": result["curve"][-1]["seconds"],
                "seconds_to_98": reached,
                "test_loss": float(result["test_losses"][-1]),
                "seed": record.trial["seed"],
            }
        )
    columns = [*_SAME, "seeds", "accuracy", "least", "greatest", "epsilon", "noise_multiplier", "seconds"]
    if not rows:
        return pd.DataFrame(columns=[*columns, "seconds_to_98", "test_loss_of_seed_0"])
    frame = pd.DataFrame(rows)
    found = []
    for keys, part in frame.groupby(_SAME, dropna=False, sort=True):
        first = part[part.seed == 0].test_loss
        found.append(
            dict(zip(_SAME, keys, strict=True))
            | {
                "seeds": len(part),
                "accuracy": part.accuracy.median(),
                "least": part.accuracy.min(),
                "greatest": part.accuracy.max(),
                "epsilon": part.epsilon.max(),
                "noise_multiplier": part.noise_multiplier.max(),
                "seconds": part.seconds.median(),
                "seconds_to_98": part.seconds_to_98.median(),
                "test_loss_of_seed_0": first.iloc[0] if len(first) else None,
            }
        )
    return pd.DataFrame(found)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people: accuracies in per cent."""
    shown = frame.copy()
    for name in ("accuracy", "least", "greatest"):
        shown[name] = [f"{100 * value:.1f} %" for value in frame[name]]
    for name, digits in (("epsilon", 3), ("noise_multiplier", 4), ("seconds", 3), ("seconds_to_98", 3)):
        shown[name] = ["" if pd.isna(value) else f"{value:.{digits}g}" for value in frame[name]]
    shown["target_epsilon"] = ["" if pd.isna(value) else f"{value:g}" for value in frame.target_epsilon]
    shown["test_loss_of_seed_0"] = ["" if pd.isna(v) else f"{v:.6f}" for v in frame.test_loss_of_seed_0]
    return shown


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The source of ε, and what it excludes."""
    trials = [record.trial for record in records]
    deltas = sorted({trial["delta"] for trial in trials})
    sizes = sorted({trial["batch_size"] for trial in trials})
    said = [
        f"Accuracy on held-out images, median and range of the seeds; δ = {', '.join(map(style.plain, deltas))},",
        f"Poisson batches of {', '.join(map(str, sizes))} expected, ε an upper bound by prv. Line and band: ordinary",
        "training of the same model on the same batches. Noise is seeded here, so that training can be repeated;",
        "choosing the settings is not accounted. The table also has each backend: exact ones differ by rounding.",
    ]
    return captions.caption(said, records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each data set and model, with one scale of accuracy."""
    panels = list(dict.fromkeys(zip(frame.data, frame.network, strict=True)))
    figure, height = sheet(_TOP + _DEPTH + AXIS + 0.2, caption)
    count = max(1, len(panels))
    wide = (WIDTH - _LEFT - 0.15 - _GAP * (count - 1)) / count
    low = float(frame.least.min()) if len(frame) else 0.0
    for i, (data, network) in enumerate(panels):
        axes = figure.add_axes(box(_LEFT + i * (wide + _GAP), _TOP, wide, _DEPTH, height))
        part = frame[(frame.data == data) & (frame.network == network)]
        ordinary = part[part.backend == "ordinary"]
        for _, row in ordinary.iterrows():
            axes.axhline(row.accuracy, color="#555555", linewidth=1.0, label="ordinary training")
            axes.axhspan(row.least, row.greatest, color="#555555", alpha=0.15, linewidth=0)
        for clip, (color, marker, beside) in LOOKS.items():
            _line(axes, part[(part["clip"] == clip) & (part.backend == "bk_mixed")], clip, color, marker, beside)
        axes.set_xscale("log")
        ticks = sorted(part.target_epsilon.dropna().unique())
        axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(max(0.0, low - 0.03), 1.0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("ε")
        axes.set_title(f"{network} on {data.partition(':')[0]}", fontsize=9)
        axes.grid(color=style.GRID, linewidth=0.5)
        if i > 0:
            axes.tick_params(labelleft=False)  # they share one scale
        else:
            axes.set_ylabel("accuracy")
        if i == 0 and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7.6, frameon=False, loc="lower right")
    return figure


def _line(axes: Any, part: pd.DataFrame, clip: str, color: str, marker: str, beside: float) -> None:
    part = part.sort_values("target_epsilon")
    if not len(part):
        return
    errors = [part.accuracy - part.least, part.greatest - part.accuracy]
    at = part.target_epsilon * beside
    label = f"{clip.replace('_', '-')} clipping"
    axes.errorbar(at, part.accuracy, errors, color=color, marker=marker, markersize=4, linewidth=1.2, label=label)


FIGURE = FigureKind(
    doc="accuracy against ε by model and clipping function, beside ordinary training",
    kinds=("utility",),
    cell=lambda r: r.id,
    facets={"experiment": ("utility",)},
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    finding=findings.utility,
    place=210,
)
