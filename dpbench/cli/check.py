"""``dpbench check``: compare backends with the microbatch oracle on difficult batches.

Every (model, backend) is a trial in its own process (`dpbench.measure.check`). So are all conformance cases of a
backend (`dpbench.conformance`), and all its hard records (`dpbench.conformance.sensitivity`). Standard output has the
rows, in the requested order; standard error has the progress. The exit code is 1 if any row is a mismatch or an error,
or a hard record moves the sum too far; a refusal with its reason is no failure.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from clipping import BACKENDS
from dpbench.cli import streams
from dpbench.cli.columns import aligned
from dpbench.conformance import ConformanceTrial
from dpbench.conformance.scorecard import RESULTS, as_row, count, scorecard
from dpbench.conformance.sensitivity import SensitivityTrial
from dpbench.conformance.sensitivity import scorecard as sensitivity
from dpbench.errors import UsageError, last_line
from dpbench.experiment import grid
from dpbench.models.references import BUILTIN, validate_reference
from dpbench.process.linux import available_cpus, memory_total
from dpbench.process.parent import Answer, Isolation, answered
from dpbench.process.variables import server_variables
from dpbench.records.environment import resolve_device
from dpbench.trials import CheckTrial, Trial
from dpbench.trials.backends import ResolveTrial, is_file, validate_backend
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Outcome
from dpbench.trials.packages import refuse_missing

Row = dict[str, Any]
CheckOf = CheckTrial | ConformanceTrial | SensitivityTrial
AnyTrial = TypeVar("AnyTrial", bound=Trial)

DTYPES = ("float64", "float32", "bfloat16", "float16")
AUTOCAST = "bfloat16-autocast"
#: Samples of a batch; SMALLER for the slowest models in float64: the fewest that can tie.
BATCH_SIZE = 3
SMALLER = dict.fromkeys(("resnet34", "resnet50", "resnet101", "resnet152"), 2)
#: A check of the largest built-in model takes some gigabytes, and more than a few at once gain nothing.
BYTES_AT_ONCE = 4 * 2**30
MOST_AT_ONCE = 8
_STATUS = {Outcome.OK: "ok", Outcome.MISMATCH: "mismatch", Outcome.UNSUPPORTED: "unsupported"}
#: The evidence of a trial begins with this if the model cannot be built.
_MODEL_ERROR = "dpbench.models.workload.ModelError: "
_HEADER = ("model", "backend", "status", "norms", "gradients", "coverage", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `check`."""
    parser.add_argument("--model", metavar="REF", action="append", help="may be given again (default: all built-in)")
    parser.add_argument(
        "--backend",
        metavar="REF",
        action="append",
        help="a name, or path/file.py:Class for a subclass of clipping.Backend; may be given again (default: all)",
    )
    parser.add_argument(
        "--conformance",
        action="store_true",
        help="the conformance cases, in float64 and below: small models, clipping functions, batches, side effects; "
        "and whole models only if --model names them (the default for path/file.py:Class)",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="how far hard records move the sum, in units of C: only small models, in --dtype (default: float32)",
    )
    parser.add_argument("--dtype", choices=(*DTYPES, AUTOCAST), help="default: float64, or float32 with --sensitivity")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """Print a row for each model and backend; 1 if any is a mismatch or an error."""
    trials = list(dict.fromkeys(_wanted(args)))
    own = dict.fromkeys(trial.backend for trial in trials if is_file(trial.backend))
    _refuse_unusable([ResolveTrial(backend=backend) for backend in own])
    rows = _check(trials)
    if args.sensitivity:
        print(to_json(rows) if args.format == "json" else _moves(rows))
        return int(any(sensitivity.failed(row) for row in rows))
    models = {_model(trial) for trial in trials if isinstance(trial, CheckTrial)}
    print(to_json(rows) if args.format == "json" else _tables(rows, models))
    return int(any(row["status"] in ("mismatch", "error") for row in rows))


def _wanted(args: argparse.Namespace) -> list[CheckOf]:
    """The requested trials: models first, then conformance."""
    backends = args.backend or list(BACKENDS)
    for model in args.model or ():
        validate_reference(model)
        refuse_missing(model)
    for backend in backends:
        validate_backend(backend)
    device = resolve_device(args.device)
    if args.sensitivity and (args.model or args.conformance):
        expected = "--sensitivity without --model and --conformance: it brings small models of its own"
        raise UsageError(expected, "--model" if args.model else "--conformance")
    if args.dtype == AUTOCAST and not args.sensitivity:
        raise UsageError(f"one of {', '.join(DTYPES)} without --sensitivity", args.dtype)
    conforming = [backend for backend in backends if args.conformance or (is_file(backend) and not args.model)]
    on_models = backends if args.model else [backend for backend in backends if backend not in conforming]
    if args.backend and "nonprivate" in (backends if args.sensitivity else conforming):
        option = "--sensitivity" if args.sensitivity else "--conformance"
        raise UsageError(f"a backend that clips with {option}", "nonprivate")
    if args.sensitivity:
        clipping = [backend for backend in backends if backend != "nonprivate"]
        return [SensitivityTrial(backend=name, dtype=args.dtype or "float32", device=device) for name in clipping]
    if conforming and args.dtype not in (None, "float64"):
        raise UsageError("no --dtype with the conformance cases, which have precisions of their own", args.dtype)
    found: list[CheckOf] = []
    for model in args.model or BUILTIN:
        options = {"dtype": args.dtype or "float64", "device": device, "batch_size": SMALLER.get(model, BATCH_SIZE)}
        found += grid(CheckTrial, model=model, backend=on_models, **options)
    return found + [ConformanceTrial(backend=name, device=device) for name in conforming if name != "nonprivate"]


