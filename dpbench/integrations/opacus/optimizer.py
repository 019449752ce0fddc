"""The optimizer of `make_private`: Opacus' interface over an optimizer attached to the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpbench.engine import AdamBC, Misuse, PrivacyEngine, PrivacyWarning
from dpbench.engine.adjust import set_clip, set_noise_multiplier
from dpbench.engine.distributed import place
from dpbench.integrations.opacus.by_hand import ByEngine
from dpbench.integrations.opacus.clips import Clips
from dpbench.integrations.opacus.criterion import Backward
from dpbench.integrations.opacus.outputs import Outputs

StepHook = Callable[["DPOptimizer"], None]


def _of_original(name: str) -> Any:
    """An attribute of the underlying optimizer."""

    def get(self: DPOptimizer) -> Any:
        return getattr(self.original_optimizer, name)

    def put(self: DPOptimizer, value: Any) -> None:
        setattr(self.original_optimizer, name, value)

    return property(get, put)


def _without(name: str) -> Any:
    """An attribute of Opacus' optimizer that always raises Misuse."""

    def get(self: DPOptimizer) -> Any:
        raise Misuse(
            f"expected code that does without per-sample gradients, got optimizer.{name}: step() clips and sums them "
            "without keeping any; clipping.load_backend('vmap') computes gradients one by one"
        )

    return property(get)


class DPOptimizer(ByEngine, Optimizer):
    """Passes the losses of `backward()` to the engine, whose step clips, adds noise and runs the optimizer's own step.

    `noise_multiplier` and `max_grad_norm` may be set between steps, as by Opacus' schedulers. Every step is accounted
    with its own noise, which is scaled to the norm of that step.

    Args:
        optimizer: attached to the engine.
        engine: accounts.
        losses: source of the losses.
        clips: clipping functions by their norms.
        loss_reduction: "mean" divides the noisy sum by `expected_batch_size`, "sum" does not.
        stepped: called after the release of a logical batch.
    """

    _step_supports_amp_scaling = True
    """Makes a GradScaler call `step`, which refuses it."""

    def _begin(
        self,
        optimizer: Optimizer,
        engine: PrivacyEngine,
        losses: Outputs | Backward,
        clips: Clips,
        loss_reduction: str,
        stepped: Callable[[], None],
    ) -> None:  # not Optimizer's: it has no parameters of its own
        self.original_optimizer = optimizer
        self.loss_reduction = loss_reduction
        self.step_hook: StepHook | None = None
        self.losses = losses
        self._engine, self._clips, self._stepped = engine, clips, stepped
        self._skip = self._told = False
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        quantile = clips.quantile
        if quantile is not None:
            engine._recorder.count = lambda norms: quantile.count(norms, clips.norm)

    @property
    def noise_multiplier(self) -> float:
        """σ of the next step."""
        return self._engine.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        clips, value = self._clips, float(value)
        moved = None if clips.quantile is None else clips.at(clips.norm, value)
        set_noise_multiplier(self._engine, value, moved)
        clips.noise_multiplier = value

    @property
    def max_grad_norm(self) -> float:
        """C of the next step; under clipping per layer, of the whole gradient."""
        return self._clips.norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self.clip_at(value, self._clips.noise_multiplier)

    def clip_at(self, norm: float, noise_multiplier: float) -> None:
        """Clip future logical batches at this norm; an adaptive norm's count gets its share of the noise.

        Args:
            norm: C.
            noise_multiplier: σ of the engine.
        """
        clips = self._clips
        if (norm, noise_multiplier) != (clips.norm, clips.noise_multiplier):
            set_clip(self._engine, clips.at(float(norm), noise_multiplier))
            clips.norm, clips.noise_multiplier = float(norm), noise_multiplier

    @property
    def expected_batch_size(self) -> int:
        """The engine's b, which divides the noisy sum."""
        return self._engine.settings.batch_size

    @property
    def adaptive(self) -> bool:
        """Whether the norm adapts itself."""
        return self._clips.quantile is not None

    @property
    def params(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def accumulated_iterations(self) -> int:
        """Always 1: the loader handles the pieces of a logical batch."""
        return 1

    grad_samples = _without("grad_samples")
    pre_step = _without("pre_step")
    clip_and_accumulate = _without("clip_and_accumulate")
    add_noise = _without("add_noise")
    scale_grad = _without("scale_grad")

    param_groups = _of_original("param_groups")
    state = _of_original("state")
    defaults = _of_original("defaults")

    def attach_step_hook(self, fn: StepHook) -> None:
        """Call `fn(optimizer)` before each step of the parameters, with the noisy gradients in `.grad`.

        It replaces an earlier hook. The engine's accounting does not depend on it.

        Args:
            fn: called with this optimizer.
        """
        self.step_hook = fn

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Always raises Misuse: only BatchMemoryManager knows the pieces of a batch.

        Args:
            do_skip: Opacus' argument.
        """
        raise Misuse(
            "expected BatchMemoryManager(data_loader=..., max_physical_batch_size=..., optimizer=...), got "
            "signal_skip_step: which pieces are of one batch is known to its loader"
        )

    def _skip_next(self, skip: bool) -> None:
        """Set whether the next step only accumulates its piece of a logical batch."""
        self._skip = skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients and the losses of `backward()`, but not the accumulated pieces of a logical batch."""
        self.losses.clear()
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Clip, add noise, and step; before the last piece of a logical batch only clip and accumulate.

        Raises:
            Misuse: no backward pass came before.
        """
        if vars(self).pop("found_inf", None) is not None or vars(self).pop("grad_scale", None) is not None:
            raise Misuse("expected no GradScaler: scaled gradients would be clipped; bfloat16 autocast needs none")
        if closure is not None:
            with torch.enable_grad():
                closure()
        try:
            losses = self.losses.take()
        except BaseException:
            self._give_up()
            raise
        skip, self._skip = self._skip, False
        quantile = self._clips.quantile
        if skip:
            self._engine.virtual_step(losses)
        else:
            self._engine.step(losses)
        if self._engine.stepped:
            self._stepped()
            self._see_who_draws()
            if quantile is not None:
                self.max_grad_norm = quantile.next(self._engine, self.max_grad_norm)

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Misuse("expected all parameters before make_private, got add_param_group after it: make a new engine")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.original_optimizer.register_step_post_hook(hook)

    def close(self) -> None:
        """Remove the hooks of optimizer and model."""
        self._handle.remove()
        self.losses.close()

    def __repr__(self) -> str:
        return f"DPOptimizer({self.original_optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("expected optimizer.state_dict() to be saved, got the private optimizer: it holds secret keys")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Multiply the noisy gradients by b for "sum", and call the hook."""
        if self.loss_reduction == "sum":
            grads = [p.grad for p in self.params if p.grad is not None]
            torch._foreach_mul_(grads, float(self.expected_batch_size))
            if isinstance(optimizer, AdamBC) and optimizer.noise is not None:
                optimizer.noise *= self.expected_batch_size
        if self.step_hook is not None:
            self.step_hook(self)

    def _give_up(self) -> None:
        """Drop the recorded forward passes, and make the other processes raise, as they wait for this one's step."""
        self._engine._recorder.drop()
        if place()[1] > 1:
            with suppress(Misuse):
                self._engine.step(None)

    def _see_who_draws(self) -> None:
        engine = self._engine
        if self._told or engine.settings.mechanism.sampling != "poisson" or engine._sampled == engine.steps:
            return
        self._told = True
        warnings.warn(
            "a batch was not one of the loader that make_private returned: that it is a new Poisson sample is assumed",
            PrivacyWarning,
            stacklevel=4,
        )
