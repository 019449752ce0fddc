"""A function of tensors as a CUDA graph: its kernels are launched by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM = 3
"""Runs before it is recorded, in which libraries choose their kernels and allocate their workspaces."""


class Replayed:
    """(tensors) -> new tensors, as `step` gives.

    Parameters and buffers are read where they lie; if one is given that lies elsewhere, the graph is recorded anew. A
    batch is copied to memory of the graph's own. Random numbers advance as they do without a graph.

    Args:
        step: reads nothing back from the device.
        given: its arguments, on one CUDA device.
        moving: the places of those that are another tensor in each call.
    """

    def __init__(self, step: Callable[..., Sequence[Tensor]], given: Sequence[Tensor], moving: Sequence[int]) -> None:
        self._step, self._moving = step, set(moving)
        self._record(given)

    def __call__(self, *given: Tensor) -> list[Tensor]:
        if any(x.data_ptr() != own.data_ptr() for i, x, own in self._pairs(given) if i not in self._moving):
            self._record(given)
        for i, x, own in self._pairs(given):
            if i in self._moving:
                own.copy_(x)
        self._graph.replay()
        return [x.clone() for x in self._outputs]

    def _pairs(self, given: Sequence[Tensor]) -> Sequence[tuple[int, Tensor, Tensor]]:
        return [(i, x, own) for i, (x, own) in enumerate(zip(given, self._own, strict=True))]

    def _record(self, given: Sequence[Tensor]) -> None:
        self._own = [x.clone() if i in self._moving else x for i, x in enumerate(given)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._step(*self._own)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = list(self._step(*self._own))
