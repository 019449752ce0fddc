"""Draws accountants' results: curves, bars of sampling schemes, and maps over σ and q."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from dpbench.report import style
from dpbench.report.data import published
from dpbench.report.drawing.curves import SHADE, Curve, Mark, Panel, panels
from dpbench.report.drawing.sheet import AXIS, WIDTH, beside, grid, logarithmic, place, sheet

SETTING = ("sample_rate", "noise_multiplier", "steps", "delta")
#: The accountant of the lower bound, and the one to compare prices with.
LOWER, BASE = "prv:lower", "moments"
ADJACENCIES = {"add_remove": "add or remove one", "zero_out": "make one zero", "replace_one": "replace one"}
#: The right panel of ε against epochs shows accountants with a last ε within this factor of the smallest bound.
_TIGHT = 3.0
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
        Mark(end, epsilon, f"{epsilon:g}", (6.0, -10.0) if name == "strong" else (-5.0, 5.0))
        for name, end, epsilon in published.EPSILONS
        if setting == published.ABADI and name in names and end <= reach * 1.05
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
        drawn.append(Panel(title, "target ε", label, close, x_log=True, y_log=False, reference=1.0, **_cut(close)))
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


def _cut(curves: Sequence[Curve]) -> dict[str, Any]:
    ys = [y for curve in curves for y in curve.y]
    if not ys:
        return {}
    room = 0.08 * (max(ys) - min(ys))
    return {"below": min(ys) - room, "above": max(ys) + room}


_MARKERS = "oDsv^P*X"
_COLORS = ("#2266AA", "#117733", "#44BB99", "#DDAA33", "#CC3311", "#AA4499", "#7F7F7F", "#882255")
_LOWER = SHADE | {"linewidth": 0.6}


def schemes(frame: pd.DataFrame, caption: str) -> Figure:
    """Left: a bar for each scheme and adjacency at one σ. Right: the tightest bound over σ."""
    several = frame[~frame.accountant.isin(["prv", "prv:lower", "shuffled"])]
    sigma = float((several if len(several) else frame).noise_multiplier.mode().iloc[0])
    at = frame[(frame.noise_multiplier == sigma) & frame.epsilon.notna()]
    rows = list(dict.fromkeys(zip(at.scheme, at.adjacency, strict=True)))
    rows.sort(key=lambda row: list(ADJACENCIES).index(row[1]))
    depth, top, names, numbers, gap, legend = 0.235 * len(rows) + 0.5, 0.36, 1.65, 0.5, 0.6, 1.2
    figure, height = sheet(top + depth + AXIS + legend, caption)
    wide = 3.75
    left = place(figure, names, top, wide, depth)
    right_at = names + wide + numbers + gap
    right = place(figure, right_at, top, WIDTH - right_at - 0.12, depth)
    _scheme_bars(left, at, rows, sigma)
    lines = _over_sigma(right, frame)
    bars = [
        Patch(facecolor=style.accountant("moments").color, label="tightest valid upper bound here"),
        Patch(label="spent for certain (lower bound)", **_LOWER),
        *(
            Line2D([], [], linestyle="", marker=look.marker, color=look.color, label=f"bound by {look.name}")
            for look in (style.accountant(name) for name in dict.fromkeys(several.accountant))
        ),
    ]
    y = 1 - (top + depth + AXIS - 0.1) / height
    looks: dict[str, Any] = {"loc": "upper left", "borderpad": 0, "borderaxespad": 0}
    figure.legend(handles=bars, bbox_to_anchor=(0.12 / WIDTH, y), ncols=2, **looks)
    figure.legend(handles=lines, bbox_to_anchor=(right_at / WIDTH, y), handlelength=2.6, **looks)
    return figure


def _scheme_bars(axes: Axes, at: pd.DataFrame, rows: Sequence[tuple[str, str]], sigma: float) -> None:
    shown = [float(v) for v in at.epsilon if math.isfinite(v) and v > 0]
    low, high = min(shown, default=0.5) / 1.6, max(shown, default=2.0) * 1.2
    logarithmic(axes.xaxis, (1.0, 3.0), "{x:,g}")
    axes.set_xlim(low, high)
    positions, y, previous = [], 0.0, None
    for _, adjacency in rows:
        if adjacency != previous:
            y += 1.05
            beside(axes, 0, y - 0.95, -6, ADJACENCIES[adjacency], ha="right", fontsize=8.5, weight="bold")
        previous = adjacency
        positions.append(y)
        y += 1.0
    axes.set_ylim(y - 0.4, -0.5)
    axes.set_yticks(positions, [scheme for scheme, _ in rows])
    for (scheme, adjacency), y in zip(rows, positions, strict=True):
        own = at[(at.scheme == scheme) & (at.adjacency == adjacency)]
        upper = own[(own.kind == "upper_bound") & own.epsilon.map(math.isfinite)]
        if len(upper):
            best = float(upper.epsilon.min())
            axes.barh([y], [best - low], left=[low], height=0.7, color=style.accountant("moments").color, zorder=2)
            beside(axes, 1, y, 6, style.number(best), fontsize=8.2)
            for row in upper[upper.epsilon > best * 1.02].itertuples(index=False):
                look, value = style.accountant(str(row.accountant)), float(str(row.epsilon))
                axes.plot([value], [y], marker=look.marker, color=look.color, markersize=5, zorder=4)
        for value in own[own.kind == "lower_bound"].epsilon:
            axes.barh([y], [float(value) - low], left=[low], height=0.34, zorder=3, **_LOWER)
    axes.set(title=f"ε at σ = {style.plain(sigma)}", xlabel="ε, logarithmic")
    axes.yaxis.grid(False)


def _over_sigma(axes: Axes, frame: pd.DataFrame) -> list[Line2D]:
    """The tightest upper bound of each scheme over σ, except for replace-one; coinciding curves share one name."""
    part = frame[(frame.adjacency != "replace_one") & frame.epsilon.notna()]
    found: list[tuple[list[str], str, pd.Series[float]]] = []
    for scheme, own in part.groupby("scheme", sort=False):
        for kind, suffix in (("upper_bound", ""), ("lower_bound", ", at least")):
            finite = own[(own.kind == kind) & own.epsilon.map(lambda e: math.isfinite(e) and e > 0)]
            best = finite.groupby("noise_multiplier").epsilon.min().astype(float)
            if len(best) < 2 or (kind == "lower_bound" and scheme == "Poisson"):  # equals the upper bound
                continue
            alike = [
                names
                for names, other, curve in found
                if other == kind and curve.index.equals(best.index) and ((curve / best - 1).abs() < 0.02).all()
            ]
            if alike:
                alike[0].append(str(scheme))
            else:
                found.append(([f"{scheme}{suffix}"], kind, best))
    handles = []
    for index, (names, kind, best) in enumerate(found):
        place = index % len(_MARKERS)
        looks: dict[str, Any] = {"marker": _MARKERS[place], "color": _COLORS[place], "label": ", ".join(names)}
        dash = "-" if kind == "upper_bound" else ":"
        handles += axes.plot(best.index.to_numpy(float), best.to_numpy(float), dash, linewidth=1.5, **looks)
    axes.set(title="over σ, remove one or make it zero", xlabel="noise multiplier σ, logarithmic")
    logarithmic(axes.xaxis, (1.0, 2.0, 5.0), "{x:,g}")
    logarithmic(axes.yaxis, (1.0, 3.0), "{x:,g}")
    return handles


_ACROSS, _CELL, _TITLE, _HEADING, _TICKS = 4, 0.21, 0.28, 0.3, 0.34
_BANDS = {"ratio": "ε over the certified lower bound, at most", "compute_seconds": "Time, at most"}
_BLUE, _OCHRE = (0.13, 0.4, 0.67), (0.87, 0.67, 0.2)


def maps(frame: pd.DataFrame, caption: str) -> Figure:
    """Two bands of maps over σ and q, one map an accountant: worst ratio to the lower bound, and longest time."""
    names = [name for name in dict.fromkeys(frame.accountant) if name != LOWER]
    rates, sigmas = sorted(set(frame.sample_rate)), sorted(set(frame.noise_multiplier))
    lines = max(1, -(-len(names) // _ACROSS))
    room = {"head": _TITLE, "foot": _TICKS, "left": 0.62, "right": 0.1, "gap": 0.14, "above": _HEADING}
    figure, panels = grid(caption, 2 * lines * _ACROSS, _ACROSS, len(rates) * _CELL, **room)
    height, band = figure.get_figheight(), lines * (_TITLE + len(rates) * _CELL + _TICKS)
    for number, (column, heading) in enumerate(_BANDS.items()):
        own = panels[number * lines * _ACROSS :]
        top = _HEADING + number * band - 0.1
        figure.text(0.12 / WIDTH, 1 - top / height, heading, fontsize=9.5, weight="bold")
        for index, (axes, name) in enumerate(zip(own, names, strict=False)):
            _cells(axes, frame[frame.accountant == name], column, rates, sigmas, first=index % _ACROSS == 0)
            axes.set_title(style.accountant(name).name, pad=3, fontsize=8.2, fontweight="normal")
        for axes in own[len(names) : lines * _ACROSS]:
            axes.remove()
    return figure


def _cells(
    axes: Axes, frame: pd.DataFrame, column: str, rates: Sequence[float], sigmas: Sequence[float], first: bool
) -> None:
    axes.set(xlim=(-0.5, len(sigmas) - 0.5), ylim=(len(rates) - 0.5, -0.5))
    shades: list[str] = []
    looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.3}
    own = {key: part for key, part in frame.groupby(["sample_rate", "noise_multiplier"])}
    places = list(itertools.product(enumerate(rates), enumerate(sigmas)))
    for (row, q), (x, sigma) in places:
        found = own.get((q, sigma), frame[:0])
        values, failed = found[column].dropna().astype(float), int(found.epsilon.isna().sum())
        infinite = column == "ratio" and bool((found.epsilon == math.inf).any())
        shade, text = _look(column, values) if len(values) else ("#F3F3F3", "∞" if infinite else "")
        shades.append(shade)
        axes.text(x, row, text, color=style.INK, **looks)
        if failed and len(values):
            beside: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 4.8}
            axes.text(x + 0.46, row - 0.44, f"✕{failed}", color=style.FAILURE, **beside)
        elif failed:
            axes.text(x, row, f"✕ {failed}", color=style.FAILURE, **looks)
    cells = [Rectangle((x - 0.48, row - 0.46), 0.96, 0.92) for (row, _), (x, _) in places]
    axes.add_collection(PatchCollection(cells, facecolors=shades, linewidths=0), autolim=False)
    axes.set_xticks(range(len(sigmas)), [style.plain(sigma) for sigma in sigmas], fontsize=7)
    axes.set_yticks(range(len(rates)), [style.plain(q) if first else "" for q in rates], fontsize=7)
    axes.set_xlabel("σ", labelpad=0)
    if first:
        axes.set_ylabel("q", rotation=0, labelpad=5)
    axes.tick_params(pad=1.5)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _look(column: str, values: pd.Series[float]) -> tuple[str, str]:
    """(shade, number): darker for a larger ratio or time; red below the lower bound."""
    least, worst = values.min(), values.max()
    if column == "compute_seconds":
        level = (math.log10(max(worst, 1e-6)) + 4) / 4.5
        return _mix(_OCHRE, min(max(level, 0.0), 1.0)), _time(worst)
    if least < 1.0 - 1e-9:
        return "#E8B4B0", _ratio(least)
    return _mix(_BLUE, 0.75 * min(math.log10(max(worst, 1.0)) / 2.0, 1.0)), _ratio(worst)


def _ratio(value: float) -> str:
    if value >= 9.95:
        return f"{value:.0f}" if value < 999.5 else "≥1000"
    return (
        f"{value:.2g}" if value < 0.995 else f"{value:.4f}" if value < 1.0 else f"{value:.{3 if value < 1.1 else 1}f}"
    )


def _time(seconds: float) -> str:
    """Two digits: '42 ms'."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            digits = 0 if seconds / factor >= 9.95 else 1
            return f"{seconds / factor:.{digits}f} {unit}"
    return f"{seconds / 1e-6:.0f} µs"


def _mix(color: tuple[float, float, float], share: float) -> str:
    red, green, blue = (1 + (part - 1) * share for part in color)
    return to_hex((red, green, blue))
