"""What a checkpoint of the engine holds, and what it means to go on from one.

ε never falls within a process. An engine that goes back to a checkpoint has released the steps after it all the same,
and one that goes on from another training's has released its own beside those: both are counted, as `abandoned`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from dpbench.engine.distributed import place
from dpbench.engine.safeguards import require_own_part
from dpbench.engine.sums import gathered

if TYPE_CHECKING:
    from dpbench.engine.engine import PrivacyEngine


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
        """From a checkpoint, by an engine that stands at `steps` logical batches."""
        name, released = state.get("name", ""), steps + self.count
        if name in self._known:
            self.count = released - state["steps"]
        else:  # another training's: all that was released here is beside it
            self.count = state.get("abandoned", 0) + released
        self._known.add(name)


def save(engine: PrivacyEngine) -> dict[str, Any]:
    """See `PrivacyEngine.state_dict`."""
    return {
        **engine._abandoned.save(),
        "settings": engine.settings.as_state(),
        "sensitivity": engine.clip.sensitivity,
        "steps": engine.steps,
        "drawn": engine.drawn,
        "sampled": engine._sampled,
        "key": engine._sampler.key,
        "noise": engine.noise.state_dict(),
        "sums": {name: total.clone() for name, total in engine._sums.items()},
        "size": engine._size,
        "place": list(place()),
    }


def load(engine: PrivacyEngine, state: dict[str, Any], *, replay: bool) -> None:
    """See `PrivacyEngine.load_state_dict`."""
    mine = {**engine.settings.as_state(), "sensitivity": engine.clip.sensitivity}
    saved = {**state["settings"], "sensitivity": state["sensitivity"]}
    different = [name for name in mine if mine[name] != saved.get(name)]
    if different:
        name = different[0]
        raise ValueError(f"expected {name}={saved.get(name)!r} as in the checkpoint, got {mine[name]!r}")
    require_own_part(state, list(place()))
    engine.noise.load_state_dict(state["noise"], replay=replay)
    engine._abandoned.go_on(state, engine.steps)
    engine._sampler.take(state["key"])
    engine.steps, engine.drawn, engine._sampled = state["steps"], state["drawn"], state["sampled"]
    device = {name: p.device for name, p in engine.model.named_parameters()}
    engine._sums = gathered({name: total.to(device[name]) for name, total in state["sums"].items()}, engine.model)
    engine._unread.clear()
    engine._size, engine._ended = state["size"], 0
    engine._drawing = engine.drawn if engine._sums else -1
    engine._recorder.drop()
    engine._tickets.clear()
