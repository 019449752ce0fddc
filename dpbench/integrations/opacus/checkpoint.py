"""Save and load checkpoints with Opacus' keys and the engine's own state, so that ε continues and never falls.

Functions take:
    private, accountant: the private optimizer, and the accountant of the same engine.
    path: a path or a file, as in `torch.save` and `torch.load`.
    module: its parameters are saved, or replaced.
    optimizer, noise_scheduler, grad_clip_scheduler: saved or restored if given.
"""

import pickle
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dpbench.engine import Misuse
from dpbench.engine.adjust import begin_after
from dpbench.integrations.opacus.accountant import Accountant, parts_in
from dpbench.integrations.opacus.optimizer import DPOptimizer

KEY = "privacy_engine_state_dict"
PARTS = ("optimizer_state_dict", "noise_scheduler_state_dict", "grad_clip_scheduler_state_dict")


def save(
    private: DPOptimizer,
    accountant: Accountant,
    *,
    path: Any,
    module: nn.Module,
    optimizer: Any = None,
    noise_scheduler: Any = None,
    grad_clip_scheduler: Any = None,
    checkpoint_dict: dict[str, Any] | None = None,
    module_state_dict_kwargs: dict[str, Any] | None = None,
    torch_save_kwargs: dict[str, Any] | None = None,
) -> None:
    """Write module, accountant and the other given parts to `path`, with Opacus' arguments.

    The file holds the keys of noise and sampling, and is as secret as the data.

    Args:
        checkpoint_dict: the caller's own entries.
        module_state_dict_kwargs, torch_save_kwargs: of `module.state_dict` and `torch.save`.
    """
    state = dict(checkpoint_dict or {})
    state["module_state_dict"] = module.state_dict(**(module_state_dict_kwargs or {}))
    state["privacy_accountant_state_dict"] = dict(accountant.state_dict())
    state[KEY] = {"engine": private._engine.state_dict(), "max_grad_norm": private.max_grad_norm}
    for name, part in zip(PARTS, (optimizer, noise_scheduler, grad_clip_scheduler), strict=True):
        if part is not None:
            state[name] = part.state_dict()
    torch.save(state, path, **(torch_save_kwargs or {}))


def load(
    private: DPOptimizer,
    accountant: Accountant,
    *,
    path: Any,
    module: nn.Module,
    optimizer: Any = None,
    noise_scheduler: Any = None,
    grad_clip_scheduler: Any = None,
    module_load_dict_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Load a file of `save` or of Opacus' `save_checkpoint`, account for its steps, and return the rest.

    A given scheduler also restores the noise and the norm that it had set. The file runs no code (`weights_only=True`)
    unless you trust it by `torch_load_kwargs={"weights_only": False}`.

    Args:
        module_load_dict_kwargs, torch_load_kwargs: of `module.load_state_dict` and `torch.load`.

    Raises:
        ValueError: a setting differs from the checkpoint's, or the file has objects without permission.
        Misuse: this training has released steps, and noise has changed in it or in the checkpoint.
    """
    try:
        state = torch.load(path, **{"weights_only": True, **(torch_load_kwargs or {})})
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"expected a checkpoint of tensors and plain values in {path}, got other objects; a file that you trust is "
            'read by load_checkpoint(..., torch_load_kwargs={"weights_only": False})'
        ) from error
    module.load_state_dict(state["module_state_dict"], **(module_load_dict_kwargs or {}))
    if KEY in state:
        moves = grad_clip_scheduler is not None or private.adaptive
        _go_on(private, state, moved=noise_scheduler is not None, norm=moves)
        accountant.know(state["privacy_accountant_state_dict"])
    else:
        accountant.load_state_dict(state["privacy_accountant_state_dict"])
    for name, part in zip(PARTS, (optimizer, noise_scheduler, grad_clip_scheduler), strict=True):
        held = state.pop(name, None)
        if part is not None and held:
            part.load_state_dict(held)
        elif name == PARTS[0] and (part is None) != (not held):
            warnings.warn(
                "expected an optimizer both in the checkpoint and here, or in neither: its state is not restored",
                stacklevel=3,
            )
    found: dict[str, Any] = state
    return found


def _go_on(private: DPOptimizer, state: dict[str, Any], *, moved: bool, norm: bool) -> None:
    engine, own = private._engine, state[KEY]
    history = state["privacy_accountant_state_dict"]["history"]
    saved, rate = own["engine"]["settings"], engine.settings.mechanism.sample_rate
    if history and history[-1][1] != rate:
        raise ValueError(f"expected sample_rate={history[-1][1]!r} as in the checkpoint, got {rate!r}")
    now = replace(engine.settings.mechanism, noise_multiplier=saved["noise_multiplier"])
    parts = [(replace(now, **fields), n) for fields, n in parts_in(state["privacy_accountant_state_dict"])]
    if len(parts) > 1 or engine.settings.earlier or moved or any(each != now for each, _ in parts):
        if engine.steps:
            raise Misuse(
                "expected a checkpoint whose noise has changed to be loaded before the first step, got one after step "
                f"{engine.steps}"
            )
        engine.settings = replace(engine.settings, mechanism=now)
        begin_after(engine, parts)
        engine.steps = 0  # the state sets it
    if norm:
        private.clip_at(own["max_grad_norm"], engine.noise_multiplier)
    engine.load_state_dict(own["engine"])
