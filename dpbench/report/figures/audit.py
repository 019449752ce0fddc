"""Which tests refute the privacy claims of the engine, sound and with seeded faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from accounting.base import rounded
from dpbench.records.reader import LeftOut, Record
from dpbench.report import style
from dpbench.report.captions import span_of
from dpbench.report.drawing.sheet import MARGIN, WIDTH, beside, grid
from dpbench.report.parts import FigureKind
from dpbench.report.readable import digits
from dpbench.training import FAULTS, FORMS, TESTS

_TOP, _ROW, _HEAD, _NAMES, _WORDS = 1.02, 0.2, 0.28, 3.95, 1.55
_SETTING = ["fault", "backend", "form", "sample_rate"]
_NUMBERS = ["claimed_epsilon", "epsilon_lower_bound", "claimed_mu", "mu_lower_bound", "sigma_hat", "sensitivity"]
_GUESSES = ["guesses", "correct", "delta"]
_HEADS = {
    "one_run": "ε of one run",
    "mu": "μ of a step",
    "scale": "noise: size",
    "shape": "noise: shape",
    "steps": "noise: two steps",
    "parameters": "noise: two parameters",
    "shards": "noise: two shards",
    "sensitivity": "sensitivity",
    "sampling": "batches",
}
#: verdict -> colour
_LOOKS = {"passes": "#117733", "found": "#2266AA", "MISSED": style.FAILURE, "REFUTED": style.FAILURE}


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each run: the claim, the finding, and a verdict on the engine or the audit.

    `refuted_by`: names of `TESTS`. `verdict`: "passes" or "REFUTED" of a sound engine, "found" or "MISSED" of a fault.
    """
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "epsilon_lower_bound" not in result:
            continue
        above = result["epsilon_lower_bound"] > result["claimed_epsilon"]
        by = result.get("refuted_by", ["one_run"] if above else [])  # the first audits had only that test
        verdict = ("found" if by else "MISSED") if trial["fault"] else ("REFUTED" if by else "passes")
        rows.append(
            {name: trial.get(name, "whole") for name in (*_SETTING, "seed", "canaries", "steps")}
            | {name: result.get(name) for name in (*_NUMBERS, *_GUESSES, "level")}
            | {f"p_{name}": p for name, p in result.get("p_values", {}).items()}
            | {"refuted_by": " ".join(by), "verdict": verdict}
        )
    columns = [*_SETTING, "seed", "canaries", "steps", *_NUMBERS, *_GUESSES, "level"]
    columns += [f"p_{name}" for name in TESTS if any(f"p_{name}" in row for row in rows)] + ["refuted_by", "verdict"]
    frame = pd.DataFrame(rows, columns=columns).astype({name: float for name in (*_NUMBERS, "delta", "level")})
    faults, forms = ["", *FAULTS], list(FORMS)

    def key(i: int) -> tuple[Any, ...]:
        fault, backend, form, rate = (frame[name][i] for name in _SETTING)
        known = faults.index(fault) if fault in faults else len(faults)
        at = forms.index(form) if form in forms else len(forms)
        return known, rate, at, form, fault, style.backend_key(backend), frame.seed[i]

    return frame.iloc[sorted(range(len(frame)), key=key)].reset_index(drop=True)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each fault, backend and form of batches, over its seeds."""
    certified = partial(rounded, kind="lower_bound", digits=3)
    three, four = digits(3), digits(4)
    rows = []
    for setting, part in _grouped(frame):
        fault, backend, form, rate = setting
        by = _counts(part)
        rows.append(
            {
                "engine": FAULTS.get(fault, fault) or "as it is",
                "backend": backend,
                "batches": form,
                "q": f"{rate:g}",
                "runs": len(part),
                "ε claimed": span_of(part.claimed_epsilon.round(2), three),
                "ε certified": span_of(part.epsilon_lower_bound, certified),
                "μ claimed": span_of(part.claimed_mu, three),
                "μ certified": span_of(part.mu_lower_bound, certified),
                "noise / claim": span_of(part.sigma_hat, four),
                "sensitivity / C": span_of(part.sensitivity, four),
                "refuted by": ", ".join(f"{_HEADS[t]} {by[t]}" for t in TESTS if by[t]),
                "verdict": _verdict(part),
            }
        )
    return pd.DataFrame(rows)


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    if not len(frame):
        return ["No audit gave a number."]
    said = [
        _finding(frame),
        "A number: how many of the row's runs a test refutes; a dot: none, which is no proof of privacy.",
        "Canaries in gradient space, each in the data by a fair coin. ε of one run: guesses of the coins from all",
        "released gradients (Steinke, Nasr and Jagielski 2023). The other tests know coins and batches, as the",
        "adversary of DP-SGD's proof does. μ of a step: errors in telling who is in a release (Nasr et al. 2023).",
        "Noise: its size (χ²), its shape, and the angle between the noise of two steps (or of one before and after a",
        "checkpoint), of two parameters, of two shards. Sensitivity: how far a record moves a sum, by replay with the",
        "same noise. Batches: are they Poisson samples?",
    ]
    if levels := sorted(set(frame.level.dropna())):
        said.append(f"A sound engine is refuted by any test with probability {style.plain(levels[-1])} at most, a run.")
    return said


def _finding(frame: pd.DataFrame) -> str:
    faults, sound = frame[frame.fault != ""], frame[frame.fault == ""]
    seeded = f"{len(faults)} runs with one of {faults.fault.nunique()} seeded faults"
    return (
        f"Of {len(sound)} runs of the engine as it is {(sound.verdict == 'REFUTED').sum()} are refuted; of {seeded} "
        f"{(faults.verdict == 'found').sum()} are."
    )


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A row for each form of the sound engine and for each fault, a column for each test, and the verdict in words."""
    groups = _grouped(frame)
    sound = sum(not fault for (fault, *_), _ in groups)
    heads = {0: "the engine as it is"} if sound else {}
    heads |= {sound: "with a seeded fault"} if sound < len(groups) else {}
    places = [i * _ROW + _ROW / 2 + _HEAD * sum(at <= i for at in heads) for i in range(len(groups))]
    depth = max(_ROW * len(groups) + _HEAD * len(heads), _ROW)
    figure, (axes,) = grid(caption, 1, 1, depth, head=_TOP, foot=0.16, left=_NAMES, right=_WORDS)
    title: dict[str, Any] = {"fontsize": 9.5, "weight": "bold", "va": "center"}
    figure.text(MARGIN / WIDTH, 1 - 0.2 / figure.get_figheight(), "Runs that a test refutes", **title)
    axes.set(xlim=(-0.5, len(TESTS) - 0.5), ylim=(depth, 0))
    for (_, part), y in zip(groups, places, strict=True):
        counts = _counts(part)
        for x, test in enumerate(TESTS):
            _cell(axes, x, y, counts[test], part)
        beside(axes, 1, y, 6, _verdict(part), color=_LOOKS[_worst(part)])
    usual = frame.sample_rate.min()
    axes.set_yticks(places, [_name(setting, usual) for setting, _ in groups])
    for first, head in heads.items():
        beside(axes, 0, places[first] - _ROW / 2 - 0.4 * _HEAD, -3.5, head, ha="right", weight="bold")
    axes.set_xticks(range(len(TESTS)), [_HEADS[test] for test in TESTS], rotation=35, ha="left")
    axes.xaxis.tick_top()
    axes.tick_params(labelsize=8, pad=2)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def _cell(axes: Axes, x: int, y: float, count: int, part: pd.DataFrame) -> None:
    """A number on a background that darkens with the share of refuted runs; a dot for none."""
    if not count:
        axes.plot([x], [y], linestyle="", marker="o", markersize=1.6, color="#B8B8B8")
        return
    share = count / len(part)
    color = _LOOKS["found" if part.fault.iloc[0] else "REFUTED"]
    axes.add_patch(
        Rectangle((x - 0.47, y - 0.46 * _ROW), 0.94, 0.92 * _ROW, facecolor=color, alpha=0.25 + 0.75 * share)
    )
    ink = "white" if share > 0.4 else style.INK
    axes.text(x, y + 0.004, str(count), ha="center", va="center", fontsize=7.6, color=ink)


