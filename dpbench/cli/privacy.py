"""Shared by `epsilon` and `calibrate`: the options of a mechanism, the accountants, and rounding.

Functions take:
    sampling, adjacency: names of `accounting.sampling`.
    error: the error raised.
    asked: typed after --accountant, or None.
    name, names: of an accountant or an argument; of accountants.
    value: a number, infinity or None.
"""

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from accounting import (
    ACCOUNTANTS,
    ADJACENCIES,
    OF_SCHEMES,
    SAMPLINGS,
    VARIANTS,
    Accountant,
    ArgumentError,
    NoAnswer,
    SubsampledGaussian,
    load_accountant,
)
from accounting.base import LARGE_DELTA
from accounting.base import rounded as few_digits
from accounting.sampling import HOME, PROVED, unproved
from accounting.tuned import DISTRIBUTIONS, Tuned
from accounting.varying import Part
from dpbench.cli import streams
from dpbench.cli.columns import aligned
from dpbench.errors import UsageError, one_of, their_code
from dpbench.trials.reference import load_object, split_file

Row = dict[str, Any]
#: The accountants with a bound for tuned runs.
TUNES = ("rdp", "best")

#: Errors shown in an accountant's row: it has no bound, or its library is missing or fails.
CANNOT = (NoAnswer, ImportError, MemoryError)
#: Details with a place in the heading, or with their own column.
_ELSEWHERE = ("sampling", "adjacency", "seconds", "reason", "evaluations")
#: Details that are bounds, and their kinds.
_BOUNDS = {"lower": "lower_bound", **dict.fromkeys(("upper", "gap", "advantage", "tpr"), "upper_bound")}


