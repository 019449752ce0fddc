"""Steps that were released, and are not in the history that a checkpoint goes on from: they count all the same.

Those of another engine that was on the same model before have a mechanism of their own: they are told of, not counted.
"""

from __future__ import annotations

import secrets
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class Abandoned:
    """The logical batches that were released, and then gone back behind.

    Attributes:
        count: how many.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: set[str] = set()  # checkpoints whose steps are counted here already: made here, or gone on from

    def save(self) -> dict[str, Any]:
        """What a checkpoint holds of it: a name of its own, and the count."""
        name = secrets.token_hex(8)
        self._known.add(name)
        return {"name": name, "abandoned": self.count}

    def go_on(self, state: dict[str, Any], steps: int) -> None:
        """From a checkpoint, by an engine that stands at `steps` logical batches.

        Args:
            state: what `save` gave.
            steps: at which the engine stands.
        """
        name, released = state.get("name", ""), steps + self.count
        if name in self._known:
            self.count = released - state["steps"]
        else:  # another training's: all that was released here is beside it
            self.count = state.get("abandoned", 0) + released
        self._known.add(name)

    def leave(self, model: nn.Module, steps: int) -> None:
        """The engine lets go of the model.

        Args:
            model: not its wrapper.
            steps: logical batches of its history that it has released.
        """
        if steps + self.count:
            _LEFT.setdefault(model, {})[self] = steps + self.count

    def beside(self, model: nn.Module) -> int:
        """Steps that other engines have released on this model, from which this one does not go on.

        Args:
            model: not its wrapper.
        """
        return sum(
            n for other, n in _LEFT.get(model, {}).items() if other is not self and not other._known & self._known
        )


_LEFT: WeakKeyDictionary[nn.Module, dict[Abandoned, int]] = WeakKeyDictionary()
