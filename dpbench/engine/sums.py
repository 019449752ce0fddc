"""The clipped sums of a logical batch, those of many parameters in one flat tensor.

Each launch costs a GPU's host some microseconds, and a model has hundreds of parameters. In one flat tensor, adding
pieces, drawing noise and dividing take one launch each. `.grad` of each parameter is a slice of it, and no two slices
overlap. On a CPU flat tensors are small enough for the allocator to reuse: fresh memory costs more than the copy.

If parameters are DTensors, each process has the sum of its shard and adds the noise of its shard. Independent draws of
N(0, σ²S²) for the shards equal one draw for the whole. Each process draws at a place of its own (its rank), which makes
the draws independent even under one key, from one checkpoint. If shards have replicas (HSDP), the first replica draws,
and broadcasts its result. The caller's generator draws the whole parameter in every process, which keeps its shard: any
number of processes then repeats the training.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping.core.microbatching import sum_dtype
from clipping.distributed.spread import any_sharded, as_sharded, here, is_sharded
from clipping.noise.chacha import Segments

SMALL = 2**22
"""Entries of a flat tensor on a CPU, about: 16 MB in float32."""


@dataclass(eq=False)
class Block:
    """The sums of parameters of one device and dtype, in one flat tensor.

    Attributes:
        names, shapes: of the parameters; the shapes of their shards in this process.
        data: [segments.length], in this process.
        segments: where each sum lies; its labels are the parameters' indices in the model's `named_parameters()`.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    data: Tensor
    segments: Segments

    def parts(self) -> list[Tensor]:
        """Each parameter's view of `data` in this process, in its shape."""
        return [x.view(shape) for x, shape in zip(self.segments.parts(self.data), self.shapes, strict=True)]


@dataclass(eq=False)
class Sums(Mapping[str, Tensor]):
    """Parameter's name -> the sum of its clipped gradients, float32 or wider; a DTensor if the parameter is one.

    Attributes:
        blocks: hold the sums.
        parameters: all of the model.
        counted: the count of `adjust.watch_norms` for their records.
    """

    blocks: list[Block] = field(default_factory=list)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    counted: float = 0.0

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable([block.names for block in self.blocks])

    def __len__(self) -> int:
        return sum(len(block.names) for block in self.blocks)

    @functools.cached_property
    def _parts(self) -> dict[str, Tensor]:
        return {
            name: as_sharded(part, self.parameters[name])
            for block in self.blocks
            for name, part in zip(block.names, block.parts(), strict=True)
        }

    def add(self, older: Sums) -> None:
        """Add another piece's sums of the same parameters, in float64; `older` is not changed.

        In float64 the number and order of the pieces do not matter.

        Args:
            older: of the pieces before.
        """
        self.counted += older.counted
        with torch.no_grad():
            if [block.names for block in self.blocks] == [block.names for block in older.blocks]:
                for mine, theirs in zip(self.blocks, older.blocks, strict=True):
                    mine.data = theirs.data.to(sum_dtype(theirs.data), copy=True).add_(mine.data)
            else:  # other dtypes, and so other blocks
                for name, total in older.items():
                    self[name].add_(total)


@torch.no_grad()
def gathered(
    grads: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    names: Iterable[str] | None = None,
    counted: float = 0.0,
) -> Sums:
    """Copy the sums of some parameters: those in `grads`, and zeros for others.

    Args:
        grads: of each parameter's shape; a DTensor if it is one.
        parameters: all of the model, in its own order.
        names: of the wanted parameters; None for those in `grads`.
        counted: of their records.
    """
    wanted = set(grads if names is None else names)
    sums = Sums(parameters=parameters, counted=counted)
    sharded = any_sharded(parameters.values())
    kinds: dict[tuple[Any, ...], list[tuple[str, torch.Size, int]]] = {}
    given: dict[str, Tensor] = {}
    entries = 0
    for number, (name, p) in enumerate(parameters.items()):
        if name not in wanted:
            continue
        like: Tensor = grads[name].detach() if name in grads else p
        like = here(like) if sharded else like
        if name in grads:
            given[name] = like
        dtype = torch.promote_types(like.dtype, torch.float32)
        kind = like.device, dtype, p.dtype, *(replicas(p) if sharded else ())
        if like.device.type == "cpu":
            kind = *kind, entries // SMALL
            entries += like.numel()
        kinds.setdefault(kind, []).append((name, like.shape, number))
    for (device, dtype, *_), members in kinds.items():
        together, shapes, indices = zip(*members, strict=True)
        segments = _segments(tuple(map(torch.Size.numel, shapes)), indices)
        block = Block(together, shapes, torch.zeros(segments.length, dtype=dtype, device=device), segments)
        parts = dict(zip(together, block.parts(), strict=True))
        straight = [name for name in together if name in given and given[name].is_contiguous()]
        if straight:
            torch._foreach_copy_([parts[name] for name in straight], [given[name] for name in straight])
        for name in parts.keys() & given.keys() - set(straight):
            parts[name].copy_(given[name])
        sums.blocks.append(block)
    return sums


@functools.lru_cache(maxsize=16)
def _segments(counts: tuple[int, ...], labels: tuple[int, ...]) -> Segments:
    """Cached for a model, as the tables are on the device."""
    return Segments(counts, labels)


def replicas(p: Any) -> tuple[Any, ...]:
    """The process groups of this process's replicas of a parameter; none for an ordinary one."""
    if not is_sharded(p):
        return ()
    return tuple(p.device_mesh.get_group(dim) for dim, x in enumerate(p.placements) if x.is_replicate())


def everywhere(true: Tensor) -> Tensor:
    """Combine bools by `and` over all processes, so that all continue or all raise."""
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
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = replicated.redistribute(placements=like.placements).to_local()
    return found
