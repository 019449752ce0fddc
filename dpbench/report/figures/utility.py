"""Accuracy against ε, during training, and against time."""

import itertools
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dpbench.records.conditions import shared_warnings
from dpbench.records.reader import LeftOut, Record
from dpbench.report import readable, style
from dpbench.report.captions import settings
from dpbench.report.data.statistics import TRAINING, over_seeds, test_losses, trained
from dpbench.report.drawing.bars import Bar, Panel, Row, bars
from dpbench.report.drawing.sheet import grid, logarithmic, spread
from dpbench.report.parts import FigureKind
from dpbench.report.readable import as_percent, digits, of
from dpbench.report.summary import several

#: clipping function -> (colour, marker, factor that moves it beside ε)
LOOKS = {"flat": ("#0077BB", "o", 1.0), "automatic": ("#EE7733", "s", 1.035), "per_layer": ("#009988", "^", 0.965)}
#: Colours of budgets, from the smallest, repeated if needed; and of ordinary training.
_COLORS, _ORDINARY = ("#CC3311", "#EE7733", "#DDAA33", "#117733", "#2266AA"), "#555555"
_MEDIANS, _MOST = ["seconds", "seconds_to_98"], ["epsilon", "noise_multiplier", "test_loss_of_seed_0"]


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each setting: median, least and greatest accuracy of its seeds, and the training's cost."""
    rows = []
    for record in records:
        if not (named := trained(record)):
            continue
        curve, result = record.result["curve"], record.result
        best = max(point["accuracy"] for point in curve)
        found = {
            "accuracy": result["accuracy"],
            "epsilon": result.get("epsilon"),
            "noise_multiplier": result.get("noise_multiplier"),
            "seconds": curve[-1]["seconds"],
            "seconds_to_98": next(point["seconds"] for point in curve if point["accuracy"] >= 0.98 * best),
            "test_loss_of_seed_0": test_losses(record)[-1] if record.trial["seed"] == 0 else None,
        }
        rows.append(named | found)
    return over_seeds(rows, TRAINING, "accuracy", _MEDIANS, _MOST)


_TEXT: readable.Columns = {
    **{name: of(name) for name in TRAINING[:-1]},
    "target_epsilon": of("target_epsilon", "{:g}".format),
    "seeds": of("seeds"),
    **{name: of(name, as_percent) for name in ("accuracy", "least", "greatest")},
    **{name: of(name, digits(3)) for name in ("epsilon", *_MEDIANS)},
    "noise_multiplier": of("noise_multiplier", digits(4)),
    "test_loss_of_seed_0": of("test_loss_of_seed_0", "{:.6f}".format),
}


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        f"Accuracy on held-out images, median and range of the seeds; δ = {settings(records, 'delta')}, Poisson "
        f"batches of {settings(records, 'batch_size')} expected, ε an upper bound by prv. Line and band: ordinary "
        "training of the same model on the same batches. Noise is seeded here, so that training can be repeated; "
        "choosing the settings is not accounted. The table also has each backend: exact ones differ by rounding."
    ]


def _finding(frame: pd.DataFrame) -> str:
    private = frame[frame.target_epsilon.notna()]
    if private.empty:
        return ""
    target = style.middle(private.target_epsilon)
    best: Any = private[private.target_epsilon == target].sort_values("accuracy").iloc[-1]
    said = (
        f"At ε = {target:g} the best private model ({best.network}, {best['clip'].replace('_', '-')} clipping) reaches "
        f"{best.accuracy:.1%} on {best.data.partition(':')[0]} (median of {several(int(best.seeds), 'seed')})"
    )
    ordinary = frame[(frame.backend == "ordinary") & (frame.network == best.network) & (frame.data == best.data)]
    return said + (f", ordinary training {ordinary.accuracy.iloc[0]:.1%}." if len(ordinary) else ".")


