"""On how many popular models each backend is exact, refuses, is wrong or crashes.

Two tables of the same records: shares by library and task, with a picture, and every reason with its models.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpbench.conformance.coverage import EAGER
from dpbench.records.reader import LeftOut, Record
from dpbench.report import captions, readable, style
from dpbench.report.data.statistics import frame_of
from dpbench.report.drawing.sheet import MARGIN, WIDTH, beside, legend, place, sheet
from dpbench.report.parts import FigureKind
from dpbench.report.readable import BACKEND, of

#: status -> (word, colour), in the order of a bar's parts.
PARTS = {
    "exact": ("exact", "#8DBF8D"),
    "refused": ("refused, with the reason", "#C9C9C9"),
    "wrong": ("wrong", style.FAILURE),
    "crash": ("crashed", style.INK),
}
NOT_BUILT = "not built"
_GRAVITY = (NOT_BUILT, *PARTS)
ALL = "all libraries"
_COLUMNS = ("library", "task", "backend", "listed", "built", *PARTS, "exact_share")
_ROW, _HEADING, _TOP, _AXIS, _NAMES, _NUMBERS, _GAP = 0.165, 0.24, 0.34, 0.42, 1.0, 1.65, 0.25


def verdicts(record: Record) -> list[tuple[str, str, str]]:
    """(backend, status, reason) each. A trial that ended by a signal or its time limit is a crash of each backend."""
    backends = record.trial["backends"]
    if record.outcome != "ok":
        said = (record.evidence.splitlines() or ["no evidence recorded"])[0]
        return [(name, "crash", f"{style.outcome(record.outcome)}: {said}") for name in backends]
    if "rows" not in record.result:
        return [(name, NOT_BUILT, record.result["reason"]) for name in backends]
    return [(row["backend"], row["status"], row["reason"] or "") for row in record.result["rows"]]


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each library, task and backend, first over all; `exact_share` is relative to built models.

    Over all, a mixture of experts counts once, by the graver result of its two implementations.
    """
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    graver: dict[tuple[str, str], str] = {}
    for record in records:
        scheme = record.trial["model"].partition(":")[0]
        place = "transformers" if scheme == "tiny" else scheme, record.trial["task"]
        for backend, status, _ in verdicts(record):
            if status == "unavailable":
                left_out[f"{style.backend(backend).name} is not available here"] += 1
                continue
            counts.setdefault((*place, backend), Counter())[status] += 1
            model = record.trial["model"].removesuffix(EAGER)
            graver[backend, model] = max(status, graver.get((backend, model), status), key=_GRAVITY.index)
    for (backend, _), status in graver.items():
        counts.setdefault((ALL, "", backend), Counter())[status] += 1
    rows = []
    for (library, task, backend), found in sorted(counts.items(), key=_order):
        built = sum(found[status] for status in PARTS)
        row = {"library": library, "task": task, "backend": backend, "listed": found.total(), "built": built}
        rows.append(row | {s: found[s] for s in PARTS} | {"exact_share": found["exact"] / built if built else None})
    return frame_of(rows, _COLUMNS)


def _order(item: tuple[tuple[str, str, str], Any]) -> tuple[Any, ...]:
    library, task, backend = item[0]
    return library != ALL, library, task, style.backend_key(backend)


_share = of("exact_share", readable.as_percent, "–")
_TEXT = {
    "Library": of("library"),
    "Task": of("task"),
    **BACKEND,
    "Models": of("listed"),
    "Built": of("built"),
    "Exact": of("exact"),
    "Refused": of("refused"),
    "Wrong": of("wrong"),
    "Crashed": of("crash"),
    "Exact of built": _share,
}


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    ended = [record for record in records if record.outcome == "ok"]
    built = [record for record in ended if "rows" in record.result]
    failing = len(ended) - len(built)
    said = [
        f"{len(records)} trials: the smallest model of each family of timm and torchvision, every type of transformers"
        " made tiny, with each of its heads; a mixture of experts in both of its implementations, which count as one"
        " over all libraries. Random weights, on three samples and then two, in train mode with dropout off and"
        " GroupNorm for BatchNorm. Exact: norms and clipped sums are autograd's own. Refused: says so, with a reason"
        " (what Opacus raises counts as one). A backend's own verification, which finds a wrong one out, is off here.",
        f"{failing} that cannot be built or trained so are in the table of reasons, and in no share.",
    ]
    narrow = sum(r.result.get("dtype") == "float32" for r in built)
    if narrow:
        said.append(f"In float64, but for {narrow} that cannot be trained in it: in float32, to 1e-3.")
    packages = [r.environment.get("packages", {}) for r in records]
    found = sorted(
        {f"{n} {p[n]}" for p in packages for n in ("timm", "torchvision", "transformers", "opacus") if p.get(n)}
    )
    return [*said, f"{', '.join(found)}."] if found else said


