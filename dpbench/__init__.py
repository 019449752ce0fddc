"""dpbench: which way of clipping per-sample gradients to use, what it costs, whether it is exact, what privacy it buys.

Importing it imports no torch: the command line answers at once, and no device is taken from a trial. What it offers is
imported when it is first asked for::

    dpbench.load("memory_speed")               # records as a tidy pandas.DataFrame
    dpbench.run("memory_speed", smoke=True)    # measure, and the same frame
    dpbench.PrivacyEngine(model, ...)          # train with it
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbench.engine import AdamBC, Misuse, PrivacyEngine, PrivacySpent, PrivacyWarning
    from dpbench.execution.notebook import load, run

__version__: str
__all__ = ["AdamBC", "Misuse", "PrivacyEngine", "PrivacySpent", "PrivacyWarning", "load", "run"]

#: Public name -> the module that defines it, and its name there where that is another.
_LAZY = {
    "__version__": "dpbench.records.environment:VERSION",
    "AdamBC": "dpbench.engine",
    "Misuse": "dpbench.engine",
    "PrivacyEngine": "dpbench.engine",
    "PrivacySpent": "dpbench.engine",
    "PrivacyWarning": "dpbench.engine",
    "load": "dpbench.execution.notebook",
    "run": "dpbench.execution.notebook",
}


def _require_siblings() -> None:
    """Raise an ImportError if a file of the caller's has the name of a package that this one imports.

    `python -m dpbench` has the current folder first in its path, and is to import nothing from there.
    """
    root = Path(__file__).resolve().parents[1]
    if sys.argv[:1] == ["-m"] and Path(sys.path[0]).resolve() == Path.cwd() != root:
        del sys.path[0]
    for name in ("accounting", "clipping", "experiments"):
        spec = find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is not None and root not in origin.parents:
            raise ImportError(f"expected {name!r} in {root}, got {origin}: give that file another name")


_require_siblings()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = _LAZY[name].partition(":")
    return getattr(import_module(module), there or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
