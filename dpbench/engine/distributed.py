"""The engine in several processes, under torchrun: one sum over all of them, one draw of noise, one sample.

Each process clips the records of its shard of the logical batch. The sums are added up at the first process, which adds
the noise, once, and sends the result to the rest: what crosses between the processes before that is not private, as
gradients of ordinary training are not. The key of the sampling is the first process's, and so is the model. Who brings
batches of their own sees to it that no two processes hold the same record: it would be in the sum twice.

`DistributedDataParallel` is not needed: it averages gradients that were not clipped. A model that is wrapped in it is
taken as it is, and its own communication is off while the engine is attached.

A model that FSDP2 has sharded (``fully_shard``) is clipped by `clipping.distributed.fsdp`, whose sums are over all
processes already, each in the process that holds the shard; there the noise is added, see `dpbench.engine.sharded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clipping.distributed.spread import is_sharded
from dpbench.engine.errors import Misuse


def place() -> tuple[int, int]:
    """(rank, processes) of this process; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def quieten(model: nn.Module, on: bool) -> None:
    """Switch the communication of a DistributedDataParallel off, and on again.

    Args:
        model: any module; of any other kind nothing is changed.
        on: quiet, or as before.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = not on
        model.require_forward_param_sync = not on  # of buffers: processes may have different numbers of pieces


def shared_key(key: bytes) -> bytes:
    """The first process's.

    Args:
        key: of this process.
    """
    if place()[1] == 1:
        return key
    box: list[Any] = [key]
    dist.broadcast_object_list(box, src=0)
    found: bytes = box[0]
    return found


def same_settings(mine: dict[str, Any]) -> None:
    """Raise Misuse, in every process, if their settings differ: the first one scales the noise for all.

    Args:
        mine: name -> setting of this process.
    """
    processes = place()[1]
    if processes == 1:
        return
    found: list[Any] = [None] * processes
    dist.all_gather_object(found, mine)
    for name, value in found[0].items():
        for rank, other in enumerate(found):
            if other.get(name) != value:
                raise Misuse(
                    f"expected the same engine in every process, got {name}={value!r} in the first and "
                    f"{other.get(name)!r} in process {rank}: batch_size and sample_size are those of all together"
                )


@contextmanager
def agreed(steps: int, batch: int) -> Iterator[None]:
    """Before a release: in all processes what is inside succeeds, at the same logical batch, or all of them raise.

    Else a process whose error was caught would be a batch behind for good, and its sums in another batch's. Where it
    fails, its own error is raised, and Misuse in the others.

    Args:
        steps: logical batches that this process has released.
        batch: the number of the loader's logical batch; -1 where batches are the caller's.
    """
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        _agree(succeeded, steps, batch)


def _agree(succeeded: bool, steps: int, batch: int) -> None:
    rank, processes = place()
    if processes == 1:
        return
    found: list[Any] = [None] * processes
    dist.all_gather_object(found, (succeeded, steps, batch))
    if not succeeded:
        return
    for other, (good, their_steps, their_batch) in enumerate(found):
        if not good:
            raise Misuse(
                f"expected every process to have its part of the logical batch, but process {other} raised an error: "
                "nothing of it is released, in any of them"
            )
        if (their_steps, their_batch) != (steps, batch):
            raise Misuse(
                f"expected every process at the same logical batch, got step {their_steps} (batch {their_batch}) in "
                f"process {other} and step {steps} (batch {batch}) in process {rank}: one of them left a batch out"
            )


def same_model(model: nn.Module) -> None:
    """Every process starts with the first one's parameters and buffers.

    Args:
        model: whose tensors are overwritten in all processes but the first.
    """
    if place()[1] > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_sharded(tensor):  # of which each process holds a part of its own
                dist.broadcast(tensor.detach(), src=0)
