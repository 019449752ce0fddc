"""``dpbench recommend``: compare every backend on one model, on this machine, and recommend one.

Standard output has the rows and the advice; on a terminal, standard error shows the progress. The exit code is 1 if no
backend can be recommended.

Functions take:
    question: the user's request.
    race: facts of the machine and the model (`dpbench.measure.recommend.run`).
    found: of each backend.
    advice: the recommended backend, and why.
"""

import argparse
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.cli.columns import aligned
from dpbench.cli.options import add_model, add_sizes, validate_model
from dpbench.cli.streams import say, tell
from dpbench.errors import UsageError
from dpbench.execution.recommend.agenda import UNUSED, Agenda, Question
from dpbench.execution.recommend.findings import LEFT_OUT, NOT_FOUND, NOT_KNOWN, ORDINARY, ROUNDS, Finding, in_order
from dpbench.execution.recommend.verdict import Verdict, verdict
from dpbench.models.references import split_reference
from dpbench.process.linux import available_cpus
from dpbench.process.parent import Isolation
from dpbench.process.variables import server_variables
from dpbench.records.environment import DEVICES, device_name, resolve_device
from dpbench.trials.json_text import to_json
from dpbench.trials.precision import PROFILES

#: Samples whose steps take about a second on two CPU cores: (images of 32 pixels, larger ones and text); on CUDA more.
BATCH_SIZES = (32, 8)
ON_CUDA = 8
SECONDS = 60.0
_FEWEST_SECONDS = 20.0
_UNITS = {"": 1, "b": 1} | {f"{p}{i}b": (1024 if i else 1000) ** n for n, p in enumerate("kmgt", 1) for i in ("", "i")}
_HEADER = ("backend", "status", "error", "coverage", "time", "memory")
_MOST_AT_ONCE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recommend`."""
    add_model(parser)
    parser.add_argument(
        "--batch-size",
        metavar="B",
        type=int,
        help="samples in the timed batch (default: {} for images of 32 pixels, else {}; on CUDA {} times more)".format(
            *BATCH_SIZES, ON_CUDA
        ),
    )
    parser.add_argument(
        "--memory", metavar="SIZE", default="16GiB", help="the budget of the largest batch (default: %(default)s)"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda if available, else cpu")
    parser.add_argument(
        "--precision", choices=PROFILES, default="float32", help="the precision profile (default: %(default)s)"
    )
    add_sizes(parser)
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=float,
        default=SECONDS,
        help="all of it ends in that time; what takes longer is left out, and said so (default: %(default)g)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """Print a row for each backend, and the advice; 1 if there is none."""
    begun = time.monotonic()
    question = _question_from(args)
    if args.batch_size is None:
        say(f"batch size {question.batch_size} (--batch-size says another)")
    with Isolation(server_variables(question.device)) as isolation:
        agenda = Agenda(question, isolation, tell, begun=begun)
        found = in_order(agenda.carry_out().values())
    advice = verdict(found, question.batch_size, _size_in_words(question.memory_budget), agenda.found.get("slow"))
    if args.format == "json":
        print(to_json(_as_json(question, agenda.found, found, advice, time.monotonic() - begun)))
    else:
        print("\n".join(table(question, agenda.found, found, advice)))
    return int(advice.backend is None)


def _question_from(args: argparse.Namespace) -> Question:
    """The user's request, with defaults filled in."""
    validate_model(args)
    if not _FEWEST_SECONDS <= args.seconds < float("inf"):
        raise UsageError(f"at least {_FEWEST_SECONDS:g} for --seconds", args.seconds)
    device = resolve_device(args.device)
    if PROFILES[args.precision].tf32 and device != "cuda":
        raise UsageError(f"a precision that {device} has, as float32", args.precision)
    size = args.image_size
    small = split_reference(args.model)[0] in ("builtin", "file") if size is None else size <= 64
    usual = BATCH_SIZES[not small] * (ON_CUDA if device == "cuda" else 1)
    return Question(
        model=args.model,
        batch_size=args.batch_size or usual,
        memory_budget=parse_size(args.memory),
        device=device,
        precision=args.precision,
        image_size=args.image_size,
        num_classes=args.num_classes,
        seconds=args.seconds,
        workers=max(1, min(available_cpus(), _MOST_AT_ONCE)),
    )


def parse_size(text: str) -> int:
    """Bytes of "16GiB", "500 MB", "2e9"."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2] if match[2].endswith("b") or not match[2] else match[2] + "b"])  # type: ignore[index]
    except (TypeError, ValueError, KeyError, OverflowError):
        size = 0
    if match and not match[2] and 1 <= size < 2**20:
        raise UsageError(f"a unit with --memory, such as {match[1]}GiB", text)
    if size < 1:
        raise UsageError("a size for --memory such as 16GiB or 500MB", text)
    return size


def _size_in_words(size: int) -> str:
    """ "16 GiB", "500 MiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.4g} {unit}"
    return f"{size} bytes"


def _as_json(
    question: Question, race: Mapping[str, Any], found: Sequence[Finding], advice: Verdict, seconds: float
) -> dict[str, Any]:
    """The request, the rows and the advice, as ``--format json`` prints them."""
    return {
        "model": question.model,
        "recommended": advice.backend,
        "reason": advice.reason,
        "backends": [finding.as_row() for finding in found],
        "batch_size": question.batch_size,
        "memory_budget": question.memory_budget,
        "max_batch_size_source": "simulated",
        "device": question.device,
        "precision": question.precision,
        "device_name": device_name(question.device),
        "threads": race.get("threads"),
        "busy_cpus": race.get("busy"),
        "seconds": seconds,
    }


def table(question: Question, race: Mapping[str, Any], found: Sequence[Finding], advice: Verdict) -> list[str]:
    """The request, a row for each backend, the advice, and the meaning of the numbers, as text."""
    inputs = ", ".join("×".join(map(str, shape)) for shape in race.get("inputs", ()))
    size = f"{race['parameters'] / 1e6:.3g}M parameters, " if race.get("parameters") else ""
    budget = _size_in_words(question.memory_budget)
    header = (*_HEADER, f"batch in {budget}", "")
    where = f"on {question.device} ({device_name(question.device)}), {question.precision}"
    return [
        f"{question.model}: {size}inputs {inputs or 'not known'}, {where}",
        "",
        *aligned([header, *map(_cells, found)], {2, 4, 5, 6}),
        "",
        advice.reason[0].upper() + advice.reason[1:] + ".",
        *left_out(question, found),
        "",
        "error: the larger of those of norms and gradients, relative to one sample after the other, in float64.",
        f"time: median over rounds beside ordinary training; [low, high]: its interval, from {ROUNDS} rounds."
        f"{_threads(question, race)}",
        f"batch in {budget}: simulated with fake tensors, to {UNUSED:.0%}; what was seen to fit.",
    ]


def _threads(question: Question, race: Mapping[str, Any]) -> str:
    """The number of threads of the steps, if not all."""
    threads, busy = race.get("threads"), race.get("busy") or 0.0
    if question.device != "cpu" or not threads or threads == available_cpus():
        return ""
    clock = ", in CPU time" if threads == 1 else ""
    return f" {threads} thread{'s' * (threads > 1)}{clock}: others use {busy:.1f} of {available_cpus()} CPUs."


def left_out(question: Question, found: Sequence[Finding]) -> list[str]:
    """A line on what the time did not allow; [] if it allowed all."""
    untimed = [each.backend for each in found if each.reason.startswith(LEFT_OUT)]
    sized = [each.backend for each in found if each.largest_note in (LEFT_OUT, NOT_FOUND) and each.status == "ok"]
    named = [f"{what} of {', '.join(names)}" for what, names in (("time", untimed), ("largest batch", sized)) if names]
    return [f"Left out for want of time (--seconds {question.seconds:g}): {'; '.join(named)}."] if named else []


def _cells(found: Finding) -> tuple[str, ...]:
    errors = [found.verification[key] for key in ("max_norm_error", "max_grad_error") if key in found.verification]
    coverage = ", ".join(f"{share:.0%} {name}" for name, share in (found.coverage or {}).items() if share)
    memory = "-" if found.memory_ratio is None else f"{found.memory_ratio:.2f}x"
    if found.backend == ORDINARY:
        memory = "1" if found.peak_bytes else "-"
    largest = "-" if found.largest is None else f"{'≥ ' if found.largest_ended == 'time' else ''}{found.largest}"
    notes = [_rounds(found), found.reason, found.largest_note if found.status == "ok" else ""]
    error = "-" if not errors else f"{max(map(float, errors)):.0e}"
    note = textwrap.shorten("; ".join(filter(None, notes)), 100, placeholder="…")
    return found.backend, found.status, error, coverage or "-", _time(found), memory, largest, note


def _time(found: Finding) -> str:
    if found.ratio is None:
        return NOT_KNOWN if found.status == NOT_KNOWN else "-"
    if found.backend == ORDINARY:
        return "1"
    ends = found.interval()
    return f"{found.ratio:.2f}x" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")


def _rounds(found: Finding) -> str:
    """How a time was measured, unless in enough rounds of the requested batch."""
    count = len(found.ratios)
    if found.backend == ORDINARY or found.ratio is None:
        return ""
    few = f"{count} round{'s' * (count > 1)}" if count < ROUNDS else ""
    return ", ".join(filter(None, [few, f"of {found.smaller} samples" if found.smaller else ""]))
