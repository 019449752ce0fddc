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

from clipping.distributed.spread import is_sharded


def as_sharded(mine: Tensor, p: Tensor) -> Any:
    """What this process has of something like parameter `p`: as a DTensor where `p` is one, else as it is.

    Args:
        mine: of the shape of this process's part of `p`.
        p: a parameter.
    """
    if not is_sharded(p):
        return mine
    from torch.distributed.tensor import DTensor

    whole: Any = p
    return DTensor.from_local(
        mine, whole.device_mesh, whole.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def replicas(p: Any) -> tuple[Any, ...]:
    """The process groups whose members all have this process's shard of `p`; none of an ordinary parameter.

    Args:
        p: a parameter.
    """
    if not is_sharded(p):
        return ()
    return tuple(p.device_mesh.get_group(dim) for dim, x in enumerate(p.placements) if x.is_replicate())


def here(x: Tensor) -> Tensor:
    """What lies in this process of a tensor: all of it, or its shard.

    Args:
        x: any tensor.
    """
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def everywhere(true: Tensor, grads: Mapping[str, Tensor]) -> Tensor:
    """Bools, and-ed over all processes where the gradients are sharded: they go on together, or raise together.

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
    """This process's part of a tensor that every process has, placed as the DTensor `like`.

    Args:
        whole: of the shape of the whole parameter.
        like: a DTensor.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = everywhere.redistribute(placements=like.placements).to_local()
    return found
