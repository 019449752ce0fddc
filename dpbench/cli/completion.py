"""``dpbench --print-completion SHELL``: a shell script that completes commands, options, names and files."""

import argparse
from collections.abc import Callable, Sequence

from accounting import ACCOUNTANTS
from clipping import BACKENDS
from dpbench.errors import UsageError, one_of
from dpbench.experiment import experiment_names
from dpbench.models.references import BUILTIN
from dpbench.trials.packages import is_missing

SHELLS = ("bash", "zsh", "tcsh")
#: argument -> a function of its names, beside files; other arguments take their choices, or files
NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "experiment": experiment_names,
    "source": experiment_names,
    "model": lambda: list(BUILTIN),
    "backend": lambda: list(BACKENDS),
    "accountant": lambda: list(ACCOUNTANTS),
}
_FOLDERS, _FILES = ("output",), ("a", "b", "file")


def script(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The script for the given shell.

    Args:
        words: typed after --print-completion.
    """
    shell = one_of("a shell after --print-completion", words[0] if words else "", SHELLS)
    if is_missing("shtab"):
        raise UsageError("the package shtab for --print-completion (pip install shtab)", "none")
    import shtab

    for command in parser._subparsers._group_actions[0].choices.values():  # type: ignore[union-attr]
        for action in command._actions:
            if action.dest in NAMES:
                action.choices = NAMES[action.dest]()
            elif action.dest in (*_FOLDERS, *_FILES):
                action.complete = shtab.DIRECTORY if action.dest in _FOLDERS else shtab.FILE
    return str(shtab.complete(parser, shell=shell))
