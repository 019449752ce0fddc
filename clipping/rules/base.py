"""One use of one parameter, and the per-sample gradient that it contributes.

Every parameter enters an operation in one of a few ways; for each there is a `Rule`. A rule is made in the forward
pass, keeps what it needs of the operation's input, and is handed the gradient g of the operation's output in the
backward pass. Layouts: B samples first; T positions, d inputs, p outputs per group, as in arXiv:2205.10683 §4.

    instantiate    the per-sample gradient itself, [B, *shape]:          time 2BTpd,       space Bpd
    ghost          its squared norm from two Gram matrices, [B]:         time 2BT²(p + d), space 2BT²

For each there may be several *ways* of computing it, all exact; which is fastest depends on shape and device. A
`Route` says which of it all is taken. Both go through the batch in blocks of samples that stay within
`Rule.workspace` bytes (or one sample's need, if that is more).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import added, blocks, concatenated, each
from clipping.numerics import kernels
from clipping.numerics.gram import HALVED, part
from clipping.numerics.per_sample import weighted_sum
from clipping.numerics.rounding_bounds import Reach, of_rows, row_norms
from clipping.numerics.squares import sum_of_squares

WORKSPACE = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""Bytes that one norm, or a copy for a sum, may always use beside the operation's own input and output gradient: on a
CPU what its caches hold, on a GPU what keeps it busy, or more (`SHARE`)."""
SHARE = 128
"""Of a GPU's memory, what is always there for it: blocks of 64 MiB are a thousand launches in a large batch."""


@functools.cache
def share_of_gpu(index: int) -> int:
    """Bytes of a GPU's workspace; 0 of one that is not here, a fake tensor's.

    Args:
        index: the device's number.
    """
    return torch.cuda.get_device_properties(index).total_memory // SHARE if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class Route:
    """How the norm of one use is found, and what is kept of it for the sum.

    Attributes:
        ghost: by Gram matrices, else from the instantiated gradient.
        way: one of the rule's ways of doing so; "" is the one that its formulas prefer.
        block: samples at a time; 0 is as many as the workspace holds.
        kept: the instantiated gradients are kept until the factors are known, in place of the input and the output's
            gradient.
    """

    ghost: bool = False
    way: str = ""
    block: int = 0
    kept: bool = False


class Spec(NamedTuple):
    """Shape and dtype of a tensor: all that the formulas read of an output's gradient that is not there yet."""

    shape: torch.Size
    dtype: torch.dtype

    def numel(self) -> int:
        """Entries, as of a tensor."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an entry, as of a tensor."""
        return self.dtype.itemsize


class Work(NamedTuple):
    """What one sample takes by some way: multiplications, bytes written or read besides, bytes of workspace."""

    multiplications: float
    traffic: float
    workspace: float


RATES = {"cpu": (1e11, 2e10), "cuda": (1.5e13, 2e12)}
"""Rough multiplications and bytes a second of a kind of device: only their ratio matters, and timings override it."""

GRAM_KERNEL, NORM_KERNEL = "gram kernel", "norm kernel"
"""Ways of `clipping.accel`, for CUDA: by Gram tiles, and by tiles of the per-sample gradient."""
COMPILED = "compiled"
"""The way of `clipping.accel.cpu`: by Gram tiles, too."""
KERNELS = (GRAM_KERNEL, NORM_KERNEL, COMPILED)
"""All of these: ways that not every machine has. The first step never takes one, unless nothing will ever be timed."""


Gradient = tuple[Any, ...]
"""(parameter or None, the class of its rule, and what else that is made with): a rule that is not made yet. It holds on
to no more of the forward pass than the rule will."""


def made(gradient: Gradient) -> Rule:
    """The rule that it stands for.

    Args:
        gradient: (parameter, kind of rule, what else the rule is made of).
    """
    parameter, kind, *made_of = gradient
    return kind(parameter, *made_of)


