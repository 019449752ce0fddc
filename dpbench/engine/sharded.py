"""The engine's noise for DTensor parameters: each process adds the noise of its shard.

Independent draws of N(0, σ²S²) for the shards equal one draw for the whole. Each process draws at a place of its own
(its rank), which makes the draws independent even under one key, from one checkpoint. If shards have replicas (HSDP),
the first replica draws, and broadcasts its result. The caller's generator draws the whole parameter in every process,
which keeps its shard: any number of processes then repeats the training.

Functions take:
    p: a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clipping.distributed.spread import is_sharded


def as_sharded(mine: Tensor, p: Tensor) -> Any:
    """Wrap this process's shard as a DTensor if `p` is one.

    Args:
        mine: of the shape of this process's part of `p`.
    """
    if not is_sharded(p):
        return mine
    from torch.distributed.tensor import DTensor

    whole: Any = p
    return DTensor.from_local(
        mine, whole.device_mesh, whole.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def replicas(p: Any) -> tuple[Any, ...]:
    """The process groups of this process's replicas of `p`; none for an ordinary parameter."""
    if not is_sharded(p):
        return ()
    return tuple(p.device_mesh.get_group(dim) for dim, x in enumerate(p.placements) if x.is_replicate())


def here(x: Tensor) -> Tensor:
    """This process's shard of a tensor; all of an ordinary tensor.

    Args:
        x: any tensor.
    """
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def everywhere(true: Tensor, grads: Mapping[str, Tensor]) -> Tensor:
    """Combine bools by `and` over all processes if gradients are sharded, so that all continue or all raise.

    Args:
        true: bools, of any shape.
        grads: parameter name -> sum.
    """
    if not any(is_sharded(g) for g in grads.values()):
        return true
    agreed = true.to(torch.uint8)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return agreed.bool()


def shard_of(whole: Tensor, like: Any) -> Tensor:
    """This process's shard of a tensor that every process holds whole, placed as `like`.

    Args:
        whole: of the shape of the whole parameter.
        like: a DTensor.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = everywhere.redistribute(placements=like.placements).to_local()
    return found
