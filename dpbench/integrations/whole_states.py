"""States of a model and an optimizer whose parameters several processes share (FSDP2): saved whole, loaded in parts.

So a checkpoint is the one that a single process would have written, and any number of processes goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def whole(state: Any) -> Any:
    """A state dict, its tensors gathered; all processes call this.

    Args:
        state: tensors in nested dicts and lists.
    """
    if isinstance(state, Mapping):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor().cpu() if isinstance(state, DTensor) else state


def load_whole_weights(model: nn.Module) -> None:
    """From now on `model.load_state_dict` takes whole tensors, too, of which each process keeps its part.

    Args:
        model: sharded by FSDP2.
    """

    def in_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, p in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            if prefix + name in state:
                state[prefix + name] = _part(state[prefix + name], p)

    model.register_load_state_dict_pre_hook(in_parts)


def load_whole_states(optimizer: Optimizer) -> None:
    """The same of `optimizer.load_state_dict`.

    Args:
        optimizer: over sharded parameters.
    """

    def in_parts(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        of = dict(zip(numbers, mine, strict=True))
        parts = {
            number: {name: _part(value, of[number]) for name, value in each.items()}
            for number, each in state["state"].items()
        }
        return {**state, "state": parts}

    optimizer.register_load_state_dict_pre_hook(in_parts)


def _part(value: Any, like: Tensor) -> Any:
    """This process's part of a whole tensor of the shape of a parameter; all else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:  # a count of steps, say
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def is_shared(model: torch.nn.Module) -> bool:
    """Has a process a part of some parameter alone?

    Args:
        model: any module.
    """
    return any(isinstance(p, DTensor) for p in model.parameters())
