"""Experiments: what is measured, declared in Python.

An experiment is a module of the package `experiments`, or any ``.py`` file, that defines ``EXPERIMENT``. Its cells are
trials, and searches for the largest batch that fits::

    def cells(device):
        return grid(StepTrial, model=["cnn", "resnet18"], backend=["nonprivate", "ghost"], batch_size=32, device=device)

    EXPERIMENT = Experiment(name="my_own", doc="What it shows.", cells=cells, smoke=smoke)
"""

from __future__ import annotations

import importlib.util
import itertools
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpbench.errors import UsageError, one_of
from dpbench.reference import load_module
from dpbench.search import MaxBatch, Probe
from dpbench.trials import Trial

__all__ = ["Cell", "Experiment", "MaxBatch", "Probe", "experiment_names", "grid", "load_experiment"]

Cell = Trial | MaxBatch
T = TypeVar("T", bound=Trial)


def grid(kind: type[T], **axes: Any) -> list[T]:
    """Every combination of the axes: a list is an axis, anything else is the same in all. The first axis is outermost.

    >>> [t.backend for t in grid(StepTrial, model="cnn", backend=["ghost", "vmap"], batch_size=8)]
    ['ghost', 'vmap']
    """
    values = [value if isinstance(value, list) else [value] for value in axes.values()]
    return [kind(**dict(zip(axes, point, strict=True))) for point in itertools.product(*values)]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is measured, how often, and which figures are drawn of it.

    `cells(device)` and `smoke(device)` take ``"cpu"`` or ``"cuda"``; `smoke` is the same in miniature, done in seconds.
    `figures` names what `dpbench.report` draws.
    """

    name: str
    doc: str
    cells: Callable[[str], Sequence[Cell]]
    smoke: Callable[[str], Sequence[Cell]]
    rounds: int = 3
    figures: tuple[str, ...] = ()


def experiment_names() -> list[str]:
    """The experiments that are installed, by what lies on disk: none is imported."""
    spec = importlib.util.find_spec("experiments")
    if spec is None or spec.submodule_search_locations is None:
        return []
    return sorted(m.name for m in pkgutil.iter_modules(spec.submodule_search_locations) if not m.name.startswith("_"))


def load_experiment(name: str) -> Experiment:
    """The experiment of this name, or the one that a ``.py`` file defines.

    Raises:
        UsageError: in one line, if there is none, if its file raises, or if it defines no ``EXPERIMENT``.
    """
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UsageError("an experiment or the path of its .py file", name)
        module_name = name
    else:
        module_name = f"experiments.{one_of('an experiment', name, experiment_names())}"
    try:
        module = load_module(module_name)
    except Exception as error:  # whatever a file of the user's own may raise, told in one line
        raise UsageError("an experiment that can be imported", f"{name}: {type(error).__name__}: {error}") from error
    found = getattr(module, "EXPERIMENT", None)
    if not isinstance(found, Experiment):
        raise UsageError(f"EXPERIMENT = Experiment(...) in {name}", found)
    return found
