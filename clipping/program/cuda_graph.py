"""Record a function of tensors as a CUDA graph, which launches all its kernels by one call."""

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from clipping.numerics.rng_replay import Draws, is_random

WARM = 3
"""Runs before recording, in which libraries choose their kernels and allocate their workspaces."""
_ALONE = threading.Lock()
"""Held while a thread records: torch records one graph at a time."""


class Pool:
    """Device memory that CUDA graphs share. They must not run at the same time.

    A small extra graph keeps the pool alive: torch cannot reuse a pool whose graphs have all been freed.

    Args:
        lends: the next graph may overwrite the sums that a graph returns.

    Methods take:
        run: reads nothing back from the device.
        device: of its tensors.
    """

    def __init__(self, *, lends: bool = False) -> None:
        self._handle: Any = None
        self.lends = lends

    def record(self, run: Callable[[], object], device: torch.device) -> Any:
        """Run `run` a few times, record it as a CUDA graph in this memory, and return the graph."""
        if self._handle is None:
            self._begin(device)
        now = torch.cuda.current_stream(device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM):
                run()
        now.wait_stream(self._stream)
        gc.collect()  # an older graph, freed during the recording, would spoil it
        try:
            return self._recorded(run, device)
        except BaseException:
            self._begin(device)  # torch draws no numbers until a recording ends well
            raise

    def _begin(self, device: torch.device) -> None:
        self._handle, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._keeper = self._recorded(lambda: torch.zeros(1, device=device), device)

    def _recorded(self, run: Callable[[], object], device: torch.device) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                # the device need not be the current one; if it fails, torch leaves its own stream the current one
                torch.cuda.stream(torch.cuda.current_stream(device)),
                # other threads may allocate meanwhile, such as one that pins a loader's batches; but none records
                _ALONE,
                torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"),
            ):
                run()
        except BaseException as error:
            # where CUDA cannot end a recording, torch does not tell its allocator, which would take it for one that
            # goes on: it would free no cached memory and refuse `empty_cache`
            with suppress(RuntimeError):  # it has been told
                torch._C._cuda_endAllocateToPool(device.index, self._handle)
                torch._C._cuda_releasePool(device.index, self._handle)
            if "previous error" in str(error) and error.__context__ is not None:
                raise error.__context__ from None  # says why
            raise
        return graph


class Replayed:
    """`step` as a CUDA graph: (tensors) -> new tensors.

    The graph reads and writes parameters and buffers in place. It copies the batch to its own memory, and likewise a
    buffer whose address has changed between calls. Random numbers advance as they do without a graph.

    Args:
        step: a function that reads nothing back from the device.
        given: its arguments, on one CUDA device; recording runs the step several times, which may change them.
        moving: indices of the arguments that differ in each call, such as the batch.
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
        self._graph: Any = None
        self._lent = lent
        self._record(given)

    def __call__(self, *given: Tensor) -> list[Tensor]:
        moved = {i for i, (x, own) in enumerate(zip(given, self._own, strict=True)) if x.data_ptr() != own.data_ptr()}
        if self._graph is None or not moved <= self._moving:
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
        self._outputs: list[Tensor] = []  # frees the previous run's outputs
        self._outputs = list(self._step(*self._own))

    def _record(self, given: Sequence[Tensor]) -> None:
        self._graph = None  # if recording fails, as without memory, an older graph would read memory of no tensor here
        self._own = [x.clone() if i in self._moving else x for i, x in enumerate(given)]
        versions = [x._version for x in self._own]
        kept = {i: self._own[i].clone() for i in self._written}
        try:
            with Draws().again():
                self._graph = self._pool.record(self._run, self._own[0].device)
            self._written = {i for i, x in enumerate(self._own) if x._version != versions[i]}
        finally:
            for i, x in kept.items():
                self._own[i].copy_(x)


def needs_host(graph: GraphModule, device: torch.device) -> bool:
    """Return whether the host computes or copies a part of the step, which a replay would not repeat.

    Constant numbers of the host do not count: a kernel may take them as arguments.

    Args:
        graph: a traced step, from make_fx.
        device: of the batch.
    """
    constants = set[Node]()  # of the host
    for node in graph.graph.nodes:
        of_host = [x for x in node.all_input_nodes if _on_host(x, device)]
        if node.op == "output" or not (of_host or _on_host(node, device)):
            continue
        if not _on_host(node, device):
            numbers = all(x in constants and not x.meta["val"].dim() for x in of_host)
            if not numbers or node.target is torch.ops.aten._to_copy.default:
                return True
        elif node.op == "get_attr" or (constants >= {*node.all_input_nodes} and _is_constant(node)):
            constants.add(node)
        else:
            return True
    return False


def _on_host(node: Node, device: torch.device) -> bool:
    return any(x.device != device for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor))


def _is_constant(node: Node) -> bool:
    """Whether it is the same whenever its inputs are."""
    return node.op == "call_function" and not is_random(node.target, node.args, dict(node.kwargs))
