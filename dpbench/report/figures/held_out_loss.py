"""Test loss of private training: by optimizer and learning rate (`adam_bias`), and by noise (`correlated`).

The first has a panel for each model and ε with a line for each of SGD, Adam and AdamBC, and below it the spread of
Adam's denominators; the second a panel for each ε with a line for each batch size.
"""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record
from dpbench.report import readable
from dpbench.report.captions import settings
from dpbench.report.data.statistics import over_seeds, test_losses
from dpbench.report.drawing.sheet import grid, legend, logarithmic, sign, spread
from dpbench.report.parts import FigureKind
from dpbench.report.readable import as_percent, digits, of
from dpbench.report.style import Look

#: optimizer -> its look; then those of a fixed floor.
LOOKS = {name: Look(name, *look) for name, look in {
    "SGD": ("#0077BB", "o"), "Adam": ("#EE7733", "s"), "AdamBC": ("#009988", "^")
}.items()}  # fmt: skip
FLOORS = (("#AA3377", "v"), ("#BBBBBB", "D"))
_ADAM = ["data", "network", "target_epsilon", "optimizer", "lr"]
_ADAM_MEDIANS = ["accuracy", "spread", "epsilon", "noise_multiplier"]
#: A panel omits losses above its least by this factor.
_MOST = 4.0


def adam_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each model, ε (None for ordinary training), optimizer and learning rate: medians over the seeds."""
    rows = [
        {name: record.trial[name] for name in _ADAM}
        | {name: record.result.get(name) for name in _ADAM_MEDIANS}
        | {"loss": test_losses(record)[-1]}
        for record in records
        if "accuracy" in record.result
    ]
    return over_seeds(rows, _ADAM, "loss", _ADAM_MEDIANS)


_ADAM_TEXT: readable.Columns = {
    **{name: of(name) for name in ("data", "network")},
    "target_epsilon": of("target_epsilon", digits(4)),
    **{name: of(name) for name in ("optimizer", "lr", "seeds")},
    **{name: of(name, digits(4)) for name in ("loss", "least", "greatest")},
    "accuracy": of("accuracy", as_percent),
    **{name: of(name, digits(4)) for name in ("spread", "epsilon", "noise_multiplier")},
}


def _adam_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        "Above: loss on held-out images, median and range of the seeds. Below: the 90 % over the 10 % quantile of what "
        "the optimizer divides the entries by after the last step; 1 is SGD with momentum. AdamBC's floor is its own, "
        "or the number times Φ. Uneven: pixels of scales that differ up to ten times. Ordinary training: one seed, and "
        f"AdamBC is Adam. δ = {settings(records, 'delta')}, Poisson batches of {settings(records, 'batch_size')} "
        "expected, ε an upper bound by prv. Choosing the learning rate is not accounted. Noise is seeded here, so that "
        "training can be repeated."
    ]


def adam_plot(frame: pd.DataFrame, caption: str) -> Figure:
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
            known = part[part[["least", "greatest"]].map(math.isfinite).all(axis=1)]  # others have diverged
            if len(known):
                least, most = known.loss.min(), 1.1 * known.greatest.max()
                above.set_ylim(0.9 * known.least.min(), max(1.1 * least, min(_MOST * least, most)))
            below.set_ylim(0.85, 1.3 * own.spread.max() if own.spread.notna().any() else 2.0)
            above.set_title(f"{network}, {'ordinary training' if target == math.inf else f'ε = {target:g}'}")
            for axes in (above, below):
                logarithmic(axes.xaxis)
                axes.set(xlim=(0.8 * own.lr.min(), 1.25 * own.lr.max()), xlabel="learning rate")
        losses[0].set_ylabel("test loss")
        spreads[0].set_ylabel("spread")
    legend(figure, [sign(look) for look in looks.values()])
    return figure


def _adam_finding(frame: pd.DataFrame) -> str:
    private = frame.dropna(subset="target_epsilon")
    best = private.sort_values("loss", kind="stable").drop_duplicates(["network", "target_epsilon", "optimizer"])
    said = []
    for (network, target), part in best.groupby(["network", "target_epsilon"], sort=False):
        by = {row.optimizer: row for row in readable.rows(part)}
        if by.keys() >= LOOKS.keys():
            losses = ", ".join(f"{name} {by[name].loss:.3f}" for name in LOOKS)
            said.append(f"{network} at ε = {target:g}: {losses}")
    return f"Least test loss, {'; '.join(sorted(said))}." if said else ""


_COLORS = (("#0077BB", "o"), ("#EE7733", "s"), ("#009988", "^"), ("#AA3377", "D"))
_NOISE = ["data", "network", "target_epsilon", "batch_size", "place"]
_NOISE_MEDIANS = ["accuracy", "epsilon", "noise_multiplier"]
_PLACES = {(0, 1): "DP-SGD", (1, 1): "DP-SGD, one pass"}
_TICKS = {(0, 1): "1", (1, 1): "one\npass"}


def noise_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each ε, batch size and noise, at its best learning rate: the one with the least median test loss.

    Losses and accuracies are medians over the seeds. `place` is (0, bands) for Poisson batches and those in turn, with
    bands 1 for independent noise; (1, 1) for independent noise in one ordered pass over the data, (1, 1 + buffers) for
    a BLT.
    """
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "accuracy" in result:
            name, _, sampling = trial["noise"].partition("@")
            count = int(name.partition(":")[2] or name.startswith("gaussian"))
            place = (int(sampling == "one_pass"), count + name.startswith("blt"))
            row = {name: trial[name] for name in (*_NOISE[:-1], "lr")}
            row |= {name: result.get(name) for name in _NOISE_MEDIANS}
            rows.append({**row, "place": place, "loss": test_losses(record)[-1]})
    found = over_seeds(rows, [*_NOISE, "lr"], "loss", _NOISE_MEDIANS)
    found["noise"] = found.place.map(_name)
    columns = [*_NOISE, "noise", "lr", "seeds", "loss", "least", "greatest", *_NOISE_MEDIANS]
    best = found[columns].sort_values("loss", kind="stable").drop_duplicates(_NOISE)
    return best.sort_values(_NOISE, ignore_index=True)


