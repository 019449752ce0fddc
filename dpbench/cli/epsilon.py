"""``dpbench epsilon``: what each accountant says of a run, and what that is worth."""

from __future__ import annotations

import argparse

from accounting import ArgumentError, SubsampledGaussian
from dpbench.cli import privacy
from dpbench.cli.privacy import Row, number
from dpbench.errors import UsageError
from dpbench.trials.json_text import to_json

_HEADER = ("accountant", "epsilon", "kind", "seconds", "how")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `epsilon`."""
    parser.add_argument("--noise-multiplier", metavar="S", required=True, help="σ, in units of the clipping norm")
    privacy.add_length(parser)
    privacy.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a row for each accountant; 0, or 1 if none has an answer.

    Raises:
        UsageError: for an unknown accountant, or a value outside its domain.
    """
    scheme = privacy.scheme(args)
    length = privacy.length(args)
    if missing := [name for name, text in length.items() if text is None]:
        wanted = {"sample_rate": "--sample-rate, or --batch-size and --dataset-size", "steps": "--steps or --epochs"}
        raise UsageError(" and ".join(wanted[name] for name in missing), "none")
    names = privacy.accountants(args.accountant, scheme["sampling"], scheme["adjacency"])
    try:
        mechanism = SubsampledGaussian(
            noise_multiplier=number("--noise-multiplier", args.noise_multiplier),
            sample_rate=number("--sample-rate", str(length["sample_rate"])),
            **scheme,
        )
        steps, delta = number("--steps", str(length["steps"])), number("--delta", args.delta)
        rows = [_row(name, mechanism, steps, delta) for name in privacy.asked(names)]
    except ArgumentError as error:
        raise privacy.usage(error) from error
    print(to_json(rows) if args.format == "json" else _table(rows, mechanism, steps, delta))
    return int(all(row["epsilon"] is None for row in rows))


def _row(name: str, mechanism: SubsampledGaussian, steps: float, delta: float) -> Row:
    """One accountant's answer; where it has none, `epsilon` is None and the reason stands in `detail`."""
    kind = None
    try:
        accountant = privacy.load(name)
        kind = accountant.kind
        answer = accountant.guarantee(mechanism, steps=steps, delta=delta)
    except privacy.CANNOT as error:
        return {"accountant": name, "epsilon": None, "kind": kind, "detail": privacy.failed(error)}
    return {"accountant": name, "epsilon": answer.epsilon, "kind": answer.kind, "detail": dict(answer.detail)}


def _table(rows: list[Row], mechanism: SubsampledGaussian, steps: float, delta: float) -> str:
    sizes = {"records": mechanism.dataset_size, "kept in a batch at most": mechanism.max_batch_size}
    heading = [
        f"ε at δ = {delta:g} after {steps:,} steps, sample rate {mechanism.sample_rate:g}, "
        f"noise multiplier {mechanism.noise_multiplier:g}",
        privacy.under(*mechanism.scheme) + "".join(f", {size:,} {what}" for what, size in sizes.items() if size),
    ]
    cells = [
        (
            row["accountant"],
            privacy.epsilon(row["epsilon"], row["kind"]),
            str(row["kind"] or "-").replace("_", " "),
            privacy.seconds(row["detail"]),
            privacy.how(row["detail"]),
        )
        for row in sorted(rows, key=_best_first)
    ]
    return privacy.table(heading, _HEADER, cells)


def _best_first(row: Row) -> tuple[int, float]:
    """Upper bounds, the smallest first; then what bounds nothing from above; then those without an answer."""
    if row["epsilon"] is None:
        return 2, 0.0
    return int(row["kind"] != "upper_bound"), row["epsilon"]
