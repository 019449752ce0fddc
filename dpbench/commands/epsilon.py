"""``dpbench epsilon``: what each accountant says of a run, and what that is worth."""

from __future__ import annotations

import argparse
import decimal
import math
import re
from collections.abc import Mapping
from typing import Any

from accounting import ACCOUNTANTS, VARIANTS, ArgumentError, NoAnswer, SubsampledGaussian, load_accountant
from dpbench.errors import UsageError, one_of
from dpbench.store import to_json

Row = dict[str, Any]

_SAMPLING = {"poisson": "Poisson sampling"}
_ADJACENCY = {"add_remove": "adding or removing one record"}
#: What a printed ε may be rounded to without becoming another claim than its kind.
_ROUNDING = {"upper_bound": decimal.ROUND_CEILING, "lower_bound": decimal.ROUND_FLOOR}
_HEADER = ("accountant", "epsilon", "kind", "seconds", "how")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # -1e-5 is a value, to be refused as one, and not an option that argparse does not know (as it thinks before 3.14).
    parser._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")
    parser.add_argument("--sample-rate", metavar="Q", required=True, help="chance of each record to be in a batch")
    parser.add_argument("--noise-multiplier", metavar="S", required=True, help="σ, in units of the clipping norm")
    parser.add_argument("--steps", metavar="T", required=True, help="number of steps")
    parser.add_argument("--delta", metavar="D", required=True, help="δ")
    parser.add_argument(
        "--accountant",
        metavar="NAME",
        action="append",
        help=f"may be given again; {', '.join(ACCOUNTANTS)} (default: all), and {', '.join(VARIANTS)}",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """Print a row for each accountant; 0.

    Raises:
        UsageError: for an unknown accountant, or a value outside its domain.
    """
    known = [*ACCOUNTANTS, *VARIANTS]
    names = [one_of("an accountant", name, known) for name in args.accountant or ACCOUNTANTS]
    try:
        mechanism = SubsampledGaussian(
            noise_multiplier=_number("--noise-multiplier", args.noise_multiplier),
            sample_rate=_number("--sample-rate", args.sample_rate),
        )
        steps, delta = _number("--steps", args.steps), _number("--delta", args.delta)
        rows = [_row(name, mechanism, steps, delta) for name in dict.fromkeys(names)]
    except ArgumentError as error:
        raise UsageError(f"--{error.argument.replace('_', '-')} {error.expected}", error.came) from error
    print(to_json(rows) if args.format == "json" else _table(rows, mechanism, steps, delta))
    return 0


def _number(option: str, text: str) -> float:
    """An int where it is written as one, as a float loses digits beyond 2**53."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"{option} to be a number", text)


def _row(name: str, mechanism: SubsampledGaussian, steps: float, delta: float) -> Row:
    """One accountant's answer; where it has none, `epsilon` is None and the reason stands in `detail`."""
    accountant = load_accountant(name)
    try:
        answer = accountant.guarantee(mechanism, steps=steps, delta=delta)
    except NoAnswer as error:
        return {"accountant": name, "epsilon": None, "kind": accountant.kind, "detail": {"reason": str(error)}}
    return {"accountant": name, "epsilon": answer.epsilon, "kind": answer.kind, "detail": dict(answer.detail)}


def _table(rows: list[Row], mechanism: SubsampledGaussian, steps: float, delta: float) -> str:
    lines = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    return "\n".join(
        [
            f"ε at δ = {delta:g} after {steps:,} steps, sample rate {mechanism.sample_rate:g}, "
            f"noise multiplier {mechanism.noise_multiplier:g}",
            f"under {_SAMPLING[mechanism.sampling]}, {_ADJACENCY[mechanism.adjacency]}, "
            "noise on the sum of clipped gradients",
            "",
            *(
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                for line in lines
            ),
        ]
    )


def _cells(row: Row) -> tuple[str, ...]:
    detail: Mapping[str, Any] = row["detail"]
    seconds = f"{detail['seconds']:.4f}" if "seconds" in detail else "-"
    shown = [f"{k}={_value(v)}" for k, v in detail.items() if k not in ("sampling", "adjacency", "seconds", "reason")]
    how = ", ".join([*shown, *([detail["reason"]] if "reason" in detail else [])])
    return row["accountant"], _epsilon(row["epsilon"], row["kind"]), row["kind"].replace("_", " "), seconds, how


def _epsilon(epsilon: float | None, kind: str) -> str:
    """Six digits, an upper bound rounded up and a lower one down."""
    if epsilon is None or math.isinf(epsilon):
        return "-" if epsilon is None else "inf"
    rounding = _ROUNDING.get(kind, decimal.ROUND_HALF_EVEN)
    return f"{decimal.Context(prec=6, rounding=rounding).create_decimal(epsilon):g}"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
