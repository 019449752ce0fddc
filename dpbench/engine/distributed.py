"""The engine in several processes, under torchrun: one sum over all of them, one draw of noise, one sample.

Each process clips the records of its shard of the logical batch. The first process reduces the sums, adds the noise
once, and broadcasts the result. As in ordinary training, the gradients exchanged before that are not private. The key
of the sampling and the model come from the first process. If you bring your own batches, no two processes may hold the
same record: it would be in the sum twice.

`DistributedDataParallel` is not needed: it averages unclipped gradients. A model wrapped in it is accepted, and its own
communication is off while the engine is attached.

`clipping.distributed.fsdp` clips a model that FSDP2 has sharded (``fully_shard``). Its sums are over all processes
already, each in the process that holds the shard. That process adds the noise, see `dpbench.engine.release`.
"""

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
    """Switch the communication of a DistributedDataParallel off or on again; other modules are not changed.

    Args:
        on: True switches communication off.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = not on
        model.require_forward_param_sync = not on  # syncs buffers: processes may have different numbers of pieces


def shared_key(key: bytes) -> bytes:
    """Returns the first process's key."""
    if place()[1] == 1:
        return key
    box: list[Any] = [key]
    dist.broadcast_object_list(box, src=0)
    found: bytes = box[0]
    return found


def same_settings(mine: dict[str, Any]) -> None:
    """Raise Misuse in every process if their settings differ, as the first one scales the noise for all.

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
    """Run the body before a release of several processes: it succeeds in all, at the same batch, or all of them raise.

    A failing process raises its own error, the others Misuse. Otherwise a process that caught its error would stay a
    batch behind, and its sums would enter another batch.

    Args:
        steps: logical batches that this process has released.
        batch: the number of the loader's logical batch; -1 for the caller's own.
    """
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        rank, processes = place()
        found: list[Any] = [None] * processes
        dist.all_gather_object(found, (succeeded, steps, batch))
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
    """Overwrite the parameters and buffers of all processes with the first one's."""
    if place()[1] > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_sharded(tensor):  # each process holds its own part
                dist.broadcast(tensor.detach(), src=0)