def _refuse_unusable(trials: Sequence[ResolveTrial]) -> None:
    """Import the files of backends, each in its own process."""
    for trial, answer in answers(trials):
        if answer.outcome is not Outcome.OK:
            said = last_line(answer.evidence)
            raise UsageError(f"{trial.backend} to import", f"{answer.outcome}: {said}")
        if answer.result and answer.result["usage"]:
            raise UsageError.of(answer.result["usage"])


def _check(trials: Sequence[CheckOf]) -> list[Row]:
    """Run as many trials at once as the machine has room for; their rows in the same order."""
    rows: dict[Trial, list[Row]] = {}
    begin = time.monotonic()
    streams.tell(f"0 of {len(trials)} checked")
    alone = len({_model(trial) for trial in trials}) == 1
    for trial, answer in answers(trials):
        if alone and isinstance(trial, CheckTrial) and _MODEL_ERROR in (answer.evidence or ""):
            raise UsageError.of(last_line(answer.evidence))
        found = rows[trial] = _rows_of(trial, answer)
        streams.tell(f"{len(rows)} of {len(trials)} checked")
        ahead = f"[{len(rows)}/{len(trials)}, {time.monotonic() - begin:.0f} s]"
        print(f"{ahead} {_model(trial)} {trial.backend}: {_said(trial, found)}", file=sys.stderr, flush=True)
    return [row for trial in trials for row in rows[trial]]


def _said(trial: CheckOf, rows: Sequence[Row]) -> str:
    """A trial's result, in a few words."""
    if isinstance(trial, SensitivityTrial):
        return sensitivity.count(rows)
    return rows[0]["status"] if isinstance(trial, CheckTrial) else count(RESULTS[row["status"]] for row in rows)


def answers(trials: Iterable[AnyTrial]) -> Iterator[tuple[AnyTrial, Answer]]:
    """Each trial with its answer, in the order of completion."""
    trials = list(trials)
    on_cuda = any(getattr(trial, "device", "cpu") == "cuda" for trial in trials)
    with Isolation(server_variables("cuda" if on_cuda else "cpu")) as isolation:
        for come in answered(isolation, trials, 1 if on_cuda else _room()):
            yield from come


def _room() -> int:
    """How many trials may run at once on the CPU, one thread each."""
    return max(1, min(available_cpus(), (memory_total() or 0) // BYTES_AT_ONCE, MOST_AT_ONCE))


def _rows_of(trial: CheckOf, answer: Answer) -> list[Row]:
    """Rows of the result; errors and coverage are None if nothing was compared."""
    result = answer.result or {}
    status, reason = _STATUS.get(answer.outcome, "error"), answer.evidence
    if status == "error":  # the last line of a traceback
        reason = f"{answer.outcome}: {last_line(answer.evidence)}"
    if isinstance(trial, SensitivityTrial):
        found = result.get("rows", [{"case": "all", "outcome": status, "reason": reason}])
        return [sensitivity.as_row(trial.backend, trial.dtype, row) for row in found]
    if "rows" in result and isinstance(trial, ConformanceTrial):
        return [as_row(trial.backend, row) for row in result["rows"]]
    row: Row = {"model": _model(trial), "backend": trial.backend, "status": status}
    row |= {name: result.get(name) for name in ("max_norm_error", "max_grad_error", "coverage")}
    return [row | {"reason": reason}]


def _tables(rows: list[Row], models: set[str]) -> str:
    """Models as a table of measurements, conformance cases as the scorecard."""
    measured = [row for row in rows if row["model"] in models]
    cases = [row for row in rows if row["model"] not in models]
    found = ["\n".join(aligned([_HEADER, *map(_cells, measured)]))] if measured else []
    return "\n\n".join([*found, *([_scorecard(cases)] if cases else [])])


def _scorecard(rows: list[Row]) -> str:
    """Case × backend, and under it the reasons why cases are not exact."""
    because = [[row["backend"], row["model"], RESULTS[row["status"]], row["reason"]] for row in rows if row["reason"]]
    return "\n".join([*aligned(scorecard(rows)), *(["", *aligned(because)] if because else [])])


def _moves(rows: list[Row]) -> str:
    """A line for each case of `--sensitivity`, and under them each backend's counts of results."""
    lines = [["case", "backend", "dtype", "excess", "outcome", "the worst record"]]
    own: dict[str, list[Row]] = {}
    for row in rows:
        said = row["record"] if row["outcome"] in ("exceeds", "not a number") else row["reason"] or ""
        excess = sensitivity.in_units(row["excess"])
        lines.append([row["case"], row["backend"], row["dtype"], excess, row["outcome"], said])
        own.setdefault(f"{row['backend']}, {row['dtype']}", []).append(row)
    totals = []
    for words, of in own.items():
        most = sensitivity.worst(of)
        furthest = f"; furthest {sensitivity.in_units(most['excess'])}, {most['case']}" if most else ""
        totals.append(f"{words}: {sensitivity.count(of)}{furthest}")
    return "\n".join([*aligned(lines), "", *totals])


def _model(trial: CheckOf) -> str:
    return trial.model if isinstance(trial, CheckTrial) else trial.kind


def _cells(row: Row) -> tuple[str, ...]:
    coverage = ", ".join(f"{share:.1%} {name}" for name, share in (row["coverage"] or {}).items() if share)
    errors = (_error(row["max_norm_error"]), _error(row["max_grad_error"]))
    reason = " ".join((row["reason"] or "").split())
    return row["model"], row["backend"], row["status"], *errors, coverage or "-", reason


def _error(value: float | str | None) -> str:
    """1.2e-16; "nan" and "inf" as they are; "-" for None."""
    return "-" if value is None else f"{float(value):.1e}"
