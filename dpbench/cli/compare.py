"""``dpbench compare``: compare two runs, with a verdict for each cell and an exit code."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpbench.cli import streams
from dpbench.cli.columns import aligned
from dpbench.errors import UsageError, one_of
from dpbench.records.comparison import Row, compare_records, counts
from dpbench.records.conditions import differences, pooled, warnings
from dpbench.records.reader import LeftOut, locate, read
from dpbench.records.statistics import CONFIDENCE, FEWEST_FOR_BOOTSTRAP, MIN_EFFECT
from dpbench.records.store import uncollected
from dpbench.trials.json_text import to_json

_CALLABLE = ("slower", "faster", "larger", "smaller", "inconclusive", "failed")
_SHOWN = 5
_HEAD = ("model", "backend", "B", "what", "A", "B is", "ratio", "interval", "verdict", "rounds", "outliers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    what = "results folder, a .jsonl file in it, or an experiment whose records lie in ./results"
    parser.add_argument("a", metavar="A", help=f"the run to compare with: a {what}")
    parser.add_argument("b", metavar="B", help="the run to judge: likewise; of another machine, by ratios alone")
    parser.add_argument(
        "--fail-on",
        metavar="VERDICT[:N%]",
        action="append",
        default=[],
        help="exit 1 if a cell is, by N %% or more: slower, faster, larger, smaller; also inconclusive or failed. "
        "May be given several times. A cell that was ok in A and failed in B then fails as well",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")


def _parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Verdict -> the least change that fails, of ``slower:5%`` or ``slower``. With any of them, failures fail too."""
    limits = {"failed": 0.0} if texts else {}
    for text in texts:
        verdict, colon, share = text.partition(":")
        one_of("a verdict for --fail-on", verdict, _CALLABLE)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", share)
        if colon and (match is None or verdict in ("inconclusive", "failed")):
            raise UsageError("--fail-on as slower:5%, larger:10% or failed", text)
        least = float(match[1]) / 100 if match else 0.0
        limits[verdict] = min(least, limits.get(verdict, least))
    return limits


def _fails(row: Row, limits: Mapping[str, float]) -> bool:
    least = limits.get(row.verdict)
    return least is not None and (row.ratio is None or not least or max(row.ratio, 1 / row.ratio) >= 1 + least)


@uncollected()
def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 if a verdict fails, else 0."""
    limits = _parse_limits(args.fail_on)
    paths = [locate(args.a), locate(args.b)]
    streams.tell("reading records")
    sides = [read(path) for path in paths]
    for path, records in zip(paths, sides, strict=True):
        if not records:
            raise UsageError(f"records in {path}", "none")
    devices = [{record.device for record in records} for records in sides]
    across = not devices[0] & devices[1]
    if across and max(map(len, devices)) > 1:
        each = " and ".join(", ".join(sorted(names)) for names in devices)
        raise UsageError("two runs on one device, or of one device each (a file of records is of one)", each)
    streams.tell("comparing cells")
    left_out: LeftOut = LeftOut()
    rows, only_a, only_b = compare_records(sides[0], sides[1], left_out, across)
    if not rows:
        raise UsageError(
            "cells that both measured (step, overhead or peak trials, or whole training steps, on as many threads)",
            f"{len(only_a)} in {paths[0]} alone, {len(only_b)} in {paths[1]} alone",
        )
    differ = differences(sides[0], sides[1])
    told = ["two machines: only ratios to ordinary training are compared"] if across else []
    for name, side in zip("AB", sides, strict=True):
        told += [f"{name} pools runs that differ in {fact}: {values}" for fact, values in pooled(side)]
        told += [f"{name}: {sentence}" for sentence in warnings(side)]
    failed = [row for row in rows if _fails(row, limits)]
    answer = {
        "a": str(paths[0]),
        "b": str(paths[1]),
        "differences": [dict(zip(("fact", "a", "b"), item, strict=True)) for item in differ],
        "warnings": told,
        "cells": [asdict(row) for row in rows],
        "only_in_a": only_a,
        "only_in_b": only_b,
        "left_out": {reason: count for reason, count in left_out.items() if count},
        "failed": len(failed),
    }
    for line in _said(answer):
        streams.say(line)
    print(to_json(answer) if args.format == "json" else "\n".join(_table(rows, paths, failed)))
    return 1 if failed else 0


def _said(answer: Mapping[str, Any]) -> list[str]:
    """Notes on the numbers, for standard error."""
    lines = ["the environments differ in {fact}: A {a}; B {b}".format(**each) for each in answer["differences"]]
    lines += answer["warnings"]
    for side, names in (("A", answer["only_in_a"]), ("B", answer["only_in_b"])):
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"only in {side}, and so not compared: {', '.join(names[:_SHOWN])}{more}")
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(answer["left_out"].items()))
    return [*lines, *([f"records that enter no verdict: {left}"] if left else [])]


def _table(rows: Sequence[Row], paths: Sequence[Path], failed: Sequence[Row]) -> list[str]:
    """The lines: the paths, a row for each common cell, the summary, how to read it, and the rows beyond a limit."""
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
    counted = ("/".join(map(str, each)) if any(each) else "" for each in (row.rounds, row.outliers))
    values = _value(row, row.a), _value(row, row.b), ratio, interval
    return row.model, row.backend, str(row.batch_size), what, *values, row.verdict, *counted


def _value(row: Row, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if row.quantity == "peak":
        return f"{value / 2**20:,.1f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"
    if row.quantity in ("time ratio", "memory ratio"):
        return f"{value:.3f}x"
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"
