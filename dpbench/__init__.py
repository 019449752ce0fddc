"""dpbench: which way of clipping per-sample gradients to use, what it costs, whether it is exact, what privacy it buys.

Importing it imports no torch: the command line answers at once, and no device is taken from a trial. What it offers is
imported when it is first asked for::

    dpbench.load("memory_speed")               # records as a tidy pandas.DataFrame
    dpbench.run("memory_speed", smoke=True)    # measure, and the same frame
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_LAZY = {"load": "dpbench.notebook", "run": "dpbench.notebook"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
