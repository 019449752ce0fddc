"""Replace and restore `optimizer.step`; detect steps that bypass the engine, and partial checkpoints."""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from clipping.core.autograd import versions_of
from clipping.distributed.spread import here, reshard
from dpbench.engine.adam import AdamBC
from dpbench.engine.errors import Misuse

if TYPE_CHECKING:
    from dpbench.engine.engine import PrivacyEngine

_ENGINES: weakref.WeakSet[PrivacyEngine] = weakref.WeakSet()
_WATCH: list[Any] = []
_MARK = "privacy_steps"
"""Key in the optimizer's first parameter group, and so in its state_dict: the number of released logical batches."""
_CLOSURE = "expected an optimizer of one gradient a step, got {}, which asks for several by a closure"
_WITHOUT = "closure", "'NoneType' object is not callable"
"""Words in the error of an optimizer that has got no closure."""


def claim(engine: PrivacyEngine) -> None:
    """Watch all optimizers of this process for steps on the engine's model."""
    _ENGINES.add(engine)
    if not _WATCH:
        _WATCH.append(register_optimizer_step_pre_hook(_watch))


def disclaim(engine: PrivacyEngine) -> None:
    """Stop watching for this engine."""
    _ENGINES.discard(engine)
    if not _ENGINES:
        while _WATCH:
            _WATCH.pop().remove()


