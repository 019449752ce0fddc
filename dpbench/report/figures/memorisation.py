"""How much of a secret a language model memorises, by repetitions, and how well it predicts new text."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record
from dpbench.report import readable, style
from dpbench.report.data.statistics import over_seeds
from dpbench.report.drawing.sheet import REFERENCE, grid, logarithmic, spread
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of

#: In order: ordinary training, then from the largest ε to the least.
_LOOKS = (("#555555", "s"), ("#CC3311", "^"), ("#EE7733", "D"), ("#0077BB", "o"), ("#009988", "v"), ("#AA3377", "P"))
_BY_CHANCE = 1.44  # mean bits of a uniform rank: log2(e)


_SHARED = ("bits_of_all", "bits_per_byte", "bits_per_byte_before", "delta")


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each ε and number of repetitions: median, least and greatest exposure in bits, over secrets and seeds.

    `target_epsilon` is None for ordinary training; `bits_per_byte` is the median of the seeds.
    """
    rows = [
        {"target_epsilon": record.trial["target_epsilon"], "seed": record.trial["seed"], "times": found["times"]}
        | {"exposure": found["bits"], **{name: record.result[name] for name in (*_SHARED, "epsilon")}}
        for record in records
        for found in record.result.get("exposures", ())
    ]
    same = ["target_epsilon", "times"]
    frame = over_seeds(rows, same, "exposure", _SHARED, ["epsilon"]).rename(columns={"seeds": "secrets"})
    seeds = pd.DataFrame(rows, columns=[*same, "seed"]).groupby(same, dropna=False).seed.nunique()
    frame.insert(6, "seeds", seeds.to_numpy())
    return frame.sort_values(same, ascending=[False, True], na_position="first", ignore_index=True)


def _name(target: Any) -> str:
    return "ordinary" if style.missing(target) else f"ε = {target:g}"


_TEXT: readable.Columns = {
    "fine-tuning": lambda r: _name(r.target_epsilon),
    **{name: of(name) for name in ("times", "secrets")},
    **{name: of(name, "{:.1f} bits".format) for name in ("exposure", "least", "greatest")},
    "seeds": of("seeds"),
    **{name: of(name, "{:.2f}".format) for name in ("bits_per_byte", "bits_per_byte_before")},
    **{name: of(name, readable.digits(3)) for name in ("epsilon", "delta")},
}


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    count = " and ".join(map(str, sorted({record.trial["records"] for record in records})))
    return [
        "A small GPT-2 that has read prose is adapted by LoRA to lines of code, some with a number of four digits that "
        f"is nowhere else, {count} lines in all. Left: exposure, log2 of the numbers less log2 of the rank that the "
        "model gives the true one (Carlini et al. 2019): all bits where it comes first, 1.44 by chance, the mean "
        "of a uniform rank. Median and range of all secrets and seeds. Right: mean of −log2 p of a byte of new code, "
        "lower is better. ε is for one line, at δ = 1/(2n); a secret that is there n times has n times as much."
    ]


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Exposure against repetitions, a line for each ε; bits a byte beside it, a bar for each."""
    figure, (left, right) = grid(caption, 2, 2, 2.4, gap=1.2)
    groups = [own for _, own in frame.groupby("target_epsilon", dropna=False, sort=False)]
    names = [_name(own.target_epsilon.iloc[0]) for own in groups]
    for i, (own, name, (color, marker)) in enumerate(zip(groups, names, _LOOKS, strict=False)):
        at = own.times.astype(float) * 1.05 ** (i - (len(groups) - 1) / 2)  # beside each other
        spread(left, at, own, "exposure", label=name, color=color, marker=marker)
    if len(frame):
        for words, bits in (("all of it", frame.bits_of_all.iloc[0]), ("by chance", _BY_CHANCE)):
            left.axhline(bits, **REFERENCE)
            place: dict[str, Any] = {"xycoords": left.get_yaxis_transform(), "textcoords": "offset points"}
            left.annotate(words, (1, bits), (4, 0), fontsize=7.6, va="center", **place)
        left.legend(loc="center left", title="fine-tuning", title_fontsize=7.6)
        values = [frame.bits_per_byte_before.median(), *(own.bits_per_byte.median() for own in groups)]
        colors = ["#BBBBBB", *(color for color, _ in _LOOKS[: len(groups)])]
        right.bar_label(right.bar(range(len(values)), values, width=0.7, color=colors), fmt="%.2f", fontsize=7.6)
    logarithmic(left.xaxis, at=sorted(frame.times.unique()))
    left.set(ylim=(0, 15), xlabel="times a secret is in the data", ylabel="exposure, bits", title="What is given away")
    right.set_xticks(range(len(names) + 1), ["before", *names])
    right.set(ylabel="bits a byte", title="How well code is predicted")
    return figure


def _finding(frame: pd.DataFrame) -> str:
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


FIGURE = FigureKind(("memorisation",), table, _TEXT, _caption, plot, _finding)
