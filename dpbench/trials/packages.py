"""The packages that are not always installed: which models and backends need them, and how they are had."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from clipping.registry import BACKENDS

ROOT = Path(__file__).resolve().parents[2]

#: Scheme of a reference -> modules that a server process can import once, before it forks a trial.
SCHEMES: dict[str, tuple[str, ...]] = {
    "timm": ("timm",),
    "torchvision": ("torchvision",),
    # the first model's module brings what all of them share, which takes longer than transformers itself
    "transformers": ("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
    "tiny": ("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
}


#: Package -> the extra of this project that brings it; others are installed by their own name.
EXTRAS = {
    "timm": "models",
    "transformers": "models",
    "accelerate": "integrations",
    "lightning": "integrations",
    "peft": "integrations",
    "ray": "ray",
    "submitit": "slurm",
}


def to_be_installed(package: str) -> str:
    """What an error expects where a package is missing: that it is installed, and the command that does it.

    An extra is installed from the checkout that this module lies in; without a checkout, the package by its own name.

    Args:
        package: its name to import.
    """
    from_checkout = package in EXTRAS and (ROOT / "pyproject.toml").is_file()
    what = f"-e '{ROOT}[{EXTRAS[package]}]'" if from_checkout else package
    return f"the package {package} to be installed (python -m pip install {what})"


def is_missing(package: str) -> bool:
    """Whether it is not installed. Imports nothing.

    Args:
        package: its name to import.
    """
    return importlib.util.find_spec(package) is None


@contextlib.contextmanager
def needed(package: str, module: str) -> Iterator[None]:
    """Around the imports of a package that may be missing: say so in one line, and how to have it.

    Args:
        package: its name to import.
        module: `__name__` of the module that imports it; a program that a person started ends with exit code 2.

    Raises:
        ImportError: it cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        line = f"expected {to_be_installed(package)}, got {error}"
        if module == "__main__":
            print(f"dpbench: {line}", file=sys.stderr)
            raise SystemExit(2) from error
        raise ImportError(line, name=package) from error


def required_modules(ref: str) -> tuple[str, ...]:
    """Modules that are worth importing before a trial with this model is forked; () for built-ins and files.

    Args:
        ref: of a model.
    """
    is_file = (ref.rpartition(":")[0] or ref).endswith(".py")
    return () if is_file else SCHEMES.get(ref.partition(":")[0], ())


def modules_of_backends(names: Iterable[str]) -> tuple[str, ...]:
    """The same of backends: what the rows of `clipping.registry` say.

    Args:
        names: of backends; those of files have no row.
    """
    known = (BACKENDS[name] for name in names if name in BACKENDS)
    return tuple(dict.fromkeys(module for info in known for module in info.modules))
