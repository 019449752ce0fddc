"""From the sums of a logical batch to gradients: over all processes, with noise, once, and divided by b.

On a GPU all of it is some twenty launches, and nothing is awaited on the host: see `dpbench.engine.sums`, and for sums
that are not finite `dpbench.engine.finite`. Elsewhere noise is drawn for all parameters in one call, over their sums.
In several processes reductions to the first are all begun before the first is waited for, and each result is on its way
to the others while the noise of the next is drawn: what crosses is one sum there and one back, after the backward pass.
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
    """Set `.grad` of each trainable parameter: (sum over all processes + N(0, deviation²)) / batch_size.

    Args:
        members: all parameters of the model, resharded, in its own order.
        sums: this process's, of the parameters that a loss depended on; used up. Of a sharded parameter: everybody's.
        noise: of the first process, or of the one that has the shard.
        deviation: σ times the sensitivity.
        batch_size: b.
        step: its number, of which no other release with this noise has the same.

    Returns:
        What nobody has read yet: (names, [names] bool), of each parameter on a GPU whether its sum was finite. Where
        one was not, all of these had noise alone. None if there is no such parameter.
    """
    parameters = {name: p for name, p in members.items() if p.requires_grad}
    for name in members.keys() - parameters.keys():
        members[name].grad = None  # of data before it was frozen: the optimizer would apply it as it is
    if set(sums) != parameters.keys():
        sums = gathered(sums, members, parameters)
    blocks, sums.blocks = sums.blocks, []
    for block in blocks:  # where the model has another tensor in a parameter's place by now
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
    """And divide by b. Of all blocks: flat ones in place, and the others in one call."""
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
    """What the first replica of a shard has goes to the others: noise is drawn once."""
    for block in blocks:
        for group in replicas(next(iter(block.parameters.values()))):
            dist.broadcast(block.data, src=dist.get_global_rank(group, 0), group=group)


def _hand_over(blocks: Sequence[Block]) -> None:
    """`.grad` of the parameters are parts of the blocks."""
    for block in blocks:
        block.data = block.data.to(next(iter(block.parameters.values())).dtype)
        for name, part in block.parts().items():
            p = block.parameters[name]
            p.grad = as_sharded(_laid_out_as(here(p), part), p)


def _laid_out_as(p: Tensor, grad: Tensor) -> Tensor:
    """In memory as autograd would lay it out: a fused optimizer pairs entries by where they lie, and does not ask."""
    like = grad if p.is_contiguous() else torch.empty_like(p, dtype=grad.dtype)
    return grad if like.stride() == grad.stride() else like.copy_(grad)


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # of a process that is not in the group
        work.wait()
