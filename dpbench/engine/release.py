"""Turn the sums of a logical batch into gradients: reduce over processes, add noise once, divide by b.

On a GPU this takes some twenty launches and does not synchronise: see `dpbench.engine.sums`, and
`dpbench.engine.finite` for sums that are not finite. Elsewhere one call draws the noise of all parameters.

In several processes all reductions to the first start before it waits for one, and each result is broadcast while the
next one's noise is drawn. Each sum crosses once to the first process and once back, after the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping.distributed.spread import is_sharded
from dpbench.engine.distributed import place
from dpbench.engine.finite import empty, finite
from dpbench.engine.noise import At, Noise
from dpbench.engine.sharded import as_sharded, everywhere, here, replicas, shard_of
from dpbench.engine.sums import Block, Sums, gathered


@torch.no_grad()
def release_gradients(
    members: Mapping[str, nn.Parameter], sums: Sums, noise: Noise, deviation: float, batch_size: int, step: int
) -> tuple[list[str], Tensor] | None:
    """Set `.grad` of each trainable parameter to (sum over all processes + N(0, deviation²)) / batch_size.

    Args:
        members: all parameters of the model, resharded, in its own order.
        sums: this process's, of the parameters that a loss depended on; overwritten. Of a sharded parameter, over all
            processes.
        noise: of the first process, or of the one that has the shard.
        deviation: σ times the sensitivity.
        batch_size: b.
        step: its number, unique among the releases with this noise.

    Returns:
        The flags that the host has not read: (names, [names] bool), whether each sum on a GPU was finite. If one was
            not,
        all these gradients are noise alone. None without a parameter on a GPU.
    """
    parameters = {name: p for name, p in members.items() if p.requires_grad}
    for name in members.keys() - parameters.keys():
        members[name].grad = None  # from before it was frozen; the optimizer would apply it
    if set(sums) != parameters.keys():
        sums = gathered(sums, members, parameters)
    blocks, sums.blocks = sums.blocks, []
    for block in blocks:  # the model may have replaced a parameter's tensor
        block.parameters = {name: parameters[name] for name in block.parameters}
        block.round()
    rank, processes = place()
    sharded = any(map(is_sharded, parameters.values()))
    works: list[Any] = []
    if processes > 1 and not sharded:
        works = [dist.reduce(block.data, dst=0, async_op=True) for block in blocks]
    crossing = bool(works)
    later = [block for block in blocks if block.segments is not None]
    unread = None
    if later:
        while works:
            _wait(works.pop())
        flags = finite(later)
        if sharded:
            flags = everywhere(flags, parameters)
        elif crossing:
            dist.broadcast(flags, src=0)
        empty(later, unless=flags)
        unread = [name for block in later for name in block.parameters], flags
    broadcasts = []
    for i, together in enumerate([[block] for block in blocks] if crossing else [blocks]):
        if works:
            _wait(works[i])
        if deviation and (sharded or rank == 0):
            _add_noise(together, noise, deviation, batch_size, step, rank)
        if sharded:
            _from_first_replica(together)
        elif crossing:
            broadcasts.append(dist.broadcast(together[0].data, src=0, async_op=True))
    for work in broadcasts:
        _wait(work)
    if not deviation and blocks:
        torch._foreach_div_([block.data for block in blocks], batch_size)
    _hand_over(blocks)
    return unread


def _add_noise(blocks: Sequence[Block], noise: Noise, deviation: float, batch_size: int, step: int, rank: int) -> None:
    """Add noise and divide by b: flat blocks in place, and all others in one call."""
    alone, divided = [], []
    for block in blocks:
        if noise.repeatable and any(map(is_sharded, block.parameters.values())):
            for (name, part), i in zip(block.parts().items(), block.indices, strict=True):
                p = block.parameters[name]
                whole = torch.zeros(p.shape, dtype=part.dtype, device=part.device)
                part.add_(shard_of(noise.added(whole, deviation, At(step, rank, i)), p))
            divided.append(block.data)
        elif block.segments is not None:
            noise.add_to_flat(block.data, block.segments, deviation, step, rank)
            divided.append(block.data)
        else:
            alone.append(block)
    places = [At(step, rank, block.indices[0]) for block in alone]
    found = noise.added_to_all([block.data for block in alone], deviation, places, divisor=batch_size)
    for block, data in zip(alone, found, strict=True):
        block.data = data
    if divided:
        torch._foreach_div_(divided, batch_size)


def _from_first_replica(blocks: Sequence[Block]) -> None:
    """Broadcast each shard from its first replica, as noise is drawn once."""
    for block in blocks:
        for group in replicas(next(iter(block.parameters.values()))):
            dist.broadcast(block.data, src=dist.get_global_rank(group, 0), group=group)


def _hand_over(blocks: Sequence[Block]) -> None:
    """Point each `.grad` at its slice of the block."""
    for block in blocks:
        block.data = block.data.to(next(iter(block.parameters.values())).dtype)
        for name, part in block.parts().items():
            p = block.parameters[name]
            p.grad = as_sharded(_laid_out_as(here(p), part), p)


def _laid_out_as(p: Tensor, grad: Tensor) -> Tensor:
    """Lay `grad` out as autograd would: a fused optimizer pairs entries by memory position, without a check."""
    like = grad if p.is_contiguous() else torch.empty_like(p, dtype=grad.dtype)
    return grad if like.stride() == grad.stride() else like.copy_(grad)


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # None if this process is not in the group
        work.wait()
