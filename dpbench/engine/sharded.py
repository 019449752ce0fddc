"""The engine's noise where a parameter is a DTensor: a coordinate of the sum lies in one process, and so its noise.

Independent draws of N(0, σ²S²) for the shards are one draw for the whole: each process draws at a place of its own (its
rank), so that they are independent though all have one key, of one checkpoint. Where shards have replicas (HSDP), the
first replica draws, and the others take what it has. A generator of the caller's draws the whole parameter in every
process, of which each keeps its shard: training is then repeated by any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clipping.spread import is_sharded
from dpbench.engine.noise import At, Noise


def with_noise(total: Any, noise: Noise, deviation: float, at: At) -> Any:
    """`total`, a DTensor of sums, + N(0, deviation²) in each coordinate, in float32 or wider.

    Args:
        total: the sum over all processes.
        noise: this process's source.
        deviation: σ times the sensitivity; 0 draws nothing.
        at: the place of the draw, with this process's rank.
    """
    from torch.distributed.tensor import DTensor

    mine = total.to_local()
    if deviation:
        if noise.repeatable:
            drawn = noise.added(torch.zeros(total.shape, dtype=mine.dtype, device=mine.device), deviation, at)
            mine = mine + _shard_of(drawn, total)
        else:
            mine = noise.added(mine, deviation, at)
        for dim, placement in enumerate(total.placements):
            if placement.is_replicate():
                group = total.device_mesh.get_group(dim)
                mine = mine.contiguous()
                dist.broadcast(mine, src=dist.get_global_rank(group, 0), group=group)
    return DTensor.from_local(
        mine, total.device_mesh, total.placements, run_check=False, shape=total.shape, stride=total.stride()
    )


def here(x: Tensor) -> Tensor:
    """What lies in this process of a tensor: all of it, or its shard."""
    mine: Tensor = getattr(x, "to_local", lambda: x)()
    return mine


def everywhere(true: Tensor, grads: Mapping[str, Tensor]) -> Tensor:
    """Bools, and-ed over all processes where the gradients are sharded: they go on together, or raise together."""
    if not any(is_sharded(g) for g in grads.values()):
        return true
    agreed = true.to(torch.uint8)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return agreed.bool()


def _shard_of(whole: Tensor, like: Any) -> Tensor:
    """This process's part of a tensor that every process has."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = everywhere.redistribute(placements=like.placements).to_local()
    return found
