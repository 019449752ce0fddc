"""What several commands share: a model and its sizes, folders, and files that cannot be written."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from dpbench.errors import UsageError
from dpbench.models.references import validate_reference
from dpbench.trials.packages import refuse_missing

#: The largest size of a tensor's dimension, on any device.
_MOST = 2**31 - 1


def folder(text: str) -> Path:
    """A folder's path, as after --output."""
    if not text:  # as "$OUT" is if OUT is not set: it would mean the current folder
        raise UsageError("a folder after --output", text)
    return Path(text)


@contextlib.contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn an error of writing to `path` into one line.

    Args:
        what: the kind of place, "a folder".
        path: the place.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} that can be written to", f"{error.filename or path}: {error.strerror}") from error


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
