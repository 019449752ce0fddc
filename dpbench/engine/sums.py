"""The clipped sums of a logical batch: one flat tensor on a GPU, separate tensors elsewhere.

Each launch costs the host some microseconds, and a model has hundreds of parameters. So on a CUDA device the sums of
all parameters are copied into one flat tensor. Adding pieces, drawing noise and dividing then take one launch each.
`.grad` of each parameter is a slice of it, and no two slices overlap. On a CPU a copy costs more than it saves, and
each sum stays where the backend formed it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipping.core.microbatching import sum_dtype
from clipping.noise.chacha import Segments
from dpbench.engine.sharded import as_sharded, here, replicas


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
        parameters: of the sums, by name.
        indices: of the parameters in the model's `named_parameters()`.
        data: in this process: [segments.length], or of the shape of the one parameter (of its shard).
        segments: where each sum lies; None for a single one.
        own: the memory is contiguous and not shared, so that it may be overwritten.
    """

    parameters: dict[str, nn.Parameter]
    indices: tuple[int, ...]
    data: Tensor
    segments: Segments | None = None
    own: bool = False

    def round(self) -> None:
        """Convert to the noise's precision, float32 or the parameters' if wider, in memory of its own."""
        dtype = torch.promote_types(next(iter(self.parameters.values())).dtype, torch.float32)
        if self.data.dtype != dtype or not self.own:
            self.data = self.data.to(dtype, copy=True, memory_format=torch.contiguous_format)
            self.own = True

    def parts(self) -> dict[str, Tensor]:
        """Each parameter's view of `data` in this process, in its shape."""
        if self.segments is None:
            return dict.fromkeys(self.parameters, self.data)
        flat = self.segments.parts(self.data)
        shapes = (here(p).shape for p in self.parameters.values())
        return {name: x.view(shape) for name, x, shape in zip(self.parameters, flat, shapes, strict=True)}


@dataclass(eq=False)
class Sums(Mapping[str, Tensor]):
    """Parameter's name -> the sum of its clipped gradients, float32 or wider; a DTensor if the parameter is one.

    Attributes:
        blocks: hold the sums.
        counted: the count of `adjust.watch_norms` for their records.
    """

    blocks: list[Block] = field(default_factory=list)
    counted: float = 0.0

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return (name for block in self.blocks for name in block.parameters)

    def __len__(self) -> int:
        return sum(len(block.parameters) for block in self.blocks)

    @functools.cached_property
    def _parts(self) -> dict[str, Tensor]:
        return {
            name: as_sharded(part, block.parameters[name])
            for block in self.blocks
            for name, part in block.parts().items()
        }

    def add(self, older: Sums) -> None:
        """Add another piece's sums of the same parameters, in float64; `older` is not changed.

        In float64 the number and order of the pieces do not matter.

        Args:
            older: of the pieces before.
        """
        self.counted += older.counted
        with torch.no_grad():
            if [list(block.parameters) for block in self.blocks] == [list(block.parameters) for block in older.blocks]:
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
    known = {name: (number, p) for number, (name, p) in enumerate(parameters.items()) if name in wanted}
    sums = Sums(counted=counted)
    kinds: dict[tuple[Any, ...], list[str]] = {}
    given: dict[str, Tensor] = {}
    for name, (number, p) in known.items():
        like = here(p)
        if name in grads:
            given[name] = like = here(grads[name]).detach()
        dtype = torch.promote_types(like.dtype, torch.float32)
        if lies_flat(like.device):
            kinds.setdefault((like.device, dtype, p.dtype, *replicas(p)), []).append(name)
        else:
            total = given[name].to(dtype) if name in given else torch.zeros_like(like, dtype=dtype)
            sums.blocks.append(Block({name: p}, (number,), total))
    for block, own in zip(sums.blocks, apart([block.data for block in sums.blocks]), strict=True):
        block.own = own
    for (device, dtype, *_), together in kinds.items():
        members, indices = {name: known[name][1] for name in together}, tuple(known[name][0] for name in together)
        segments = _segments(tuple(here(p).numel() for p in members.values()), indices)
        block = Block(members, indices, torch.zeros(segments.length, dtype=dtype, device=device), segments, own=True)
        _fill(dict(zip(together, segments.parts(block.data), strict=True)), given)
        sums.blocks.append(block)
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
