"""Draws the trade-off curve of a run: what membership attacks can and cannot reach."""

import functools
import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting.base import rounded
from accounting.membership import RATES, TradeOff, line
from dpbench.report import style
from dpbench.report.drawing.sheet import grid, logarithmic

#: Colours of the area that attacks can reach, the curve, and ε alone.
_REACHED, _LINE, _ALONE = "#C7DCEF", "#2266AA", "#CC3311"


def draw(curve: TradeOff, epsilon: float | None, delta: float) -> Figure:
    """Two panels, linear and logarithmic, of the true positive rate against the false positive rate.

    Args:
        curve: the bounds.
        epsilon: the smallest upper bound on ε at `delta`, drawn too; or None.
        delta: δ.
    """
    at_most = functools.partial(rounded, kind="upper_bound", digits=3)
    found = [f"{at_most(100 * curve.true_positives(rate))} % at {100 * rate:g} % false ones" for rate in RATES]
    words = [
        "An attack that says of a record whether it was in the data, at most: shaded, from guessing up to the upper "
        f"bound. Advantage: {at_most(curve.advantage)} at most; true positives {', '.join(found)}."
    ]
    if curve.lower is not None:
        words.append("Dashed: what the best attack certainly reaches.")
    if epsilon is not None and math.isfinite(epsilon):
        point = f"({rounded(epsilon, 'upper_bound')}, {style.plain(delta)})"
        words.append(f"Dotted: the bound that (ε, δ) = {point} alone gives.")
    alone = None if epsilon is None or not math.isfinite(epsilon) else TradeOff((line(epsilon, delta),))
    figure, axes = grid(" ".join(words), 2, 2, 3.3, left=0.75, gap=0.95)
    rates = np.geomspace(1e-4, 0.999, 120)
    _panel(axes[0], np.concatenate([rates[:60:6], np.linspace(0.011, 0.999, 90)]), curve, alone)
    _panel(axes[1], rates, curve, alone)
    form = lambda rate, _: f"{100 * rate:.4g} %"  # noqa: E731
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_major_formatter(form)
    for axis in (axes[1].xaxis, axes[1].yaxis):
        logarithmic(axis, form=form)
    axes[1].set_ylim(float(rates[0]), 1.05)
    axes[0].set_title("What an attack can reach")
    axes[1].set_title("The same in logarithms: few false positives")
    return figure


def _panel(axes: Axes, rates: np.ndarray, curve: TradeOff, alone: TradeOff | None) -> None:
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
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(loc="lower right")
