"""Draws the trade-off curve of a run: what membership attacks can and cannot reach."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from accounting.membership import RATES, TradeOff, line
from dpbench.report import style
from dpbench.report.drawing.bars import sheet
from dpbench.report.drawing.curves import box

_LEFT, _TOP, _WIDTH, _HEIGHT, _BETWEEN = 0.75, 0.4, 3.7, 3.3, 0.95
#: Colours of the area that attacks can reach, the curve, and ε alone.
_REACHED, _LINE, _ALONE = "#C7DCEF", "#2266AA", "#CC3311"


def draw(curve: TradeOff, epsilon: float | None, delta: float) -> Figure:
    """Two panels, linear and logarithmic, of the true positive rate against the false positive rate.

    Args:
        curve: the bounds.
        epsilon: the smallest upper bound on ε at `delta`, drawn too; or None.
        delta: δ.
    """
    words = [
        "An attack that says of a record whether it was in the data, at most: shaded, from guessing up to the upper "
        f"bound. Advantage: {curve.advantage:.3g} at most; true positives "
        + ", ".join(f"{100 * curve.true_positives(rate):.3g} % at {100 * rate:g} % false ones" for rate in RATES)
        + "."
    ]
    if curve.lower is not None:
        words.append("Dashed: what the best attack certainly reaches.")
    if epsilon is not None and math.isfinite(epsilon):
        words.append(f"Dotted: the bound that (ε, δ) = ({epsilon:.4g}, {style.plain(delta)}) alone gives.")
    figure, height = sheet(_TOP + _HEIGHT + 0.6, " ".join(words))
    alone = None if epsilon is None or not math.isfinite(epsilon) else TradeOff((line(epsilon, delta),))
    with_logarithm = np.geomspace(1e-4, 0.999, 120)
    for place, rates in enumerate(
        (np.concatenate([with_logarithm[:60:6], np.linspace(0.011, 0.999, 90)]), with_logarithm)
    ):
        left = _LEFT + place * (_WIDTH + _BETWEEN)
        axes = figure.add_axes(box(left, _TOP, _WIDTH, _HEIGHT, height))
        _panel(axes, np.sort(rates), curve, alone, logarithmic=bool(place))
    return figure


def _panel(axes: Axes, rates: np.ndarray, curve: TradeOff, alone: TradeOff | None, *, logarithmic: bool) -> None:
    most = [curve.true_positives(rate) for rate in rates]
    axes.fill_between(rates, rates, most, color=_REACHED, label="attacks can be here")
    axes.plot(rates, most, color=_LINE, linewidth=1.6, label="upper bound on every attack")
    if curve.lower is not None:
        least = [curve.least_true_positives(rate) or 0.0 for rate in rates]
        axes.plot(rates, least, color=style.INK, linewidth=1.0, linestyle="--", label="certainly reached")
    if alone is not None:
        beside = [alone.true_positives(rate) for rate in rates]
        axes.plot(rates, beside, color=_ALONE, linewidth=1.2, linestyle=":", label="by (ε, δ) alone")
    axes.plot(rates, rates, color=style.FAINT, linewidth=0.9, label="guessing")
    for rate in RATES:
        axes.plot([rate], [curve.true_positives(rate)], "o", color=_LINE, markersize=4)
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(float(rates[0]), 1.05)
    axes.set_title("The same in logarithms: few false positives" if logarithmic else "What an attack can reach", pad=7)
    axes.set_xlabel("false positive rate", labelpad=3)
    axes.set_ylabel("true positive rate", labelpad=4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:.4g} %"))
        if logarithmic:
            axis.set_minor_locator(NullLocator())
    axes.tick_params(length=0)
    axes.grid(color=style.GRID, linewidth=0.7)
    axes.legend(loc="lower right", frameon=False, fontsize=7.6)
