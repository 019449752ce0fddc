"""Steps as graphs without a compiler, which takes seconds and minutes."""

from __future__ import annotations

import clipping.graphs


def not_compiled(monkeypatch) -> None:
    """TorchInductor fails, whatever it is given."""

    def refused(self, inputs, targets):
        raise self._no_graph("it is a test", RuntimeError("told so"))

    monkeypatch.setattr(clipping.graphs.Graph, "_compiled", refused)