class Patch:
    """Replaces `optimizer.step` and adds `optimizer.virtual_step`; a scheduler may wrap the new `step`.

    accelerate may have wrapped the optimizer. Its `prepare` returns an attached optimizer unchanged, as the `step` of
    its wrapper takes no losses.

    Raises:
        Misuse: the optimizer or the model has an engine, or their parameters differ.
    """

    def __init__(self, engine: PrivacyEngine, optimizer: torch.optim.Optimizer) -> None:
        _refuse(engine, optimizer)
        self.optimizer = optimizer
        self.stepping = False
        inner = optimizer.step
        self._beneath = _beneath(optimizer)  # accelerate's wrapper skips steps within accumulate()
        self._inner: Any = inner if self._beneath is None else self._beneath.step
        self._innermost = self._beneath or optimizer
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.know_gradients()
        patch = self
        claim(engine)

        def step(this: Any, closure: Any = None, *, loss: Any = None, **others: Any) -> Any:
            if patch.engine is None:  # detached; a scheduler's wrapper remains
                return inner(closure) if closure is not None else inner()
            if vars(optimizer).pop("found_inf", None) is not None or "grad_scale" in vars(optimizer):
                vars(optimizer).pop("grad_scale", None)
                raise Misuse(
                    "expected no GradScaler: the losses go to optimizer.step(loss=losses) unscaled, or every gradient "
                    "would be above the clipping norm; autocast to bfloat16 needs no scaling"
                )
            if closure is None and loss is None and not others and patch.moves_nothing():
                return patch.inner_step(0.0)  # torch.distributed.checkpoint creates the optimizer's state so
            if closure is not None or loss is None or others:
                given = "a closure" if closure is not None else ", ".join(others)
                raise Misuse(
                    "expected optimizer.step(loss=losses) with per-sample losses, got "
                    + (given or "no loss: gradients in .grad were not clipped, and are not used")
                )
            patch._skipped(True)
            patch.engine.step(loss)

        def virtual_step(this: Any, *, loss: Any) -> None:
            if patch.engine is None:
                raise Misuse("expected an engine on this optimizer, got a virtual_step after detach()")
            patch._skipped(True)
            patch.engine.virtual_step(loss)

        self._is_scheduled = hasattr(inner, "_wrapped_by_lr_sched")
        if self._is_scheduled:  # else torch would wrap it again, and warn about the order of calls
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.engine: PrivacyEngine | None = engine
        own = vars(optimizer)
        # attributes of accelerate's own wrappers: it then leaves the optimizer as it is
        wrapper: dict[str, Any] = {
            "_is_accelerate_prepared": True,
            "optimizer": optimizer,
            "step_was_skipped": False,
        }
        if self._beneath is not None:  # the wrapper has no hooks to register with
            wrapper["register_step_pre_hook"] = self._beneath.register_step_pre_hook
            wrapper["register_step_post_hook"] = self._beneath.register_step_post_hook
        self._added = {
            "step": types.MethodType(step, optimizer),
            "virtual_step": types.MethodType(virtual_step, optimizer),
            "privacy_engine": engine,
            "_step_supports_amp_scaling": True,  # a GradScaler then calls step, above
            **{name: value for name, value in wrapper.items() if name not in own},
        }
        self._before = {name: own[name] for name in self._added if name in own}
        own.update(self._added)
        optimizer.param_groups[0].setdefault(_MARK, 0)  # states of all steps have the same keys

    def inner_step(self, noise: float) -> None:
        """Run the optimizer's own step on the gradients in `.grad`.

        Args:
            noise: standard deviation of the noise in each of their entries.
        """
        if isinstance(self._innermost, AdamBC):
            self._innermost.noise = noise
        self.stepping = True
        try:
            self._inner()
            torch.clear_autocast_cache()  # of a caller's context that spans several steps
            self._skipped(False)
            if self._is_scheduled:
                self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns about the order of calls
        except Exception as error:
            if any(words in str(error) for words in _WITHOUT):
                raise Misuse(_CLOSURE.format(type(self._innermost).__name__)) from error
            raise
        finally:
            self.stepping = False
            self.know_gradients()

    def _skipped(self, skipped: bool) -> None:
        """Tell accelerate whether the parameters have moved: its scheduler then steps, also within accumulate()."""
        vars(self.optimizer)["step_was_skipped" if self._beneath is None else "_is_overflow"] = skipped
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None and not skipped:
            accelerate.GradientState()._set_sync_gradients(True)  # accumulate() counts pieces, not logical batches

    def moves_nothing(self) -> bool:
        """Whether there are gradients, and all of them and the learning rates are zero."""
        grads = [here(grad) for _, grad, _ in self._gradients()]
        still = not any(group.get("lr", 1.0) for group in self.optimizer.param_groups)
        return still and bool(grads) and not any(bool(grad.any()) for grad in grads if not grad.is_sparse)

    def know_gradients(self) -> None:
        """Remember the gradients in `.grad`: the next step may overwrite them."""
        self._known = {id(p): (weakref.ref(grad), version) for p, grad, version in self._gradients()}

    def _gradients(self) -> list[tuple[nn.Parameter, Any, int]]:
        """(parameter, its `.grad`, how often that was written to), for each gradient in the optimizer."""
        held = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in held]
        return list(zip(held, grads, versions_of(grads), strict=True))

    def require_no_other_gradient(self) -> None:
        """Raise Misuse if a gradient was put into `.grad`, or added to one, since the last step: it would be lost."""
        others = []
        for p, grad, version in self._gradients():
            known, before = self._known.get(id(p), (None, 0))
            if p.requires_grad and (known is None or known() is not grad or version != before):
                others.append((p, here(grad)))
        dense = [x.any() for _, x in others if not x.is_sparse]
        if others and len(dense) == len(others) and not torch.stack([x.to(dense[0].device) for x in dense]).any():
            return  # zeros, as of zero_grad(set_to_none=False); a GPU is waited for once
        for p, mine in others:
            if mine.is_sparse or bool(mine.any()):
                assert self.engine is not None
                name = next((name for name, q in self.engine.model.named_parameters() if q is p), "")
                raise Misuse(
                    f"expected no gradient in .grad before a step on losses, got one at parameter {name!r}, added or "
                    "changed since the last step, which would be lost: add a term that depends on no record to the "
                    "noisy gradients in optimizer.register_step_pre_hook, take weight_decay=, or call zero_grad() "
                    "after another backward(); leave out clip_grad_norm_, as samples are clipped"
                )

    def undo(self) -> None:
        """Restore the optimizer. A wrapper added later stays, and reaches the optimizer's own step."""
        if self.engine is not None:
            self.engine._abandoned.leave(self.engine.model, self.engine.steps)
        self.engine = None
        self._skipped(False)
        if isinstance(self._innermost, AdamBC):
            self._innermost.noise = None
        own = vars(self.optimizer)
        for name, value in self._added.items():
            if name == "step" and own.get(name) is not value:
                continue
            own.pop(name, None)
            if name in self._before:
                own[name] = self._before[name]
        unmark(self.optimizer)


