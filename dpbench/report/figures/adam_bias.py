"""Test loss by learning rate of SGD, Adam and AdamBC, and the spread of Adam's denominators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record
from dpbench.report import readable
from dpbench.report.captions import settings
from dpbench.report.data.statistics import over_seeds
from dpbench.report.drawing.sheet import grid, legend, logarithmic, sign, spread
from dpbench.report.parts import FigureKind
from dpbench.report.readable import as_percent, digits, of
from dpbench.report.style import Look

#: optimizer -> its look; then those of a fixed floor.
LOOKS = {name: Look(name, *look) for name, look in {
    "SGD": ("#0077BB", "o"), "Adam": ("#EE7733", "s"), "AdamBC": ("#009988", "^")
}.items()}  # fmt: skip
FLOORS = (("#AA3377", "v"), ("#BBBBBB", "D"))
_SAME = ["data", "network", "target_epsilon", "optimizer", "lr"]
_MEDIANS = ["accuracy", "spread", "epsilon", "noise_multiplier"]
#: A panel omits losses above its least by this factor.
_MOST = 4.0


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each model, ε (None for ordinary training), optimizer and learning rate: medians over the seeds."""
    rows = [
        {name: record.trial[name] for name in _SAME}
        | {name: record.result.get(name) for name in _MEDIANS}
        | {"loss": float(record.result["test_losses"][-1])}
        for record in records
        if "accuracy" in record.result
    ]
    return over_seeds(rows, _SAME, "loss", _MEDIANS)


_TEXT: readable.Columns = {
    **{name: of(name) for name in ("data", "network")},
    "target_epsilon": of("target_epsilon", digits(4)),
    **{name: of(name) for name in ("optimizer", "lr", "seeds")},
    **{name: of(name, digits(4)) for name in ("loss", "least", "greatest")},
    "accuracy": of("accuracy", as_percent),
    **{name: of(name, digits(4)) for name in ("spread", "epsilon", "noise_multiplier")},
}


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        "Above: loss on held-out images, median and range of the seeds. Below: the 90 % over the 10 % quantile of what "
        "the optimizer divides the entries by after the last step; 1 is SGD with momentum. AdamBC's floor is its own, "
        "or the number times Φ. Uneven: pixels of scales that differ up to ten times. Ordinary training: one seed, and "
        f"AdamBC is Adam. δ = {settings(records, 'delta')}, Poisson batches of {settings(records, 'batch_size')} "
        "expected, ε an upper bound by prv. Choosing the learning rate is not accounted. Noise is seeded here, so that "
        "training can be repeated."
    ]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """For each model two rows, loss and spread; a column for ordinary training and for each ε, the largest first."""
    networks = sorted(set(frame.network), key=lambda name: (name == "cnn", name))
    frame = frame.assign(target=frame.target_epsilon.astype(float).fillna(math.inf))
    columns = sorted(frame.target.unique(), reverse=True)
    by_hand = sorted(name for name in set(frame.optimizer) if ":" in name)
    looks = {name: look for name, look in LOOKS.items() if name in set(frame.optimizer)}
    for name, floor in zip(by_hand, FLOORS, strict=False):
        looks[name] = Look(name.replace(":", ", floor "), *floor)
    figure, panels = grid(
        caption, 2 * len(networks) * len(columns), max(1, len(columns)), 1.25, head=0.3, foot=0.45, above=0.25
    )
    rows = [panels[at : at + len(columns)] for at in range(0, len(panels), len(columns) or 1)]
    for network, losses, spreads in zip(networks, rows[::2], rows[1::2], strict=True):
        own = frame[frame.network == network]
        for above, below, target in zip(losses, spreads, columns, strict=True):
            part = own[own.target == target]
            for optimizer, look in looks.items():
                line = part[part.optimizer == optimizer].sort_values("lr")
                if len(line):
                    spread(above, line.lr, line, "loss", color=look.color, marker=look.marker)
                    below.plot(line.lr, line.spread, color=look.color, marker=look.marker)
            logarithmic(above.yaxis, (1.0, 1.5, 2.0, 3.0, 5.0))
            logarithmic(below.yaxis, (1.0, 2.0, 5.0))
            if len(part):
                least = part.loss.min()
                above.set_ylim(0.9 * part.least.min(), max(1.1 * least, min(_MOST * least, 1.1 * part.greatest.max())))
            below.set_ylim(0.85, 1.3 * own.spread.max() if own.spread.notna().any() else 2.0)
            above.set_title(f"{network}, {'ordinary training' if target == math.inf else f'ε = {target:g}'}")
            for axes in (above, below):
                logarithmic(axes.xaxis)
                axes.set_xlim(0.8 * own.lr.min(), 1.25 * own.lr.max())
                axes.set_xlabel("learning rate")
        losses[0].set_ylabel("test loss")
        spreads[0].set_ylabel("spread")
    legend(figure, [sign(look) for look in looks.values()])
    return figure


def _finding(frame: pd.DataFrame) -> str:
    private = frame.dropna(subset="target_epsilon")
    best = private.sort_values("loss", kind="stable").drop_duplicates(["network", "target_epsilon", "optimizer"])
    said = []
    for (network, target), part in best.groupby(["network", "target_epsilon"], sort=False):
        by = {row.optimizer: row for row in part.itertuples()}
        if by.keys() >= LOOKS.keys():
            losses = ", ".join(f"{name} {by[name].loss:.3f}" for name in LOOKS)
            said.append(f"{network} at ε = {target:g}: {losses}")
    return f"Least test loss, {'; '.join(sorted(said))}." if said else ""


FIGURE = FigureKind(
    doc="test loss by learning rate of Adam with and without the noise in its second moment, and of SGD",
    kinds=("adam_bias",),
    table=table,
    text=_TEXT,
    caption=_caption,
    plot=plot,
    finding=_finding,
    place=216,
)
