"""``dpbench plan``: what an experiment has done, pruned and left, and how long the rest will take."""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dpbench.cli.columns import aligned
from dpbench.cli.run import add_request_arguments, request_from
from dpbench.errors import UsageError
from dpbench.execution.progress import duration
from dpbench.execution.runner import Plan, make_plan
from dpbench.execution.schedule import Run, probes_left, step_search
from dpbench.records.environment import device_name, resolve_device
from dpbench.trials import OverheadTrial, Trial
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import FINAL, Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    add_request_arguments(parser)
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        type=Path,
        help="five lines of TOML, see dpbench.execution.cluster: predict the whole experiment on that cluster",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """Print what is done and what remains; 0.

    With --cluster, print a prediction for it.
    """
    request = request_from(args)
    plan = make_plan(request, resolve_device(args.device))
    if args.cluster is not None:
        if request.minutes is not None:
            raise UsageError("--minutes without --cluster", f"--cluster {args.cluster}")
        from dpbench.cli import plan_cluster

        plan_cluster.show(request, plan, args.cluster, args.format)
        return 0
    rows = _survey(plan)
    if args.format == "json":
        cells = [asdict(row) | dict(zip(("kind", "model", "backend"), row.name, strict=True)) for row in rows]
        left = plan.clock.left(plan.schedule.remaining())
        print(to_json({"experiment": request.experiment.name, "rows": cells, "seconds_left": left}))
        return 0
    rounds = plan.schedule.rounds
    print(
        f"{request.experiment.name} on {plan.device} ({device_name(plan.device)}), {rounds} rounds, in {request.folder}"
    )
    if others := plan.machines.others():
        print(f"what these nodes of a sweep (run --executor ray or slurm) have recorded counts: {', '.join(others)}")
    for line in _table(rows):
        print(line)
    print(_summary(plan, rows, request.minutes))
    return 0


@dataclass
class _Row:
    """Runs of one model under one backend by state. `left` of a search is an estimate.

    `seconds`: of one remaining run, if known.
    """

    name: tuple[str, ...]
    done: int = 0
    left: int = 0
    pruned: int = 0
    failed: int = 0
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text and text not in self.notes:
            self.notes.append(text)


def _survey(plan: Plan) -> list[_Row]:
    """A row for each kind, model and backend, in the order of declaration."""
    rows: dict[tuple[str, ...], _Row] = {}

    def row_of(trial: Trial) -> _Row:
        name = _name(trial)
        return rows.setdefault(name, _Row(name, seconds=plan.clock.of(trial)))

    for search in plan.schedule.searches:
        state = step_search(search, plan.schedule.history)
        row = row_of(search.probe)
        row.done += len(state.seen)
        if state.failed:
            row.done += 1
            row.failed += 1
            row.note(f"ended by {state.failed}")
        elif not state.ended:
            row.left += probes_left(search, state)
            row.note("searching" if state.seen else "")
        else:
            limit = "the search's limit" if state.answer >= search.max_batch_size else "largest batch"
            row.note(f"{limit} {state.answer}" if state.answer else "no batch fits")
        if search.then is None:
            continue
        then = row_of(search.then)  # once the search has ended, it is among the trials
        then.left += 0 if state.ended else plan.schedule.rounds
        if state.ended and not state.answer:
            then.pruned += plan.schedule.rounds
            then.note("pruned: no batch size to run at")
    for trial, number in itertools.product(plan.schedule.trials(), range(plan.schedule.rounds)):
        run = Run(trial, number)
        row = row_of(run.trial)
        record = plan.schedule.history.of(run)
        if record is not None:
            row.done += 1
            row.failed += record["outcome"] not in FINAL
            row.note("" if record["outcome"] == Outcome.OK else record["outcome"])
        elif reason := plan.schedule.history.pruned_by(run):
            row.pruned += 1
            row.note(f"pruned by {reason}")
        else:
            row.left += 1
    return list(rows.values())


def _name(trial: Trial) -> tuple[str, ...]:
    several = f"{len(trial.backends)} of them" if isinstance(trial, OverheadTrial) else "-"
    backend = getattr(trial, "backend", getattr(trial, "accountant", several))
    return trial.kind, str(getattr(trial, "model", "-")), str(backend)


def _table(rows: Sequence[_Row]) -> list[str]:
    """The rows as text, under a header."""
    head = ["kind", "model", "backend", "done", "left", "pruned", "failed", "each", ""]
    cells = [
        [
            *row.name,
            *(str(n or "-") for n in (row.done, row.left, row.pruned, row.failed)),
            duration(row.seconds) if row.left and row.seconds is not None else "-",
            "; ".join(row.notes),
        ]
        for row in rows
    ]
    return aligned([head, *cells], range(3, 8))


def _summary(plan: Plan, rows: Sequence[_Row], minutes: float | None) -> str:
    """A line with what is done and left, and with `minutes`, how many runs of that length remain."""
    done, left, pruned, failed = (sum(getattr(row, n) for row in rows) for n in ("done", "left", "pruned", "failed"))
    text = f"done {done}, remaining {left}, pruned {pruned}, failed {failed}"
    if not left:
        return f"{text}: nothing is left to run"
    seconds = plan.clock.left(plan.schedule.remaining())
    if seconds is None:
        return f"{text}; time left not known yet"
    runs = "" if minutes is None else f", {math.ceil(seconds / (60 * minutes))} or more runs of --minutes {minutes:g}"
    return f"{text}; about {duration(seconds)} left{runs}"