class Refused(Exception):
    """This configuration of an operation has no exact rule."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def title(operation: Any) -> str:
    """What people call it.

    Args:
        operation: a function of torch's.
    """
    return getattr(operation, "__name__", str(operation))


def as_refused(error: Exception) -> Refused:
    """The refusal that an error stands for which came of recording an operation, or of its gradient.

    Args:
        error: what was raised.

    Raises:
        Exception: the error itself, if it is about memory.
    """
    if isinstance(error, Refused):
        return error
    said = " ".join(str(error).split())[:200]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "memory" in said or "ALLOC_FAILED" in said:
        raise error
    return Refused(f"has no exact rule for such operands: {type(error).__name__}: {said}", "use microbatch or vmap")


class Rule(ABC):
    """The gradient of one parameter through one operation.

    Attributes:
        parameter: the parameter, or the tensor made of parameters, that the operation read.
        positions, inputs, outputs, groups: T, d, p and the number of independent groups of the weight's linear form
            (0 where there is none).

    Methods take:
        g, samples: the output's gradient, [B·fold, ...], and which samples of the batch. Of a `Spec` shape and dtype.
        way, block: one of `ghosts` or `instantiations`; samples at once. "" and 0: what the formulas prefer.
        other, other_g, others: other uses, and the gradients of their outputs.
        route, factors, ghost, kept: as decided; c [B]; by Gram matrices; the sum is formed from kept gradients.
        fold, count: rows to a sample; how many samples.
    """

    ghosts: tuple[str, ...] = ()
    """Ways of finding the norm without the gradient in memory, by Gram matrices for most; none where there is none."""
    instantiations: tuple[str, ...] = ("direct",)
    """Ways of forming the per-sample gradient."""
    is_fallback = False
    aligned = False
    """The tensor has a row for each row of the output, and each meets its own."""
    library = ""  # whose product forms Σ_i c_i g_i on CUDA, which may round its operands: cublas, cudnn or none
    fold = 1
    """Rows of the output to a sample: more than one where windows or tokens were folded into the batch."""
    route = Route()
    """What was decided for this use, before the backward pass."""
    chosen_for = 0
    """Samples that routes are chosen for; 0 for as many as there are. See `clipping.backends.tape`."""
    share: Any = None
    """Told that only the gradient of the operation's input is wanted, if it can make use of that."""

    def __init__(self, parameter: Tensor, positions: int = 0, inputs: int = 0, outputs: int = 0, groups: int = 1):
        self.parameter = parameter
        self.positions, self.inputs, self.outputs, self.groups = positions, inputs, outputs, groups

    @abstractmethod
    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        """Per-sample gradients [b, *shape] of the `samples` of a batch, from the output's gradient g [B, ...]."""

    def regroup(self, fold: int) -> Rule:
        """The rule for an output of B·fold rows, `fold` consecutive ones to a sample."""
        return Regrouped(self, fold)

    def inner(self, g: Tensor, other: Rule, other_g: Tensor) -> Tensor | None:
        """<this use's per-sample gradient, the other's> [B] of the same parameter, or None if there is no short way."""
        return None

    def reach(self, g: Tensor) -> Reach | None:
        """How large the terms are that the gradient is summed from (`numerics.rounding_bounds`); None if not known."""
        return None

    def features(self) -> int:
        """Of the longest rows that are multiplied with one another in a Gram matrix."""
        return max(self.inputs, self.outputs)

    def _reach_of_rows(self, g: Tensor, of_block: Callable[[slice], Reach], size: int) -> Reach:
        """In blocks of samples, of which each takes so many bytes."""
        found = each(lambda samples: of_block(samples), blocks(self.samples(g), size, self.workspace(g)))
        return Reach(*(map(torch.cat, zip(*found, strict=True)) if len(found) > 1 else found[0]))

    def companions(self, g: Tensor) -> Hashable:
        """The same for uses, of different parameters, whose squared norms are found faster together: see there."""
        return id(self)

    def squared_norms(self, g: Tensor, route: Route, others: Sequence[tuple[Rule, Tensor]] = ()) -> Tensor:
        """‖per-sample gradient‖² [B], float32 or wider; by Gram matrices, perhaps a rounding below zero.

        With `others`, its companions and their output gradients, the sum of all their squared norms.
        """
        way = route.way or self.best_way(g, ghost=route.ghost)

        def squares(samples: slice) -> Tensor:
            if others:
                return self._ghosts_together(g, samples, way, others)
            return (self._ghost if route.ghost else self._instantiated)(g, samples, way)

        return concatenated(squares, self.blocks(g, way, route.block))

    def squares_and_reach(
        self, g: Tensor, route: Route, others: Sequence[tuple[Rule, Tensor]] = ()
    ) -> tuple[Tensor, list[Reach]]:
        """`squared_norms`, and the reach of each where it is found with them; none where it is to be asked for."""
        return self.squared_norms(g, route, others), []

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        """Σ_i c_i g_i, of the shape of `parameter`, from the output's gradient g [B, ...] and the factors c [B]."""
        way = self.best_way(g, ghost=False)

        def weighted(samples: slice) -> Tensor:
            return weighted_sum(part(factors, samples), self.instantiate(g, samples, way))

        return added(weighted, self.blocks(g, way))

    def instantiate_all(self, g: Tensor) -> Tensor:
        """Per-sample gradients [B, *shape], in the way and the blocks of the route if it names an instantiating one."""
        way = "" if self.route.ghost else self.route.way
        several = self.blocks(g, way, self.route.block) if way else [slice(0, self.samples(g))]
        return concatenated(lambda samples: self.instantiate(g, samples, way), several)

    def held_input(self) -> Tensor | None:
        """The operation's input, if the weight gradient needs it."""
        return None

    def shapes(self) -> tuple[object, ...]:
        """What the work of a sample depends on beside the output."""
        return tuple(self.parameter.shape), self.positions, self.inputs, self.outputs, self.groups

    def offer_kernels(self, *ways: str) -> None:
        """Triton's kernels as further ways of the norm, where they run: they write neither Grams nor gradients."""
        if kernels.cuda.supported(self.parameter):
            self.ghosts = (*self.ghosts, *ways)

    def offer_compiled(self) -> None:
        """The kernel for CPUs as a further way of the norm, where there is a library and anything to multiply."""
        if self.positions > 1 and kernels.cpu.supported(self.parameter):
            self.ghosts = (*self.ghosts, COMPILED)

    def samples(self, g: Tensor | Spec) -> int:
        """B, from the output's gradient."""
        return g.shape[0] // self.fold

    def output_rows(self, count: int) -> int:
        """Rows of the output that so many samples have."""
        return count * self.fold

    def rows(self, samples: slice) -> slice:
        """Where the rows of these samples are in the output."""
        return slice(samples.start * self.fold, samples.stop * self.fold)

    def blocks(self, g: Tensor | Spec, way: str, block: int = 0) -> list[slice]:
        """The batch in blocks of at most `block` samples, or of what the workspace holds."""
        available = block if block else int(self.workspace(g) // max(1, self.work(g, way).workspace))
        return blocks(self.samples(g), 1, available)

    def workspace(self, g: Tensor | Spec) -> int:
        """Bytes that a norm may use: a quarter of the output's gradient, so that large batches need no more blocks."""
        return max(self.room(), g.numel() * g.element_size() // 4)

    def room(self) -> int:
        """Bytes that a norm may use whatever the batch."""
        least = WORKSPACE.get((device := self.parameter.device).type, WORKSPACE["cuda"])
        return max(least, share_of_gpu(device.index or 0)) if device.type == "cuda" else least

    def planned(self, g: Tensor | Spec) -> tuple[int, int]:
        """Samples that routes are chosen for, and bytes of each one's part of the output's gradient."""
        return self.chosen_for or self.samples(g), g.numel() * g.element_size() // max(1, self.samples(g))

    def is_kept(self, g: Tensor | Spec) -> bool:
        """Whether the instantiated gradients of the whole batch take no more than what would be kept instead."""
        count, each = self.planned(g)
        return count * self.instantiated_bytes(g) <= max(self.room(), count * each)

    def work(self, g: Tensor | Spec, way: str) -> Work:
        """What one sample's norm takes by `way`; of g only shape and dtype are read."""
        entries, size = self.parameter.numel(), g.element_size()
        if way in self.ghosts:
            pairs = self.positions**2 * self.groups
            if way in KERNELS:
                by_gradient = way == NORM_KERNEL
                return Work(self.positions * entries if by_gradient else pairs * (self.inputs + self.outputs), 0, 4096)
            halved = 0.75 if self.positions >= HALVED else 1.0
            wide = norm_dtype(g.dtype).itemsize
            return Work(halved * pairs * (self.inputs + self.outputs), 6 * pairs * wide, 2 * pairs * wide)
        return Work(max(1, self.positions) * entries, 2 * entries * size, entries * size)

    def norm_bytes(self, g: Tensor | Spec, way: str, block: int) -> int:
        """Bytes that the norms of a block of samples take at once, instantiated gradients among them."""
        bytes_ = int(block * self.work(g, way).workspace)
        return min(bytes_, self.workspace(g)) if way in self.ghosts else bytes_  # large Gram matrices come in blocks

    def summing_bytes(self, g: Tensor | Spec) -> int:
        """Bytes that `weighted` takes beside (a, g) and the sum: one of them is scaled, if there is an input."""
        return 0 if self.held_input() is None else g.numel() * g.element_size()

    def best_way(self, g: Tensor | Spec, *, ghost: bool) -> str:
        """The way that the formulas prefer; a kernel is never taken before it was timed."""
        ways = [way for way in (self.ghosts if ghost else self.instantiations) if way not in KERNELS]
        return ways[0] if len(ways) == 1 else min(ways, key=lambda way: self.seconds(g, way))

    def seconds(self, g: Tensor | Spec, way: str) -> float:
        """Seconds of one sample's norm by `way`, predicted from its work and rough rates of the kind of device."""
        work = self.work(g, way)
        multiplying, moving = RATES.get(self.parameter.device.type, RATES["cuda"])
        return work.multiplications / multiplying + work.traffic / moving

    def summing_seconds(self, g: Tensor | Spec, *, kept: bool) -> float:
        """Seconds of one sample's share of the clipped sum, from kept gradients or by a weight gradient."""
        multiplying, moving = RATES.get(self.parameter.device.type, RATES["cuda"])
        if kept:
            return self.parameter.numel() * g.element_size() / moving
        return max(1, self.positions) * self.parameter.numel() / multiplying

    def instantiated_bytes(self, g: Tensor | Spec) -> int:
        """Bytes of one sample's gradient."""
        return self.parameter.numel() * g.element_size()

    def _instantiated(self, g: Tensor, samples: slice, way: str) -> Tensor:
        return sum_of_squares(self.instantiate(g, samples, way))

    def _ghost(self, g: Tensor, samples: slice, way: str) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no Gram form; `ghosts` says so")

    def _ghosts_together(self, g: Tensor, samples: slice, way: str, others: Sequence[tuple[Rule, Tensor]]) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no companions")


class Regrouped(Rule):
    """A rule whose rows are `fold` to a sample: instantiated for each row, then summed over each sample's."""

    def __init__(self, rule: Rule, fold: int) -> None:
        super().__init__(rule.parameter, rule.positions * fold, rule.inputs, rule.outputs, rule.groups)
        self.rule, self.fold, self.library = rule, fold, rule.library
        self.is_fallback, self.instantiations = rule.is_fallback, rule.instantiations

    def work(self, g: Tensor | Spec, way: str) -> Work:
        each = self.rule.work(g, way)
        return Work(*(self.fold * number for number in each))

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        return self.rule.instantiate(g, self.rows(samples), way).unflatten(0, (-1, self.fold)).sum(1)

    def reach(self, g: Tensor) -> Reach | None:
        found = self.rule.reach(g)
        return found and Reach(*(each.unflatten(0, (-1, self.fold)).sum(1) for each in found))


class Bias(Rule):
    """A bias added to every position: the per-sample gradient is the sum of g over positions.

    Args:
        parameter: [p].
        channel: the dimension of the output that the bias runs along; negative counts from the end.
    """

    def __init__(self, parameter: Tensor, channel: int) -> None:
        super().__init__(parameter)
        self.channel = channel

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        g, channel = part(g, samples), self.channel % g.dim()
        over = [d for d in range(1, g.dim()) if d != channel]
        return g.sum(over, dtype=norm_dtype(g.dtype)) if over else g

    def reach(self, g: Tensor) -> Reach:
        norms = row_norms(g, self.channel % g.dim()).reshape(len(g), -1)
        return of_rows(torch.ones_like(norms[:, :1]), norms, 1, self.parameter.numel())
