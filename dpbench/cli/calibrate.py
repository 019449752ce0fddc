"""``dpbench calibrate``: noise, steps, epochs or sample rate for a target ε, by each accountant."""

import argparse

from accounting import Accountant, calibrate
from accounting.calibration import UNKNOWNS
from dpbench.cli import privacy
from dpbench.cli.privacy import Row, number
from dpbench.errors import UsageError, one_of
from dpbench.trials.json_text import to_json

#: Two of these are given, for the third.
_SETTINGS = ("sample_rate", "noise_multiplier", "steps")
#: Unknown -> the safe direction to round it (True for up, None for none).
_KINDS = {"noise_multiplier": "upper_bound", "steps": None, "epochs": "lower_bound", "sample_rate": "lower_bound"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`."""
    parser.add_argument("--target-epsilon", metavar="E", help="the largest allowed ε")
    parser.add_argument("--target-advantage", metavar="A", help="or the largest allowed membership advantage")
    parser.add_argument("--target-tpr", metavar="P", help="or an attack's largest true positive rate at --fpr")
    parser.add_argument("--fpr", metavar="P", help="the false positive rate of --target-tpr (default: 0.01)")
    parser.add_argument(
        "--solve",
        metavar="UNKNOWN",
        default="noise-multiplier",
        help=f"{', '.join(name.replace('_', '-') for name in UNKNOWNS)} (default: %(default)s); the others are given",
    )
    privacy.add_arguments(parser)


@privacy.of_options()
def run(args: argparse.Namespace) -> int:
    """Print a row for each accountant; 0, or 1 if none has an answer."""
    unknown = one_of("what to solve for", args.solve.replace("-", "_"), UNKNOWNS)
    scheme = privacy.scheme(args)
    names = privacy.accountants(args.accountant, scheme["sampling"], scheme["adjacency"])
    given = _given(args, unknown)
    target, words = _target(args)
    delta = privacy.delta_of(args.delta, args.dataset_size)

    def answer(accountant: Accountant) -> Row:
        found = calibrate(accountant, unknown, **target, **given, delta=delta, **scheme)
        return {
            "noise_multiplier": found.mechanism.noise_multiplier,
            "sample_rate": found.mechanism.sample_rate,
            "steps": found.steps,
            "epochs": found.epochs,
            "epsilon": found.guarantee.epsilon,
            "kind": found.guarantee.kind,
            "detail": {**found.guarantee.detail, "seconds": found.seconds, "evaluations": found.evaluations},
        }

    known = {name: given.get(name) for name in ("noise_multiplier", "sample_rate", "steps", "epochs")}
    rows = privacy.rows(names, args, answer, **known)
    what = UNKNOWNS[unknown][2] if unknown != "epochs" else "number of epochs"
    size = "smallest" if unknown == "noise_multiplier" else "largest"
    settings = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in given.items())
    heading = [f"{size} {what} with {words} at δ = {delta:g}, {settings}"]
    heading += [privacy.under(scheme["sampling"], scheme["adjacency"]), *privacy.more(args)]
    found = [row[unknown] for row in rows]
    whole = unknown == "steps"
    values = [f"{each:,}" if whole and each is not None else privacy.rounded(each, _KINDS[unknown]) for each in found]
    table = privacy.table(heading, rows, unknown.replace("_", " "), values)
    print(to_json(rows) if args.format == "json" else table)
    return int(all(row["epsilon"] is None for row in rows))


def _target(args: argparse.Namespace) -> tuple[dict[str, float], str]:
    """(the target as arguments of `calibrate`, and in words)."""
    signs = {"target_epsilon": "ε", "target_advantage": "advantage", "target_tpr": "true positives"}
    named = [name for name in signs if getattr(args, name) is not None]
    options = "--target-epsilon, --target-advantage or --target-tpr"
    if len(named) != 1:
        raise UsageError(f"one of {options}", "none" if not named else "several")
    (name,) = named
    target = {name: number(name, getattr(args, name))}
    words = f"{signs[name]} ≤ {getattr(args, name)}"
    if name == "target_tpr":
        target["fpr"] = number("fpr", args.fpr or "0.01")
        return target, f"{words} at {args.fpr or '0.01'} false ones"
    if args.fpr is not None:
        raise UsageError("--fpr with --target-tpr", args.fpr)
    return target, words


def _given(args: argparse.Namespace, unknown: str) -> dict[str, float]:
    """The settings other than the unknown."""
    needed = [name for name in _SETTINGS if name != unknown and (name, unknown) != ("steps", "epochs")]
    texts = {**privacy.length(args), "noise_multiplier": args.noise_multiplier, "epochs": None}
    if args.epochs is not None and unknown != "noise_multiplier":
        raise UsageError(f"no --epochs when solving for {unknown.replace('_', '-')}", args.epochs)
    for name, text in texts.items():
        option = f"--{name.replace('_', '-')}"
        if (text is None) == (name in needed):
            what = "" if text is None else "no "
            raise UsageError(f"{what}{option} when solving for {unknown.replace('_', '-')}", text or "none")
    return {name: number(name, texts[name]) for name in needed}
