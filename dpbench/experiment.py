"""Experiments: what is measured, declared in Python.

An experiment is a module of the package `experiments`, or any ``.py`` file, that defines ``EXPERIMENT``; or any object
of a module or file, named as ``my/file.py:NAME`` or ``package.module:NAME``. Nothing is registered. Its cells are
trials, and searches for the largest batch that fits::

    def cells(device):
        return grid(StepTrial, model=["cnn", "resnet18"], backend=["nonprivate", "ghost"], batch_size=32, device=device)

    EXPERIMENT = Experiment(name="my_own", doc="What it shows.", cells=cells, smoke=smoke)

Functions take:
    name: what was typed.
    device: "cpu" or "cuda".
"""

import importlib.util
import itertools
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dpbench.errors import UsageError, in_words, nearest, one_of, their_code
from dpbench.trials import Trial, canonical_json
from dpbench.trials.line_shapes import flaw_of_trial
from dpbench.trials.max_batch import MaxBatch
from dpbench.trials.reference import load_module

#: Models that several experiments measure; texts need a number of tokens, such as @128.
VIT = "timm:vit_tiny_patch16_224?patch_size=4"
CONVNEXT = "timm:convnext_pico?patch_size=2"
GPT2 = "transformers:gpt2?n_layer=6&n_embd=384&n_head=6&vocab_size=4096"
BERT = "transformers:bert?num_hidden_layers=6&hidden_size=384&num_attention_heads=6&intermediate_size=1536"
BERT += "&vocab_size=4096&positions=true"
# For other libraries: a head that shares no weight, each sample's position ids, and no trained parameter of the root
# module, for which Opacus would run the whole model again.
UNTIED = "tie_word_embeddings=false&positions=true"
UNTIED_GPT2 = f"{GPT2}&{UNTIED}"
ROOTLESS_VIT = f"{VIT}&frozen=(cls_token,pos_embed)"
TINY_GPT2 = "transformers:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=64"

Cell = Trial | MaxBatch
#: More rounds than anybody waits for.
MOST_ROUNDS = 10_000
#: An experiment's name is that of a folder, and never a way to another one.
_NAME = re.compile(r"[^./\\-][^/\\]{0,79}")
T = TypeVar("T", bound=Trial)


def grid(kind: type[T], **axes: Any) -> list[T]:
    """Every combination of the axes: a list is an axis, anything else is the same in all. The first axis is outermost.

    >>> [t.backend for t in grid(StepTrial, model="cnn", backend=["ghost", "vmap"], batch_size=8)]
    ['ghost', 'vmap']

    Args:
        kind: of the trials.
        axes: field -> value, or a list of values.
    """
    values = [value if isinstance(value, list) else [value] for value in axes.values()]
    return [kind(**dict(zip(axes, point, strict=True))) for point in itertools.product(*values)]


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """The part of a figure's table that a README shows.

    Args:
        figure: a name in the experiment's `figures`.
        rows: columns that name a row; one that the table lacks is left out.
        cells: columns with the numbers of a cell; () for all others.
        across: the column whose values become columns; "" for a column each of `cells`.
        instead: the column with the reason where a cell has no number.
        where: whether to keep a row, given as column -> text.
        turned: the heading of the columns' names if the table is turned, a row for each of `cells`; "" if it is not.
    """

    figure: str
    rows: tuple[str, ...]
    cells: tuple[str, ...]
    across: str = ""
    instead: str = ""
    where: Callable[[Mapping[str, str]], bool] = lambda row: True
    turned: str = ""


