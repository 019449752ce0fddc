"""How much of a secret a language model memorises, by repetitions, and how well it predicts new text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from dpbench.report import captions, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.drawing.bars import AXIS, WIDTH, sheet
from dpbench.report.drawing.curves import box
from dpbench.report.parts import FigureKind

_TOP, _DEPTH, _LEFT, _GAP, _BYTES = 0.36, 2.4, 0.62, 1.2, 2.2
#: In order: ordinary training, then from the largest ε to the least.
_LOOKS = (("#555555", "s"), ("#CC3311", "^"), ("#EE7733", "D"), ("#0077BB", "o"), ("#009988", "v"), ("#AA3377", "P"))
_BY_CHANCE = 1.44  # mean bits of a uniform rank: log2(e)


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each ε and number of repetitions: median, least and greatest exposure in bits, over secrets and seeds.

    `target_epsilon` is None for ordinary training; `bits_per_byte` is the median of the seeds.
    """
    rows = []
    for record in records:
        if "exposures" not in record.result:
            left_out[f"ε {record.trial['target_epsilon']}: {record.outcome}"] += 1
            continue
        shared = {name: record.result[name] for name in _SHARED}
        for found in record.result["exposures"]:
            rows.append(
                {"target_epsilon": record.trial["target_epsilon"], "seed": record.trial["seed"], **shared, **found}
            )
    columns = ["target_epsilon", "times", "secrets", "exposure", "least", "greatest", "seeds", *_SHARED]
    if not rows:
        return pd.DataFrame(columns=columns)
    frame, found = pd.DataFrame(rows), []
    for (target, times), part in frame.groupby(["target_epsilon", "times"], dropna=False):
        bits = part.bits
        found.append(
            {"target_epsilon": target, "times": times, "secrets": len(part), "exposure": bits.median()}
            | {"least": bits.min(), "greatest": bits.max(), "seeds": part.seed.nunique()}
            | {name: part[name].max() if name == "epsilon" else part[name].median() for name in _SHARED}
        )
    made = pd.DataFrame(found, columns=columns)
    return made.sort_values(
        ["target_epsilon", "times"], ascending=[False, True], na_position="first", ignore_index=True
    )


