"""``dpbench run``: measure what remains of an experiment, then draw its figures."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from dpbench.environment import DEVICES
from dpbench.errors import UsageError, one_of
from dpbench.experiment import load_experiment
from dpbench.outcome import RETRYABLE
from dpbench.runner import Request
from dpbench.selection import parse_only


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` and `plan` have in common: which part of which experiment, where."""
    parser.add_argument("experiment", metavar="EXPERIMENT", help="its name, or my/file.py, or my/file.py:NAME")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("results"), help="records and figures lie here"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is one, else cpu")
    parser.add_argument(
        "--only", metavar="FIELD=A,B", action="append", default=[], help="only trials whose field has one of the values"
    )
    parser.add_argument("--rounds", metavar="N", type=int, help="how often each trial is run")
    parser.add_argument(
        "--retry",
        metavar="OUTCOME,...",
        default="",
        help="run trials again that ended so: error,timeout,crash,mismatch",
    )
    parser.add_argument("--smoke", action="store_true", help="the same in miniature: seconds, records apart")


def request_from(args: argparse.Namespace) -> Request:
    """The request that the arguments spell.

    Raises:
        UsageError: for any that cannot be.
    """
    retry = [name for name in args.retry.split(",") if name]
    check(args.rounds, retry)
    return Request(
        experiment=load_experiment(args.experiment),
        results=args.output,
        device=args.device,
        only=parse_only(args.only),
        rounds=args.rounds,
        retry=retry,
        smoke=args.smoke,
    )


def check(rounds: int | None, retry: Collection[str]) -> None:
    """
    Raises:
        UsageError: for a number of rounds, or outcomes to retry, that cannot be.
    """
    if rounds is not None and rounds < 1:
        raise UsageError("at least 1 for --rounds", rounds)
    known = sorted(map(str, RETRYABLE))
    for name in retry:
        one_of("an outcome for --retry", name, known)


def run(args: argparse.Namespace) -> int:
    from dpbench.progress import Progress
    from dpbench.runner import run as run_request

    request = request_from(args)
    done = run_request(request, Progress())
    if done.outcomes:
        _say(f"recorded {done.outcomes.total()} trials ({_counts(done.outcomes)}) in {done.path}")
    if done.signum is not None:
        _say("stopped; everything that ended is recorded, and the same command continues from there")
        return 128 + done.signum
    if not done.outcomes:
        _say(f"nothing is left to run; records in {request.folder}")
    if request.experiment.figures:
        from dpbench.report import write_report

        for path in write_report(request.folder, request.folder, request.experiment.figures):
            print(path)
    return 0


def _counts(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in outcomes.most_common())


def _say(line: str) -> None:
    print(f"dpbench: {line}", file=sys.stderr)
