"""Check and resolve the engine's arguments: model, backend, clipping function, sampling, steps, noise."""

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from accounting import Accountant, Guarantee, SubsampledGaussian, calibrate_noise_multiplier, load_accountant
from accounting.base import LARGE_DELTA
from accounting.blt import Blt, best
from accounting.mechanism import real, whole
from accounting.reductions import as_poisson
from accounting.sampling import BY_EPOCH
from accounting.varying import guarantee_of_parts
from clipping import BACKENDS, FAMILIES, Automatic, ClipFunction, Flat, PerLayer, load_backend
from clipping.backends.base import Backend
from clipping.backends.recording import recordable
from clipping.core.types import Problem, UnsupportedModel
from dpbench.engine.correlated import Banded, Buffered
from dpbench.engine.discrete import Discrete
from dpbench.engine.errors import PrivacyWarning
from dpbench.engine.noise import Noise, Pseudo, Secure
from dpbench.errors import complaint, nearest

#: Sampling schemes.
SCHEMES = ("poisson", "truncated_poisson", "balls_and_bins", "without_replacement", "shuffled", "one_pass")
CLIPS: dict[str, Any] = {"flat": Flat, "automatic": Automatic, "per_layer": PerLayer}
UNPLANNED = 1000
"""Steps that correlated noise assumes for its coefficients if none are planned."""


NOISES = ("gaussian", "discrete", "banded:N", "blt:N")
CORRELATED = {
    "banded": ("bands", 2, "poisson", "batches are Poisson samples of groups of records in turn"),
    "blt": ("buffers", 1, "one_pass", "the steps of a record must be an epoch apart"),
}
"""Name -> what N counts, the least N, the only sampling with a bound on ε, and the reason."""
ACCOUNTANTS = ("rdp:whole", "moments")
"""Accountants that are valid for discrete noise; the first is the default."""


