"""How far hard records move the clipped sum, in units of C: a row a library, a mark a case, a colour a dtype."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.conformance.sensitivity import DTYPES, FAILURES
from dpbench.conformance.sensitivity.scorecard import FIELDS, as_row, in_units, worst
from dpbench.records.reader import LeftOut, Record
from dpbench.report import style
from dpbench.report.data.statistics import frame_of
from dpbench.report.drawing.sheet import AXIS, MARGIN, REFERENCE, WIDTH, beside, legend, logarithmic, place, sheet, sign
from dpbench.report.parts import FigureKind
from dpbench.trials.backends import PEERS

#: dtype -> (colour, marker, size)
LOOKS = {
    "float64": ("#7F7F7F", "s", 4.6),
    "float32": ("#2266AA", "o", 5.2),
    "bfloat16-autocast": ("#44BB99", "D", 4.4),
    "bfloat16": ("#DDAA33", "^", 5.4),
    "float16": ("#AA4499", "v", 5.4),
}
NUMBER, REFUSED, UNSUPPORTED = "not a number", "refused", "unsupported"
#: Outcome, counted by cases in a column at the right -> (heading, colour)
COLUMNS = {
    NUMBER: ("not a\nnumber", style.FAILURE),
    REFUSED: ("record\nrefused", style.INK),
    UNSUPPORTED: ("model\nrefused", style.FAINT),
}
_KEPT = "#E7F1E7"
_LEAST = 0.35
"""In units of C: smaller moves are drawn here."""
_TOP, _LANE, _GAP, _NAMES, _WORDS = 0.78, 0.08, 0.1, 2.7, 0.56
_ROW = _LANE * len(DTYPES) + _GAP


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each backend, dtype and case, with the number of its records that met each outcome."""
    rows = []
    for record in records:
        trial = record.trial
        for found in record.result.get("rows") or ():
            met = found.get("counts") or {}
            counts = {name: met.get(name, 0) for name in (NUMBER, REFUSED)}
            rows.append(as_row(trial["backend"], trial["dtype"], found) | counts)
    order = {dtype: place for place, dtype in enumerate(DTYPES)}
    rows.sort(key=lambda row: (style.backend_key(row["backend"]), order.get(row["dtype"], len(order)), row["dtype"]))
    return frame_of(rows, (*FIELDS, NUMBER, REFUSED))


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each backend and dtype: the largest move, its case and record, and the other outcomes."""
    rows = [part for _, part in frame.groupby(["backend", "dtype"], sort=False)]
    furthest = [(part, worst(part.to_dict("records"))) for part in rows]
    return pd.DataFrame(
        [
            {
                "Backend": style.backend(part.backend.iloc[0]).name,
                "Dtype": part["dtype"].iloc[0],
                "Furthest": in_units(None if most is None else most["excess"]),
                "Case": "" if most is None else most["case"],
                "Record": "" if most is None or most["outcome"] != "exceeds" else most["record"],
                "Too far": str(int((part.outcome == "exceeds").sum())),
                "Not a number": str(_cases(part, NUMBER)),
                "Record refused": str(_cases(part, REFUSED)),
                "Model refused": str(_cases(part, UNSUPPORTED)),
                "Within": str(int((part.outcome == "within").sum())),
            }
            for part, most in furthest
        ],
        dtype=object,
    )


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    return [
        "How far the sum of clipped gradients moves when one record is added, ‖S(D ∪ x) - S(D)‖ / C of the sums as"
        " computed, differences in float64: DP-SGD's noise hides C and no more. A mark is the worst record of one of",
        f"{frame.case.nunique()} hard cases: inputs whose gradients cancel, squares that overflow or vanish, records"
        " alike in their thousands, the worst order, constant inputs before a normalisation, pixels that are no",
        "numbers. The green ground: at most 1.01 C, in 16 bits 1.05 C. Counts of cases, over all dtypes. Not a number:",
        "the sum is none, and destroyed. Record refused: it is named. Model refused: with any batch.",
    ]


def _finding(frame: pd.DataFrame) -> str:
    told = []
    for backend, part in frame.groupby("backend", sort=False):
        most = worst(part.to_dict("records"))
        if most is not None:
            bad = most["outcome"] == "exceeds"
            refused = part[part[REFUSED] > 0].case.nunique()
            notes = [most["case"]] * bad + [f"refuses {refused} of the kinds"] * bool(refused)
            named = f" ({'; '.join(notes)})" if notes else ""
            told.append(f"{style.backend(str(backend)).name} {in_units(most['excess'])}{named}")
    if not told:
        return ""
    return f"One record, of {frame.case.nunique()} hard kinds, moves the computed sum by up to: {'; '.join(told)}."


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A row a backend, in it a lane a dtype; the case with the largest move is named beneath the backend."""
    backends = list(dict.fromkeys(frame.backend))
    depth = _ROW * max(len(backends), 1)
    figure, height = sheet(_TOP + depth + AXIS, caption)
    axes = place(figure, _NAMES, _TOP, WIDTH - _NAMES - _WORDS * len(COLUMNS) - MARGIN, depth)
    known = [float(value) for value in frame.excess.dropna()]
    _scale(axes, max([10.0, *known]), depth)
    for number, backend in enumerate(backends):
        part, top = frame[frame.backend == backend], number * _ROW
        _row(axes, part, top)
        _names(axes, part, top)
        for column, (name, (_, color)) in enumerate(COLUMNS.items()):
            count = _cases(part, name)
            looks: dict[str, Any] = {"ha": "center", "fontsize": 8.5, "color": color if count else "#BBBBBB"}
            beside(axes, 1, top + _ROW / 2, 72 * _WORDS * (column + 0.55), str(count or "·"), **looks)
    for column, (heading, color) in enumerate(COLUMNS.values()):
        beside(axes, 1, -0.17, 72 * _WORDS * (column + 0.55), heading, ha="center", fontsize=7.6, color=color)
    title = f"How far can one record move the sum? {frame.case.nunique()} hard records, in units of C"
    figure.text(MARGIN / WIDTH, 1 - 0.16 / height, title, fontsize=10.5, weight="bold", va="center")
    handles = [
        sign(style.Look(dtype, color, marker), linestyle="", markersize=size)
        for dtype, (color, marker, size) in LOOKS.items()
        if dtype in set(frame["dtype"])
    ]
    corner = (MARGIN / WIDTH, 1 - 0.26 / height)
    legend(figure, handles, bbox_to_anchor=corner, handletextpad=0.1, columnspacing=1.1)
    return figure


