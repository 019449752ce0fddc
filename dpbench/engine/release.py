"""Turn the sums of a logical batch into gradients: reduce over processes, add noise once, divide by b.

Noise is scaled to the `sensitivity` of the computed sum. Each sum crosses once to the first process and once back,
after the backward pass. On a GPU this takes some twenty launches and does not synchronise: see `dpbench.engine.sums`,
and `dpbench.engine.finite` for sums that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping.backends.base import Backend
from clipping.distributed.spread import any_sharded, as_sharded, here
from dpbench.engine.distributed import place
from dpbench.engine.finite import empty, finite, later
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
            not, all these gradients are noise alone. None without a parameter on a GPU.
    """
    parameters = {name: p for name, p in members.items() if p.requires_grad}
    for name in members.keys() - parameters.keys():
        members[name].grad = None  # from before it was frozen; the optimizer would apply it
    if set(sums) != parameters.keys():
        sums = gathered(sums, members, parameters)
    blocks, sums.blocks = sums.blocks, []
    for block in blocks:  # the noise's precision is float32, or the parameters' if wider
        block.data = block.data.to(torch.promote_types(parameters[block.names[0]].dtype, torch.float32))
    rank, processes = place()
    sharded = any_sharded(parameters.values())
    crossing = processes > 1 and not sharded
    if crossing:
        _wait(dist.reduce(block.data, dst=0, async_op=True) for block in blocks)
    unread = None
    if on_device := later(blocks):
        flags = finite(on_device)
        if sharded:
            flags = everywhere(flags)
        elif crossing:
            dist.broadcast(flags, src=0)
        empty(on_device, unless=flags)
        unread = [name for block in on_device for name in block.names], flags
    if deviation and (sharded or rank == 0):
        for block in blocks:
            if sharded and noise.repeatable:
                _add_shards(block, noise, deviation, step, parameters)
            else:
                noise.add_to_flat(block.data, block.segments, deviation, step, rank)
    if sharded:
        _from_first_replica(blocks, parameters)
    elif crossing:
        _wait(dist.broadcast(block.data, src=0, async_op=True) for block in blocks)
    if blocks:
        torch._foreach_div_([block.data for block in blocks], batch_size)
    _hand_over(blocks, parameters)
    return unread


def _add_shards(
    block: Block, noise: Noise, deviation: float, step: int, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Add this process's shards of the noise that every process draws of the whole parameters."""
    for name, part, i in zip(block.names, block.parts(), block.segments.labels, strict=True):
        zeros = torch.zeros(parameters[name].shape, dtype=part.dtype, device=part.device)
        part.add_(shard_of(noise.added(zeros, deviation, At(step, place()[0], i)), parameters[name]))


def _from_first_replica(blocks: Iterable[Block], parameters: Mapping[str, nn.Parameter]) -> None:
    """Broadcast each shard from its first replica, as noise is drawn once."""
    for block in blocks:
        for group in replicas(parameters[block.names[0]]):
            dist.broadcast(block.data, src=dist.get_global_rank(group, 0), group=group)


def _hand_over(blocks: Iterable[Block], parameters: Mapping[str, nn.Parameter]) -> None:
    """Point each `.grad` at its slice of the block, laid out as autograd would.

    A fused optimizer pairs entries by memory position, without a check.
    """
    for block in blocks:
        block.data = block.data.to(parameters[block.names[0]].dtype)
        for name, grad in zip(block.names, block.parts(), strict=True):
            p = parameters[name]
            mine = here(p)
            if not mine.is_contiguous():
                like = torch.empty_like(mine, dtype=grad.dtype)
                grad = grad if like.stride() == grad.stride() else like.copy_(grad)
            p.grad = as_sharded(grad, p)


def _wait(works: Iterable[Any]) -> None:
    """Start all communication before waiting for it."""
    for work in list(works):
        if work is not None:  # None if this process is not in the group
            work.wait()
