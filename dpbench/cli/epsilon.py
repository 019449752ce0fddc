"""``dpbench epsilon``: ε of a run by each accountant, and its meaning.

Successive steps of different noise, sample rate, sampling or number are phases of a TOML file, as in
`dpbench.guide.accountants`.
"""

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accounting import Accountant, compose
from accounting.varying import Part
from dpbench.cli import privacy
from dpbench.cli.privacy import Row
from dpbench.errors import UsageError, one_of
from dpbench.records.toml_file import read_toml
from dpbench.trials.json_text import to_json

#: Formats of `--output`.
_PICTURES = ("png", "svg", "pdf")
#: The fields of a phase, named as the options.
_FIELDS = (
    *("noise_multiplier", "sample_rate", "batch_size", "dataset_size", "max_batch_size", "steps", "epochs"),
    *("group_size", "sampling", "adjacency"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `epsilon`."""
    parser.add_argument(
        "phases",
        metavar="PHASES.toml",
        nargs="?",
        help="phases of different steps: delta, then a [[phase]] each with noise_multiplier, sample_rate, steps, or "
        "other options",
    )
    parser.add_argument(
        "--risk",
        action="store_true",
        help="what ε means: largest membership advantage, and true positives at 1 %% and 0.1 %% false positives",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="with --risk: the trade-off curve as a figure (.png, .svg, .pdf)"
    )
    privacy.add_arguments(parser)


@privacy.of_options()
def run(args: argparse.Namespace) -> int:
    """Print a row for each accountant; 0, or 1 if none has an answer."""
    suffix = _suffix(args)
    parts, delta_text = _read_phases(args) if args.phases else ([privacy.part(args)], args.delta)
    delta = privacy.delta_of(delta_text, args.dataset_size)

    def answer(accountant: Accountant) -> Row:
        composition = compose(accountant, parts)
        found = composition.guarantee(delta=delta)
        row: Row = {"epsilon": found.epsilon, "kind": found.kind, "detail": dict(found.detail)}
        if args.risk and found.kind == "upper_bound":
            row["risk"] = composition.risk(delta=delta)
        return row

    rows = privacy.rows(privacy.accountants(args.accountant, *parts[0][0].scheme), args, answer)
    lines = [_table(rows, parts, delta, privacy.more(args)), *(privacy.risk_lines(rows) if args.risk else ())]
    print(to_json(rows) if args.format == "json" else "\n".join(lines))
    if suffix:
        _draw(Path(args.output), suffix, parts, rows, delta)
    return int(all(row["epsilon"] is None for row in rows))


def _suffix(args: argparse.Namespace) -> str:
    if args.output is None:
        return ""
    if not args.risk or args.tuned is not None:
        raise UsageError("--output with --risk, and of one run", args.output)
    path = Path(args.output)
    if not path.parent.is_dir():
        raise UsageError("--output in an existing folder", args.output)
    return one_of("a suffix of --output", path.suffix.removeprefix("."), _PICTURES)


def _table(rows: list[Row], parts: list[Part], delta: float, more: list[str]) -> str:
    mechanism, steps = parts[0][0], sum(steps for _, steps in parts)
    sizes = {"records": mechanism.dataset_size, "kept in a batch at most": mechanism.max_batch_size}
    phases = [
        f"{count:,} steps, sample rate {each.sample_rate:g}, noise multiplier {each.noise_multiplier:g}"
        for each, count in parts
    ]
    heading = [
        f"ε at δ = {delta:g} after {phases[0]}"
        if len(parts) == 1
        else f"ε at δ = {delta:g} after {steps:,} steps in {len(parts)} phases",
        *(phases if len(parts) > 1 else ()),
        privacy.under(*mechanism.scheme) + "".join(f", {size:,} {what}" for what, size in sizes.items() if size),
        *more,
    ]
    return privacy.table(heading, sorted(rows, key=_best_first))


def _best_first(row: Row) -> tuple[int, float]:
    """A sort key: upper bounds, the smallest first; then other results; then failures."""
    if row["epsilon"] is None:
        return 2, 0.0
    return int(row["kind"] != "upper_bound"), row["epsilon"]


def _draw(path: Path, suffix: str, parts: list[Part], rows: list[Row], delta: float) -> None:
    """Draw the trade-off curve, with the curve that the smallest ε alone implies."""
    from matplotlib import rc_context

    from accounting.membership import trade_off_or_line  # scipy and matplotlib are slow to import
    from dpbench.report import style
    from dpbench.report.drawing.trade_off_plot import draw  # as above

    bounds = [row["epsilon"] for row in rows if row["kind"] == "upper_bound" and row["epsilon"] is not None]
    with rc_context(style.RC):
        figure = draw(trade_off_or_line(parts, min(bounds, default=math.inf), delta), min(bounds, default=None), delta)
        figure.savefig(path, format=suffix, dpi=200)


def _read_phases(args: argparse.Namespace) -> tuple[list[Part], str | None]:
    """(the parts, δ as typed; the command line's δ overrides the file's)."""
    beside = {name: None if name == "sampling" else getattr(args, name) for name in _FIELDS}
    if given := [f"--{name.replace('_', '-')}" for name, value in beside.items() if value is not None]:
        raise UsageError(f"either {given[0]} or phases", args.phases)
    found = read_toml(Path(args.phases), "a file of phases")
    phases = found.pop("phase", [])
    if not isinstance(phases, list) or not phases or not all(isinstance(phase, dict) for phase in phases):
        raise UsageError(f"one [[phase]] at least in {args.phases}", phases)
    delta = found.pop("delta", None)
    common = dict.fromkeys(_FIELDS) | {"sampling": "poisson"} | _fields(found)
    parts = []
    for count, phase in enumerate(phases, start=1):
        with _named(f"{args.phases}, phase {count}"):
            parts.append(privacy.part(argparse.Namespace(**common | _fields(phase))))
    for name in ("adjacency", "group_size"):
        values = [str(getattr(mechanism, name)) for mechanism, _ in parts]
        if len(set(values)) > 1:
            raise UsageError(f"one {name} in all phases", ", ".join(values))
    return parts, args.delta if args.delta is not None else None if delta is None else str(delta)


@contextlib.contextmanager
def _named(place: str) -> Iterator[None]:
    """Name the place in an error of a field."""
    try:
        with privacy.of_options():
            yield
    except UsageError as error:
        raise UsageError.of(f"{place}: {error}") from error


def _fields(table: dict[str, Any]) -> dict[str, str]:
    """Every value as typed after an option.

    Raises:
        UsageError: an unknown field, such as delta, which belongs to all phases.
    """
    what = "a field of a phase (delta stands above the first)"
    return {one_of(what, name, _FIELDS): str(value) for name, value in table.items()}
