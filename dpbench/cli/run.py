"""``dpbench run``: measure the rest of an experiment, then draw its figures."""

import argparse
from pathlib import Path

from dpbench.cli import streams
from dpbench.cli.options import folder
from dpbench.errors import UsageError, going_on
from dpbench.execution.executors import EXECUTORS, OPTIONS, Cluster
from dpbench.execution.runner import Request
from dpbench.execution.selection import parse_only
from dpbench.experiment import load_experiment
from dpbench.records.environment import DEVICES

_VARIABLES = """\
DPBENCH_HOST=NAME      this machine's name in records; machines of one name resume each other's runs
DPBENCH_COMMIT=SHA     the commit, if git cannot tell; SHA-dirty if the sources differ from it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    add_request_arguments(parser)
    group = parser.add_argument_group("where trials run (records, plan and resume are the same everywhere)")
    group.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="local",
        help="local: processes of this machine; ray: tasks of a Ray cluster (extra [ray]); slurm: a job array "
        "(extra [slurm])",
    )
    for name, option in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, metavar=option.metavar, type=option.kind, help=option.help)
    parser.add_argument(
        "--wait", action="store_true", help="for another run with the same folder to end, instead of refusing"
    )
    parser.add_argument_group("environment variables", _VARIABLES)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run` and `plan`: the experiment, the part of it, and the device and folder."""
    parser.add_argument("experiment", metavar="EXPERIMENT", help="its name, or my/file.py, or my/file.py:NAME")
    parser.add_argument(
        "--output", metavar="DIR", type=folder, default=Path("results"), help="folder of records and figures"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda if available, else cpu")
    parser.add_argument(
        "--only", metavar="FIELD=A,B", action="append", default=[], help="only trials with one of these values"
    )
    parser.add_argument("--rounds", metavar="N", type=int, help="how often each trial is run")
    parser.add_argument(
        "--retry",
        metavar="OUTCOME,...",
        default="",
        help="run trials with these outcomes again: error,timeout,crash,mismatch",
    )
    parser.add_argument(
        "--minutes", metavar="N", type=float, help="start no trial that would end later; the same command continues"
    )
    parser.add_argument("--smoke", action="store_true", help="a quick version, with separate records")


def request_from(args: argparse.Namespace) -> Request:
    """The request given by the arguments."""
    retry = [name for name in args.retry.split(",") if name]
    if args.retry and not retry:
        raise UsageError("outcomes after --retry, as error,timeout", args.retry)
    return Request(
        experiment=load_experiment(args.experiment),
        results=args.output,
        device=args.device,
        only=parse_only(args.only),
        rounds=args.rounds,
        retry=retry,
        smoke=args.smoke,
        reference=args.experiment,
        cluster=_cluster_from(args) if hasattr(args, "executor") else None,
        minutes=args.minutes,
        wait=getattr(args, "wait", False),
    )


def _cluster_from(args: argparse.Namespace) -> Cluster | None:
    """The cluster named by the arguments; None for this machine."""
    cluster = Cluster(name=args.executor, **{name: getattr(args, name) for name in OPTIONS})
    return None if cluster.name == "local" else cluster


def run(args: argparse.Namespace) -> int:
    """Run the rest and draw it; 0, or the exit code of the signal that ended it."""
    from dpbench.execution.progress import Progress
    from dpbench.execution.runner import run as run_request

    request = request_from(args)
    if request.experiment.figures:
        from dpbench.report import find_figures

        find_figures(request.experiment.figures)  # check names before hours of measuring
    done = run_request(request, Progress())
    if done.outcomes:
        where = done.paths[0] if len(done.paths) == 1 else f"{len(done.paths)} files of {request.folder}"
        counts = ", ".join(f"{count} {name}" for name, count in done.outcomes.most_common())
        streams.say(f"recorded {done.outcomes.total()} trials ({counts}) in {where}")
    if done.signum is not None:
        streams.say("stopped; everything that ended is recorded, and the same command continues from there")
        return 128 + done.signum
    for line in done.left:
        streams.say(line)
    if not done.outcomes and not done.left:
        streams.say(f"nothing is left to run; records in {request.folder}")
    if request.cluster is not None:
        _say_devices(request.folder)
    if request.experiment.figures:
        from dpbench.report import write_report

        with going_on(), streams.waiting.shown("drawing figures"):
            paths = write_report(request.folder, request.folder, request.experiment.figures)
        for path in paths:
            print(path)
    if done.unrecorded:
        streams.say(f"{done.unrecorded} trials are not recorded; the same command runs them again")
    return 1 if done.unrecorded else 0


def _say_devices(folder: Path) -> None:
    from dpbench.records.reader import by_device, read

    devices = {name: {record.node for record in records} for name, records in by_device(read(folder)).items()}
    if len(devices) > 1:
        each = "; ".join(f"{name} ({', '.join(sorted(nodes))})" for name, nodes in devices.items())
        streams.say(f"{len(devices)} devices differ and are not pooled, each has figures of its own: {each}")
