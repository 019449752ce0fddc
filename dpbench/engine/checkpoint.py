"""Save an engine's state and resume from it.

ε never falls within a process. If an engine returns to a checkpoint, the later steps still count; if it resumes from
another training's checkpoint, its own released steps still count. Both are `abandoned`.

Functions take:
    engine, state, replay: as the methods of `PrivacyEngine`; `load` needs an engine with the same settings.
"""

from __future__ import annotations

from typing import Any

from clipping.core.named_parameters import named_parameters
from dpbench.engine.distributed import place
from dpbench.engine.safeguards import require_own_part
from dpbench.engine.state import State
from dpbench.engine.sums import gathered


def save(engine: State) -> dict[str, Any]:
    """See `PrivacyEngine.state_dict`."""
    return {
        **engine._abandoned.save(),
        "settings": engine.settings.as_state(),
        "sensitivity": engine.clip.sensitivity,
        "steps": engine.steps,
        "drawn": engine.drawn,
        "sampled": engine._sampled,
        "key": engine._sampler.key,
        "branch": engine._sampler.branch,
        "noise": engine.noise.state_dict(),
        "sums": {name: total.clone() for name, total in engine._sums.items()},
        "counted": engine._sums.counted,
        "size": engine._size,
        "drawing": engine._drawing,
        "backend": engine._recorder.backend.settle(),
        "place": list(place()),
    }


def load(engine: State, state: dict[str, Any], *, replay: bool) -> None:
    """See `PrivacyEngine.load_state_dict`."""
    mine = {**engine.settings.as_state(), "sensitivity": engine.clip.sensitivity}
    saved = {**state["settings"], "sensitivity": state["sensitivity"]}
    different = [name for name in mine if mine[name] != saved.get(name)]
    if different:
        name = different[0]
        raise ValueError(f"expected {name}={saved.get(name)!r} as in the checkpoint, got {mine[name]!r}")
    require_own_part(state, list(place()))
    engine.noise.load_state_dict(state["noise"], replay=replay)
    engine._recorder.backend.resume(state.get("backend", {}))
    engine._abandoned.go_on(state, engine.steps)
    same = replay or engine._abandoned.count == state.get("abandoned", 0)  # no released step is undone
    engine._sampler.take(state["key"], state.get("branch", 0) if same else engine._abandoned.count)
    engine.steps, engine.drawn, engine._sampled = state["steps"], state["drawn"], state["sampled"]
    parameters = named_parameters(engine.model)
    sums = {
        name: total.to(parameters[name].device, copy=True) for name, total in state["sums"].items()
    }  # noise is added in place
    engine._sums = gathered(sums, parameters, counted=state.get("counted", 0.0))
    engine._unread.clear()
    engine._size, engine._ended = state["size"], 0
    engine._drawing = state.get("drawing", engine.drawn) if engine._sums else -1
    engine._recorder.drop()
    engine._tickets.clear()
