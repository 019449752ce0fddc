"""``dpbench compare``: compare two runs, with a verdict for each cell and an exit code."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dpbench.cli import streams
from dpbench.errors import UsageError, one_of
from dpbench.trials.json_text import to_json

_CALLABLE = ("slower", "faster", "larger", "smaller", "inconclusive", "failed")
_SHOWN = 5


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


@dataclass(frozen=True)
class _Limit:
    """A verdict that fails if the change is at least `by`."""

    verdict: str
    by: float

    def struck_by(self, verdict: str, ratio: float | None) -> bool:
        """True if a cell of this verdict and ratio fails by this limit."""
        if verdict != self.verdict:
            return False
        return ratio is None or not self.by or max(ratio, 1 / ratio) >= 1 + self.by


def _parse_limit(text: str) -> _Limit:
    """Parse ``slower:5%`` or ``slower``.

    Raises:
        UsageError: for a text of another form.
    """
    verdict, colon, share = text.partition(":")
    one_of("a verdict for --fail-on", verdict, _CALLABLE)
    if not colon:
        return _Limit(verdict, 0.0)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", share)
    if match is None or verdict in ("inconclusive", "failed"):
        raise UsageError("--fail-on as slower:5%, larger:10% or failed", text)
    return _Limit(verdict, float(match[1]) / 100)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 if a verdict fails, else 0.

    Raises:
        UsageError: a path that does not exist, no records, no common cells, an invalid limit.
    """
    limits = [_parse_limit(text) for text in args.fail_on]
    from dpbench.records.comparison import VERDICTS, compare_records
    from dpbench.records.conditions import differences, pooled, warnings
    from dpbench.records.reader import LeftOut, locate, read

    assert set(_CALLABLE) < set(VERDICTS)
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
    limits += [_Limit("failed", 0.0)] if limits else []
    failed = [row for row in rows if any(limit.struck_by(row.verdict, row.ratio) for limit in limits)]
    for line in _said(differ, told, only_a, only_b, left_out):
        print(f"dpbench: {line}", file=sys.stderr)
    if args.format == "json":
        print(
            to_json(
                {
                    "a": str(paths[0]),
                    "b": str(paths[1]),
                    "differences": [dict(zip(("fact", "a", "b"), item, strict=True)) for item in differ],
                    "warnings": told,
                    "cells": [row.as_json() for row in rows],
                    "only_in_a": only_a,
                    "only_in_b": only_b,
                    "left_out": {reason: count for reason, count in left_out.items() if count},
                    "failed": len(failed),
                }
            )
        )
    else:
        from dpbench.cli.compare_table import table

        print("\n".join(table(rows, paths, failed)))
    return 1 if failed else 0


def _said(
    differ: Sequence[tuple[str, str, str]],
    told: Sequence[str],
    only_a: Sequence[str],
    only_b: Sequence[str],
    left_out: dict[str, int],
) -> list[str]:
    """Notes on the numbers, for standard error."""
    lines = [f"the environments differ in {name}: A {a}; B {b}" for name, a, b in differ]
    lines += told
    for side, names in (("A", only_a), ("B", only_b)):
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"only in {side}, and so not compared: {', '.join(names[:_SHOWN])}{more}")
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()) if count)
    return [*lines, *([f"records that enter no verdict: {left}"] if left else [])]