def _finding(frame: pd.DataFrame) -> str:
    of_all = frame[(frame.library == ALL) & (frame.built > 0)]
    told: dict[str, list[str]] = {}
    for r in readable.rows(of_all):
        others = {"refuses": r.refused, "wrong on": r.wrong, "crashed on": r.crash}
        notes = ", ".join(f"{word} {count}" for word, count in others.items() if count)
        told.setdefault(str(r.exact) + (f" ({notes})" if notes else ""), []).append(style.backend(r.backend).name)
    if not told:
        return ""
    how = "tiny, random weights, GroupNorm for BatchNorm; a mixture of experts counts once"
    said = "; ".join(f"{' and '.join(names)} {result}" for result, names in told.items())
    return f"Public models with exact gradients, of {of_all.built.max()} ({how}): {said}."


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """Shares as bars, a group for each library and task, in two columns."""
    groups = list(frame.groupby(["library", "task"], sort=False))
    depths = [_HEADING + _ROW * len(rows) for _, rows in groups]
    left = next((i + 1 for i in range(len(groups)) if 2 * sum(depths[: i + 1]) > sum(depths) - _ROW), len(groups))
    depth = max(sum(depths[:left]), sum(depths[left:]), _ROW)
    figure, _ = sheet(_TOP + depth + _AXIS, caption)
    width = (WIDTH - 2 * MARGIN - _GAP) / 2
    for column, own in enumerate((groups[:left], groups[left:])):
        if own:
            start, room = MARGIN + column * (width + _GAP) + _NAMES, sum(_HEADING + _ROW * len(rows) for _, rows in own)
            _bars(place(figure, start, _TOP, width - _NAMES - _NUMBERS, room), own, room)
    legend(figure, [Patch(facecolor=color, label=word) for word, color in PARTS.values()], right=True, handlelength=1.6)
    return figure


def _bars(axes: Axes, groups: Sequence[tuple[Any, pd.DataFrame]], room: float) -> None:
    """Groups of rows from the top down; `room` is their depth in inches."""
    axes.set(xlim=(0, 1), ylim=(room, 0))
    places, names, y = [], [], 0.0
    for (library, task), rows in groups:
        heading = f"{f'{library}, {task}' if task else library}: {rows.built.max()} of {rows.listed.max()} built"
        beside(axes, 0, y + 0.6 * _HEADING, -72 * (_NAMES - 0.02), heading, weight="bold")
        y += _HEADING
        for row in readable.rows(rows):
            shares = [getattr(row, status) / row.built if row.built else 0.0 for status in PARTS]
            starts = [0.0, *itertools.accumulate(shares)][: len(shares)]
            colors = [color for _, color in PARTS.values()]
            axes.barh([y + _ROW / 2] * len(PARTS), shares, 0.8 * _ROW, starts, color=colors, linewidth=0, zorder=2)
            faults = ((row.wrong, "wrong"), (row.crash, "crashed"))
            numbers = "  ".join([_share(row), *(f"{count} {word}" for count, word in faults if count)])
            beside(axes, 1, y + _ROW / 2, 5, numbers, fontsize=7.6)
            places.append(y + _ROW / 2)
            names.append(style.backend(row.backend).name)
            y += _ROW
    axes.set_yticks(places, names, fontsize=7.6)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25", "50", "75", "100 %"], fontsize=7.6)
    axes.set_xlabel("share of the models that are built", fontsize=8)
    axes.yaxis.grid(False)
    axes.spines["left"].set_visible(False)


def reasons(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each backend, status and reason: how many models, and which.

    Reasons that differ only in numbers and quoted names count as one, except for wrong results.
    """
    rows = []
    for record in records:
        for backend, status, said in verdicts(record):
            if status not in ("exact", "unavailable"):
                short = said
                if status == "refused":  # the reason for the first parameter or module, without its name
                    problem = said.partition("does not support this model: ")[2].partition("; ")[0] or said
                    short = problem.partition(": ")[2] or problem
                alike = short if status == "wrong" else re.sub(r"'[^']*'|\d[\d.e+-]*", "#", short)
                of = "" if status == NOT_BUILT else backend
                rows.append((of, status, alike, short, record.trial["model"]))
    found = pd.DataFrame(rows, columns=["backend", "status", "alike", "reason", "which"])
    told = found.drop_duplicates(["backend", "status", "alike", "which"]).groupby(["backend", "status", "alike"])
    frame = told.agg(
        models=("which", "size"), reason=("reason", "first"), which=("which", lambda names: ", ".join(sorted(names)))
    ).reset_index()
    grave = ["wrong", "crash", "refused", NOT_BUILT]

    def order(row: Any) -> tuple[Any, ...]:
        return row.backend == "", style.backend_key(row.backend), grave.index(row.status), -row.models, row.alike

    columns = ["backend", "status", "models", "reason", "which"]
    return pd.DataFrame(sorted(readable.rows(frame), key=order), columns=frame.columns)[columns]


_REASONS = {
    "Backend": lambda r: style.backend(r.backend).name if r.backend else "any",
    "": lambda r: PARTS[r.status][0].partition(",")[0] if r.status in PARTS else r.status,
    "Models": of("models"),
    "First of the reasons": of("reason"),
    "Which": of("which"),
}
FIGURES = {
    "coverage": FigureKind(
        ("coverage",), table, _TEXT, _caption, plot, _finding, cell=captions.libraries, with_causes=False
    ),
    "coverage_reasons": FigureKind(
        kinds=("coverage",),
        cell=captions.libraries,
        table=reasons,
        text=_REASONS,
        caption="Every model on which a backend is not exact, and every one that is not built, by reason.",
        with_causes=False,
    ),
}