def ratios(figure: str, *rows: str, where: Callable[[Mapping[str, str]], bool] = lambda row: True) -> Excerpt:
    """The ratios of every backend to ordinary training, time and then memory: a column a backend.

    Args:
        figure: with a table of such ratios.
        rows: columns beside model and batch size.
        where: whether to keep a row.
    """
    return Excerpt(
        figure=figure,
        rows=("Model", *rows, "B"),
        cells=("Time ratio", "Memory ratio"),
        across="Backend",
        instead="Time/step",
        where=lambda row: row["Backend"] != "Non-private" and where(row),
    )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is measured, how often, and which figures are drawn of it.

    `doc`: a line, or a docstring, of which the first line is taken. `cells(device)` and `smoke(device)` take ``"cpu"``
    or ``"cuda"``; `smoke` is the same in miniature, done in seconds. `figures` names what `dpbench.report` draws;
    `excerpts` names the tables of READMEs, the first that of results/README.md. `in_order`: each round runs the cells
    as declared, the most informative first, and not in an order of its own.
    """

    name: str
    doc: str
    cells: Callable[[str], Sequence[Cell]]
    smoke: Callable[[str], Sequence[Cell]]
    rounds: int = 3
    figures: tuple[str, ...] = ()
    in_order: bool = False
    excerpts: Mapping[str, Excerpt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not _NAME.fullmatch(self.name):
            raise UsageError("a name that a folder can have, and that leads to no other", self.name)
        object.__setattr__(self, "doc", self.doc.strip().partition("\n")[0].rstrip("."))
        if not isinstance(self.figures, tuple | list) or not all(isinstance(each, str) for each in self.figures):
            raise UsageError(f"names in figures of {self.name}", self.figures)
        check_rounds(self.rounds, f"rounds of {self.name}")

    def declared(self, device: str, *, smoke: bool = False) -> list[Cell]:
        """The cells on a device, each such that it can be run, recorded and found again.

        What the declaration prints goes to standard error: standard output is the command's.

        Args:
            smoke: those in miniature.

        Raises:
            UsageError: in one line, if the declaration fails or ends the process, or if a cell is none.
        """
        name = "smoke" if smoke else "cells"
        with their_code(f"{name}({device!r}) of {self.name} to return trials"):
            cells = list((self.smoke if smoke else self.cells)(device))
        for cell in cells:
            if not isinstance(cell, Trial | MaxBatch):
                raise UsageError(f"a trial or a search in {name} of {self.name}", cell)
            if (why := _flaw_of(cell)) is not None:
                raise UsageError(f"trials that can be recorded in {name} of {self.name}", why)
        return cells


def experiment_of(
    module: str, *, table: Excerpt | None = None, brief: Excerpt | None = None, **more: Any
) -> Experiment:
    """The experiment of a module with `cells`, `smoke` and a docstring, with the module's name.

    Args:
        module: its ``__name__``.
        table, brief: its table in results/README.md, and that in README.md.
        more: arguments of `Experiment`.
    """
    given = sys.modules[module]
    name = module.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    excerpts = {name: excerpt for name, excerpt in (("table", table), ("brief", brief)) if excerpt is not None}
    declared = {"name": name, "doc": given.__doc__ or "", "cells": given.cells, "smoke": given.smoke}
    return Experiment(**declared, excerpts=excerpts, **more)


def check_rounds(rounds: Any, what: str) -> None:
    """Raise a UsageError about `what` if so many `rounds` cannot be run, or are beyond reason.

    Args:
        rounds, what: as given; where, for the error.
    """
    if type(rounds) is not int or rounds < 1:
        raise UsageError(f"at least 1 for {what}", rounds)
    if rounds > MOST_ROUNDS:
        raise UsageError(f"at most {MOST_ROUNDS} for {what}", rounds)


def _flaw_of(cell: Cell) -> str | None:
    """Why a cell cannot be run, recorded and found again, in words; None if it can. What it says of itself is code."""
    try:
        if isinstance(cell, MaxBatch):  # it says itself which batch sizes it tries
            cell.check()
        trials = [cell.probe_at(1), cell.then_at(1)] if isinstance(cell, MaxBatch) else [cell]
        return next((why for trial in trials if trial is not None and (why := _flaw_of_trial(trial))), None)
    except Exception as error:
        return f"{type(cell).__name__}: {in_words(error)}"


def _flaw_of_trial(trial: Trial) -> str | None:
    seconds: Any = trial.timeout
    if type(seconds) not in (int, float) or not seconds > 0:
        return f"{trial.label()}: a timeout of {seconds!r}, which is no number of seconds above 0"
    bool({trial: trial.alone}[trial.replace()])  # trials are looked up by what they are
    if not all(isinstance(words, str) for words in (trial.id, trial.label(), *trial.modules())):
        return f"{type(trial).__name__}: an id, a label or modules that are no texts"
    return flaw_of_trial(json.loads(canonical_json(trial.describe())))


def experiment_names() -> list[str]:
    """The experiments that are installed, by what lies on disk: none is imported."""
    spec = importlib.util.find_spec("experiments")
    if spec is None or spec.submodule_search_locations is None:
        return []
    return sorted(m.name for m in pkgutil.iter_modules(spec.submodule_search_locations) if not m.name.startswith("_"))


def is_reference(name: str) -> bool:
    """Whether this is ``file.py``, ``file.py:NAME`` or ``package.module:NAME``, and not the name of an experiment."""
    return name.endswith(".py") or ":" in name


def load_experiment(name: str) -> Experiment:
    """The experiment of this name, or the one that a reference leads to; ``EXPERIMENT`` if that names a file alone.

    Raises:
        UsageError: in one line, if there is none, if its file raises, or if it defines no such experiment.
    """
    module_name, attribute = name, "EXPERIMENT"
    if is_reference(name):
        if ":" in name:
            module_name, _, attribute = name.rpartition(":")
        if module_name.endswith(".py") and not Path(module_name).is_file():
            raise UsageError("an experiment or the path of its .py file", name)
    else:
        module_name = f"experiments.{one_of('an experiment', name, experiment_names())}"
    with their_code(f"an experiment that can be imported from {name}"):
        module = load_module(module_name)
    found = getattr(module, attribute, None)
    if not isinstance(found, Experiment):
        near = nearest(attribute, [key for key, value in vars(module).items() if isinstance(value, Experiment)])
        raise UsageError(f"{attribute} = Experiment(...) in {module_name}", found, near)
    return found
