"""``dpbench explain``: how each use of each parameter gets its norm, what each route costs, and the plan of `bk_mixed`.

With ``--measure``, every route is timed on this device.

Functions take:
    rows, summary: of the trial's result.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from dpbench.cli import streams
from dpbench.cli.columns import aligned
from dpbench.cli.options import add_model, add_sizes, validate_model
from dpbench.errors import UsageError, last_line
from dpbench.process.parent import Isolation
from dpbench.records.environment import DEVICES, resolve_device
from dpbench.trials import ExplainTrial
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Outcome

Row = dict[str, Any]

BATCH_SIZE = 8
_HEADER = ("parameter", "op", "T", "d", "p", "2T²", "pd", "paper", "choice")
_COSTS = ("bytes: ghost", "instantiate", "operations: ghost", "instantiate")
_PLAN = ("plan of bk_mixed", "predicted")
_ROUTES = ("ghost", "kept", "discarded")
_NUMBERS = range(2, 7)
#: Seconds; measuring takes many steps.
_MEASURING_TIMEOUT = 3600.0
_STRATEGIES = {"ghost": "all ghost", "instantiate": "all instantiated", "mixed": "mixed"}
_SHARES = {
    "ghost": "ghost",
    "instantiate": "instantiated",
    "fallback": "fallback",
    "unused": "that the loss does not depend on",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    add_model(parser)
    parser.add_argument(
        "--batch-size", metavar="B", type=int, default=BATCH_SIZE, help="samples in the batch (default: %(default)s)"
    )
    add_sizes(parser)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time every route of every use on this device, and the memory and time of a step: takes many steps",
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="for --measure; auto: cuda if available, else cpu"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """Print a row for each use of each parameter; 0, or 1 if the model is refused, with a line for each problem."""
    validate_model(args)
    trial = ExplainTrial(
        model=args.model,
        batch_size=args.batch_size,
        image_size=args.image_size,
        num_classes=args.num_classes,
        measure=args.measure,
        device=resolve_device(args.device),
        timeout=_MEASURING_TIMEOUT if args.measure else ExplainTrial.timeout,
    )
    streams.tell("timing every route" if args.measure else f"building {args.model}")
    with Isolation() as isolation:
        answer = isolation.run(trial)
    if answer.outcome != Outcome.OK or answer.result is None:
        streams.say(f"{args.model} cannot be explained: {answer.outcome}: {last_line(answer.evidence)}")
        return 1
    if "usage" in answer.result:
        raise UsageError.of(answer.result["usage"])
    if "problems" in answer.result:
        for problem in answer.result["problems"]:
            line = f"{problem['module']}: {problem['reason']} (remedy: {problem['remedy']})"
            streams.say(f"{args.model} is refused; {' '.join(line.split())}")
        return 1
    if args.format == "json":
        print(to_json(answer.result["rows"]))
    else:
        print("\n".join(table(args.model, answer.result["rows"], answer.result["summary"])))
    return 0


def table(model: str, rows: Sequence[Row], summary: dict[str, Any]) -> list[str]:
    """The lines of the table: a title, the rows, totals, and the meaning of the columns."""
    inputs = ", ".join("×".join(map(str, shape)) for shape in summary["inputs"])
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row["reason"]))
    measured = any(row["measured_seconds"] for row in rows)
    routes = (f"measured: {_ROUTES[0]}", *_ROUTES[1:]) if measured else ()
    header = (*_HEADER, *_COSTS, *_PLAN, *routes, "")
    cells = [header, *(_cells(row, reasons, measured) for row in rows)]
    right = {*_NUMBERS, *range(len(_HEADER), len(header) - 1)} - {header.index(_PLAN[0])}
    return [
        f"{model}: {summary['parameters']:,} trainable parameters, inputs {inputs}",
        "",
        *aligned(cells, right),
        "",
        *_totals(summary),
        "",
        *_footer(rows, summary, reasons),
    ]


def _cells(row: Row, reasons: list[str], measured: bool) -> tuple[str, ...]:
    planned = (row["plan"] or "").replace(",", " ").partition(" ")[0]
    op = row["op"] if (row["groups"] or 1) == 1 else f"{row['op']}, {row['groups']} groups"
    return (
        row["parameter"],
        op,
        *(_count(row[key]) for key in ("T", "d", "p")),
        *(_short(row[key]) for key in ("two_T_squared", "p_times_d")),
        row["paper_choice"] or "-",
        row["choice"] or "-",
        *(_bytes(row["bytes"][route]) for route in ("ghost", "instantiate")),
        *(_short(row["flops"][route]) for route in ("ghost", "instantiate")),
        row["plan"] or "-",
        _seconds((row["predicted_seconds"] or {}).get(planned)),
        *(_seconds((row["measured_seconds"] or {}).get(route)) for route in _ROUTES if measured),
        f"[{reasons.index(row['reason']) + 1}]" if row["reason"] else "",
    )


def _totals(summary: dict[str, Any]) -> list[str]:
    """Parameters by route, and the three strategies compared."""
    shown = [f"{summary['share'][key]:.1%} {word}" for key, word in _SHARES.items() if summary["share"][key] > 0]
    found = summary["totals"]
    lines = [("", *_STRATEGIES.values())]
    for count in dict.fromkeys((1, summary["batch_size"])):
        what = "one sample" if count == 1 else f"{count} samples"
        lines.append((f"bytes, {what}", *(_bytes(count * found[key]["bytes"]) for key in _STRATEGIES)))
        lines.append((f"operations, {what}", *(_short(count * found[key]["flops"]) for key in _STRATEGIES)))
    return [f"parameters by the route of mixed_ghost: {', '.join(shown) or 'none'}", "", *aligned(lines, {1, 2, 3})]


def _footer(rows: Sequence[Row], summary: dict[str, Any], reasons: Sequence[str]) -> list[str]:
    """The meaning of the columns, and what they exclude."""
    lines = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    lines += [
        "Figures of a row are for one sample; T, d, p, 2T² and pd (in entries) for one group of it.",
        "paper: ghost where 2T² ≤ pd (arXiv:2205.10683). choice: what mixed_ghost does. -: there is no such thing.",
        "bytes: workspace of the norm in the way that the formulas prefer (Gram matrices of pixels or of patches,",
        "  gradients from patches or by a grouped convolution), if it is not cut into blocks (large ones are).",
        "operations: of the norm, a multiplication and an addition being two; all else is the same by every route.",
        "plan: ghost, by Gram matrices; kept, gradients instantiated, kept for the sum; discarded, for the norm only.",
        "predicted, measured: seconds of the whole batch, of the norm and of the use's share of the clipped sum.",
    ]
    if summary["measured"]:
        lines.append("-: a route that there is not, or that was so slow by its formula that it was not timed.")
    lines += _figures(summary)
    if any(row["flops"]["instantiate"] == 0 for row in rows):
        lines.append("What is made of several parameters has a row for each of them, and counts with the first.")
    if summary["uncounted"]:
        lines.append(f"Operations of {summary['uncounted']} uses by fallback are not known, and in no total.")
    if summary["unused"]:
        lines.append(f"The loss does not depend on {', '.join(summary['unused'])}.")
    if summary["real_tensors"]:
        lines.append(f"Computed on real tensors, as fake ones would not do ({summary['real_tensors']}).")
    return lines


def _figures(summary: dict[str, Any]) -> list[str]:
    """Time and peak memory of the plan, a line each; none if nothing was measured."""
    measured = summary["measured"]
    if not measured:
        return []
    plan, ordinary = measured["plan"], measured["ordinary"]
    ratio = plan["peak_bytes"] / max(1, ordinary["peak_bytes"])
    verified = plan["verification"]
    error = max(verified["max_norm_error"], verified["max_grad_error"])
    return [
        f"Measured peak of the plan: {_bytes(plan['peak_bytes'])}, {ratio:.2f}x ordinary training's "
        f"{_bytes(ordinary['peak_bytes'])} ({plan['source']}).",
        f"Measured step: {_seconds(plan['step_seconds'])}, ordinary training's {_seconds(ordinary['step_seconds'])}; "
        f"exact to {error:.0e} on {verified['samples']} samples.",
    ]


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _seconds(number: float | None) -> str:
    """Three digits of s, ms or µs: 1.23 ms."""
    return _scaled(None if number is None else 1e6 * number, 1000, ("µs", "ms", "s"))


def _short(number: int | None) -> str:
    """Three digits and a power of a thousand: 5.04 G."""
    return _scaled(number, 1000, ("", "k", "M", "G", "T", "P", "E"))


def _bytes(number: int | None) -> str:
    """Three digits and a power of 1024: 18.8 GiB."""
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(number: float | None, base: int, units: Sequence[str]) -> str:
    """Three digits of a number in the largest unit below it; whole numbers keep theirs."""
    if number is None:
        return "-"
    value, power = number, 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = 0 if isinstance(value, int) else max(0, 2 - (value >= 9.995) - (value >= 99.95))
    return f"{value:.{digits}f} {units[power]}".rstrip()
