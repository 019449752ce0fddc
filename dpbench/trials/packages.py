"""Optional packages: which models and backends need them, and how to install them."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from clipping.registry import BACKENDS
from dpbench.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]

#: Scheme of a reference -> modules that a server process imports once, before it forks trials.
SCHEMES: dict[str, tuple[str, ...]] = {
    "timm": ("timm",),
    "torchvision": ("torchvision",),
    # importing one model's module imports what all share, the slowest part
    "transformers": ("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
    "tiny": ("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
}


#: Package -> this project's extra that includes it; others are installed by name.
EXTRAS = {"timm": "models", "transformers": "models", "ray": "ray", "submitit": "slurm", "jax": "jax"}
EXTRAS |= {"jax_privacy": "jax"} | dict.fromkeys(("accelerate", "lightning", "peft"), "integrations")


def to_be_installed(package: str) -> str:
    """An error's text for a missing package: "to be installed", with the command.

    The command installs an extra from this module's checkout; without a checkout, the package by name.
    """
    from_checkout = package in EXTRAS and (ROOT / "pyproject.toml").is_file()
    what = f"-e '{ROOT}[{EXTRAS[package]}]'" if from_checkout else package
    return f"the package {package} to be installed (python -m pip install {what})"


def is_missing(package: str) -> bool:
    """Returns whether a package is not installed, without importing it."""
    return importlib.util.find_spec(package) is None


@contextlib.contextmanager
def needed(package: str, module: str) -> Iterator[None]:
    """Wrap the imports of an optional package: an error says in one line how to install it.

    Args:
        module: `__name__` of the importing module; a program run by a person exits with code 2.

    Raises:
        ImportError: the package cannot be imported.
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
    """Modules to import before forking a trial of this model; () for built-ins and files."""
    is_file = (ref.rpartition(":")[0] or ref).endswith(".py")
    return () if is_file else SCHEMES.get(ref.partition(":")[0], ())


def refuse_missing(ref: str) -> None:
    """Say which package a model needs where it is not installed. Imports nothing.

    Raises:
        UsageError: it is not installed; with the command that does it.
    """
    for package in {module.partition(".")[0] for module in required_modules(ref)}:
        if is_missing(package):
            raise UsageError(to_be_installed(package), "none")


def modules_of_backends(names: Iterable[str]) -> tuple[str, ...]:
    """The same for backends, from the rows of `clipping.registry`.

    Args:
        names: of backends; those of files have no row.
    """
    known = (BACKENDS[name] for name in names if name in BACKENDS)
    return tuple(dict.fromkeys(module for info in known for module in info.modules))
