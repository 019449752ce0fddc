"""``dpbench list``: all names, each with a description."""

import argparse
import json

from dpbench.errors import UsageError
from dpbench.experiment import experiment_names, load_experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option of `list`."""
    parser.add_argument("--format", choices=["table", "json"], default="table")


def run(args: argparse.Namespace) -> int:
    """Print all names; 0."""
    listed = _everything()
    if args.format == "json":
        print(json.dumps(listed, ensure_ascii=False, indent=1))
        return 0
    width = max(len(entry["name"]) for entries in listed.values() for entry in entries)
    for kind, entries in listed.items():
        print(f"{kind}:")
        for entry in entries:
            print(f"  {entry['name']:<{width}}  {entry['doc']}")
    print(
        "\nmodels may also be timm:NAME, torchvision:NAME, transformers:NAME, tiny:HEAD/TYPE and path/file.py:factory"
    )
    return 0


def _everything() -> dict[str, list[dict[str, str]]]:
    """Kind -> entries with `name` and `doc`. Imports no torch."""
    from accounting import ACCOUNTANTS
    from clipping import BACKENDS
    from dpbench.models.references import BUILTIN

    return {
        "experiments": [{"name": name, "doc": _experiment_doc(name)} for name in experiment_names()],
        "backends": [{"name": name, "doc": info.doc} for name, info in BACKENDS.items()],
        "models": [{"name": name, "doc": doc} for name, (_, doc) in BUILTIN.items()],
        "accountants": [{"name": name, "doc": info.doc} for name, info in ACCOUNTANTS.items()],
    }


def _experiment_doc(name: str) -> str:
    try:
        return load_experiment(name).doc
    except UsageError as error:  # print the rest of the list all the same
        return str(error)
