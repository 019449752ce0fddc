"""``dpbench history``: draw an experiment's times and memory over versions of the code, with the steps found."""

import argparse

from dpbench.cli import streams
from dpbench.cli.options import folder, writing
from dpbench.errors import UsageError
from dpbench.records.reader import locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `history`."""
    what = "an experiment, whose records lie in ./results/EXPERIMENT, or any folder with records in it"
    parser.add_argument("source", metavar="EXPERIMENT|DIR", help=what)
    parser.add_argument("--output", type=folder, metavar="DIR", help="figures' folder (default: that of the records)")


def run(args: argparse.Namespace) -> int:
    """Write figure and table for each device, and print their paths; 0."""
    source = locate(args.source)
    from dpbench.report import history

    streams.tell("reading records")
    output = args.output or (source if source.is_dir() else source.parent)
    with writing("a folder", output):
        written = history.write(source, output)
    if not written:
        raise UsageError(f"two versions of a cell with ratios to ordinary training in {source}", "none")
    print(*written, sep="\n")
    return 0
