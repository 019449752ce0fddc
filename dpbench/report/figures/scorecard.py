"""The scorecard: conformance case × backend, each exact, refused or wrong, by mark and colour.

Beneath it, if measured: how far one hard record moves the sum of each backend, by dtype.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from dpbench.conformance.scorecard import as_row, scorecard
from dpbench.conformance.sensitivity import scorecard as sensitivity
from dpbench.records.reader import LeftOut, Record
from dpbench.report import style
from dpbench.report.drawing.sheet import grid, legend, sign
from dpbench.report.parts import FigureKind
from dpbench.report.summary import several

#: result -> (marker, colour, size)
MARKS = {"exact": ("o", "#BBD5BB", 18), "refuses": ("_", "#555555", 40), "wrong": ("X", style.FAILURE, 52)}
_ROW, _TOP, _NAMES = 0.17, 1.25, 2.55
_TOTAL = "in all"


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row a case, a column a backend; then a row of counts, and one for each dtype of hard records."""
    ran = [record for record in records if record.result.get("rows")]
    ran.sort(key=lambda record: style.backend_key(record.trial["backend"]))
    judged, moved = ([r for r in ran if r.kind == kind] for kind in ("conformance", "sensitivity"))
    header, *lines = scorecard(as_row(r.trial["backend"], verdict) for r in judged for verdict in r.result["rows"])
    found = [sensitivity.as_row(r.trial["backend"], r.trial["dtype"], row) for r in moved for row in r.result["rows"]]
    return pd.DataFrame([*lines, *sensitivity.lines(found, header[1:])], columns=header)


def cases(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows for cases."""
    return frame[: list(frame["case"]).index(_TOTAL)]


def moves(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows for moves of the sum by hard records."""
    return frame[frame["case"].str.startswith(sensitivity.FURTHEST)]


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with the backends' names; "exact" is one letter, so that other results stand out."""
    short = frame.replace({"exact": "·", "wrong": "**wrong**"})
    return short.rename(columns={name: style.backend(name).name for name in frame.columns[1:]})


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    said = [
        f"{len(cases(frame))} cases: small models in float64 and float32, clipping functions, batches, side effects.",
        "Exact: norms and clipped sums are the microbatch oracle's. Refuses: says so, with a reason. Wrong: neither;",
        "verification of the first batch, which finds such a backend out, is off here, but where samples mix.",
    ]
    if len(moves(frame)):
        said.append("Beneath: the furthest that a hard record moves the sum, in units of C, which should be 1.")
    return said


def _finding(frame: pd.DataFrame) -> str:
    judged, backends = cases(frame), list(frame.columns[1:])
    if judged.empty or not backends:
        return ""
    wrong = {name: int((judged[name] == "wrong").sum()) for name in backends}
    never = sum(not count for count in wrong.values())
    worst = sorted((name for name in backends if wrong[name]), key=lambda name: -wrong[name])
    told = f"; wrong: {', '.join(f'{style.backend(n).name} in {wrong[n]}' for n in worst)}" if worst else ""
    of = f"Of {several(len(backends), 'backend')} {never or 'none'}"
    return f"{of} {'is' if never < 2 else 'are'} never wrong in {several(len(judged), 'case')}{told}."


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A grid of marks, cases down and backends across."""
    judged, further, backends = cases(frame), moves(frame), list(frame.columns[1:])
    count = max(len(judged) + len(further), 1)
    figure, (axes,) = grid(caption, 1, 1, _ROW * count, head=_TOP, foot=0.1, left=_NAMES, right=0.75)
    axes.set(xlim=(-0.5, max(len(backends), 1) - 0.5), ylim=(count - 0.5, -0.5))
    for result, (marker, color, size) in MARKS.items():
        ys, xs = (judged[backends] == result).to_numpy().nonzero()
        axes.scatter(xs, ys, marker=marker, c=color, s=size, linewidths=1.6, clip_on=False)
    for y, line in enumerate(further.itertuples(index=False), len(judged)):
        for x, said in enumerate(line[1:]):
            axes.text(x, y, said.removesuffix(" C"), ha="center", va="center", fontsize=6)
    hard = [f"hard record, {name.removeprefix(sensitivity.FURTHEST)}, in C" for name in further["case"]]
    labels = [*judged["case"], *hard]
    axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
    axes.set_xticks(range(len(backends)), [style.backend(b).name for b in backends], rotation=35, ha="left")
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    handles = [
        sign(style.Look(result, color, marker), linestyle="", markersize=size**0.5, markeredgewidth=1.6)
        for result, (marker, color, size) in MARKS.items()
    ]
    legend(figure, handles, ncols=1)
    return figure


FIGURE = FigureKind(
    kinds=("conformance", "sensitivity"),
    table=table,
    text=text,
    caption=_caption,
    plot=plot,
    finding=_finding,
    cell=lambda r: (r.kind, r.trial["backend"], r.trial.get("dtype")),
    by=(),
    facets={"experiment": ("conformance",)},
    applies=lambda records: any(record.kind == "conformance" for record in records),
)
