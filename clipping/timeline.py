"""What a step holds in memory while its backward pass runs, predicted before it begins.

The graph of the losses says which tensors autograd saved, and the number of its nodes in which order it will visit them
(the latest first): a saved tensor is let go of by the last node that saved it. From this follows, for each moment at
which the gradient of a use arrives, what is held

    by both                 saved tensors that are still needed, and the gradients on their way from node to node
    by ordinary training    the weight gradients that are there already
    by book-keeping         what is kept for the sum, and the workspace of a norm

beside parameters, buffers and batch. Temporaries inside kernels are not seen.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from clipping.tape import nodes


@dataclass(frozen=True)
class Held:
    """What one use would hold from the arrival of its gradient on.

    Attributes:
        node: the number of the node of its output.
        kept: bytes that are there from then on (instantiated gradients, or the output's gradient).
        input: the storage of its input if that is kept as well, else None.
        workspace: bytes that finding the norm takes at that moment.
    """

    node: int
    kept: int
    input: int | None
    workspace: int


class Timeline:
    """The moments of one backward pass, which visits the nodes of the graph from the last one made to the first.

    Between two moments at which book-keeping may begin to hold more, only the fullest one is looked at.

    Args:
        losses: [B], with their graph.
        uses: the number of the node, and the bytes of the parameters, of each use.
        outside: tensors that are held whatever happens (parameters, buffers), not counted as saved.

    Attributes:
        outside: their bytes.
        ordinary: the most that ordinary training holds.
    """

    def __init__(self, losses: Tensor, uses: Sequence[tuple[int, int]], outside: Iterable[Tensor]) -> None:
        given = {storage_of(x): x.untyped_storage().nbytes() for x in outside}
        self.outside = sum(given.values())
        visited = sorted(nodes([losses.grad_fn]), key=lambda node: -node._sequence_nr())
        self._times = [-node._sequence_nr() for node in visited]  # ascending, for bisect
        count = len(visited)
        self._sizes: dict[int, int] = {}
        self._freed: dict[int, int] = {}  # storage -> the first moment at which it is gone
        for time, node in enumerate(visited):
            for saved in _saved(node):
                if storage_of(saved) not in given:
                    self._sizes[storage_of(saved)] = saved.untyped_storage().nbytes()
                    self._freed[storage_of(saved)] = time + 1
        changes = [0] * (count + 1)
        for storage, time in self._freed.items():
            changes[0] += self._sizes[storage]
            changes[time] -= self._sizes[storage]
        for first, last, size in _on_the_way(visited):
            changes[first] += size
            changes[last + 1] -= size
        both = list(accumulate(changes))
        gradients = [0] * (count + 1)
        for node, size in uses:
            gradients[self._moment(node)] += size
        self.ordinary = max(map(sum, zip(both, accumulate(gradients), strict=True)))
        self._sums = sorted(uses)  # formed when the backward pass is over, the first layer first
        events = {0, count, *self._freed.values(), *(self._moment(node) for node, _ in uses)}
        self._begins = sorted(events | {time + 1 for time in events if time < count})
        self._both = [max(both[a:b]) for a, b in pairwise([*self._begins, count + 1])]

    def peak(self, held: Iterable[Held]) -> int:
        """The most bytes that book-keeping holds."""
        held = list(held)
        grown = [0] * len(self._begins)
        keepers: Counter[int] = Counter()
        for use in held:
            at = self._segment(self._moment(use.node))
            grown[at] += use.kept
            if use.input is not None:
                keepers[use.input] += 1
                if keepers[use.input] == 1:
                    time = max(self._moment(use.node), self._freed.get(use.input, 0))
                    grown[self._segment(time)] += self._sizes.get(use.input, 0)
        totals = [a + b for a, b in zip(self._both, accumulate(grown), strict=True)]
        for use in held:
            at = self._segment(self._moment(use.node))
            totals[at] += use.workspace
        return max(*totals, self._peak_of_sums(held, sum(grown), keepers))

    def _peak_of_sums(self, held: Sequence[Held], kept: int, keepers: Counter[int]) -> int:
        """The most bytes at the end: the sum of one use after the other is formed, then what it was formed from goes.

        Args:
            held: by each use.
            kept: bytes of all of it.
            keepers: of each input that is kept, how many keep it; used up here.
        """
        by_node: dict[int, list[Held]] = {}
        for use in held:
            by_node.setdefault(use.node, []).append(use)
        peak = 0
        for node, size in self._sums:
            kept += size
            here = by_node.get(node, ())
            # what the library's kernel sums up is multiplied by the factors first, in a tensor of its own
            peak = max(peak, kept + max((use.kept for use in here if use.input is not None), default=0))
            for use in here:
                kept -= use.kept
                if use.input is not None:
                    keepers[use.input] -= 1
                    kept -= 0 if keepers[use.input] else self._sizes.get(use.input, 0)
        return peak

    def _moment(self, node: int) -> int:
        """When the node of this number is visited."""
        return bisect.bisect_left(self._times, -node)

    def _segment(self, time: int) -> int:
        return bisect.bisect_right(self._begins, time) - 1


def storage_of(x: Tensor) -> int:
    """An identity of the memory behind a tensor, while it lives."""
    return x.untyped_storage()._cdata


ALIASES = ("Add", "View", "Reshape", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Clone", "_Anchor", "Alias")
"""Nodes that hand on the gradient that they are given, or a view of it."""


def _on_the_way(visited: Sequence[Any]) -> Iterable[tuple[int, int, int]]:
    """(time at which it is made, last time at which it is held, bytes) of each gradient between nodes.

    Args:
        visited: the nodes in the order of the backward pass.
    """
    incoming: dict[Any, tuple[int, int]] = {}  # node -> its gradient: (key, bytes)
    born: dict[int, tuple[int, int]] = {}  # key -> (when it is made, bytes)
    last: dict[int, int] = {}
    for time, node in enumerate(visited):
        given = incoming.get(node)
        if given is not None:
            last[given[0]] = time
        hands_on = given is not None and type(node).__name__.rstrip("0123456789").removesuffix("Backward") in ALIASES
        for child, index in node.next_functions:
            if child is None or not child.next_functions or _leads_to_a_leaf(child):
                continue
            size = _bytes(child, index)
            if hands_on and given is not None and child not in incoming and size == given[1]:
                incoming[child] = given
            elif child not in incoming:
                key = len(born)
                born[key] = time, size
                incoming[child] = key, size
    for key, (time, size) in born.items():
        yield time, last.get(key, time), size


def _leads_to_a_leaf(node: Any) -> bool:
    """It makes the gradient of a parameter (transposed, say), which ordinary training counts as such."""
    return all(child is None or not child.next_functions for child, _ in node.next_functions)


def _bytes(node: Any, index: int) -> int:
    metadata = node._input_metadata
    if index >= len(metadata):
        return 0
    return int(math.prod(metadata[index].shape)) * metadata[index].dtype.itemsize


_SAVED: dict[type, list[str]] = {}


def _saved(node: Any) -> Iterable[Tensor]:
    """The tensors that a node of the graph saved."""
    kind = type(node)
    if kind not in _SAVED:
        names = [name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"]
        _SAVED[kind] = names
    for name in _SAVED[kind]:
        try:
            value = getattr(node, name)
        except RuntimeError:  # changed in place since: a backward pass through this node would say so itself
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor):
                yield item