def _scale(axes: Axes, most: float, depth: float) -> None:
    """A logarithmic axis, from moves within C to the largest."""
    logarithmic(axes.xaxis, form=_power, most=14)
    axes.set(xlim=(0.25, 10 ** (math.ceil(math.log10(most)) + 0.15)), ylim=(depth, 0))
    axes.fill_betweenx((0, depth), 0.25, 1.05, color=_KEPT, linewidth=0, zorder=0)
    axes.axvline(1.0, **REFERENCE)
    axes.set_xlabel("the computed sum moves by, in units of C, logarithmic; the noise hides C")
    axes.set_yticks([])


def _power(value: float, _: float) -> str:
    """'C', '10', '1,000', '10⁷'."""
    if value < 0.99:
        return ""
    power = round(math.log10(value))
    digits = str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "C" if power == 0 else f"{10**power:,}" if power < 4 else f"10{digits}"


def _row(axes: Axes, part: pd.DataFrame, top: float) -> None:
    """The marks of one backend; moves beyond C stand out from the green background."""
    first = part.backend.iloc[0] == PEERS[0] and top > 0
    axes.axhline(top, color=style.INK if first else style.GRID, linewidth=0.8, zorder=1)
    for lane, dtype in enumerate(DTYPES):
        color, marker, size = LOOKS[dtype]
        y = top + _GAP / 2 + (lane + 0.5) * _LANE
        own = part[(part["dtype"] == dtype) & part.excess.notna()]
        far = own.outcome == "exceeds"
        for rows, looks in ((own[~far], {"alpha": 0.35, "zorder": 2}), (own[far], {"alpha": 0.9, "zorder": 3})):
            xs = [max(_LEAST, float(value)) for value in rows.excess]
            edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.4, "clip_on": False, **looks}
            axes.plot(xs, [y] * len(xs), marker, color=color, markersize=size, **edge)


def _names(axes: Axes, part: pd.DataFrame, top: float) -> None:
    """The backend, and its case with the largest move."""
    most = worst(part.to_dict("records"))
    far = most is not None and most["outcome"] in FAILURES
    beside(axes, 0, top + 0.34 * _ROW, -72 * (_NAMES - 0.12), style.backend(part.backend.iloc[0]).name, fontsize=9.5)
    if most is None:
        words = "no number"
    else:
        words = in_units(most["excess"]) + (f": {most['case']}, {most['dtype']}" if far else " at most")
    ink = style.FAILURE if far else style.FAINT
    beside(axes, 0, top + 0.7 * _ROW, -72 * (_NAMES - 0.12), words, fontsize=7.2, color=ink)


def _cases(part: pd.DataFrame, name: str) -> int:
    """Number of cases with a record of this outcome."""
    return int((part.outcome == UNSUPPORTED).sum()) if name == UNSUPPORTED else int((part[name] > 0).sum())


FIGURE = FigureKind(
    ("sensitivity",), table, text, _caption, plot, _finding, lambda r: (r.trial["backend"], r.trial["dtype"]), by=()
)
