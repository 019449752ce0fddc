"""``dpbench scorecard``: one page of every backend and every claim, from all records."""

import argparse
import shlex
from pathlib import Path

from dpbench.cli import streams
from dpbench.cli.options import folder, writing
from dpbench.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `scorecard`."""
    parser.add_argument(
        "source",
        metavar="DIR",
        type=folder,
        nargs="?",
        default=Path("results"),
        help="of all records (default: ./results)",
    )
    parser.add_argument("--output", type=folder, metavar="FILE", help="the page (default: DIR/scorecard.html)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path; 0."""
    from dpbench.report import scorecard

    if not args.source.is_dir():
        raise UsageError("a folder with records", str(args.source))
    path = args.output or args.source / "scorecard.html"
    words = [str(args.source), *(["--output", str(args.output)] if args.output else [])]
    streams.tell("reading records")
    with writing("a file", path):
        written = scorecard.write(args.source, path, f"python -m dpbench scorecard {shlex.join(words)}")
    if written is None:
        raise UsageError(f"records in {args.source} (`python -m dpbench run EXPERIMENT` makes them)", "none")
    print(written)
    return 0
