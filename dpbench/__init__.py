"""dpbench: which way of clipping per-sample gradients to use, what it costs, whether it is exact, what privacy it buys.

Importing it imports no torch: the command line answers at once, and no device is taken from a trial. Its privacy engine
is loaded when it is asked for: `from dpbench import PrivacyEngine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbench.engine import Misuse, PrivacyEngine, PrivacySpent, PrivacyWarning

__version__ = "0.1.0"
__all__ = ["Misuse", "PrivacyEngine", "PrivacySpent", "PrivacyWarning"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("dpbench.engine"), name)
    raise AttributeError(f"module 'dpbench' has no attribute {name!r}")