def _beneath(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer inside accelerate's wrapper; None without a wrapper."""
    own = vars(optimizer)
    return own.get("optimizer") if "accelerator_state" in own else None


def _refuse(engine: PrivacyEngine, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Misuse(f"expected one torch.optim.Optimizer of the model's parameters, got {type(optimizer).__name__}")
    if hasattr(optimizer, "privacy_engine"):
        raise Misuse("expected an optimizer without an engine, got one that has one; detach() that first")
    if _beneath(optimizer) is not None and vars(optimizer).get("scaler") is not None:
        raise Misuse(
            "expected an optimizer without a GradScaler, got one that accelerate has wrapped for fp16: the losses are "
            "not scaled, or every gradient would be above the clipping norm; take mixed_precision='bf16'"
        )
    innermost = _beneath(optimizer) or optimizer
    if engine.settings.correlated and isinstance(innermost, AdamBC):
        raise Misuse(
            "expected noise='gaussian' or 'discrete' with AdamBC, got correlated noise, whose variance changes as a "
            "stream goes on; take torch.optim.Adam"
        )
    _, *taken = inspect.signature(type(innermost).step).parameters.values()
    if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in taken):
        raise Misuse(_CLOSURE.format(type(innermost).__name__))
    reshard(engine.model)
    parameters = dict(engine.model.named_parameters())
    mine = {id(p): name for name, p in parameters.items() if p.requires_grad}
    for other in list(_ENGINES):
        if other is not engine and other._patch is not None:
            shared = [name for name, p in other.model.named_parameters() if id(p) in mine]
            if shared:
                raise Misuse(
                    f"expected one engine on a model, got a second one on {shared[0]!r}: neither would account for the "
                    "other's steps; detach() the first"
                )
    if not mine:
        raise Misuse("expected a model with trainable parameters, got none that requires grad")
    require_own(optimizer, parameters)


def held_by(optimizer: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """Identity -> parameter, of an optimizer's parameters."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def require_own(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Require that an optimizer moves the trainable parameters of the model, all of them and no others.

    Args:
        optimizer: any.
        parameters: name -> parameter, all of the model, resharded: gathered shards are other tensors.

    Raises:
        Misuse: it holds others, or not all.
    """
    held = held_by(optimizer)
    mine = set(map(id, parameters.values()))
    others = [p for key, p in held.items() if key not in mine and (p.requires_grad or p.grad is not None)]
    if others:
        raise Misuse(
            f"expected an optimizer of the model's parameters alone, got {len(others)} of others: it would apply their "
            "gradients as they are, neither clipped nor noised; give them an optimizer of their own, on public data"
        )
    loose = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
    if loose:
        raise Misuse(
            f"expected the optimizer to hold every trainable parameter, but {loose[0]!r} is not among its: freeze it "
            "(requires_grad_(False)) or add it; if another optimizer has it, attach one whose step() runs both"
        )


def _watch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: raise Misuse if it would move a private model without its engine.

    While the engine steps, gradients are released, and the attached optimizer may step others that it is made of.
    """
    for engine in list(_ENGINES):
        patch = engine._patch
        if patch is not None and patch.stepping:
            continue
        if held_by(optimizer).keys().isdisjoint(map(id, dict(engine.model.named_parameters()).values())):
            continue
        if patch is not None:
            raise Misuse("expected steps of the attached optimizer alone, got one that goes round the privacy engine")
        if "loss" in kwargs:
            raise Misuse("expected engine.attach(optimizer) before optimizer.step(loss=losses)")


def mark(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Store `steps` in the optimizer's own state, and so in its checkpoints."""
    optimizer.param_groups[0][_MARK] = steps


def unmark(optimizer: torch.optim.Optimizer) -> None:
    """Remove the mark."""
    for group in optimizer.param_groups:
        group.pop(_MARK, None)


def require_accounted(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Raise Misuse if the optimizer has released more steps than the engine.

    Then the optimizer's state was restored and the engine's was not: ε would cover the later steps alone.
    """
    known: Any = max([group.get(_MARK, 0) for group in optimizer.param_groups], default=0)
    if known > steps:
        raise Misuse(
            f"expected engine and optimizer of one checkpoint, got the optimizer of step {known} where the engine "
            f"counts {steps}: load the state of both, or steps would not be accounted"
        )
