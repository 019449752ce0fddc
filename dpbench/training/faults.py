"""Privacy faults to seed into an engine: known mistakes in DP-SGD.

Each function changes the parts of an attached engine; the first line of its docstring names the fault. An audit must
find each of them. No torch: the parent reads the descriptions.

Functions take:
    engine: attached; changed permanently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from dpbench.engine import PrivacyEngine
    from dpbench.engine.noise import At

    Added = Callable[[Tensor, float, At], Tensor]


def no_noise(engine: PrivacyEngine) -> None:
    """no noise is added"""
    _noise(engine, lambda added, total, deviation, at: added(total, 0.0, at))


def less_noise(engine: PrivacyEngine) -> None:
    """the noise is 0.95 of what it should be"""
    _noise(engine, lambda added, total, deviation, at: added(total, 0.95 * deviation, at))


def unscaled(engine: PrivacyEngine) -> None:
    """the noise is not scaled by the clipping norm"""
    norm = engine.clip.sensitivity
    _noise(engine, lambda added, total, deviation, at: added(total, deviation / norm, at))


def divisor(engine: PrivacyEngine) -> None:
    """the noise is divided by the batch size once too often"""
    size = engine.settings.batch_size
    _noise(engine, lambda added, total, deviation, at: added(total, deviation / size, at))


def one_parameter(engine: PrivacyEngine) -> None:
    """one parameter of many gets no noise"""
    _noise(engine, lambda added, total, deviation, at: added(total, deviation if at.parameter else 0.0, at))


def sparse_noise(engine: PrivacyEngine) -> None:
    """coordinates that no record of the batch has get no noise"""
    _noise(engine, lambda added, total, deviation, at: added(total, deviation, at) * (total != 0))


def uniform_noise(engine: PrivacyEngine) -> None:
    """the noise is uniform, of the right deviation"""

    def change(added: Added, total: Tensor, deviation: float, at: At) -> Tensor:
        normal = (added(total, deviation, at) - total) / deviation
        return total + deviation * 3**0.5 * (normal / 2**0.5).erf()

    _noise(engine, change)


def averaged_noise(engine: PrivacyEngine) -> None:
    """each piece of a batch has noise, of which the average is taken"""
    pieces = [0, 0]  # of the batch being accumulated, and of the released one
    accumulate, let_go = engine._accumulate, engine._release

    def counted(*given: Any) -> Any:
        pieces[0] += 1
        return accumulate(*given)

    def released(parameters: Any, *, sampled: bool) -> None:
        pieces[:] = 0, pieces[0]
        let_go(parameters, sampled=sampled)

    engine._accumulate, engine._release = counted, released  # type: ignore[method-assign, assignment]
    _noise(engine, lambda added, total, deviation, at: added(total, deviation / max(1, pieces[1]) ** 0.5, at))


def late_noise(engine: PrivacyEngine) -> None:
    """each piece of a batch moves the model, the last alone with noise"""
    accumulate = engine._accumulate

    def moved(losses: Any, drawn: tuple[int, int] | None) -> None:
        accumulate(losses, drawn)
        if not engine.stepped:
            for name, p in engine.model.named_parameters():
                p.data.sub_(engine._sums[name] / engine.settings.batch_size)
            engine._drop_parts()

    engine._accumulate = moved  # type: ignore[method-assign]


def repeated_noise(engine: PrivacyEngine) -> None:
    """every step has the noise of the first"""
    _once(engine, lambda at: at.parameter)


def noise_of_parameters(engine: PrivacyEngine) -> None:
    """all parameters have the noise of the first"""
    _once(engine, lambda at: (engine.noise.state_dict()["key"], at.step, at.process))


def shared_noise(engine: PrivacyEngine) -> None:
    """two shards have the same noise"""
    _once(engine, lambda at: (engine.noise.state_dict()["key"], at.step, at.parameter))


def resumed_noise(engine: PrivacyEngine) -> None:
    """training that goes on from a checkpoint draws its noise again"""
    load = engine.load_state_dict
    engine.load_state_dict = lambda state, *, replay=False: load(state, replay=True)  # type: ignore[method-assign]


def per_parameter(engine: PrivacyEngine) -> None:
    """each parameter is clipped by itself at the whole norm"""
    norm = engine.clip.sensitivity
    object.__setattr__(engine.clip, "per_layer", True)
    _factors(engine, lambda norms: (norm / norms).clamp(max=1.0))


def stale_norm(engine: PrivacyEngine) -> None:
    """records are clipped at 1.1 times the norm that the noise is scaled by"""
    norm = engine.clip.sensitivity
    _factors(engine, lambda norms: (1.1 * norm / norms).clamp(max=1.0))


def overflow(engine: PrivacyEngine) -> None:
    """a norm that overflows half precision counts as 0"""
    factors = engine.clip.factors
    _factors(engine, lambda norms: factors(norms.half().nan_to_num(posinf=0.0).to(norms.dtype)))


def clipped_average(engine: PrivacyEngine) -> None:
    """the average of a batch is clipped, and not each record"""
    norm, size = engine.clip.sensitivity, engine.settings.batch_size
    _factors(engine, lambda norms: norms * 0 + 1)
    finish = engine._recorder.finish

    def clipped(losses: Any, drawn: tuple[int, int] | None = None) -> Any:
        result = finish(losses, drawn)
        if result is not None:
            length = sum(float(g.double().norm()) ** 2 for g in result.grads.values()) ** 0.5 / size
            for g in result.grads.values():
                g.mul_(min(1.0, norm / length) if length else 1.0)
        return result

    engine._recorder.finish = clipped  # type: ignore[method-assign]


def padded_copies(engine: PrivacyEngine) -> None:
    """the copies that fill a batch up are counted as records"""
    finish = engine._recorder.finish
    engine._recorder.finish = lambda losses, drawn=None: finish(losses)  # type: ignore[method-assign]


def record_twice(engine: PrivacyEngine) -> None:
    """a record is twice in each batch"""
    _batches(engine, lambda batch, step: np.concatenate([batch(step), batch(step)[:1]]))


def fixed_batches(engine: PrivacyEngine) -> None:
    """fixed batches are accounted as Poisson samples"""
    size, turns = engine.settings.batch_size, engine.settings.sample_size // engine.settings.batch_size
    _batches(engine, lambda batch, step: np.arange(size) + step % turns * size)


def repeated_batches(engine: PrivacyEngine) -> None:
    """the same ten batches are drawn again and again"""
    _batches(engine, lambda batch, step: batch(step % 10))


def twice_the_rate(engine: PrivacyEngine) -> None:
    """each of two processes samples at the whole rate"""
    _batches(engine, lambda batch, step: np.union1d(batch(2 * step), batch(2 * step + 1)))


_ALL: tuple[Callable[[PrivacyEngine], None], ...] = (
    *(no_noise, less_noise, unscaled, divisor, one_parameter, sparse_noise, uniform_noise, averaged_noise, late_noise),
    *(repeated_noise, noise_of_parameters, shared_noise, resumed_noise),
    *(per_parameter, stale_norm, overflow, clipped_average, padded_copies, record_twice),
    *(fixed_batches, repeated_batches, twice_the_rate),
)
SEEDS = {fault.__name__: fault for fault in _ALL}
"""Name -> the function that seeds the fault."""
FAULTS = {name: (fault.__doc__ or "").splitlines()[0] for name, fault in SEEDS.items()}
"""Name -> the fault, in words."""


def _noise(engine: PrivacyEngine, change: Callable[[Added, Tensor, float, At], Tensor]) -> None:
    """Replace the engine's noise by `change`, called for each parameter with the original function first."""
    from clipping.noise.chacha import Segments  # with torch, which the parent does without
    from dpbench.engine.noise import At, emptied_and_divided  # the same

    add = engine.noise.add_to_flat

    def added(total: Tensor, deviation: float, at: At) -> Tensor:
        found = total.clone()
        add(found, Segments((len(total),), (at.parameter,)), deviation, at.step, at.process)
        return found

    def changed(flat: Tensor, segments: Segments, deviation: float, step: int, process: int, **given: Any) -> None:
        with emptied_and_divided(flat, **given):
            for part, label in zip(segments.parts(flat), segments.labels, strict=True):
                part.copy_(change(added, part, deviation, At(step, process, label)))

    engine.noise.add_to_flat = changed  # type: ignore[method-assign]


def _once(engine: PrivacyEngine, place: Callable[[At], Any]) -> None:
    """Draw once for all places that `place` maps to one value, and add that draw to each."""
    drawn: dict[Any, Tensor] = {}

    def change(added: Added, total: Tensor, deviation: float, at: At) -> Tensor:
        if place(at) not in drawn:
            drawn[place(at)] = added(total, deviation, at) - total
        return total + drawn[place(at)]

    _noise(engine, change)


def _factors(engine: PrivacyEngine, factors: Callable[[Tensor], Tensor]) -> None:
    """Clip by these factors, under the unchanged sensitivity."""
    object.__setattr__(engine.clip, "factors", factors)


def _batches(engine: PrivacyEngine, change: Callable[[Callable[[int], Any], int], Any]) -> None:
    """Replace the records of each batch by `change(batch, step)`; `batch(step)` returns the engine's own."""
    batch = engine._sampler.batch
    engine._sampler.batch = lambda step: change(batch, step)  # type: ignore[method-assign]
