"""Is training as private as it says: the ε that an adversary certifies from below, beside the one that is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.report import captions, style
from dpbench.report.curves import box
from dpbench.report.figures import AXIS, WIDTH, sheet
from dpbench.report.select import LeftOut, Record
from dpbench.training import FAULTS

_TOP, _ROW, _HEAD, _NAMES, _WORDS = 0.34, 0.2, 0.27, 3.35, 2.75
_WORDS_OF = {"": "sound", **FAULTS}
#: verdict -> (colour, marker)
_LOOKS = {
    "passes": ("#117733", "o"),
    "found": ("#2266AA", "D"),
    "MISSED": ("#CC3311", "X"),
    "VIOLATED": ("#CC3311", "X"),
}


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each run: what was claimed, what is certified, and what that says of the engine, or of the audit.

    `verdict`: "passes" or "VIOLATED" of a sound engine, "found" or "MISSED" of a seeded fault.
    """
    rows = []
    for record in records:
        trial, result = record.trial, record.result
        if "epsilon_lower_bound" not in result:
            left_out[f"{trial['fault'] or 'sound'} {trial['backend']}: {record.outcome}"] += 1
            continue
        above = result["epsilon_lower_bound"] > result["claimed_epsilon"]
        verdict = ("found" if above else "MISSED") if trial["fault"] else ("VIOLATED" if above else "passes")
        rows.append(
            {name: trial[name] for name in ("fault", "backend", "seed", "canaries", "steps", "sample_rate")}
            | {name: result[name] for name in ("claimed_epsilon", "epsilon_lower_bound", "guesses", "correct", "delta")}
            | {"verdict": verdict}
        )
    columns = ["fault", "backend", "seed", "canaries", "steps", "sample_rate", "claimed_epsilon"]
    columns += ["epsilon_lower_bound", "guesses", "correct", "delta", "verdict"]
    frame = pd.DataFrame(rows, columns=columns)
    order = sorted(
        range(len(frame)),
        key=lambda i: (list(_WORDS_OF).index(frame.fault[i]), style.backend_key(frame.backend[i]), frame.seed[i]),
    )
    return frame.iloc[order].reset_index(drop=True)


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each fault and backend, over its seeds."""
    rows = []
    for (fault, backend), part in _grouped(frame):
        low, high = part.epsilon_lower_bound.min(), part.epsilon_lower_bound.max()
        rows.append(
            {"engine": _WORDS_OF[fault], "backend": backend, "runs": len(part)}
            | {"ε claimed": f"{part.claimed_epsilon.max():.3g}", "ε certified": f"{low:.2f} to {high:.2f}"}
            | {"guesses right": f"{part.correct.sum()} of {part.guesses.sum()}", "verdict": _verdict(part)}
        )
    return pd.DataFrame(rows)


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """What was attacked, and what the two kinds of row say."""
    if not len(frame):
        return captions.caption(["No audit gave a number."], records, left_out, setting=False)
    first = frame.iloc[0]
    faults, sound = frame[frame.fault != ""], frame[frame.fault == ""]
    said = [
        f"One-run audit (Steinke, Nasr and Jagielski 2023): {first.canaries} canaries in gradient space, each in the",
        f"data by a fair coin; {first.steps} steps at q = {first.sample_rate:g}; an adversary who sees every released",
        f"gradient guesses {first.guesses} of the coins. A point is one run: the largest ε that its right guesses",
        f"refute with 95 % confidence at δ = {style.plain(first.delta)}. Right of the line, the ε that the engine",
        "claims, the claim is refuted; a point to the left of it is no proof of privacy.",
        f"Of {len(sound)} runs of the sound engine {(sound.verdict == 'VIOLATED').sum()} refute it;",
        f"of {len(faults)} runs with a seeded fault {(faults.verdict == 'found').sum()} find it.",
    ]
    return captions.caption([" ".join(said)], records, left_out, setting=False)


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """A row for each backend of the sound engine and for each fault, a point for each run, and the verdict in words."""
    groups = _grouped(frame)
    backends = {fault: {b for (f, b), _ in groups if f == fault} for (fault, _), _ in groups}
    places, heads, depth = [], [], 0.0
    for i, ((fault, _), _part) in enumerate(groups):
        if i == 0 or bool(fault) != bool(groups[i - 1][0][0]):
            heads.append(("with a seeded fault" if fault else "the engine as it is, by backend", depth + 0.6 * _HEAD))
            depth += _HEAD
        places.append(depth + _ROW / 2)
        depth += _ROW
    depth = max(depth, _ROW)
    figure, height = sheet(_TOP + depth + AXIS, caption)
    axes = figure.add_axes(box(_NAMES, _TOP, WIDTH - _NAMES - _WORDS, depth, height))
    claimed = frame.claimed_epsilon.max() if len(frame) else 1.0
    axes.axvline(claimed, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)))
    if len(frame):
        axes.axvspan(claimed, 1e3, color=style.FAILURE, alpha=0.06, linewidth=0)
    names = []
    for ((fault, backend), part), y in zip(groups, places, strict=True):
        for verdict, points in part.groupby("verdict"):
            color, marker = _LOOKS[str(verdict)]
            bounds = points.epsilon_lower_bound
            axes.plot(bounds, [y] * len(bounds), linestyle="", color=color, marker=marker, markersize=4.5, alpha=0.8)
        alone = fault and len(backends[fault]) == 1
        names.append(_WORDS_OF[fault] if alone else f"{_WORDS_OF[fault]}, {backend}" if fault else backend)
        _beside(axes, 1, y, 8, _verdict(part), _LOOKS[part.verdict.iloc[0]][0])
    axes.set_ylim(depth, 0)
    axes.set_xlim(-0.05 * claimed, max(1.3 * claimed, 1.08 * frame.epsilon_lower_bound.max() if len(frame) else 0))
    axes.set_yticks(places, names)
    for head, y in heads:
        _beside(axes, 0, y, -3.5, head, style.INK, ha="right", weight="bold")
    axes.set_title(f"ε certified from below; dashed: ε = {claimed:.3g}, as claimed", pad=7)
    axes.set_xlabel("ε", labelpad=2)
    axes.grid(axis="x", color=style.GRID, linewidth=0.7)
    axes.tick_params(length=0, labelsize=8)
    return figure


def _grouped(frame: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    return [((str(f), str(b)), part) for (f, b), part in frame.groupby(["fault", "backend"], sort=False)]


def _verdict(part: pd.DataFrame) -> str:
    """'found in 3 of 3: ε ≥ 3.10 to 3.32'."""
    low, high = part.epsilon_lower_bound.min(), part.epsilon_lower_bound.max()
    span = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    worst = next((v for v in ("VIOLATED", "MISSED") if (part.verdict == v).any()), part.verdict.iloc[0])
    return f"{worst} in {(part.verdict == worst).sum()} of {len(part)}: ε ≥ {span}"


def _beside(axes: Any, x: float, y: float, points: float, words: str, color: str, **looks: Any) -> None:
    axes.annotate(
        words,
        (x, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(points, -0.5),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=color,
        annotation_clip=False,
        **looks,
    )
