"""Every figure: a module with a `FIGURE` (`dpbench.report.parts.FigureKind`), under the module's name.

A new figure is a new file; modules without a `FIGURE` are shared helpers.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from dpbench.report.parts import FigureKind


def found() -> dict[str, FigureKind]:
    """Name -> figure, in the order of a page."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    kinds = {name: getattr(import_module(f"{__name__}.{name}"), "FIGURE", None) for name in names}
    known = [(kind.place, name, kind) for name, kind in kinds.items() if isinstance(kind, FigureKind)]
    return {name: kind for _, name, kind in sorted(known, key=lambda entry: entry[:2])}