_SHARED = ("bits_of_all", "bits_per_byte", "bits_per_byte_before", "epsilon", "delta")


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people."""
    shown = frame.drop(columns=["target_epsilon", "bits_of_all"])
    shown.insert(0, "fine-tuning", [_name(target) for target in frame.target_epsilon])
    for name in ("exposure", "least", "greatest"):
        shown[name] = [f"{value:.1f} bits" for value in frame[name]]
    for name in ("bits_per_byte", "bits_per_byte_before"):
        shown[name] = [f"{value:.2f}" for value in frame[name]]
    for name in ("epsilon", "delta"):
        shown[name] = ["" if pd.isna(value) else f"{value:.3g}" for value in frame[name]]
    return shown


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The attack, its target, and what ε says about it."""
    trials = [record.trial for record in records]
    count = " and ".join(str(n) for n in sorted({trial["records"] for trial in trials}))
    said = [
        "A small GPT-2 that has read prose is adapted by LoRA to lines of code, some with a number of four digits that",
        f"is nowhere else, {count} lines in all. Left: exposure, log2 of the numbers less log2 of the rank that the",
        "model gives the true one (Carlini et al. 2019): all bits where it comes first, 1.44 by chance, the mean",
        "of a uniform rank. Median and range of all secrets and seeds. Right: mean of −log2 p of a byte of new code,",
        "lower is better. ε is for one line, at δ = 1/(2n); a secret that is there n times has n times as much.",
    ]
    return captions.caption(said, records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Exposure against repetitions, a line for each ε; bits a byte beside it, a bar for each."""
    figure, height = sheet(_TOP + _DEPTH + AXIS + 0.2, caption)
    wide = WIDTH - _LEFT - _GAP - _BYTES - 0.15
    left = figure.add_axes(box(_LEFT, _TOP, wide, _DEPTH, height))
    right = figure.add_axes(box(_LEFT + wide + _GAP, _TOP, _BYTES, _DEPTH, height))
    targets = list(dict.fromkeys(None if pd.isna(target) else target for target in frame.target_epsilon))
    looks = dict(zip(targets, _LOOKS, strict=False))
    for i, (target, (color, marker)) in enumerate(looks.items()):
        part = frame[frame.target_epsilon.isna() if target is None else frame.target_epsilon == target]
        at = part.times.astype(float) * 1.05 ** (i - (len(looks) - 1) / 2)  # beside each other
        errors = [part.exposure - part.least, part.greatest - part.exposure]
        look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4.5, "linewidth": 1.3}
        left.errorbar(at, part.exposure, errors, label=_name(target), capsize=2, elinewidth=0.8, **look)
        _bar(right, i + 1, part.bits_per_byte.median(), color)
    if len(frame):
        left.axhline(frame.bits_of_all.iloc[0], color=style.INK, linewidth=0.8, linestyle="--")
        left.axhline(_BY_CHANCE, color=style.INK, linewidth=0.8, linestyle=":")
        for name, bits in (("all of it", frame.bits_of_all.iloc[0]), ("by chance", _BY_CHANCE)):
            at = {"xycoords": left.get_yaxis_transform(), "textcoords": "offset points"}
            left.annotate(name, (1, bits), xytext=(4, 0), fontsize=7.6, va="center", **at)
        _bar(right, 0, frame.bits_per_byte_before.median(), "#BBBBBB")
        left.legend(fontsize=7.6, frameon=False, loc="center left", title="fine-tuning", title_fontsize=7.6)
    left.set_xscale("log", base=2)
    left.set_xticks(sorted(frame.times.unique()))
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.xaxis.set_minor_locator(NullLocator())
    left.set_ylim(0, 15)
    left.set_xlabel("times a secret is in the data")
    left.set_ylabel("exposure, bits")
    left.set_title("What is given away", fontsize=9)
    right.set_xticks(range(len(looks) + 1), ["before", *(_name(target).replace("private, ", "") for target in looks)])
    right.set_ylabel("bits a byte")
    right.set_title("How well code is predicted", fontsize=9)
    for axes in (left, right):
        axes.grid(axis="y", color=style.GRID, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure


def _bar(axes: Axes, place: int, value: float, color: str) -> None:
    axes.bar([place], [value], width=0.7, color=color)
    axes.annotate(f"{value:.2f}", (place, value), ha="center", va="bottom", fontsize=7.6)


def finding(frame: pd.DataFrame) -> str:
    """For the most repeated secrets: ordinary fine-tuning against the largest ε."""
    most = frame[frame.times == frame.times.max()]
    ordinary, private = most[most.target_epsilon.isna()], most[most.target_epsilon.notna()]
    if ordinary.empty or private.empty:
        return ""
    plain, best = ordinary.iloc[0], private.iloc[0]
    return (
        f"Of a secret that is there {plain.times:.0f} times ordinary fine-tuning gives away {plain.exposure:.1f} of "
        f"{plain.bits_of_all:.1f} bits, at ε = {best.target_epsilon:g} {best.exposure:.1f} (1.4 by chance); code takes "
        f"{plain.bits_per_byte:.2f} and {best.bits_per_byte:.2f} bits a byte, {plain.bits_per_byte_before:.2f} before."
    )


def _name(target: float | None) -> str:
    return "ordinary" if target is None or pd.isna(target) else f"ε = {target:g}"


FIGURE = FigureKind(
    doc="what a fine-tuned language model gives away of secrets in its data, by ε",
    kinds=("memorisation",),
    cell=lambda r: r.id,
    facets={"experiment": ("memorisation",)},
    table=table,
    text=text,
    caption=caption,
    plot=plot,
    finding=finding,
    place=235,
)
