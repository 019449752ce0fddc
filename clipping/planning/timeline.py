"""What a step holds in memory while its backward pass runs, predicted before it begins.

The graph of the losses says which tensors autograd saved, and the number of its nodes in which order it will visit them
(the latest first): a saved tensor is let go of by the last node that saved it. From this follows, for each moment at
which the gradient of a use arrives, what is held

    by both                 saved tensors that are still needed, the gradients on their way from node to node, and
                            what convolutions allocate inside (`clipping.numerics.convolution_memory`, on a CPU)
    by ordinary training    the weight gradients that are there already
    by book-keeping         what is kept for the sum, and the workspace of a norm

beside parameters, buffers and batch. What activation checkpointing computes once more counts for nothing. Norms from
what is kept anyway, (a, g), are found after the backward pass. Then the sums are formed, one after the other, each
letting go of what it was formed from. So a plan is a set of intervals on one axis of *segments*: of the backward pass,
with one more for each arrival of a use's gradient (a norm that is found there comes before the node of the graph
computes), of the norms after it, and of the sums.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from clipping.numerics import kernels
from clipping.numerics.convolution_memory import Convolution
from clipping.tape.graph import nodes


@dataclass(frozen=True)
class Held:
    """What one use would hold from the arrival of its gradient on.

    Attributes:
        node: the number of the node of its output.
        kept: bytes that are there from then on (instantiated gradients).
        input: the storage of its input if that is kept, else None.
        workspace: bytes that finding the norm takes, at that moment, or after the backward pass if (a, g) is kept.
        output: bytes of the output's gradient if that is kept: until then autograd holds it anyway.
        summing: bytes that forming the sum takes, beside what it is formed from and the sum.
    """

    node: int
    kept: int
    input: int | None
    workspace: int
    output: int = 0
    summing: int = 0

    @property
    def bytes(self) -> int:
        """At the most, but for an input."""
        return self.kept + self.output + self.workspace


class Timeline:
    """The segments of one backward pass, which visits the nodes of the graph from the last one made to the first.

    Between two moments at which book-keeping may begin to hold more, only the fullest one is looked at.

    Args:
        losses: [B], with their graph.
        uses: the number of the node, and the bytes of the parameters, of each use.
        outside: tensors that are held whatever happens (parameters, buffers), not counted as saved.

    Attributes:
        outside: their bytes.
        ordinary: the most that ordinary training holds.
        base: of each segment, what book-keeping holds whatever is kept.
    """

    def __init__(self, losses: Tensor, uses: Sequence[tuple[int, int]], outside: Iterable[Tensor]) -> None:
        given = {storage_of(x): x.untyped_storage().nbytes() for x in outside if x.layout is torch.strided}
        self.outside = sum(given.values())
        visited = sorted(nodes([losses.grad_fn]), key=lambda node: -node._sequence_nr())
        with _nothing_computed_again():
            self._lay_out(visited, uses, given)

    def _lay_out(self, visited: Sequence[Any], uses: Sequence[tuple[int, int]], given: Mapping[int, int]) -> None:
        self._times = [-node._sequence_nr() for node in visited]  # ascending, for bisect
        count = len(visited)
        self._sizes: dict[int, int] = {}
        self._freed: dict[int, int] = {}  # storage -> the first moment at which it is gone
        for time, node in enumerate(visited):
            for saved in _saved(node):
                if saved.layout is torch.strided and storage_of(saved) not in given:  # others have no one memory
                    self._sizes[storage_of(saved)] = saved.untyped_storage().nbytes()
                    self._freed[storage_of(saved)] = time + 1
        changes, born = [0] * (count + 1), [0] * (count + 1)
        for storage, time in self._freed.items():
            changes[0] += self._sizes[storage]
            changes[time] -= self._sizes[storage]
        ordinary = list(changes)
        ours = list(_on_the_way(visited, overwritten=True))
        theirs = _on_the_way(visited, overwritten=False) if any(map(kernels.overwriting.overwrites, visited)) else ours
        for first, last, size in theirs:
            ordinary[first] += size
            ordinary[last + 1] -= size
        for first, last, size in ours:
            changes[first] += size
            born[first] += size
            changes[last + 1] -= size
        both = list(accumulate(changes))
        inside = [_temporaries(node) for node in visited] + [(0, 0)]
        gradients = [0] * (count + 1)
        for node, size in uses:
            gradients[self._moment(node)] += size
        temporary = [with_weights for with_weights, _ in inside]
        everything = zip(accumulate(ordinary), accumulate(gradients), temporary, strict=True)
        self.ordinary = max(map(sum, everything))
        arrivals = {self._moment(node) for node, _ in uses}
        events = {0, count, *self._freed.values(), *arrivals}
        begins = sorted(events | {time + 1 for time in events if time < count})
        without = [bytes_ + own for bytes_, (_, own) in zip(both, inside, strict=True)]
        self.base: list[int] = []
        self._begins, self._runs, self._arrivals = begins, [0] * len(begins), dict[int, int]()
        for i, (time, end) in enumerate(pairwise([*begins, count + 1])):
            if time in arrivals:
                self._arrivals[time] = len(self.base)
                self.base.append(both[time] - born[time])
            self._runs[i] = len(self.base)
            self.base.append(max(without[time:end]))
        self._norms: dict[int, int] = {}
        for node, _ in uses:
            self._norms[node] = len(self.base)
            self.base.append(0)
        self._sums: dict[int, int] = {}
        formed = 0
        for node, size in sorted(uses, key=lambda use: (use[1], use[0])):  # as `norms.Book` does: the smallest first
            formed += size
            self._sums.setdefault(node, len(self.base))
            self.base.append(formed)

    def peak(self, held: Iterable[Held]) -> int:
        """The most bytes that book-keeping holds.

        Args:
            held: what each planned use holds.
        """
        return Balance(self, held).peak

    def intervals(self, use: Held) -> list[tuple[int, int, int]]:
        """(first segment, the one after the last, bytes) of all that a use holds but its input.

        Args:
            use: what a planned use holds.
        """
        arrival, end = self._arrival(use), self._sums[use.node]
        norm = self._norms[use.node] if use.output else arrival
        found = [(arrival, end + 1, use.kept), (norm, norm + 1, use.workspace)]
        return [*found, (self._run(self._moment(use.node) + 1), end + 1, use.output), (end, end + 1, use.summing)]

    def interval_of_input(self, use: Held) -> tuple[int, int]:
        """(first segment, the one after the last) in which nobody else would hold a use's input.

        Args:
            use: what a planned use holds, its input among it.
        """
        assert use.input is not None
        time = max(self._moment(use.node) + 1, self._freed.get(use.input, 0))
        return self._run(time), self._sums[use.node] + 1

    def size(self, storage: int) -> int:
        """Bytes of what autograd saved; 0 for what is held anyway.

        Args:
            storage: as `storage_of` names it.
        """
        return self._sizes.get(storage, 0)

    def _moment(self, node: int) -> int:
        """When the node of this number is visited."""
        return bisect.bisect_left(self._times, -node)

    def _arrival(self, use: Held) -> int:
        time = self._moment(use.node)
        return self._arrivals[time] if time in self._arrivals else self._run(time)

    def _run(self, time: int) -> int:
        return self._runs[bisect.bisect_right(self._begins, time) - 1]


class Balance:
    """The bytes of each segment under a plan, and what an exchange of one choice would make of them."""

    def __init__(self, timeline: Timeline, held: Iterable[Held]) -> None:
        self._timeline = timeline
        self._keepers: dict[int, list[tuple[int, int]]] = {}
        changes = [0] * (len(timeline.base) + 1)
        for use in held:
            for at, change in self._edges(None, use):
                changes[at] += change
            self._keep(None, use)
        self._set([a + b for a, b in zip(timeline.base, accumulate(changes), strict=False)])

    def saved(self, old: Held, new: Held) -> int:
        """Bytes by which an exchange lowers the fullest segment; 0 if another is then as full as this one was.

        Args:
            old, new: what a use holds, before and after.
        """
        ranges, lowered = self._ranges(old, new), 0
        for begin, end, change in ranges:
            if begin <= self._fullest < end:
                lowered = -change
        if lowered <= 0:
            return 0
        after = max(max(self._totals[begin:end]) + change for begin, end, change in ranges)
        if after < self.peak:
            return lowered
        ties = sum(self._totals[begin:end].count(self.peak - change) for begin, end, change in ranges)
        return lowered if after == self.peak and ties < self._totals.count(self.peak) else 0

    def peak_after(self, old: Held, new: Held) -> int:
        """The peak that an exchange would lead to.

        Args:
            old, new: what a use holds, before and after.
        """
        return max(max(self._totals[begin:end]) + change for begin, end, change in self._ranges(old, new))

    def exchange(self, old: Held, new: Held) -> None:
        """Make it.

        Args:
            old, new: what a use holds, before and after.
        """
        totals = [total + change for begin, end, change in self._ranges(old, new) for total in self._totals[begin:end]]
        self._keep(old, new)
        self._set(totals)

    def _set(self, totals: list[int]) -> None:
        self._totals, self.peak = totals, max(totals)
        self._fullest = totals.index(self.peak)

    def _keep(self, old: Held | None, new: Held) -> None:
        if old is not None and old.input is not None:
            self._keepers[old.input].remove(self._timeline.interval_of_input(old))
        if new.input is not None:
            self._keepers.setdefault(new.input, []).append(self._timeline.interval_of_input(new))

    def _ranges(self, old: Held, new: Held) -> list[tuple[int, int, int]]:
        """All segments, in ranges (first, the one after the last, by how many bytes it grows)."""
        edges: dict[int, int] = {0: 0}
        for at, change in self._edges(old, new):
            edges[at] = edges.get(at, 0) + change
        count, grown, found = len(self._timeline.base), 0, []
        for at, end in pairwise([*sorted(edges), count]):
            grown += edges[at]
            if at < end:
                found.append((at, end, grown))
        return found

    def _edges(self, old: Held | None, new: Held) -> Iterable[tuple[int, int]]:
        """(segment, bytes that are more from it on) by which `new` differs from `old`."""
        for use, sign in ((old, -1), (new, 1)):
            for begin, end, size in self._timeline.intervals(use) if use is not None else ():
                if size and begin < end:
                    yield begin, sign * size
                    yield end, -sign * size
        inputs = {use.input for use in (old, new) if use is not None and use.input is not None}
        for storage in inputs if old is None or old.input != new.input else ():
            size = self._timeline.size(storage)
            before = list(self._keepers.get(storage, ()))
            after = list(before)
            if old is not None and old.input == storage:
                after.remove(self._timeline.interval_of_input(old))
            if new.input == storage:
                after.append(self._timeline.interval_of_input(new))
            for spans, sign in ((before, -1), (after, 1)):  # many keepers of one tensor keep it once
                if spans:
                    yield min(begin for begin, _ in spans), sign * size
                    yield max(end for _, end in spans), -sign * size


def storage_of(x: Tensor) -> int:
    """An identity of the memory behind a tensor, while it lives.

    Args:
        x: any tensor that has memory.
    """
    return x.untyped_storage()._cdata


ALIASES = {"Add", "View", "UnsafeView", "Reshape", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Clone"}
ALIASES |= {"Anchored", "Alias"}
"""Nodes that hand on the gradient that they are given, or a view of it."""


def _on_the_way(visited: Sequence[Any], *, overwritten: bool) -> Iterable[tuple[int, int, int]]:
    """(time at which it is made, last time at which it is held, bytes) of each gradient between nodes.

    Args:
        visited: the nodes in the order of the backward pass.
        overwritten: by activation functions that may, which ordinary training's do not.
    """
    incoming: dict[Any, tuple[int, int]] = {}  # node -> its gradient: (key, bytes)
    born: dict[int, tuple[int, int]] = {}  # key -> (when it is made, bytes)
    last: dict[int, int] = {}
    for time, node in enumerate(visited):
        given = incoming.get(node)
        if given is not None:
            last[given[0]] = time
        alias = type(node).__name__.rstrip("0123456789").removesuffix("Backward") in ALIASES
        hands_on = given is not None and (alias or (overwritten and kernels.overwriting.overwrites(node)))
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
            elif not hands_on and not (overwritten and kernels.overwriting.adds(node)):
                # added to the one that is there, and let go of
                yield time, time, size
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


def _temporaries(node: Any) -> tuple[int, int]:
    """What a node allocates beside its gradients, on a CPU: (with all of them, without those of its parameters)."""
    if shapes := kernels.chunked_conv.sizes_of(node):
        whole, input_only = shapes.gradients(True, True), kernels.chunked_conv.in_pieces(shapes)
        return whole - shapes.results(True, True), input_only - shapes.results(True, False)
    if not type(node).__name__.startswith("ConvolutionBackward") or node._saved_transposed:
        return 0, 0
    try:
        x, weight = node._saved_input, node._saved_weight
    except RuntimeError:  # changed in place since
        return 0, 0
    if x.device.type != "cpu":
        return 0, 0
    y = node._input_metadata[0]
    sizes = Convolution(x.shape, weight.shape, y.shape, node._saved_stride, node._saved_groups, y.dtype)
    wanted = [child is not None for child, _ in node.next_functions][:2]
    all_of_them = sizes.gradients(*wanted) - sizes.results(*wanted)
    return all_of_them, sizes.gradients(wanted[0], False) - sizes.results(wanted[0], False)


@contextmanager
def _nothing_computed_again() -> Iterator[None]:
    """In here, to ask for what activation checkpointing let go of raises RuntimeError: computed, it would be held."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        with disable_saved_tensors_hooks("what a checkpoint let go of is not counted"):
            yield
    else:  # the caller's own, which cannot be set aside
        yield


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
        except RuntimeError:  # let go of; or changed in place since, as a backward pass through this node would say
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor):
                yield item
