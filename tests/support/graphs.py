"""Runs steps as graphs without TorchInductor, which compiles for seconds to minutes."""

from __future__ import annotations

import clipping.program.graphs
import clipping.program.step


def not_compiled(monkeypatch) -> None:
    """Make every compilation by TorchInductor fail."""

    def refused(self, *given):
        raise clipping.program.step.no_graph("a test", "it is a test", RuntimeError("told so"))

    monkeypatch.setattr(clipping.program.step.Graph, "_made", refused)
