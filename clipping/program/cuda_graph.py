"""Record a function of tensors as a CUDA graph, which launches all its kernels by one call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM = 3
"""Runs before recording, in which libraries choose their kernels and allocate their workspaces."""


class Pool:
    """Device memory that CUDA graphs share. They must not run at the same time.

    A small extra graph keeps the pool alive: torch cannot reuse a pool whose graphs have all been freed.

    Args:
        lends: the next graph may overwrite the sums that a graph returns.
    """

    def __init__(self, *, lends: bool = False) -> None:
        self._handle: Any = None
        self.lends = lends

    def record(self, run: Callable[[], object], device: torch.device) -> Any:
        """Record `run` as a CUDA graph in this memory, and return the graph.

        Args:
            run: reads nothing back from the device.
            device: the current one.
        """
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
            self._keeper = self.record(lambda: torch.zeros(1, device=device), device)
        graph = torch.cuda.CUDAGraph()
        # if recording fails, torch leaves its own stream the current one
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=self._handle):
            run()
        return graph


class Replayed:
    """`step` as a CUDA graph: (tensors) -> new tensors.

    The graph reads and writes parameters and buffers in place. It copies the batch to its own memory, and likewise a
    buffer whose address has changed between calls. Random numbers advance as they do without a graph.

    Args:
        step: a function that reads nothing back from the device.
        given: its arguments, on one CUDA device; recording runs the step several times, which may change them.
        moving: indices of the arguments that are another tensor in each call.
        pool: memory of activations and outputs.
        lent: number of outputs, the last ones, that another graph of the pool may overwrite; the others are copied.
    """

    def __init__(
        self,
        step: Callable[..., Sequence[Tensor]],
        given: Sequence[Tensor],
        moving: Sequence[int],
        pool: Pool,
        lent: int = 0,
    ) -> None:
        self._step, self._moving, self._written, self._pool = step, set(moving), set[int](), pool
        self._lent = lent
        self._record(given)

    def __call__(self, *given: Tensor) -> list[Tensor]:
        moved = {i for i, (x, own) in enumerate(zip(given, self._own, strict=True)) if x.data_ptr() != own.data_ptr()}
        if not moved <= self._moving:
            self._moving |= moved
            self._record(given)
        for i in self._moving:
            self._own[i].copy_(given[i])
        self._graph.replay()
        for i in self._moving & self._written:
            given[i].copy_(self._own[i])
        own = self._outputs[: len(self._outputs) - self._lent]
        copies = [torch.empty_like(x) for x in own]
        torch._foreach_copy_(copies, own)
        return copies + self._outputs[len(own) :]

    def _run(self) -> None:
        self._outputs = list(self._step(*self._own))

    def _record(self, given: Sequence[Tensor]) -> None:
        self._own = [x.clone() if i in self._moving else x for i, x in enumerate(given)]
        versions = [x._version for x in self._own]
        kept = {i: self._own[i].clone() for i in self._written}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._step(*self._own)
        torch.cuda.current_stream().wait_stream(side)
        self._written = {i for i, x in enumerate(self._own) if x._version != versions[i]}
        self._graph = self._pool.record(self._run, self._own[0].device)
        for i, x in kept.items():
            self._own[i].copy_(x)
