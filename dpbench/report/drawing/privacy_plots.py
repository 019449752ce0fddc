"""Draws accountants' results as curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.report import style
from dpbench.report.data import published
from dpbench.report.drawing.curves import Curve, Mark, Panel, panels

SETTING = ("sample_rate", "noise_multiplier", "steps", "delta")
#: The accountant of the lower bound, and the one to compare prices with.
LOWER, BASE = "prv:lower", "moments"
ADJACENCIES = {"add_remove": "add or remove one", "zero_out": "make one zero", "replace_one": "replace one"}
#: The right panel of ε against epochs shows accountants with a last ε within this factor of the smallest bound.
_TIGHT = 3.0
#: ε of Abadi et al. 2016 after 100 epochs.
_ABADI = 1.26
_AXES = {"noise_multiplier": "noise multiplier σ", "sample_rate": "sample rate q", "delta": "δ"}


def epochs(frame: pd.DataFrame, caption: str) -> Figure:
    """ε against epochs: all accountants on a logarithmic axis, and the tight ones on a linear one."""
    curves = []
    for name, own in frame.groupby("accountant", sort=False):
        failed, answered = own[own.epsilon.isna()], own[own.epsilon.notna()]
        for kind, points in answered.groupby("kind", sort=False):
            note = "" if any(map(math.isfinite, points.epsilon)) else f"{style.KINDS[str(kind)][1]}, infinite"
            curves.append(Curve(str(name), str(kind), list(points.epochs), list(points.epsilon), note))
        if not len(answered):
            curves.append(Curve(str(name), "", [], [], note=str(failed.note.iloc[0])))
    setting = tuple(frame[["sample_rate", "noise_multiplier", "delta"]].iloc[0])
    names, reach = set(frame.accountant), max(frame.epochs)
    shown = [
        Mark(p.epochs, p.epsilon, p.label, (6.0, -10.0) if p.accountant == "strong" else (-5.0, 5.0))
        for p in published.EPSILONS
        if p.setting == setting and p.accountant in names and p.epochs <= reach * 1.05
    ]
    ends = {c.accountant: c.y[-1] for c in curves if c.kind == "upper_bound" and c.y and math.isfinite(c.y[-1])}
    tight = [c for c in curves if c.y and ends and c.y[-1] <= _TIGHT * min(ends.values())]
    left = Panel("Privacy spent, ε, as training goes on", "epochs (steps × sample rate)", "ε", curves, shown)
    low_marks = [mark for mark in shown if mark.y <= max((max(c.y) for c in tight), default=0.0)]
    right = Panel("The tight ones", "epochs (steps × sample rate)", "ε", tight, low_marks, y_log=False)
    row = [left, right] if 2 <= len(tight) < len(curves) else [left]
    return panels(row, caption, height=3.4, published="printed in Abadi et al. 2016")


def sweeps(frame: pd.DataFrame, caption: str) -> Figure:
    """ε along σ, q and δ, with the ratio to the certified lower bound below."""
    above: list[Panel] = []
    below: list[Panel] = []
    limits: dict[str, Any] = {"y_log": False, "below": 0.7, "above": 2.5}
    for name, words in _AXES.items():
        part, first = _along(frame, name), not above
        title = f"ε along {words.split()[-1]}"
        above.append(Panel(title, words, "ε" if first else "", _curves(part, name, "epsilon"), x_log=True))
        ratios = [c for c in _curves(part, name, "ratio") if c.accountant != LOWER]
        xs = [x for curve in ratios for x in curve.x]
        shade = [Curve(LOWER, "lower_bound", [min(xs), max(xs)], [1.0, 1.0])] if xs else []
        label = "ratio" if first else ""
        below.append(Panel("over the lower bound", words, label, [*shade, *ratios], x_log=True, **limits))
    return panels([*above, *below], caption, across=len(above), height=2.2)


def _along(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The points that vary in this setting and share all others with most points."""
    kept = pd.Series(True, index=frame.index)
    for other in SETTING:
        if other != name:
            kept &= frame[other] == frame[other].mode().iloc[0]
    return frame[kept].sort_values(name)


def _curves(frame: pd.DataFrame, x: str, y: str) -> list[Curve]:
    """A curve for each accountant and kind; if an accountant's kind changes along x, its points stay together."""
    found = []
    for accountant, own in frame.groupby("accountant", sort=False):
        own = own[own[y].notna()]
        if len(own):
            kind = str(own.kind.mode().iloc[0])
            found.append(Curve(str(accountant), kind, [float(v) for v in own[x]], [float(v) for v in own[y]]))
    return sorted(found, key=lambda curve: (curve.kind != "lower_bound", style.accountant_key(curve.accountant)))


def prices(frame: pd.DataFrame, caption: str) -> Figure:
    """Allowed steps and required noise, relative to those of the moments accountant."""
    drawn = []
    for unknown, title, label in (
        ("steps", "Steps allowed at the same noise", "steps ÷ the moments'"),
        ("noise_multiplier", "Noise asked for the same steps", "noise ÷ the moments'"),
    ):
        part = frame[(frame.unknown == unknown) & frame.ratio.notna()]
        curves = _curves(part.sort_values("target_epsilon"), "target_epsilon", "ratio")
        close = [c for c in curves if 0.4 <= c.y[-1] <= 4.0]
        note = _bought(part, unknown)
        drawn.append(
            Panel(title, "target ε", label, close, note=note, x_log=True, y_log=False, reference=1.0, **_cut(close))
        )
    return panels(drawn, caption, height=3.0)


def tuned(frame: pd.DataFrame, caption: str) -> Figure:
    """ε over the mean number of runs, a panel for each noise multiplier."""
    shown: list[Panel] = []
    for sigma, part in frame[frame.epsilon.notna()].groupby("noise_multiplier"):
        one, several = part[part.distribution == ""], part[part.distribution != ""].sort_values("runs")
        curves = [
            Curve(f"tuned:{name}", "upper_bound", list(own.runs.astype(float)), list(own.epsilon))
            for name, own in several.groupby("distribution")
        ]
        reference = float(one.epsilon.iloc[0]) if len(one) else None
        title = f"The best of several runs, σ = {style.plain(float(str(sigma)))}"
        limits: dict[str, Any] = {"reference": reference, "below": None if reference is None else 0.8 * reference}
        shown.append(Panel(title, "runs on average", "" if shown else "ε", curves, x_log=True, **limits))
    return panels(shown, caption, across=max(1, len(shown)), height=3.0)


def _bought(part: pd.DataFrame, unknown: str) -> tuple[str, str] | None:
    """The numbers at the target nearest to that of Abadi et al. 2016, by the best valid bound; and their place."""
    valid = part[part.kind == "upper_bound"]
    if not len(valid):
        return None
    target = min(valid.target_epsilon, key=lambda e: abs(e - _ABADI))
    at = valid[valid.target_epsilon == target]
    base = at[at.accountant == BASE]
    if not len(base):
        return None
    old, found = float(base.value.iloc[0]), at.value.astype(float)
    if unknown == "steps":
        return f"at ε = {target:g}: {found.max():,.0f} steps\nagainst {old:,.0f}", "top"
    return f"at ε = {target:g}: σ = {found.min():.2f}\nagainst {old:.2f}", "bottom"


def _cut(curves: Sequence[Curve]) -> dict[str, Any]:
    ys = [y for curve in curves for y in curve.y]
    if not ys:
        return {}
    room = 0.08 * (max(ys) - min(ys))
    return {"below": min(ys) - room, "above": max(ys) + room}
