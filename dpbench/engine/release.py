"""Turn the sums of a logical batch into gradients: reduce over processes, add noise once, divide by b.

Noise is scaled to the `sensitivity` of the computed sum.

On a GPU this takes some twenty launches and does not synchronise: see `dpbench.engine.sums`, and
`dpbench.engine.finite` for sums that are not finite. Elsewhere one call draws the noise of all parameters.

In several processes all reductions to the first start before it waits for one, and each result is broadcast while the
next one's noise is drawn. Each sum crosses once to the first process and once back, after the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping.backends.base import Backend
from clipping.distributed.spread import any_sharded, as_sharded, here
from dpbench.engine.distributed import place
from dpbench.engine.finite import empty, finite
from dpbench.engine.noise import At, Noise
from dpbench.engine.sums import Block, Sums, everywhere, gathered, replicas, shard_of

WORST = 1e-2
"""Largest η for which noise covers the worst case of all roundings; beyond it, random roundings."""
DEVIATIONS = 12
"""Deviations above the expected batch size: larger Poisson batches have probability below 1e-30."""


class Sensitivity(NamedTuple):
    """S, a bound on how far one record can move the computed sum, and in words the roundings that it holds for."""

    bound: float
    words: str


def sensitivity(backend: Backend, batch_size: int) -> Sensitivity:
    """C(1 + η) for a logical batch.

    Args:
        backend: clips; η depends on the shapes that it has seen.
        batch_size: b. Batches larger by 12 standard deviations of Poisson samples are covered.
    """
    clip = backend.clip.sensitivity
    most = math.ceil(batch_size + DEVIATIONS * (math.sqrt(batch_size) + 1))
    bound, words = backend.sensitivity_bound(most, worst=True), "in the worst case"
    if bound > clip * (1 + WORST):
        bound, words = backend.sensitivity_bound(most), "if roundings are random"
    excess = bound / clip - 1 if clip else 0.0
    return Sensitivity(bound, f"C (1 + {excess:.1e}) in floating point, {words}")


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
    for block in blocks:  # the noise's precision is float32, or the parameters' if wider; in memory of its own
        dtype = torch.promote_types(parameters[block.names[0]].dtype, torch.float32)
        if block.data.dtype != dtype or not block.own:
            block.data = block.data.to(dtype, copy=True, memory_format=torch.contiguous_format)
    rank, processes = place()
    sharded = any_sharded(parameters.values())
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
            flags = everywhere(flags)
        elif crossing:
            dist.broadcast(flags, src=0)
        empty(later, unless=flags)
        unread = [name for block in later for name in block.names], flags
    broadcasts = []
    for i, together in enumerate([[block] for block in blocks] if crossing else [blocks]):
        if works:
            _wait(works[i])
        if deviation and (sharded or rank == 0):
            whole = parameters if sharded and noise.repeatable else None
            _add_noise(together, noise, deviation, batch_size, At(step, rank, 0), whole)
        if sharded:
            _from_first_replica(together, parameters)
        elif crossing:
            broadcasts.append(dist.broadcast(together[0].data, src=0, async_op=True))
    for work in broadcasts:
        _wait(work)
    if not deviation and blocks:
        torch._foreach_div_([block.data for block in blocks], batch_size)
    _hand_over(blocks, parameters, sharded)
    return unread


def _add_noise(
    blocks: Sequence[Block],
    noise: Noise,
    deviation: float,
    batch_size: int,
    at: At,
    whole: Mapping[str, nn.Parameter] | None,
) -> None:
    """Add noise and divide by b: flat blocks in place, and all others in one call.

    Args:
        blocks, noise, deviation, batch_size: as in `release_gradients`.
        at: the place of parameter 0.
        whole: the sharded parameters, if each process draws the noise of all shards.
    """
    alone, divided = [], []
    for block in blocks:
        if whole is not None:
            for name, part, i in zip(block.names, block.parts(), block.indices, strict=True):
                zeros = torch.zeros(whole[name].shape, dtype=part.dtype, device=part.device)
                part.add_(shard_of(noise.added(zeros, deviation, at._replace(parameter=i)), whole[name]))
            divided.append(block.data)
        elif block.segments is not None:
            noise.add_to_flat(block.data, block.segments, deviation, at.step, at.process)
            divided.append(block.data)
        else:
            alone.append(block)
    places = [At(at.step, at.process, block.indices[0]) for block in alone]
    found = noise.added_to_all([block.data for block in alone], deviation, places, divisor=batch_size)
    for block, data in zip(alone, found, strict=True):
        block.data = data
    if divided:
        torch._foreach_div_(divided, batch_size)


def _from_first_replica(blocks: Sequence[Block], parameters: Mapping[str, nn.Parameter]) -> None:
    """Broadcast each shard from its first replica, as noise is drawn once."""
    for block in blocks:
        for group in replicas(parameters[block.names[0]]):
            dist.broadcast(block.data, src=dist.get_global_rank(group, 0), group=group)


def _hand_over(blocks: Sequence[Block], parameters: Mapping[str, nn.Parameter], sharded: bool) -> None:
    """Point each `.grad` at its slice of the block, laid out as autograd would.

    A fused optimizer pairs entries by memory position, without a check.
    """
    for block in blocks:
        block.data = block.data.to(parameters[block.names[0]].dtype)
        for name, grad in zip(block.names, [block.data] if block.segments is None else block.parts(), strict=True):
            p = parameters[name]
            mine = here(p) if sharded else p
            if not mine.is_contiguous():
                like = torch.empty_like(mine, dtype=grad.dtype)
                grad = grad if like.stride() == grad.stride() else like.copy_(grad)
            p.grad = as_sharded(grad, p) if sharded else grad


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # None if this process is not in the group
        work.wait()
