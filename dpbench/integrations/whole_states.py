"""Save whole states of FSDP2 models and optimizers, and load them in parts.

A checkpoint equals a single process's, and any number of processes can resume from it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def whole(state: Any) -> Any:
    """Gather the tensors of a state dict; all processes must call this.

    Args:
        state: tensors in nested dicts and lists.
    """
    if isinstance(state, Mapping):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor().cpu() if isinstance(state, DTensor) else state


def load_whole_weights(model: nn.Module) -> None:
    """Make `model.load_state_dict` accept whole tensors, of which each process keeps its part.

    Args:
        model: sharded by FSDP2.
    """

    def in_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, p in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            if prefix + name in state:
                state[prefix + name] = _part(state[prefix + name], p)

    model.register_load_state_dict_pre_hook(in_parts)


def load_whole_states(optimizer: Optimizer) -> None:
    """Make `optimizer.load_state_dict` accept whole tensors, too.

    Args:
        optimizer: of sharded parameters.
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
    """This process's part of a whole tensor shaped like a parameter; other values are unchanged."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:  # a count of steps, say
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
