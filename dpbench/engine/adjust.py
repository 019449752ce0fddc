"""What an adapter of another library's interface may change on an engine: noise, clipping, sample rate, what counts.

All of it is accounted: steps keep the noise that they were released with (`Settings.earlier`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from accounting import SubsampledGaussian
from accounting.reductions import as_poisson
from dpbench.engine.errors import Misuse
from dpbench.engine.poisson_check import Sizes
from dpbench.engine.settings import require_sensitivity
from dpbench.engine.state import State

if TYPE_CHECKING:
    from torch import Tensor

    from clipping import ClipFunction


def set_rate(engine: State, sample_rate: float, steps_per_epoch: int) -> None:
    """Draw and account batches of rate q where that is not b/n: n q is no whole number, and b, the divisor, is.

    Args:
        engine: before its first step.
        sample_rate: q in (0, 1].
        steps_per_epoch: of the caller's loader.

    Raises:
        Misuse: steps were released.
    """
    if engine.steps:
        raise Misuse(f"expected a sample rate before the first step, got one after {engine.steps}")
    rate, _ = as_poisson(sample_rate, 0, engine.settings.bands)
    mechanism = replace(engine.settings.mechanism, sample_rate=rate)
    engine.settings = replace(engine.settings, mechanism=mechanism, epoch=steps_per_epoch)
    engine._sampler.settings = engine.settings
    engine._sizes = Sizes(engine.settings.sample_size, engine.settings.sample_size * sample_rate)


def plan(engine: State, steps: int, target_epsilon: float, target_delta: float) -> None:
    """Say for how many steps, and for which ε at which δ, the noise was calibrated: later steps are warned of.

    Args:
        engine: whose settings are changed.
        steps: how many are planned.
        target_epsilon, target_delta: what they are to spend.
    """
    settings = replace(engine.settings, planned_steps=steps, target_epsilon=target_epsilon, delta=target_delta)
    engine.settings = settings


def set_noise_multiplier(engine: State, noise_multiplier: float) -> None:
    """σ of the steps that are to come.

    Args:
        engine: whose settings are changed.
        noise_multiplier: σ >= 0, finite.

    Raises:
        ValueError: a number that is none >= 0; another σ where noise has none to choose (discrete), or ε no bound.
    """
    settings = engine.settings
    if noise_multiplier == settings.mechanism.noise_multiplier:
        return
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"expected a finite noise_multiplier >= 0, got {noise_multiplier!r}")
    if settings.load().kind != "upper_bound":
        raise ValueError(
            f"expected one noise_multiplier throughout with accountant={settings.accountant!r}, got another one: take "
            "'prv' or 'rdp', whose bounds hold for noise that changes"
        )
    if kind := engine.noise.constant:
        raise ValueError(f"expected one noise_multiplier throughout with {kind} noise, got another one")
    told = sum(count for _, count in settings.earlier)
    earlier = settings.earlier
    if engine.steps > told:
        earlier = (*earlier, (settings.mechanism, engine.steps - told))
    mechanism = replace(settings.mechanism, noise_multiplier=float(noise_multiplier))
    engine.settings = replace(settings, mechanism=mechanism, earlier=earlier)


def set_clip(engine: State, clip: ClipFunction) -> None:
    """The clipping function of the logical batches that are to come; noise is scaled to its sensitivity.

    Args:
        engine: between two logical batches.
        clip: norms -> factors.

    Raises:
        Misuse: in the middle of a logical batch, whose pieces would be clipped in two ways.
        ValueError: a function that does not keep to the sensitivity that it states.
    """
    if engine._sums:
        raise Misuse("expected another clipping norm between logical batches, got one between the pieces of one")
    require_sensitivity(clip)
    engine.clip = clip
    engine._recorder.backend.clip = clip


def watch_norms(engine: State, count: Callable[[Tensor], float]) -> None:
    """Add up what `count` makes of each piece's norms before clipping: not private, and not accounted.

    The count lies beside the sums of the pieces, and is dropped, retried and saved with them. After a step
    `engine.counted` is that of the logical batch which the step released.

    Args:
        engine: whose pieces are watched.
        count: of the norms [B] of a piece's records.
    """
    engine._recorder.count = count


def begin_after(engine: State, parts: Sequence[tuple[SubsampledGaussian, int]]) -> None:
    """Account for the steps of an earlier training of this model, too: (mechanism, how many) of each part.

    Args:
        engine: before its first step.
        parts: of the earlier training, in order.

    Raises:
        Misuse: steps were released.
    """
    if engine.steps:
        raise Misuse(f"expected the steps of an earlier training before the first of this one, got {engine.steps} here")
    *before, last = parts if parts else [(engine.settings.mechanism, 0)]
    if last[0] != engine.settings.mechanism:
        before = [*before, last]
    engine.settings = replace(engine.settings, earlier=tuple(before))
    engine.steps = engine._sampled = sum(count for _, count in parts)
    engine.drawn = engine.steps


def count_batches(engine: State, batches: int) -> None:
    """A loader that is not the engine's has handed out so many logical batches, of which none are counted twice.

    Args:
        engine: whose count is raised.
        batches: handed out so far.
    """
    engine.drawn = max(engine.drawn, batches)


def drawn_by_engine(engine: State) -> bool:
    """Did the engine's loader draw every batch that was released?

    Args:
        engine: which is asked about.
    """
    return engine._sampled == engine.steps


def drop_recorded(engine: State) -> None:
    """Let go of the forward passes since the last step: their batch is left out.

    Args:
        engine: whose passes they are.
    """
    engine._recorder.drop()


def drop_parts(engine: State) -> None:
    """A logical batch of the caller's begins: what an unfinished one has left is in no sum.

    Args:
        engine: whose batch it is.
    """
    engine._drop_parts()
