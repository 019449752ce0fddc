"""Detect silent breaches of the guarantee: layers that mix samples, partial checkpoints.

`dpbench.engine.finite` detects NaN and infinity, `dpbench.engine.looks` models that mix samples or keep them.

Functions take:
    layers: from `batch_norms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from clipping.core.types import Problem, UnsupportedModel
from dpbench.engine.errors import Misuse

_MARK = "privacy_steps"
"""Key in the optimizer's first parameter group, and so in its state_dict: the number of released logical batches."""


def require_usable(model: nn.Module) -> None:
    """Raise an UnsupportedModel if the model mixes samples, scales parameters, is TorchScript or on "meta"."""
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
    known: Any = max((group.get(_MARK, 0) for group in optimizer.param_groups), default=0)
    if known > steps:
        raise Misuse(
            f"expected engine.load_state_dict beside the optimizer's, which comes from a checkpoint of step {known} "
            f"where the engine counts {steps}: the steps before would not be accounted"
        )
