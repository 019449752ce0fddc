"""Steps as graphs without a compiler, which takes seconds and minutes."""

from __future__ import annotations

import clipping.graphs
import clipping.program


def not_compiled(monkeypatch) -> None:
    """TorchInductor fails, whatever it is given."""

    def refused(self, *given):
        raise clipping.program.no_graph("a test", "it is a test", RuntimeError("told so"))

    monkeypatch.setattr(clipping.program.Graph, "_made", refused)
