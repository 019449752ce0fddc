"""Private and ordinary training in several processes: throughput and memory ratios, and their scaling."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record
from dpbench.report import readable, style
from dpbench.report.captions import join
from dpbench.report.drawing.sheet import WIDTH, grid, logarithmic
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of

BASELINE = "nonprivate"
SPREADS = {"ddp": "DDP", "fsdp": "FSDP2"}
_COLORS = ("#0077BB", "#EE7733", "#009988", "#CC3311", "#33BBEE", "#EE3377")
_MARKERS = "os^Dvp"
_ACROSS = 4
_SAME = ["model", "spread", "precision", "backend", "batch_size", "processes"]
_ALIKE = [name for name in _SAME if name != "processes"]
_NUMBERS = ["samples_per_second", "throughput_ratio", "least", "greatest", "scaling", "peak_bytes", "memory_ratio"]
_COLUMNS = [*_SAME, "rounds", *_NUMBERS, "oversubscribed"]


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each backend of each trial.

    `throughput_ratio` is the median over rounds of ordinary training's seconds over the backend's in the same round;
    `scaling` is a process's samples a second relative to a single process; memory is the largest of any process.
    """
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "backends" not in result:
            continue
        seconds = {
            name: {turn["round"]: median(turn["step_seconds"]) for turn in entry["turns"]}
            for name, entry in result["backends"].items()
        }
        base = seconds.get(BASELINE, {})
        peaks = {name: max(m["peak_bytes"] for m in entry["memory"]) for name, entry in result["backends"].items()}
        for name, own in seconds.items():
            ratios = [base[number] / own[number] for number in own if number in base]
            rows.append(
                {field: trial[field] for field in _SAME if field != "backend"}
                | {
                    "backend": name,
                    "rounds": len(own),
                    "samples_per_second": trial["batch_size"] * trial["processes"] / median(own.values()),
                    "throughput_ratio": median(ratios) if ratios else None,
                    "least": min(ratios, default=None),
                    "greatest": max(ratios, default=None),
                    "peak_bytes": peaks[name],
                    "memory_ratio": peaks[name] / peaks[BASELINE] if BASELINE in peaks else None,
                    "oversubscribed": result["oversubscribed"],
                }
            )
    frame = pd.DataFrame(rows, columns=[c for c in _COLUMNS if c != "scaling"])
    alone = frame[frame.processes == 1].drop_duplicates(_ALIKE)[[*_ALIKE, "samples_per_second"]]
    each = frame.merge(alone, "left", _ALIKE, suffixes=("", "_alone"))
    frame["scaling"] = each.samples_per_second / each.processes / each.samples_per_second_alone
    return frame[_COLUMNS].sort_values(_SAME, kind="stable").reset_index(drop=True)


_TEXT: readable.Columns = {
    **{name: of(name) for name in (*_SAME, "rounds")},
    "samples_per_second": of("samples_per_second", "{:.3g} /s".format),
    **{name: of(name, "{:.3f}".format) for name in ("throughput_ratio", "least", "greatest", "scaling")},
    "peak_bytes": of("peak_bytes", style.size),
    "memory_ratio": of("memory_ratio", "{:.3f}".format),
    "oversubscribed": lambda r: "yes" if r.oversubscribed else "",
}


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    libraries = sorted({r.result["communication"] for r in records if "communication" in r.result})
    return [
        "Training steps in several processes, each with as many samples (weak scaling): forward, backward, "
        "communication, noise and optimizer. Throughput beside ordinary training in the same processes and rounds, "
        f"median and range of {join(sorted(set(frame['rounds'])))} rounds; memory of the process that holds most, "
        f"measured. Communication by {join(libraries) or 'none'}. Hollow: more processes than CPUs or GPUs, which "
        "share them."
    ]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Throughput above, memory below, a column for DDP and one for FSDP2; a line a model and precision."""
    spreads = [name for name in SPREADS if name in set(frame.spread)] or ["ddp"]
    private = frame[frame.backend != BASELINE]
    lines = list(private.groupby(["model", "precision", "backend"], sort=False))
    models = list(dict.fromkeys(private.model))
    below = 0.2 * -(-len(lines) // _ACROSS) + 0.1
    figure, panels = grid(caption, 2 * len(spreads), len(spreads), 1.9, foot=0.5, below=below)
    for index, axes in enumerate(panels):
        row, column = divmod(index, len(spreads))
        field, most = (("throughput_ratio", "greatest"), ("memory_ratio", "memory_ratio"))[row]
        for key, own in lines:
            part = own[own.spread == spreads[column]].sort_values("processes")
            if len(part):
                _line(axes, part, field, models.index(key[0]), key)
        axes.axhline(1.0, color="#555555", linewidth=1.0)
        logarithmic(axes.xaxis, at=sorted(set(frame.processes)) or [1])
        highest = frame[most].astype(float).max()
        axes.set(ylim=(0.0, 1.1 * max(1.0, 0.0 if pd.isna(highest) else highest)), title=SPREADS[spreads[column]])
        axes.set(xlabel="processes")
        if column == 0:
            axes.set_ylabel(f"{('throughput', 'peak memory')[row]} / ordinary")
    entries = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    looks: dict[str, Any] = {"fontsize": 7.4, "borderaxespad": 0, "loc": "lower left", "ncols": _ACROSS}
    bottom = panels[-1].get_position().y0 - (0.5 + below) / figure.get_figheight()
    if entries:
        figure.legend(entries.values(), entries.keys(), bbox_to_anchor=(0.1 / WIDTH, bottom), **looks)
    return figure


def _line(axes: Axes, part: pd.DataFrame, field: str, i: int, key: Any) -> None:
    model, precision, backend = key
    color, marker = _COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)]
    label = f"{style.model(model)}, {style.backend(backend).name}" + (", bfloat16" if precision == "mixed" else "")
    axes.plot(part.processes, part[field], "--" if precision == "mixed" else "-", color=color, label=label)
    for row in readable.rows(part):
        face = "white" if row.oversubscribed else color
        axes.plot([row.processes], [getattr(row, field)], marker, color=color, markerfacecolor=face)
    if field == "throughput_ratio":
        axes.vlines(part.processes, part.least, part.greatest, color=color, linewidth=1.0)


FIGURE = FigureKind(("distributed",), table, _TEXT, _caption, plot, by=("experiment", "threads"))