@dataclass(frozen=True)
class Settings:
    """Everything that ε depends on except the number of steps taken.

    Attributes:
        batch_size: b, the expected size of a logical batch, which divides the noisy sum.
        sample_size: n.
        planned_steps: the steps given, or those of the epochs; None without either.
        delta: δ.
        target_epsilon: None if the noise multiplier was given.
        accountant: its name.
        mechanism: one step.
        epoch: steps of an epoch, if not those of the sizes.
        earlier: (mechanism, steps) of the first steps, which had other noise than `mechanism`.
        bands: b of `accounting.banded`; `mechanism` then stands for b steps. 1 for other noise.
        blt: parameters of `accounting.blt`; all steps are then one mechanism. None for other noise.
    """

    batch_size: int
    sample_size: int
    planned_steps: int | None
    delta: float
    target_epsilon: float | None
    accountant: str
    mechanism: SubsampledGaussian
    epoch: int | None = None
    earlier: tuple[tuple[SubsampledGaussian, int], ...] = ()
    bands: int = 1
    blt: Blt | None = None

    @property
    def correlated(self) -> bool:
        """Whether the noise of a step depends on that of others."""
        return self.bands > 1 or self.blt is not None

    @cached_property
    def sampling(self) -> str:
        """A name of `accounting.sampling`, or "cyclic_poisson" with one group a band."""
        return self.mechanism.sampling if self.bands == 1 else "cyclic_poisson"

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a loader's epoch: fixed batches leave an incomplete last one out, so that q = b/n for all.

        Under balls and bins batches have n/⌊n/b⌋ records on average, b or slightly more.
        """
        if self.epoch is not None:
            return self.epoch
        return steps_per_epoch(self.batch_size, self.sample_size, self.mechanism.sampling)

    @property
    def period(self) -> int:
        """Steps of an epoch or a block of bands, in which a record is in one batch; 1 if each batch is drawn afresh."""
        return self.steps_per_epoch if self.mechanism.sampling in BY_EPOCH else self.bands

    def guarantee(self, steps: int, delta: float) -> Guarantee:
        """ε of `steps` steps, including the earlier ones."""
        if self.blt is not None:
            of_all = self.blt.mechanism(self.mechanism.noise_multiplier, max(1, steps))
            return guarantee_of_parts(self.load(), [(of_all, min(1, steps))], delta=delta)
        later = max(0, steps - sum(count for _, count in self.earlier))
        _, blocks = as_poisson(0.0, later, self.bands)
        return guarantee_of_parts(self.load(), [*self.earlier, (self.mechanism, blocks)], delta=delta)

    def load(self) -> Accountant:
        """Load the accountant."""
        return load_accountant(self.accountant)

    def as_state(self) -> dict[str, Any]:
        """The settings that a checkpoint must share."""
        m = self.mechanism
        return {
            "batch_size": self.batch_size,
            "sample_size": self.sample_size,
            "noise_multiplier": m.noise_multiplier,
            "bands": self.bands,
            "sampling": self.sampling,
            "max_batch_size": m.max_batch_size,
            "group_size": m.group_size,
            **({"planned_steps": self.planned_steps, "blt": (self.blt.omega, self.blt.theta)} if self.blt else {}),
        }


def resolve(
    *,
    batch_size: int,
    sample_size: int,
    epochs: float | None,
    steps: int | None,
    target_epsilon: float | None,
    noise_multiplier: float | None,
    target_delta: float | None,
    accountant: str,
    sampling: str,
    max_batch_size: int | None,
    group_size: int = 1,
    bands: int = 1,
    buffers: int = 0,
) -> Settings:
    """Check the engine's arguments, and find the noise multiplier.

    Raises:
        ValueError: an invalid argument, named.
        NoAnswer: the target cannot be met, or the accountant has no bound for this sampling and group size.
    """
    batch_size, sample_size = int(whole("batch_size", batch_size, 1)), int(whole("sample_size", sample_size, 1))
    steps = None if steps is None else int(whole("steps", steps, 1))
    epochs, target_epsilon = _number("epochs", epochs), _number("target_epsilon", target_epsilon)
    noise_multiplier = _number("noise_multiplier", noise_multiplier)
    target_delta = _number("target_delta", target_delta)
    if batch_size > sample_size:
        raise ValueError(f"expected batch_size <= sample_size, got {batch_size} > {sample_size}")
    require_known("sampling", sampling, SCHEMES)
    if epochs is not None and steps is not None:
        raise ValueError(f"expected epochs or steps, not both, got epochs={epochs!r} and steps={steps!r}")
    if (target_epsilon is None) == (noise_multiplier is None):
        came = "neither" if noise_multiplier is None else "both"
        raise ValueError(f"expected one of target_epsilon and noise_multiplier, got {came}")
    planned = _planned(epochs, steps, batch_size, sample_size, sampling)
    if target_epsilon is not None and planned is None:
        raise ValueError("expected epochs or steps beside target_epsilon, got neither: the noise depends on them")
    delta = _delta(target_delta, sample_size)
    scheme: dict[str, Any] = {"sampling": sampling, "dataset_size": sample_size, "group_size": group_size}
    scheme["max_batch_size"] = max_batch_size
    if bands * batch_size > sample_size:
        most = sample_size // batch_size
        raise ValueError(f"expected noise with at most sample_size // batch_size = {most} bands, got {bands}")
    q, spending = as_poisson(batch_size / sample_size, planned or 0, bands)
    load_accountant(accountant)
    blt = best(buffers, planned or UNPLANNED, steps_per_epoch(batch_size, sample_size, sampling)) if buffers else None
    if noise_multiplier is None:
        assert target_epsilon is not None and planned is not None
        at: dict[str, Any] = {"target_epsilon": target_epsilon, "delta": delta}
        if blt is None:
            noise_multiplier = calibrate_noise_multiplier(accountant, sample_rate=q, steps=spending, **at, **scheme)
        else:
            alone = calibrate_noise_multiplier(accountant, sample_rate=1.0, steps=1, **at)
            noise_multiplier = alone * blt.sensitivity(planned) * (1 + 1e-12)  # rounded up
    mechanism = SubsampledGaussian(noise_multiplier, q, **scheme)
    settings = Settings(
        batch_size, sample_size, planned, delta, target_epsilon, accountant, mechanism, bands=bands, blt=blt
    )
    settings.guarantee(1, 0.5)  # raises NoAnswer now rather than after training
    return settings


def steps_per_epoch(batch_size: int, sample_size: int, sampling: str) -> int:
    """⌈n/b⌉, as an ordinary loader; ⌊n/b⌋ if a record is in one batch of an epoch, at a rate of b/n."""
    if sampling in BY_EPOCH:
        return sample_size // batch_size
    return -(-sample_size // batch_size)


def clip_function(clip: str | ClipFunction, max_grad_norm: float, stabiliser: float) -> ClipFunction:
    """Return a clipping function by name, or check the given one.

    Args:
        clip: one of `CLIPS`, or a function.
        max_grad_norm, stabiliser: C, and the stabiliser of a named function.

    Raises:
        ValueError: an unknown name, C = 0, or a function whose sensitivity is not C.
    """
    if max_grad_norm == 0:
        raise ValueError("expected max_grad_norm > 0, got 0: every gradient would be 0, and so would the noise")
    if isinstance(clip, str):
        require_known("clip or a clipping function", clip, CLIPS)
        found: ClipFunction = CLIPS[clip](max_grad_norm=max_grad_norm, stabiliser=stabiliser)
        return found
    if not isinstance(clip, ClipFunction):
        raise ValueError(f"expected clip, one of {', '.join(CLIPS)} or a clipping function, got {clip!r}")
    if clip.sensitivity != max_grad_norm:
        raise ValueError(f"expected max_grad_norm to be the sensitivity of clip={clip!r}, got {max_grad_norm!r}")
    require_sensitivity(clip)
    return clip


def require_sensitivity(clip: ClipFunction) -> None:
    """Raise a ValueError if a clipped gradient is longer than the clipping function's stated sensitivity.

    Tries norms from 1e-18 to 1e18 times the sensitivity; for a per-layer function, in several layers.
    """
    norms = torch.logspace(-18, 18, 721, dtype=torch.float64, device="cpu")
    norms = torch.cat([norms.new_zeros(1), norms]) * max(clip.sensitivity, 1e-12)
    for layers in (1, 2, 7) if clip.per_layer else (0,):
        of_layers = norms.expand(layers, -1) if layers else norms[None]
        factors = clip.factors(of_layers if layers else norms).double()
        lengths = torch.linalg.vector_norm((factors * of_layers).view(-1, len(norms)), dim=0)
        lengths = torch.where(of_layers[0] > 0, lengths, 0.0)  # a zero gradient stays zero
        worst = int(lengths.nan_to_num(nan=math.inf).argmax())
        if not lengths[worst] <= clip.sensitivity * (1 + 1e-6):
            raise ValueError(
                f"expected clip={clip!r} to keep to its sensitivity {clip.sensitivity:g}, got a clipped gradient of "
                f"norm {float(lengths[worst]):g} from one of {float(norms[worst]):g}: the noise would be too small"
            )


def usable_backend(backend: str, ghost_clipping: bool | None, mixed: bool | None) -> tuple[str, type[Backend]]:
    """The backend's name, given or from private_CNN's two switches, and its class.

    Without ghost clipping, gradients are instantiated.

    Args:
        backend: as given; "bk_mixed" by default.
        ghost_clipping, mixed: the switches, or None.

    Raises:
        ValueError: both a backend and a switch, or a backend that cannot clip each sample's gradient from its loss.
    """
    if (ghost_clipping, mixed) != (None, None):
        if backend != "bk_mixed":
            message = f"expected backend or ghost_clipping and mixed, not both, got backend={backend!r} beside them"
            raise ValueError(message)
        backend = "fastgradclip" if ghost_clipping is False else "ghost" if mixed is False else "mixed_ghost"
    cls = load_backend(backend)
    if backend.partition(":")[0] in FAMILIES:
        raise ValueError(
            f"expected a backend that clips each sample's gradient, got {backend!r}: it clips the mean of several, "
            "where a sample can move the sum by 2 max_grad_norm and more, and the accounting is for max_grad_norm"
        )
    if not recordable(cls):  # a peer's backend may need its package
        usable = ", ".join(
            name for name, known in BACKENDS.items() if not known.peer and recordable(load_backend(name))
        )
        raise ValueError(f"expected a backend that works from losses, one of {usable}, got {backend!r}")
    return backend, cls


def require_known(what: str, name: Any, known: Collection[str]) -> None:
    """Raise a ValueError that says the nearest known name.

    Args:
        what: the argument.
        known: all names.
    """
    if name not in known:
        raise ValueError(complaint(what, name, nearest(str(name), known), known))


def _planned(epochs: float | None, steps: int | None, batch_size: int, sample_size: int, sampling: str) -> int | None:
    if steps is not None:
        return steps
    if epochs is None:
        return None
    if not 0 < epochs < math.inf:
        raise ValueError(f"expected epochs to be a finite number > 0, got {epochs!r}")
    return math.ceil(epochs * steps_per_epoch(batch_size, sample_size, sampling))


def _number(name: str, value: float | None) -> float | None:
    return None if value is None else real(name, "to be a number", value)


def _delta(target_delta: float | None, sample_size: int) -> float:
    delta = 1 / (2 * sample_size) if target_delta is None else target_delta
    if not 0 <= delta <= 1:
        raise ValueError(f"expected target_delta in [0, 1], got {delta!r}")
    if delta >= 1 / sample_size:
        warnings.warn(
            LARGE_DELTA.format("target_delta", delta, "sample_size", 1 / sample_size),
            PrivacyWarning,
            stacklevel=4,
        )
    return delta


def source_of(name: str, settings: Settings, coordinates: int, generator: torch.Generator | None) -> Noise:
    """Create the engine's noise.

    Raises:
        ValueError: a generator with discrete noise.
    """
    if name == "discrete" and generator is not None:
        raise ValueError("expected noise='discrete' or a generator, got both: what is seeded is not private")
    noise_multiplier = settings.mechanism.noise_multiplier
    if name == "discrete" and noise_multiplier:
        return Discrete(noise_multiplier, coordinates)
    source: Noise = Secure() if generator is None else Pseudo(generator)
    if settings.blt is not None:
        return Buffered(source, settings.blt)
    return Banded(source, settings.bands, settings.planned_steps or UNPLANNED) if settings.bands > 1 else source


def of_noise(noise: str, accountant: str | None, sampling: str, group_size: int) -> dict[str, Any]:
    """Return the arguments of `resolve` that depend on the noise: its accountant; N of "banded:N" or "blt:N".

    Raises:
        ValueError: no such noise, N is not a whole number or too small, or the noise has no bound with this accountant,
            sampling or group size.
    """
    name, colon, digits = str(noise).partition(":")
    if colon and name in CORRELATED:
        counted, least, scheme, reason = CORRELATED[name]
        if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
            raise ValueError(f"expected noise='{name}:N' with a whole number N >= {least}, got {noise!r}")
        if sampling != scheme:
            raise ValueError(f"expected sampling={scheme!r} with noise={noise!r}, got {sampling!r}: {reason}")
        if group_size != 1:
            raise ValueError(
                f"expected group_size=1 with noise={noise!r}, got {group_size!r}: there is no bound for groups"
            )
        return {"accountant": "prv" if accountant is None else accountant, counted: int(digits)}
    if noise not in NOISES[:2]:
        raise ValueError(f"expected noise, one of {', '.join(NOISES)}, got {noise!r}")
    if noise != "discrete":
        return {"accountant": "prv" if accountant is None else accountant}
    if accountant is not None and accountant not in ACCOUNTANTS:
        raise ValueError(
            f"expected accountant, one of {', '.join(ACCOUNTANTS)} with noise='discrete', got {accountant!r}: "
            "its bound is the continuous Gaussian's"
        )
    if sampling != "poisson":
        raise ValueError(f"expected sampling='poisson' with noise='discrete', got {sampling!r}")
    return {"accountant": accountant or ACCOUNTANTS[0]}


def require_usable(model: nn.Module) -> None:
    """Raise an UnsupportedModel if the model mixes samples, scales parameters, is TorchScript, lazy or on "meta"."""
    problem = batch_norm_problem(batch_norms(model))
    bounded = [
        name or "model" for name, module in model.named_modules() if getattr(module, "max_norm", None) is not None
    ]
    if bounded:
        problem = Problem(
            bounded[0],
            "scales the rows of its batch's words in the forward pass (max_norm), without noise",
            "max_norm=None, and scale the output of the embedding if need be",
        )
    elif isinstance(model, torch.jit.ScriptModule):
        problem = Problem(
            "model", "is TorchScript, whose operations cannot be recorded", "train the model it is made of"
        )
    elif any(p.is_meta for p in model.parameters()):
        problem = Problem("model", "is on the meta device", "model.to_empty(device=...), and initialise it")
    elif any(map(torch.nn.parameter.is_lazy, model.parameters())):
        problem = Problem("model", "has lazy layers without parameters", "run it once, on numbers that are no records")
    if problem is not None:
        raise UnsupportedModel("PrivacyEngine", [problem])


def batch_norms(model: nn.Module) -> list[tuple[str, nn.modules.batchnorm._NormBase]]:
    """Return (name, layer) of all BatchNorm and InstanceNorm layers, which may mix the samples of a batch."""
    kinds = nn.modules.batchnorm._NormBase  # of BatchNorm and of InstanceNorm
    return [(name or "model", module) for name, module in model.named_modules() if isinstance(module, kinds)]


def batch_norm_problem(layers: list[tuple[str, nn.modules.batchnorm._NormBase]]) -> Problem | None:
    """The layers that mix samples or store their statistics, as one problem; None without any."""
    mixing, running = [], []
    for name, module in layers:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.training or not module.track_running_stats:
                mixing.append(name)
        elif module.training and module.track_running_stats:
            running.append(name)
    if not mixing + running:
        return None
    first, *more = mixing or running
    name = f"{first} and {len(more)} more" if more else first
    if mixing:
        return Problem(
            name,
            "BatchNorm mixes the samples of a batch, so there is no per-sample gradient to clip",
            "replace it by nn.GroupNorm (opacus.validators.ModuleValidator.fix does), or freeze it in eval mode",
        )
    return Problem(
        name,
        "InstanceNorm with running statistics keeps a mean of the data in its buffers, without noise",
        "give it track_running_stats=False, or freeze it in eval mode",
    )