_NOISE_TEXT: readable.Columns = {
    **{name: of(name) for name in (*_NOISE[:-1], "noise", "lr", "seeds")},
    **{name: of(name, digits(4)) for name in ("loss", "least", "greatest")},
    "accuracy": of("accuracy", as_percent),
    **{name: of(name, digits(4)) for name in ("epsilon", "noise_multiplier")},
}


def _noise_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        "Loss on held-out images, median and range of the seeds at the best of the learning rates by that loss (a "
        f"choice that is not accounted), at the same ε in each panel; δ = {settings(records, 'delta')}, an "
        "upper bound by prv. One band is DP-SGD with Poisson batches; of more bands batches come from as many groups "
        "of records in turn. At the right, batches in the same order each epoch, which amplify nothing: DP-SGD (one "
        "pass) and BLT, for neighbours of whom one has a record's gradient made zero. Noise is seeded here, so that "
        "training can be repeated."
    ]


def noise_plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A panel for each ε."""
    targets, sizes = sorted(frame.target_epsilon.unique()), sorted(frame.batch_size.unique())
    places = sorted(frame.place.unique())
    figure, panels = grid(caption, len(targets), max(1, len(targets)), 2.3)
    for axes, target in zip(panels, targets, strict=True):
        for j, size in enumerate(sizes):
            part = frame[(frame.target_epsilon == target) & (frame.batch_size == size)].sort_values("place")
            color, marker = _COLORS[j % len(_COLORS)]
            for passes in (0, 1):
                line = part[part.place.str[0] == passes]  # not by a list: an empty one would choose columns
                at = [places.index(place) + 0.12 * j for place in line.place]
                look: dict[str, Any] = {"linestyle": "none"} if passes else {"label": f"batches of {size}"}
                spread(axes, at, line, "loss", color=color, marker=marker, **look)
        logarithmic(axes.yaxis, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7))
        axes.set_xticks(range(len(places)), [_TICKS.get(p, "BLT" if p[0] else str(p[1])) for p in places], fontsize=7)
        axes.set(xlabel="bands (1: DP-SGD)", title=f"ε = {target:g}")
    if panels:
        panels[0].set_ylabel("test loss")
        panels[0].legend()
    return figure


def _noise_finding(frame: pd.DataFrame) -> str:
    part = frame[frame.target_epsilon == frame.target_epsilon.max()].sort_values("loss", kind="stable")
    small = part[part.batch_size == part.batch_size.min()]
    alone, banded = small[small.place == (0, 1)], small[[place > (0, 1) and not place[0] for place in small.place]]
    if alone.empty or banded.empty:
        return ""
    one, best = alone.iloc[0], banded.iloc[0]
    plain: Any = part[part.place == (0, 1)].iloc[0]
    said = (
        f"At ε = {best.target_epsilon:g}, {best.noise} take the test loss of batches of {best.batch_size} from "
        f"{one.loss:.4f} to {best.loss:.4f} (accuracy {one.accuracy:.1%} to {best.accuracy:.1%}); the best of "
        f"independent noise, batches of {plain.batch_size}, has {plain.loss:.4f} ({plain.accuracy:.1%})."
    )
    ordered = part[[place[0] == 1 for place in part.place]]
    blt, still = ordered[ordered.place > (1, 1)], ordered[ordered.place == (1, 1)]
    if blt.empty or still.empty:
        return said
    return (
        f"{said} In one pass an epoch a BLT has {blt.iloc[0].loss:.4f} (batches of {blt.iloc[0].batch_size}), and "
        f"independent noise {still.iloc[0].loss:.4f} (batches of {still.iloc[0].batch_size})."
    )


def _name(place: tuple[int, int]) -> str:
    return _PLACES.get(place) or (f"BLT of at most {place[1] - 1} buffers" if place[0] else f"{place[1]} bands")


FIGURES = {
    "correlated": FigureKind(("correlated",), noise_table, _NOISE_TEXT, _noise_caption, noise_plot, _noise_finding),
    "adam_bias": FigureKind(("adam_bias",), adam_table, _ADAM_TEXT, _adam_caption, adam_plot, _adam_finding),
}
