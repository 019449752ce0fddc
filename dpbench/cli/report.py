"""``dpbench report``: make figures, tables and one page from records."""

import argparse
import itertools
import shlex
import sys
from pathlib import Path

from dpbench.cli import streams
from dpbench.cli.options import folder, writing
from dpbench.errors import UsageError, nearest
from dpbench.experiment import experiment_names, is_reference, load_experiment

RESULTS = Path("results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    what = "an experiment, whose records lie in ./results/EXPERIMENT, or any folder with records in it"
    parser.add_argument("source", nargs="?", metavar="EXPERIMENT|DIR", help=what)
    parser.add_argument(
        "--output",
        type=folder,
        metavar="DIR",
        help="folder of the figures (default: that of the records); after `run --output DIR`, the same DIR finds its "
        "records",
    )
    readme = "write the numbers of ./README.md and ./results/README.md from the records in ./results"
    parser.add_argument("--readme", action="store_true", help=readme)


def run(args: argparse.Namespace) -> int:
    """Write the figures, or the numbers of the READMEs, and print the paths; 0."""
    if args.readme:
        if args.source is not None or args.output is not None:
            raise UsageError("--readme alone", args.source or f"--output {args.output}")
        from dpbench.report.readme import write_readme  # imports pandas

        print(*write_readme(Path(), streams.tell), sep="\n")
        return 0
    if args.source is None:
        raise UsageError("an experiment, a folder with records, or --readme", "none")
    source, figures, remedy = _source(args.source, args.output)
    from dpbench.report import FIGURES, write_report  # pandas and matplotlib are slow to import

    elsewhere = args.output is not None and args.output not in source.parents
    output = _free(args.output, source) if elsewhere else source
    words = [args.source, *(["--output", str(args.output)] if args.output is not None else [])]
    again = f"python -m dpbench report {shlex.join(words)}"
    with writing("an output folder", output):
        paths = write_report(source, output, figures or tuple(FIGURES), again, streams.tell)
    if not paths:
        raise UsageError(f"records in {source} ({remedy})", "none")
    print(*paths, sep="\n")
    return 0


def _free(output: Path, source: Path) -> Path:
    """`output`, or a subfolder named after `source` if the page in `output` is of other records."""
    from dpbench.report.output import page  # imports pandas

    name = source.resolve().name
    for place in itertools.chain([output, output / name], (output / f"{name}-{n}" for n in itertools.count(2))):
        if page.owner(place / "report.html") in (None, page.beside(place, source)):
            if place != output:
                print(f"dpbench: {output} has the report of other records; this one goes to {place}", file=sys.stderr)
            break
    return place


def _source(name: str, output: Path | None) -> tuple[Path, tuple[str, ...], str]:
    """(folder with the records, figures to draw or () for all, the command that makes such records)."""
    names = experiment_names()
    if name in names or is_reference(name):
        experiment = load_experiment(name)
        folders = [root / experiment.name for root in (output, RESULTS) if root is not None]
        source = next((folder for folder in folders if any(folder.glob("*.jsonl"))), RESULTS / experiment.name)
        return source, experiment.figures, f"`python -m dpbench run {name}` makes them"
    if name and Path(name).is_dir():  # '' would be the current folder
        return Path(name), (), "`python -m dpbench run EXPERIMENT` makes them"
    raise UsageError("an experiment or a folder with records", name, nearest(name, names), names)
