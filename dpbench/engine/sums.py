"""The clipped sums of a logical batch: one flat tensor on a GPU, separate tensors elsewhere, shards of DTensors.

Each launch costs the host some microseconds, and a model has hundreds of parameters. So on a CUDA device the sums of
all parameters are copied into one flat tensor. Adding pieces, drawing noise and dividing then take one launch each.
`.grad` of each parameter is a slice of it, and no two slices overlap. On a CPU a copy costs more than it saves, and
each sum stays where the backend formed it.

If parameters are DTensors, each process has the sum of its shard and adds the noise of its shard. Independent draws of
N(0, σ²S²) for the shards equal one draw for the whole. Each process draws at a place of its own (its rank), which makes
the draws independent even under one key, from one checkpoint. If shards have replicas (HSDP), the first replica draws,
and broadcasts its result. The caller's generator draws the whole parameter in every process, which keeps its shard: any
number of processes then repeats the training.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping.core.microbatching import sum_dtype
from clipping.distributed.spread import any_sharded, as_sharded, here, is_sharded
from clipping.noise.chacha import Segments


def lies_flat(device: torch.device) -> bool:
    """Returns whether sums on this device share a flat tensor, whose finiteness flags are then read later.

    Args:
        device: of the parameters.
    """
    return device.type == "cuda"


@dataclass(eq=False)
class Block:
    """Sums in one flat tensor, or a single sum in its own.

    Attributes:
        names, shapes: of the parameters; the shapes of their shards in this process.
        indices: of the parameters in the model's `named_parameters()`.
        data: in this process: [segments.length], or of the one shape.
        segments: where each sum lies; None for a single one.
        own: the memory is contiguous and not shared, so that it may be overwritten.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    indices: tuple[int, ...]
    data: Tensor
    segments: Segments | None = None
    own: bool = False

    def parts(self) -> list[Tensor]:
        """Each parameter's view of `data` in this process, in its shape."""
        if self.segments is None:
            return [self.data]
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
                    mine.data, mine.own = theirs.data.to(sum_dtype(theirs.data), copy=True).add_(mine.data), True
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
    """Collect the sums of some parameters: those in `grads`, and zeros for others.

    Args:
        grads: of each parameter's shape; a DTensor if it is one. On a CPU they are not copied.
        parameters: all of the model, in its own order.
        names: of the wanted parameters; None for those in `grads`.
        counted: of their records.
    """
    wanted = set(grads if names is None else names)
    sums = Sums(parameters=parameters, counted=counted)
    sharded, is_flat = any_sharded(parameters.values()), functools.cache(lies_flat)
    kinds: dict[tuple[Any, ...], list[tuple[str, torch.Size, int]]] = {}
    given: dict[str, Tensor] = {}
    for number, (name, p) in enumerate(parameters.items()):
        if name not in wanted:
            continue
        like: Tensor = grads[name].detach() if name in grads else p
        like = here(like) if sharded else like
        if name in grads:
            given[name] = like
        dtype = torch.promote_types(like.dtype, torch.float32)
        if is_flat(like.device):
            kind = like.device, dtype, p.dtype, *(replicas(p) if sharded else ())
            kinds.setdefault(kind, []).append((name, like.shape, number))
        else:
            total = like.to(dtype) if name in given else torch.zeros_like(like, dtype=dtype)
            sums.blocks.append(Block((name,), (like.shape,), (number,), total))
    for block, own in zip(sums.blocks, apart([block.data for block in sums.blocks]), strict=True):
        block.own = own
    for (device, dtype, *_), members in kinds.items():
        together, shapes, indices = zip(*members, strict=True)
        segments = _segments(tuple(map(torch.Size.numel, shapes)), indices)
        flat = torch.zeros(segments.length, dtype=dtype, device=device)
        _fill(dict(zip(together, segments.parts(flat), strict=True)), given)
        sums.blocks.append(Block(together, shapes, indices, flat, segments, own=True))
    return sums


def apart(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor is contiguous and overlaps no other.

    Args:
        tensors: on any device; a tensor that is not contiguous counts as all of its storage.
    """
    found = [x.is_contiguous() for x in tensors]
    spans = []
    for i, x in enumerate(tensors):
        first = x.storage_offset() * x.element_size() if found[i] else 0
        size = x.numel() * x.element_size() if found[i] else x.untyped_storage().nbytes()
        spans.append((x.untyped_storage()._cdata, first, first + size, i))
    spans.sort()
    reached: tuple[Any, Any, int] = 0, 0, 0  # (storage, furthest end in it, its tensor)
    for storage, first, end, i in spans:
        if storage == reached[0] and first < reached[1]:
            found[i] = found[reached[2]] = False
        if storage != reached[0] or end > reached[1]:
            reached = storage, end, i
    return found


@functools.lru_cache(maxsize=16)
def _segments(counts: tuple[int, ...], labels: tuple[int, ...]) -> Segments:
    """Cached for a model, as the tables are on the device."""
    return Segments(counts, labels)


def _fill(parts: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy the given sums into their parts [n], all contiguous ones at once."""
    names = [name for name in parts if name in given]
    straight = [name for name in names if given[name].is_contiguous()]
    if straight:
        torch._foreach_copy_([parts[name] for name in straight], [given[name].view(-1) for name in straight])
    for name in names:
        if not given[name].is_contiguous():
            parts[name].view(given[name].shape).copy_(given[name])


def replicas(p: Any) -> tuple[Any, ...]:
    """The process groups of this process's replicas of a parameter; none for an ordinary one.

    Args:
        p: a parameter.
    """
    if not is_sharded(p):
        return ()
    return tuple(p.device_mesh.get_group(dim) for dim, x in enumerate(p.placements) if x.is_replicate())


def everywhere(true: Tensor) -> Tensor:
    """Combine bools by `and` over all processes, so that all continue or all raise.

    Args:
        true: bools, of any shape.
    """
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
