"""``dpbench template FILE``: write a model file for `recommend`, `explain`, `check` and experiments."""

import argparse
import os
from pathlib import Path

from clipping import cache
from dpbench.errors import UsageError

TEMPLATE = '''"""A model of my own: python -m dpbench recommend {name}:build"""

import torch
import torch.nn.functional as F
from torch import nn


def losses(outputs, targets):
    """One loss a record, [B]: no mean over the batch."""
    return F.cross_entropy(outputs, targets, reduction="none")


def build():
    """The model, and a few records to measure it on: any batch size is made of them."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    inputs, targets = torch.randn(16, 20), torch.randint(0, 3, (16,))
    return model, (inputs, targets), losses  # inputs: a tensor, a tuple (positional) or a dict (keyword arguments)
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `template`."""
    parser.add_argument("file", metavar="FILE", help="where to write it, such as mine.py")


def run(args: argparse.Namespace) -> int:
    """Write the file, and print the commands that take it; 0."""
    path = Path(args.file)
    if path.suffix != ".py":
        raise UsageError("a name that ends in .py", args.file)
    text = TEMPLATE.format(name=args.file).encode(errors="backslashreplace")
    if os.path.lexists(path):
        raise UsageError("a file that is not there yet", args.file)
    try:
        cache.replace(path, text, mode=0o666)
    except OSError as error:
        raise UsageError(f"a place to write {args.file} to", error.strerror or str(error)) from error
    print(f"{args.file} written; next: dpbench recommend {args.file}:build")
    return 0
