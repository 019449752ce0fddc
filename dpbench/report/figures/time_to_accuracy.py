"""Time to accuracy: epochs and seconds until a model reaches a goal, by budget and by backend.

All trainings of a model on a data set share the goal: the largest multiple of 5 % that is at most 0.95 of ordinary
training's final accuracy. Epochs do not depend on the machine; seconds are of training alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.conditions import shared_warnings
from dpbench.report import readable, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.data.statistics import TRAINING, trained
from dpbench.report.drawing.bars import Bar, Panel, Row, bars
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of

#: The backend used to compare budgets and clipping functions.
_REFERENCE = "bk_mixed"
_COLUMNS = [
    *("by", *TRAINING, "goal", "seeds", "reached"),
    *("epochs", "seconds", "seconds_low", "seconds_high", "seconds_per_epoch"),
]


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each setting: the seeds that reached the goal, and their median epochs and seconds to it.

    `by`: "budget" for a setting with all its seeds; "backend" for a comparison of backends, with their common seeds.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    ordinary: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if named := trained(record):
            groups.setdefault(tuple(named.values()), []).append(record)
            if named["backend"] == "ordinary":
                ordinary.setdefault((named["data"], named["network"]), []).append(record.result["accuracy"])
    rows = []
    for key, group in groups.items():
        if key[:2] not in ordinary:
            left_out["without ordinary training to compare with"] += len(group)
            continue
        goal = math.floor(0.95 * median(ordinary[key[0], key[1]]) * 20 + 1e-9) / 20
        named = dict(zip(TRAINING, key, strict=True)) | {"goal": goal}
        if key[3] in ("ordinary", _REFERENCE):
            rows.append(named | {"by": "budget"} | _reached(group, goal))
        peers = [other for k, other in groups.items() if (*k[:3], k[4]) == (*key[:3], key[4])]
        if len(peers) > 1:
            seeds = set.intersection(*({record.trial["seed"] for record in peer} for peer in peers))
            same = [record for record in group if record.trial["seed"] in seeds]
            if same:
                rows.append(named | {"by": "backend"} | _reached(same, goal))
    rows.sort(key=lambda row: (row["data"], row["network"], row["by"] != "budget", row["clip"] != "none", _rank(row)))
    return pd.DataFrame(rows, columns=_COLUMNS)


def _reached(group: Sequence[Record], goal: float) -> dict[str, Any]:
    curves = [record.result["curve"] for record in group]
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
        "seconds_per_epoch": median(map(_epoch, curves)),
    }


def _rank(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["clip"] != "flat", row["clip"], -(row["target_epsilon"] or math.inf), style.backend_key(row["backend"])


def _epoch(curve: Sequence[dict[str, float]]) -> float:
    """Median seconds of an epoch: the first one includes one-time costs."""
    ends = [0.0, *(point["seconds"] for point in curve)]
    return median(b - a for a, b in itertools.pairwise(ends))


def _applies(records: Sequence[Record]) -> bool:
    return any(record.trial["target_epsilon"] is None and "accuracy" in record.result for record in records)


_TEXT: readable.Columns = {
    **{name: of(name) for name in ("by", *TRAINING[:-1])},
    "ε": of("target_epsilon", "{:g}".format),
    "goal": of("goal", "{:.0%}".format),
    "reached by": lambda r: f"{r.reached} of {r.seeds}",
    "epochs": of("epochs", "{:g}".format),
    "time": of("seconds", style.duration),
    "time an epoch": of("seconds_per_epoch", style.duration),
}


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    said = (
        "Epochs and seconds of training until the accuracy on held-out images is first as high as stands beside each "
        "model: the largest multiple of 5 % within 0.95 of ordinary training's. Median of the seeds, with the range of "
        "the seconds, in which the checks of the first batch are, but no evaluation and no calibration. By ε: flat "
        "clipping with bk_mixed. By backend: the seeds that all were run with; same batches, same noise. One thread."
    )
    return [said, *shared_warnings(records)]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
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


FIGURE = FigureKind(
    doc="epochs and seconds until a model is nearly as accurate as by ordinary training, by ε and by backend",
    kinds=("utility",),
    table=table,
    text=_TEXT,
    caption=_caption,
    plot=plot,
    applies=_applies,
    place=230,
)
