"""Options shared by `explain` and `recommend`: the model, and the size of its images and classes."""

from __future__ import annotations

import argparse

from dpbench.errors import UsageError
from dpbench.models.references import validate_reference
from dpbench.trials.packages import refuse_missing

#: The largest size of a tensor's dimension, on any device.
_MOST = 2**31 - 1


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a built-in, timm:NAME, torchvision:NAME, transformers:NAME, tiny:HEAD/TYPE or path/file.py:factory",
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add --image-size and --num-classes."""
    parser.add_argument(
        "--image-size", metavar="S", type=int, help="default: 32 for built-ins and files, else 224 or timm's own"
    )
    parser.add_argument(
        "--num-classes", metavar="K", type=int, help="default: 1000 for timm and torchvision, 10 for all others"
    )


def validate_model(args: argparse.Namespace) -> None:
    """Check the model's reference, the sizes and --batch-size, without torch."""
    validate_reference(args.model)
    refuse_missing(args.model)
    for option in ("batch_size", "image_size", "num_classes"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"at least 1 for --{option.replace('_', '-')}", value)
        if value is not None and value > _MOST:
            raise UsageError(f"at most {_MOST:,} for --{option.replace('_', '-')}", value)