def length(args: argparse.Namespace) -> dict[str, str | None]:
    """Sample rate and steps as typed, or computed from batch size, data set and epochs; None for neither."""
    rate, steps = args.sample_rate, args.steps
    if args.batch_size is not None:
        if rate is not None or args.dataset_size is None:
            came = "--batch-size" if rate is None else "both"
            raise UsageError("--batch-size with --dataset-size, or --sample-rate", came)
        batch, records = number("batch_size", args.batch_size), number("dataset_size", args.dataset_size)
        if not 0 < batch <= records <= sys.float_info.max:
            raise UsageError("--batch-size to be at most --dataset-size, below 1e308", args.batch_size)
        rate = repr(batch / records)
    if args.epochs is not None:
        if steps is not None:
            raise UsageError("either --steps or --epochs", "both")
        q, epochs = number("sample_rate", rate or "nan"), number("epochs", args.epochs)
        if not (q > 0 and 0 <= epochs <= sys.float_info.max and epochs / q < math.inf):
            raise UsageError("--epochs to be a number >= 0, at a sample rate above 0", args.epochs)
        steps = str(math.ceil(epochs / q * (1 - 1e-12)))
    return {"sample_rate": rate, "steps": steps}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    # -1e-5 is a value to refuse, not an unknown option (as for argparse before 3.14).
    parser._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")
    proved = "; ".join(f"{sampling}: {', '.join(names)}" for sampling, names in PROVED.items())
    drawn = ", ".join(DISTRIBUTIONS)
    options = {
        "--noise-multiplier S": "σ, in units of the clipping norm",
        "--sample-rate Q": "probability that a record is in a batch: a number, or 256/60000",
        "--batch-size B": "with --dataset-size, in place of --sample-rate: B/N",
        "--steps T": "number of steps",
        "--epochs E": "in place of --steps: passes over the data, rounded up to a step",
        "--delta D": "δ",
        "--sampling NAME": ", ".join(SAMPLINGS),
        "--adjacency NAME": f"one with a bound under the sampling, by default the first ({proved})",
        "--dataset-size N": "number of records",
        "--max-batch-size B": "the size to which truncated_poisson cuts a batch",
        "--group-size K": "neighbours differ in K records at once, such as those of a person (default: 1)",
        "--tuned N": "for publishing only the best of N runs, on average (rdp, best)",
        "--tuned-by NAME": f"with --tuned, how the number of runs is drawn: {drawn} (default: geometric)",
    }
    for option, meaning in options.items():
        name, metavar = option.split()
        parser.add_argument(name, metavar=metavar, help=meaning)
    parser.set_defaults(sampling="poisson")
    parser.add_argument(
        "--accountant",
        metavar="NAME",
        action="append",
        help=f"may be given again; path/file.py:Class, {', '.join(ACCOUNTANTS)} (default: all), {', '.join(VARIANTS)}; "
        f"for other sampling also {', '.join(OF_SCHEMES)}",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")


def scheme(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `accounting.SubsampledGaussian` for the sampling and adjacency."""
    sizes = {name: getattr(args, name) for name in ("dataset_size", "max_batch_size", "group_size")}
    if args.batch_size is not None and args.sampling != "truncated_poisson":
        sizes["dataset_size"] = None  # it was for the sample rate
    sampling = one_of("a sampling scheme", args.sampling, SAMPLINGS)
    adjacency = PROVED[sampling][0] if args.adjacency is None else one_of("an adjacency", args.adjacency, ADJACENCIES)
    if expected := unproved(sampling, adjacency):
        raise UsageError(f"--adjacency {expected}", adjacency)
    return {
        "sampling": sampling,
        "adjacency": adjacency,
        **{name: number(name, text) for name, text in sizes.items() if text is not None},
    }


def part(args: argparse.Namespace) -> Part:
    """The mechanism of each step, and the number of steps."""
    found = length(args)
    wanted = {
        "--noise-multiplier": args.noise_multiplier,
        "--sample-rate, or --batch-size and --dataset-size": found["sample_rate"],
        "--steps or --epochs": found["steps"],
    }
    if missing := [words for words, text in wanted.items() if text is None]:
        raise UsageError(" and ".join(missing), "nothing")
    mechanism = SubsampledGaussian(
        noise_multiplier=number("noise_multiplier", args.noise_multiplier),
        sample_rate=number("sample_rate", str(found["sample_rate"])),
        **scheme(args),
    )
    return mechanism, number("steps", str(found["steps"]))


def delta_of(text: str | None, dataset_size: str | None) -> float:
    """Parse δ; warn on standard error if it is 1/n or more.

    Args:
        text, dataset_size: as typed, or None.

    Raises:
        UsageError: no δ.
    """
    if text is None:
        raise UsageError("--delta", "nothing")
    delta, records = number("delta", text), number("dataset_size", dataset_size or "nan")
    if records > 0 and 1 / records <= delta <= 1:
        streams.say("Warning: " + LARGE_DELTA.format("delta", delta, "dataset_size", 1 / records))
    return delta


def accountants(asked: Sequence[str] | None, sampling: str, adjacency: str) -> list[str]:
    """The requested names, each once; the default is all, and those made for the scheme."""
    known = [*ACCOUNTANTS, *VARIANTS, *OF_SCHEMES]
    if asked:
        for name in asked:
            if ".py:" in name:
                _load(name)
            else:
                one_of("an accountant", name, known)
        return list(dict.fromkeys(asked))
    if sampling == HOME[0]:
        return list(ACCOUNTANTS)
    made = [name for name in OF_SCHEMES if (sampling, adjacency) in load_accountant(name).supports]
    return [*made, *ACCOUNTANTS]


def _load(name: str) -> Accountant:
    """An accountant by its name, or the user's own, ``path/file.py:Class``."""
    if ".py:" not in name:
        return load_accountant(name)
    path, _ = split_file(name, "an accountant as path/file.py:Class")
    with their_code(f"{name} to be made"):
        found = load_object(name)()
    if not isinstance(found, Accountant):
        raise UsageError(f"an accounting.Accountant in {path}", type(found).__name__)
    return found


def rows(
    names: Sequence[str], args: argparse.Namespace, answer: Callable[[Accountant], Row], **known: Any
) -> list[Row]:
    """Each accountant's row; without an answer, `epsilon` is None and `detail` has the reason.

    The terminal's last line names the current accountant, since some take many seconds. Whatever one of the user's own
    raises, but for the errors of accountants, is one line.

    Args:
        answer: returns an accountant's fields of its row.
        known: fields of every row.
    """
    found: list[Row] = []
    for index, name in enumerate(names, start=1):
        streams.tell(f"{name}, {index} of {len(names)} accountants")
        own = their_code(f"an answer of {name}", but=(*CANNOT, ArgumentError, UsageError))
        row: Row = {"accountant": name, **known, "epsilon": None, "kind": None}
        try:
            with own if ".py:" in name else contextlib.nullcontext():
                accountant = _asked(name, args)
                row["kind"] = accountant.kind
                row |= answer(accountant)
        except CANNOT as error:
            row["detail"] = _failed(error)
        found.append(row)
    return found


def _asked(name: str, args: argparse.Namespace) -> Accountant:
    """The accountant of a row: by its name, or, if requested, for the best of several runs.

    Raises:
        UsageError: of `_load`, --tuned-by without --tuned, or an invalid number of runs.
        NoAnswer: tuned runs, and an accountant without a bound for them.
    """
    if args.tuned is None:
        if args.tuned_by is not None:
            raise UsageError("--tuned-by with --tuned", args.tuned_by)
        return _load(name)
    distribution = one_of("a distribution of runs", args.tuned_by or "geometric", DISTRIBUTIONS)
    try:
        tuned = Tuned(number("tuned", args.tuned), distribution)
    except ArgumentError as error:
        raise UsageError(f"--tuned {error.expected}", args.tuned) from error
    if name not in TUNES:
        raise NoAnswer("no bound of the best of several runs by this accountant; rdp has one")
    return tuned


def number(name: str, text: str) -> float:
    """Parse a number; whole numbers become ints, since a float loses digits beyond 2**53."""
    over, _, under = text.partition("/")
    try:
        if under:
            return _whole(float(over) / float(under))
        return int(text) if text.strip("+-").isdecimal() else _whole(float(text))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--{name.replace('_', '-')} to be a number", text) from None


@contextlib.contextmanager
def of_options() -> Iterator[None]:
    """Name the option in an error of an argument."""
    try:
        yield
    except ArgumentError as error:
        raise UsageError(f"--{error.argument.replace('_', '-')} {error.expected}", error.came) from error


def _failed(error: BaseException) -> dict[str, str]:
    """The detail of a row without a number."""
    text = " ".join(str(error).split()) or type(error).__name__
    return {"reason": text if isinstance(error, NoAnswer) else f"{type(error).__name__}: {text}"}


def under(sampling: str, adjacency: str) -> str:
    """The line over a table with its sampling and adjacency."""
    return f"under {SAMPLINGS[sampling]}, {ADJACENCIES[adjacency]}, noise on the sum of clipped gradients"


def more(args: argparse.Namespace) -> list[str]:
    """Lines over a table on further options: groups, and tuned runs."""
    lines = [] if args.group_size is None else [f"of {args.group_size} records at once"]
    if args.tuned is not None:
        lines.append(
            f"of the best of {args.tuned} runs on average (their number drawn before the first, "
            f"{args.tuned_by or 'geometric'}), which alone is published"
        )
    return lines


def table(heading: Sequence[str], rows: Sequence[Row], name: str = "", values: Sequence[str] = ()) -> str:
    """The heading's lines, then a line for each accountant.

    Args:
        heading: lines above the table.
        rows: of the accountants.
        name, values: a further column, after the accountants'.
    """
    cells = [["accountant", "epsilon", "kind", "seconds", "how"]]
    for row in rows:
        epsilon = rounded(row["epsilon"], row["kind"])
        kind, seconds = str(row["kind"] or "-").replace("_", " "), row["detail"].get("seconds")
        took = "-" if seconds is None else f"{seconds:.4f}"
        cells.append([row["accountant"], epsilon, kind, took, _how(row["detail"])])
    if name:
        for line, value in zip(cells, [name, *values], strict=True):
            line.insert(1, value)
    return "\n".join([*heading, "", *aligned(cells)])


def _how(detail: Mapping[str, Any]) -> str:
    """The accountant's further details, in a few words; the reason last."""
    told = {
        name: rounded(value, _BOUNDS.get(name), 4) if isinstance(value, float) else value
        for name, value in detail.items()
        if name not in _ELSEWHERE
    }
    shown = [f"{name}={value}" for name, value in told.items()]
    return ", ".join([*shown, *([str(detail["reason"])] if "reason" in detail else [])])


def risk_lines(rows: Sequence[Row]) -> list[str]:
    """Lines below a table: the upper and lower limits of a membership attack, by the smallest bound of the rows."""
    risk = min((row["risk"] for row in rows if "risk" in row), key=lambda each: each["advantage"], default=None)
    if risk is None:
        return ["", "no limits of a membership attack: they need an accountant with an upper bound"]
    least = risk.get("at_least") or {"advantage": None, "tpr_at_fpr": {}}
    numbers = [("advantage", risk["advantage"], least["advantage"])]
    for rate, most in risk["tpr_at_fpr"].items():
        name = f"true positives at {100 * float(rate):g} % false ones"
        numbers.append((name, most, least["tpr_at_fpr"].get(rate)))
    lines = [
        [name, rounded(most, "upper_bound"), "" if low is None else f"at least {rounded(low, 'lower_bound')}"]
        for name, most, low in numbers
    ]
    said = "what that means, for an attack that says whether a record was in the data, at most:"
    return ["", said, *aligned(lines)]


def rounded(value: float | None, kind: str | None, digits: int = 6) -> str:
    """Few digits, rounded so that a bound stays one.

    Args:
        kind: of an accountant's result, or None.
        digits: significant ones.
    """
    return "-" if value is None else f"{float(few_digits(value, kind, digits)):g}"


def _whole(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) >= 1 else value