def _models(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """'cnn on digits', and the rows of each."""
    groups = frame.groupby(["data", "network"], sort=False)
    return [(f"{network} on {str(data).partition(':')[0]}", own) for (data, network), own in groups]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each data set and model, with one scale of accuracy; a line a clipping function."""
    models = _models(frame)
    figure, panels = grid(caption, max(1, len(models)), max(1, len(models)), 2.3, gap=0.3)
    low = float(frame.least.min()) if len(frame) else 0.0
    for i, (axes, (name, part)) in enumerate(zip(panels, models, strict=False)):
        for _, row in part[part.backend == "ordinary"].iterrows():
            axes.axhline(row.accuracy, color=_ORDINARY, linewidth=1.0, label="ordinary training")
            axes.axhspan(row.least, row.greatest, color=_ORDINARY, alpha=0.15, linewidth=0)
        for clip, (color, marker, beside) in LOOKS.items():
            line = part[(part["clip"] == clip) & (part.backend == "bk_mixed")].sort_values("target_epsilon")
            if len(line):
                label = f"{clip.replace('_', '-')} clipping"
                spread(axes, line.target_epsilon * beside, line, "accuracy", color=color, marker=marker, label=label)
        logarithmic(axes.xaxis, at=sorted(part.target_epsilon.dropna().unique()))
        axes.set_ylim(max(0.0, low - 0.03), 1.0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(xlabel="ε", title=name)
        axes.tick_params(labelleft=i == 0)  # they share one scale
        if i == 0:
            axes.set_ylabel("accuracy")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="lower right")
    return figure


def curves(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each setting and epoch: accuracies of the seeds."""
    rows = [
        named | {"epoch": epoch, **point}
        for record in records
        if (named := trained(record))
        for epoch, point in enumerate(record.result["curve"], start=1)
    ]
    return over_seeds(rows, [*TRAINING, "epoch", "steps"], "accuracy")


def curves_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Each setting half-way and at the end."""
    groups = [own for _, own in frame.groupby(TRAINING, dropna=False, sort=False)]
    rows = [own.iloc[[*{max(0, len(own) // 2 - 1), len(own) - 1}]].sort_values("epoch") for own in groups]
    columns: readable.Columns = {
        **{name: of(name) for name in TRAINING[:-1]},
        "ε": of("target_epsilon", "{:g}".format),
        "epoch": of("epoch"),
        "seeds": of("seeds"),
        "accuracy": of("accuracy", as_percent),
        "range": lambda r: f"{100 * r.least:.1f} to {100 * r.greatest:.1f} %",
    }
    return readable.texts(pd.concat(rows) if rows else frame, columns)


def _curves_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        "Accuracy on held-out images after each epoch, median and range of the seeds; flat clipping, bk_mixed; grey is "
        "ordinary training of the same model on the same batches."
    ]


def curves_plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each data set and model."""
    models = _models(frame)
    figure, panels = grid(caption, len(models), len(models), 2.1, left=0.72, gap=0.62)
    for axes, (name, own) in zip(panels, models, strict=False):
        axes.set_title(f"{name}: accuracy")
        _accuracies(axes, own)
    for axes in figure.axes:
        axes.set_xlabel("epochs")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def _accuracies(axes: Axes, part: pd.DataFrame) -> None:
    flat = part[((part["clip"] == "flat") & (part.backend == "bk_mixed")) | (part.backend == "ordinary")]
    budgets = sorted(flat.target_epsilon.dropna().unique(), reverse=True)
    lines = [(flat[flat.target_epsilon.isna()], _ORDINARY, "ordinary training")]
    lines += [
        (flat[flat.target_epsilon == budget], _COLORS[-1 - i % len(_COLORS)], f"ε = {budget:g}")
        for i, budget in enumerate(budgets)
    ]
    for line, color, label in lines:
        if len(line):
            axes.plot(line.epoch, line.accuracy, color=color, label=label)
            axes.fill_between(line.epoch, line.least, line.greatest, color=color, alpha=0.16, linewidth=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(max(0.0, flat.accuracy.min() - 0.05) if len(flat) else 0.0, 1.0)
    if len(flat):
        axes.legend(loc="lower right")


#: The backend used to compare budgets and clipping functions.
_REFERENCE = "bk_mixed"
_TIME_COLUMNS = [
    *("by", *TRAINING, "goal", "seeds", "reached"),
    *("epochs", "seconds", "seconds_low", "seconds_high", "seconds_per_epoch"),
]


def times(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each setting: the seeds that reached the goal, and their median epochs and seconds to it.

    `by`: "budget" for a setting with all its seeds; "backend" for a comparison of backends, with their common seeds.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if named := trained(record):
            groups.setdefault(tuple(named.values()), []).append(record)
    rows = []
    for key, group in groups.items():
        ordinary = groups.get((*key[:2], "none", "ordinary", None))
        if ordinary is None:
            left_out["without ordinary training to compare with"] += len(group)
            continue
        goal = math.floor(0.95 * median(record.result["accuracy"] for record in ordinary) * 20 + 1e-9) / 20
        named = dict(zip(TRAINING, key, strict=True)) | {"goal": goal}
        if key[3] in ("ordinary", _REFERENCE):
            rows.append(named | {"by": "budget"} | _reached(group, goal))
        peers = [other for k, other in groups.items() if (*k[:3], k[4]) == (*key[:3], key[4])]
        if len(peers) > 1:
            seeds = set.intersection(*({record.trial["seed"] for record in peer} for peer in peers))
            same = [record for record in group if record.trial["seed"] in seeds]
            if same:
                rows.append(named | {"by": "backend"} | _reached(same, goal))
    rows.sort(key=_rank)
    return pd.DataFrame(rows, columns=_TIME_COLUMNS)


def _reached(group: Sequence[Record], goal: float) -> dict[str, Any]:
    curves = [record.result["curve"] for record in group]
    ends = [[0.0, *(point["seconds"] for point in curve)] for curve in curves]
    firsts = [next((i for i, p in enumerate(curve) if p["accuracy"] >= goal), None) for curve in curves]
    took = [(i + 1, curve[i]["seconds"]) for curve, i in zip(curves, firsts, strict=True) if i is not None]
    seconds = [second for _, second in took]
    all_did = len(took) == len(group)
    return {
        "seeds": len(group),
        "reached": len(took),
        "epochs": median(epochs for epochs, _ in took) if all_did else None,
        "seconds": median(seconds) if all_did else None,
        "seconds_low": min(seconds, default=None),
        "seconds_high": max(seconds, default=None),
        # medians, since the first epoch includes one-time costs
        "seconds_per_epoch": median(median(b - a for a, b in itertools.pairwise(own)) for own in ends),
    }


def _rank(row: dict[str, Any]) -> tuple[Any, ...]:
    clip, epsilon, backend = row["clip"], row["target_epsilon"], row["backend"]
    group = row["data"], row["network"], row["by"] != "budget", clip != "none"
    return *group, clip != "flat", clip, -(epsilon or math.inf), style.backend_key(backend)


_TIME_TEXT: readable.Columns = {
    **{name: of(name) for name in ("by", *TRAINING[:-1])},
    "ε": of("target_epsilon", "{:g}".format),
    "goal": of("goal", lambda share: f"{100 * share:.0f} %"),
    "reached by": lambda r: f"{r.reached} of {r.seeds}",
    "epochs": of("epochs", "{:g}".format),
    "time": of("seconds", style.duration),
    "time an epoch": of("seconds_per_epoch", style.duration),
}


def _times_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    said = (
        "Epochs and seconds of training until the accuracy on held-out images is first as high as stands beside each "
        "model: the largest multiple of 5 % within 0.95 of ordinary training's. Median of the seeds, with the range of "
        "the seconds, in which the checks of the first batch are, but no evaluation and no calibration. By ε: flat "
        "clipping with bk_mixed. By backend: the seeds that all were run with; same batches, same noise. One thread."
    )
    return [said, *shared_warnings(records)]


def times_plot(frame: pd.DataFrame, caption: str) -> Figure:
    """For each model a block of budgets and a block of backends; epochs at the left, seconds at the right."""
    rows, epochs, seconds = [], [], []
    for (data, network, by), part in frame.groupby(["data", "network", "by"], sort=False):
        where, of_budget = f"{network}, {str(data).partition(':')[0]}", by == "budget"
        for row in readable.rows(part[part["clip"].isin(["flat", "none"])]):
            ordinary, budget = row.backend == "ordinary", f"ε = {row.target_epsilon:g}"
            label = "ordinary" if ordinary else budget if of_budget else row.backend
            group = f"{where}: {100 * row.goal:.0f} %" if of_budget else f"{where}, {budget}"
            rows.append(Row(group, "nonprivate" if ordinary else row.backend, label))
            if pd.isna(row.epochs):
                late = Bar(note=f"{row.reached} of {row.seeds} seeds did")
                epochs.append(late)
                seconds.append(late)
                continue
            epochs.append(Bar(row.epochs, text=f"{row.epochs:g}"))
            low, high = (row.seconds_low, row.seconds_high) if row.seeds > 1 else (None, None)
            seconds.append(Bar(row.seconds, low, high, text=style.duration(row.seconds)))
    panels = [Panel("Epochs to accuracy", "epochs", epochs), Panel("Time to accuracy", "seconds", seconds)]
    return bars(rows, panels, caption, ranges="seeds")


FIGURES = {
    "utility": FigureKind(("utility",), table, _TEXT, _caption, plot, _finding),
    "utility_curves": FigureKind(("utility",), curves, curves_text, _curves_caption, curves_plot),
    "time_to_accuracy": FigureKind(
        kinds=("utility",),
        table=times,
        text=_TIME_TEXT,
        caption=_times_caption,
        plot=times_plot,
        applies=lambda records: any(r.trial["target_epsilon"] is None and "accuracy" in r.result for r in records),
    ),
}
