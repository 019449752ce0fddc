"""From the sums of a logical batch to gradients: over all processes, with noise, once, and divided by b.

Reductions to the first process are all begun before the first is waited for, and each result is on its way to the
others while the noise of the next is drawn: what crosses is one sum there and one back, after the backward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping.spread import is_sharded, reshard
from dpbench.engine.distributed import place
from dpbench.engine.noise import At, Noise
from dpbench.engine.sharded import with_noise


def release_gradients(
    model: nn.Module, sums: dict[str, Tensor], noise: Noise, deviation: float, batch_size: int, step: int
) -> None:
    """Set `.grad` of each trainable parameter: (sum over all processes + N(0, deviation²)) / batch_size.

    Args:
        model: not its wrapper.
        sums: this process's, of the parameters that a loss depended on; used up. Of a sharded parameter: everybody's.
        noise: of the first process, or of the one that has the shard.
        deviation: σ times the sensitivity.
        batch_size: b.
        step: its number, of which no other release with this noise has the same.
    """
    reshard(model)
    for p in model.parameters():
        if not p.requires_grad:
            p.grad = None  # of data before it was frozen: the optimizer would apply it as it is
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    index = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    rank, processes = place()
    totals: dict[str, Tensor] = {}
    for name, p in parameters.items():
        wide = torch.promote_types(p.dtype, torch.float32)
        total = (sums.pop(name) if name in sums else torch.zeros_like(p, dtype=wide)).detach()
        totals[name] = total if is_sharded(p) else total.contiguous()
    alone = {name: is_sharded(p) or processes == 1 for name, p in parameters.items()}
    reductions = {name: dist.reduce(totals[name], dst=0, async_op=True) for name in totals if not alone[name]}
    broadcasts = {}
    for name, p in parameters.items():
        if name in reductions:
            _wait(reductions[name])
        if is_sharded(p):
            totals[name] = with_noise(totals[name], noise, deviation, At(step, rank, index[name]))
        elif deviation and rank == 0:
            totals[name] = noise.added(totals[name], deviation, At(step, rank, index[name]))
        if name in reductions:
            broadcasts[name] = dist.broadcast(totals[name], src=0, async_op=True)
    for name, p in parameters.items():
        if name in broadcasts:
            _wait(broadcasts[name])
        p.grad = (totals.pop(name) / batch_size).to(p.dtype)


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # of a process that is not in the group
        work.wait()
