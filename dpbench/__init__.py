"""dpbench: which way of clipping per-sample gradients to use, what it costs, whether it is exact, what privacy it buys.

Importing it imports no torch: the command line answers at once, and no device is taken from a trial. What it offers is
imported when it is first asked for::

    dpbench.load("memory_speed")               # records as a tidy pandas.DataFrame
    dpbench.run("memory_speed", smoke=True)    # measure, and the same frame
    dpbench.PrivacyEngine(model, ...)          # train with it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbench.engine import Misuse, PrivacyEngine, PrivacySpent, PrivacyWarning
    from dpbench.execution.notebook import load, run

__version__: str
__all__ = ["Misuse", "PrivacyEngine", "PrivacySpent", "PrivacyWarning", "load", "run"]

#: Public name -> the module that defines it, and its name there where that is another.
_LAZY = {
    "__version__": "dpbench.records.environment:VERSION",
    "Misuse": "dpbench.engine",
    "PrivacyEngine": "dpbench.engine",
    "PrivacySpent": "dpbench.engine",
    "PrivacyWarning": "dpbench.engine",
    "load": "dpbench.execution.notebook",
    "run": "dpbench.execution.notebook",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = _LAZY[name].partition(":")
    return getattr(import_module(module), there or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
