"""Change an engine's noise, clipping, sample rate or counts, for adapters of other libraries' interfaces.

Every change is accounted: past steps keep the noise of their release (`Settings.earlier`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from accounting import SubsampledGaussian
from accounting.reductions import as_poisson
from clipping import ClipFunction
from dpbench.engine.engine import PrivacyEngine
from dpbench.engine.errors import Misuse
from dpbench.engine.sampling import Sizes
from dpbench.engine.settings import require_sensitivity


def set_rate(engine: PrivacyEngine, sample_rate: float, steps_per_epoch: int) -> None:
    """Draw and account batches at a rate q other than b/n: the divisor b is whole, n q need not be.

    Args:
        sample_rate: q in (0, 1].
        steps_per_epoch: of the caller's loader.

    Raises:
        Misuse: the engine has released steps.
    """
    if engine.steps:
        raise Misuse(f"expected a sample rate before the first step, got one after {engine.steps}")
    rate, _ = as_poisson(sample_rate, 0, engine.settings.bands)
    mechanism = replace(engine.settings.mechanism, sample_rate=rate)
    engine.settings = replace(engine.settings, mechanism=mechanism, epoch=steps_per_epoch)
    engine._sampler.settings = engine.settings
    engine._sizes = Sizes(engine.settings.sample_size, engine.settings.sample_size * sample_rate)


def set_noise_multiplier(engine: PrivacyEngine, noise_multiplier: float, clip: ClipFunction | None = None) -> None:
    """Set σ of future steps, with a clipping function whose sensitivity depends on σ; or change neither and raise.

    Raises:
        ValueError: σ is negative or not finite; or another σ where noise or accountant need one throughout.
        Misuse: as `set_clip`.
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
    if clip is not None:
        set_clip(engine, clip)
    mechanism = replace(settings.mechanism, noise_multiplier=float(noise_multiplier))
    engine.settings = replace(settings, mechanism=mechanism, earlier=tuple(parts(engine)))


def parts(engine: PrivacyEngine) -> list[tuple[SubsampledGaussian, int]]:
    """Return (mechanism, steps) of each part of training, in order. The sum of the steps is `engine.accounted`."""
    settings = engine.settings
    since = engine.accounted - sum(count for _, count in settings.earlier)
    return [*settings.earlier, *([(settings.mechanism, since)] if since > 0 else [])]


def set_clip(engine: PrivacyEngine, clip: ClipFunction) -> None:
    """Set the clipping function of future logical batches; noise is scaled to its sensitivity.

    Raises:
        Misuse: the engine holds part of a logical batch, which would be clipped in two ways.
        ValueError: the function exceeds the sensitivity that it states.
    """
    if engine._sums:
        raise Misuse("expected another clipping norm between logical batches, got one between the pieces of one")
    require_sensitivity(clip)
    engine._recorder.backend.clip = clip


def begin_after(engine: PrivacyEngine, parts: Sequence[tuple[SubsampledGaussian, int]]) -> None:
    """Also account for the steps of an earlier training of this model.

    If the parts differ in adjacency, ε is that of making one record's gradient zero, which all samplings have.

    Args:
        parts: (mechanism, steps) of each part of the earlier training, in order.

    Raises:
        Misuse: the engine has released steps.
    """
    if engine.steps:
        raise Misuse(f"expected the steps of an earlier training before the first of this one, got {engine.steps} here")
    now = engine.settings.mechanism
    if any(each.adjacency != now.adjacency for each, _ in parts):
        now = replace(now, adjacency="zero_out")
        parts = [(replace(each, adjacency="zero_out"), count) for each, count in parts]
    *before, last = parts if parts else [(now, 0)]
    if last[0] != now:
        before = [*before, last]
    engine.settings = replace(engine.settings, mechanism=now, earlier=tuple(before))
    engine.steps = engine._sampled = sum(count for _, count in parts)
    engine.drawn = engine.steps