def _name(setting: tuple[str, str, str, float], usual: float) -> str:
    """A fault in words; for the sound engine, its backend and, unless whole, its batches."""
    fault, backend, form, rate = setting
    words = FAULTS.get(fault, fault) if fault else style.backend(backend).name
    words += f", {FORMS.get(form, form)}" if not fault and form != "whole" else ""
    return words if rate == usual else f"{words}, q = {rate:g}"


def _grouped(frame: pd.DataFrame) -> list[tuple[tuple[str, str, str, float], pd.DataFrame]]:
    parts = [part for _, part in frame.groupby(_SETTING, sort=False)]
    return [(tuple(part[name].iloc[0] for name in _SETTING), part) for part in parts]


def _counts(part: pd.DataFrame) -> Counter[str]:
    """How many runs each test refutes."""
    return Counter(test for tests in part.refuted_by for test in tests.split())


def _worst(part: pd.DataFrame) -> str:
    return next((v for v in ("REFUTED", "MISSED") if (part.verdict == v).any()), str(part.verdict.iloc[0]))


def _verdict(part: pd.DataFrame) -> str:
    """'found in 5 of 5'."""
    worst = _worst(part)
    return f"{worst} in {(part.verdict == worst).sum()} of {len(part)}"


FIGURE = FigureKind(("audit",), table, text, _caption, plot, _finding)
