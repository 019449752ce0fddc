"""Formats a comparison as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpbench.cli.columns import aligned
from dpbench.records.comparison import Row, counts
from dpbench.records.statistics import CONFIDENCE, FEWEST_FOR_BOOTSTRAP, MIN_EFFECT

_HEAD = ("model", "backend", "B", "what", "A", "B is", "ratio", "interval", "verdict", "rounds", "outliers")


def table(rows: Sequence[Row], paths: Sequence[Path], failed: Sequence[Row]) -> list[str]:
    """The lines: the paths, a row each, the summary, and how to read it.

    Args:
        rows: of the common cells.
        paths: of both runs.
        failed: rows beyond a limit.
    """
    differing = _differing(rows)
    body = [_cells(row, differing) for row in rows]
    head, *texts = aligned([_HEAD, *body], set(range(len(_HEAD))) - {0, 1, 3, 8})
    lines = [f"A: {paths[0]}", f"B: {paths[1]}", ""]
    devices = sorted({row.device for row in rows})
    for device in devices:
        lines += [f"{device}:"] if len(devices) > 1 else []
        lines += [head, *(text for row, text in zip(rows, texts, strict=True) if row.device == device)]
    found = counts(rows)
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in found.items())]
    lines += [
        f"Device: {', '.join(devices)}.",
        "Ratio: B over A. A time ratio is a time over ordinary training's in the same round, and so free of drift.",
        f"Interval: {CONFIDENCE:.0%} by bootstrap from {FEWEST_FOR_BOOTSTRAP} rounds on, else the range (r). "
        f"Least effect: {MIN_EFFECT:.0%}.",
    ]
    if found.get("inconclusive"):
        lines.append("Inconclusive: too few rounds, or too noisy. `run --rounds 7` on an idle machine decides most.")
    slower = [row for row in rows if row.verdict == "slower"]
    if slower and {row.quantity for row in slower} == {"time"} and any(row.quantity == "time ratio" for row in rows):
        lines.append(
            "Slower, and not beside ordinary training: the machine or a library that all share, not a backend."
        )
    if failed:
        lines.append(f"FAILED: {len(failed)} of {len(rows)} by --fail-on:")
        lines += [f"  {row.model} {row.backend} B={row.batch_size}, {row.quantity}: {_change(row)}" for row in failed]
    return lines


def _change(row: Row) -> str:
    by = "" if row.ratio is None else f" by {max(row.ratio, 1 / row.ratio) - 1:.1%}"
    return f"{row.verdict}{by} ({_value(row, row.a)} to {_value(row, row.b)})"


def _differing(rows: Sequence[Row]) -> list[str]:
    """Names of settings that distinguish cells of the same model, backend and batch size."""
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.kind, row.device, row.model, row.backend, row.batch_size, row.quantity), []).append(row)
    names = dict.fromkeys(name for row in rows for name in row.setting)
    return [
        name for name in names if any(len({str(row.setting.get(name)) for row in own}) > 1 for own in alike.values())
    ]


def _cells(row: Row, differing: Sequence[str]) -> tuple[str, ...]:
    interval = ratio = ""
    if row.ratio is not None and row.low is not None and row.high is not None:
        ratio = f"{row.ratio:.3f}"
        interval = f"{row.low:.3f}-{row.high:.3f}{' r' if row.interval == 'range' else ''}"
        if row.interval == "exact" or 1 in row.rounds:
            interval = "exact" if row.interval == "exact" else "one round"
    what = f"{row.quantity}, simulated" if row.setting.get("memory") == "simulated" else row.quantity
    for name in differing:
        value = row.setting.get(name)
        if isinstance(value, bool):
            what += f", {name}" if value else ""
        elif value is not None and name != "memory":
            what += f", {value}" if isinstance(value, str) else f", {name.replace('_', ' ')} {value}"
    return (
        row.model,
        row.backend,
        str(row.batch_size),
        what,
        _value(row, row.a),
        _value(row, row.b),
        ratio,
        interval,
        row.verdict,
        "/".join(map(str, row.rounds)) if any(row.rounds) else "",
        "/".join(map(str, row.outliers)) if any(row.outliers) else "",
    )


def _value(row: Row, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if row.quantity == "peak":
        return f"{value / 2**20:,.1f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"
    if row.quantity in ("time ratio", "memory ratio"):
        return f"{value:.3f}x"
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"
