"""Every figure: a module with a `FIGURE` (`dpbench.report.parts.FigureKind`), under the module's name.

A new figure is a new file; a module with several has them in `FIGURES`, under their names.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from dpbench.report.parts import FigureKind


def found() -> dict[str, FigureKind]:
    """Name -> figure, in the order of a page."""
    kinds: dict[str, FigureKind] = {}
    for module in pkgutil.iter_modules(__path__):
        own = import_module(f"{__name__}.{module.name}")
        kinds |= {module.name: own.FIGURE} if hasattr(own, "FIGURE") else own.FIGURES
    return dict(sorted(kinds.items(), key=lambda item: (item[1].place, item[0])))
