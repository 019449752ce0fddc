"""Steps undone by loading an earlier checkpoint; they still spend budget.

Steps of another engine that was on the model before have their own mechanism: they are reported, not counted.
"""

from __future__ import annotations

import secrets
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class Abandoned:
    """Counts the released logical batches that loading a checkpoint has undone.

    Attributes:
        count: how many.

    Methods take:
        steps: logical batches that the engine has released, without the abandoned ones.
        model: not its wrapper.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: set[str] = set()  # checkpoints whose steps are counted here: saved or loaded here

    def save(self) -> dict[str, Any]:
        """The part of a checkpoint: its unique name, and the count."""
        name = secrets.token_hex(8)
        self._known.add(name)
        return {"name": name, "abandoned": self.count}

    def go_on(self, state: dict[str, Any], steps: int) -> None:
        """Update the count as the engine resumes from a checkpoint.

        Args:
            state: from `save`.
        """
        name, released = state.get("name", ""), steps + self.count
        if name in self._known:
            self.count = released - state["steps"]
        else:  # another training's: all steps released here are abandoned
            self.count = state.get("abandoned", 0) + released
        self._known.add(name)

    def leave(self, model: nn.Module, steps: int) -> None:
        """Remember the released steps as the engine detaches from the model."""
        if steps + self.count:
            _LEFT.setdefault(model, {})[self] = steps + self.count

    def beside(self, model: nn.Module) -> int:
        """Steps that other engines have released on this model, unless this one resumes from them."""
        return sum(
            n for other, n in _LEFT.get(model, {}).items() if other is not self and not other._known & self._known
        )


_LEFT: WeakKeyDictionary[nn.Module, dict[Abandoned, int]] = WeakKeyDictionary()
