"""Rules: compute the per-sample gradient that one use of one parameter contributes.

A `Rule` describes one way in which parameters enter operations. The forward pass creates the rule, which keeps the
input that it needs. In the backward pass the rule receives the gradient g of the operation's output.
Layouts: B samples first; T positions, d inputs, p outputs per group, as in arXiv:2205.10683 §4.

    instantiate    the per-sample gradient itself, [B, *shape]:          time 2BTpd,       space Bpd
    ghost          its squared norm from two Gram matrices, [B]:         time 2BT²(p + d), space 2BT²

Each may have several ways (`Way`), all exact; the fastest depends on shape and device. A `Route` states the choice.
Both process the batch in blocks of at most `Rule.workspace` bytes, or of one sample if it needs more.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from clipping.core.dtypes import HALF, norm_dtype
from clipping.core.microbatching import Parts, added, blocks, concatenated, each
from clipping.numerics.per_sample import HALVED, part, sum_of_squares, weighted_sum
from clipping.numerics.products import ALIGNED, on_gpu
from clipping.numerics.rounding_bounds import Reach

WORKSPACE = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""Bytes that one norm, or a copy for a sum, may always use besides the operation's input and output gradient. They fit
a CPU's caches and keep a GPU busy. A GPU may use more (`SHARE`)."""
SHARE = 128
"""A norm may also use 1/128 of a GPU's memory; blocks of 64 MiB would take a thousand launches in a large batch."""


@functools.cache
def share_of_gpu(index: int) -> int:
    """Bytes of a GPU's workspace; 0 for a missing GPU (of a fake tensor).

    Args:
        index: index of the device.
    """
    return torch.cuda.get_device_properties(index).total_memory // SHARE if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class Route:
    """How to compute the norm of one use, and what to keep for the sum.

    Attributes:
        ghost: True for Gram matrices, False for the instantiated gradient.
        way: one of the rule's ways; "" for the one with the lowest predicted time.
        block: samples at a time; 0 for as many as the workspace holds.
        kept: keep the instantiated gradients until the factors are known, instead of the input and output gradient.
    """

    ghost: bool = False
    way: str = ""
    block: int = 0
    kept: bool = False


class Spec(NamedTuple):
    """Shape and dtype of a tensor, enough for formulas on an output's gradient before it exists."""

    shape: torch.Size
    dtype: torch.dtype

    def numel(self) -> int:
        """Number of entries, as `Tensor.numel`."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an entry, as `Tensor.element_size`."""
        return self.dtype.itemsize


class Work(NamedTuple):
    """The cost of one sample: multiplications, other bytes read or written, bytes of workspace."""

    multiplications: float
    traffic: float
    workspace: float


RATES = {"cpu": (1e11, 2e10), "cuda": (1.5e13, 2e12), "cuda, half": (2.8e14, 2e12)}
"""Rough multiplications and bytes a second of each kind of device. Only ratios matter, and timings override them."""

UNALIGNED = 5.0
"""How much slower a GPU's library forms Gram matrices in half precision whose rows are not aligned: T = 197 of ViT."""

UNTIMED = 2.25
"""Factor by which an untimed plan assumes that a Triton kernel multiplies more slowly than libraries."""

Gradient = tuple[Any, ...]
"""(parameter or None, class of the rule, further arguments): a rule to create later. It keeps no more of the forward
pass alive than the rule will."""


def made(gradient: Gradient) -> Rule:
    """Create the rule."""
    parameter, kind, *made_of = gradient
    return kind(parameter, *made_of)


class Refused(Exception):
    """Raised for a configuration of an operation that has no exact rule."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def title(func: Any) -> str:
    """Return the usual name of an operation; for a custom function, that of its class."""
    owner = getattr(func, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        func = owner
    return getattr(func, "__name__", str(func))


def as_refused(error: Exception) -> Refused:
    """Convert an error raised while recording an operation or its gradient to a refusal.

    Raises:
        Exception: the error itself, if it is an out-of-memory error.
    """
    if isinstance(error, Refused):
        return error
    said = " ".join(str(error).split())[:200]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "memory" in said or "ALLOC_FAILED" in said:
        raise error
    return Refused(f"has no exact rule for such operands: {type(error).__name__}: {said}", "use microbatch or vmap")


R = TypeVar("R", bound="Rule")


def of_columns(found: Tensor) -> Parts:
    """Convert the result of a kernel to the result of `Way.norms`.

    Args:
        found: [b, 1 + k]: squared norms, and the columns of a reach.
    """
    return found[:, 0], *Reach.of_columns(found[:, 1:])


class Way(ABC, Generic[R]):
    """One way to compute the norms of a kind of rules. It has no state.

    Attributes:
        name: see `Route.way`.
        ghost: True if no per-sample gradient is stored.
        is_kernel: True if some machines lack it. The first step uses it only if routes are not timed.

    Methods take:
        rule, g, samples: as the methods of `Rule`.
        block: number of samples at once.
    """

    name: ClassVar[str]
    ghost: ClassVar[bool] = True
    is_kernel: ClassVar[bool] = False

    @abstractmethod
    def norms(self, rule: R, g: Tensor, samples: slice) -> Parts:
        """‖gradient‖² [b], float32 or wider; a way that finds the reach, too, adds its tensors."""

    @abstractmethod
    def work(self, rule: R, g: Tensor | Spec) -> Work:
        """Cost of one sample."""

    def kept(self, rule: R, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """The per-sample gradients [b, *shape] and their squared norms, by a way that forms gradients."""
        made = rule.instantiate(g, samples, self.name)
        return made, sum_of_squares(made)  # while it is in cache

    def bytes_at_once(self, rule: R, g: Tensor | Spec, block: int) -> int:
        """Bytes that the norms of a block need, with its instantiated gradients."""
        return min(int(block * rule.work(g, self.name).workspace), rule.workspace(g))  # large Gram matrices use blocks


class Direct(Way[R]):
    """Instantiates the gradients, and adds their squares."""

    name, ghost = "direct", False

    def norms(self, rule: R, g: Tensor, samples: slice) -> Parts:
        return (self.kept(rule, g, samples)[1],)

    def work(self, rule: R, g: Tensor | Spec) -> Work:
        made = rule.instantiated_bytes(g)
        return Work(max(1, rule.positions) * rule.parameter.numel(), 2 * made, made)

    def bytes_at_once(self, rule: R, g: Tensor | Spec, block: int) -> int:
        return int(block * rule.work(g, self.name).workspace)


class Gram(Way[R]):
    """Gram matrices by torch's operations."""

    name = "gram"

    def work(self, rule: R, g: Tensor | Spec) -> Work:
        pairs, wide = rule.positions**2 * rule.groups, norm_dtype(g.dtype).itemsize
        halved = 0.75 if rule.positions >= HALVED else 1.0
        unaligned = g.dtype in HALF and rule.positions % ALIGNED and on_gpu(rule.parameter)
        multiplications = (UNALIGNED if unaligned else halved) * pairs * (rule.inputs + rule.outputs)
        return Work(multiplications, 6 * pairs * wide, 2 * pairs * wide)


DIRECT = Direct[Any]()


class Rule(ABC):
    """The gradient of one parameter through one operation.

    Attributes:
        parameter: the parameter, or tensor made of parameters, that the operation read.
        positions, inputs, outputs, groups: T, d, p and the number of independent groups of the weight's linear form
            (0 without one).

    Methods take:
        g, samples: the output's gradient, [B·fold, ...] (or its `Spec`), and a slice of the batch.
        way, block: name of one of `ways`, and samples at once; "" and 0 choose by predicted time.
        other, other_g: another use, and its output's gradient.
        route, factors: the chosen route, and c [B].
        ghost, kept: True for Gram matrices; True if kept gradients form the sum.
        fold, count: rows for each sample; number of samples.
        slower: factor by which a way multiplies more slowly than libraries.
    """

    ways: tuple[Way[Any], ...] = (DIRECT,)
    """Ways to compute the norm, at least one of them by forming the per-sample gradient."""
    is_fallback = False
    aligned = False
    """True if each row of the output uses its own row of the tensor."""
    library = ""  # library of the product Σ_i c_i g_i on CUDA, which may round its operands: cublas, cudnn or none
    fold = 1
    """Output rows for each sample: more than one where windows or tokens were folded into the batch."""
    bias: Any = None
    """`Source` of a bias that norm and sum include, as a weight of inputs of 1 (`clipping.accel.ways.takes_bias`)."""
    beside: tuple[Tensor, ...] = ()
    """Output gradients of other layers of one input, whose norms are added (see `clipping.accel.ways.shares_input`)."""
    settings: tuple[object, ...] = ()
    """What a sample's cost depends on besides shapes: stride and padding of a convolution, letters of an einsum."""
    share: Any = None
    """`chunked_conv.Share` of the operation's node, or None; `input_only` is set when g arrives, before it runs."""

    def __init__(self, parameter: Tensor, positions: int = 0, inputs: int = 0, outputs: int = 0, groups: int = 1):
        self.parameter = parameter
        self.positions, self.inputs, self.outputs, self.groups = positions, inputs, outputs, groups

    @property
    def ghosts(self) -> tuple[str, ...]:
        """Names of the ways that store no gradient, mostly by Gram matrices; may be empty."""
        return tuple(way.name for way in self.ways if way.ghost)

    @property
    def instantiations(self) -> tuple[str, ...]:
        """Names of the ways that form the per-sample gradient."""
        return tuple(way.name for way in self.ways if not way.ghost)

    def named(self, way: str) -> Way[Any]:
        """Return the way of this name; `DIRECT` for the name of another rule's way."""
        for mine in self.ways:
            if mine.name == way:
                return mine
        return DIRECT

    def with_bias(self, bias: Any) -> Self:
        """Return a copy of this rule of a weight that includes the bias.

        Args:
            bias: its `Source`.
        """
        both = copy.copy(self)
        both.bias = bias
        return both

    def with_beside(self, g: Tensor) -> Self:
        """Return a copy of this rule that adds the norms of another layer of its input.

        Args:
            g: gradient of that layer's output.
        """
        both = copy.copy(self)
        both.beside = (*self.beside, g)
        return both

    @abstractmethod
    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        """Return the per-sample gradients [b, *shape] of some samples, from the output's gradient g [B, ...]."""

    def regroup(self, fold: int) -> Rule:
        """Return the rule for an output of B·fold rows, `fold` consecutive ones for each sample."""
        return Regrouped(self, fold)

    def inner(self, g: Tensor, other: Rule, other_g: Tensor) -> Tensor | None:
        """Inner products [B] of two uses' per-sample gradients of one parameter, or None without a fast way."""
        return None

    def reach(self, g: Tensor) -> Reach | None:
        """Size of the terms in the gradient's sum (`numerics.rounding_bounds`); None if unknown."""
        return None

    def features(self, route: Route) -> int:
        """Length of the longest rows that this route multiplies in a Gram matrix."""
        return max(self.inputs, self.outputs)

    def _reach_of_rows(self, g: Tensor, of_block: Callable[[slice], Reach], size: int) -> Reach:
        """Compute the reach in blocks of samples of `size` bytes each."""
        found = each(of_block, blocks(self.samples(g), size, self.workspace(g)))
        return Reach(*(map(torch.cat, zip(*found, strict=True)) if len(found) > 1 else found[0]))

    def squared_norms(self, g: Tensor, route: Route) -> Tensor:
        """‖per-sample gradient‖² [B], float32 or wider; with Gram matrices rounding may make it slightly negative."""
        return self.squares_and_reach(g, route)[0]

    def squares_and_reach(self, g: Tensor, route: Route) -> tuple[Tensor, Reach | None]:
        """`squared_norms`, and the reach if it is computed along with them."""
        way = self.named(route.way or self.best_way(g, ghost=route.ghost))
        parts = each(functools.partial(way.norms, self, g), self.blocks(g, way.name, route.block))
        squares, *found = map(torch.cat, zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
        return squares, Reach(*found) if found else None

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        """Σ_i c_i g_i, of the shape of `parameter`, from the output's gradient g [B, ...] and the factors c [B]."""
        way = self.best_way(g, ghost=False)

        def weighted(samples: slice) -> Tensor:
            return weighted_sum(part(factors, samples), self.instantiate(g, samples, way))

        return added(weighted, self.blocks(g, way))

    def instantiate_all(self, g: Tensor, route: Route) -> Tensor:
        """Per-sample gradients [B, *shape], in the way and blocks of the route if it instantiates them."""
        way = "" if route.ghost else route.way
        if not way:
            return self.instantiate(g, slice(0, self.samples(g)))
        return concatenated(lambda samples: self.instantiate(g, samples, way), self.blocks(g, way, route.block))

    def laid_out(self, g: Tensor, *, ghost: bool) -> Tensor:
        """Return the output's gradient in the fastest layout for norm and sum: g, or one copy for both."""
        return g

    def lay_out_input(self, g: Tensor) -> None:  # noqa: B027
        """Replace the input by a copy in the fastest layout for norm and sum. Call it after the backward pass.

        Then nothing else holds most inputs, and the copy takes the memory of the original.
        """

    def samples(self, g: Tensor | Spec) -> int:
        """Return B from the output's gradient."""
        return g.shape[0] // self.fold

    def output_rows(self, count: int) -> int:
        """Return the number of output rows of this many samples."""
        return count * self.fold

    def rows(self, samples: slice) -> slice:
        """Return the output rows of these samples."""
        return slice(samples.start * self.fold, samples.stop * self.fold)

    def blocks(self, g: Tensor | Spec, way: str, block: int = 0) -> list[slice]:
        """Split the batch into blocks of at most `block` samples, or of what the workspace holds."""
        return blocks(self.samples(g), 1, block or self.fitting(g, way))

    def fitting(self, g: Tensor | Spec, way: str) -> int:
        """Return how many samples the workspace holds at once."""
        return int(self.workspace(g) // max(1, self.work(g, way).workspace))

    def workspace(self, g: Tensor | Spec) -> int:
        """Bytes that a norm may use: at least a quarter of the output's gradient, which bounds the number of blocks."""
        return max(self.room(), g.numel() * g.element_size() // 4)

    def room(self) -> int:
        """Bytes that a norm may use for any batch size."""
        least = WORKSPACE.get((device := self.parameter.device).type, WORKSPACE["cuda"])
        return max(least, share_of_gpu(device.index or 0)) if device.type == "cuda" else least

    def bytes_of_each(self, g: Tensor | Spec) -> int:
        """Bytes of one sample's part of the output's gradient."""
        return g.numel() * g.element_size() // max(1, self.samples(g))

    def is_kept(self, g: Tensor | Spec, count: int) -> bool:
        """True if the instantiated gradients of `count` samples fit the workspace, or are no larger than g."""
        each = self.bytes_of_each(g)
        return count * self.instantiated_bytes(g) <= max(self.room(), count * each)

    def work(self, g: Tensor | Spec, way: str) -> Work:
        """Return the cost of one sample's norm by `way`."""
        return self.named(way).work(self, g)

    def norm_bytes(self, g: Tensor | Spec, way: str, block: int) -> int:
        """Bytes that the norms of a block of samples need at once, instantiated gradients included."""
        return self.named(way).bytes_at_once(self, g, block)

    def best_way(self, g: Tensor | Spec, *, ghost: bool) -> str:
        """Return the way with the lowest predicted time; kernels must be timed first."""
        ways = [way.name for way in self.ways if way.ghost == ghost and not way.is_kernel]
        return ways[0] if len(ways) == 1 else min(ways, key=lambda way: self.seconds(g, way))

    def seconds(self, g: Tensor | Spec, way: str, slower: float = 1.0) -> float:
        """Predict the seconds of one sample's norm by `way`, from its cost and rough rates of the device kind."""
        work = self.work(g, way)
        multiplying, moving = self._rates(g)
        parts = slower * work.multiplications / multiplying, work.traffic / moving
        return max(parts) if self.named(way).is_kernel else sum(parts)

    def _rates(self, g: Tensor | Spec) -> tuple[float, float]:
        """Multiplications and bytes a second."""
        kind = self.parameter.device.type
        return RATES[kind if kind == "cpu" else "cuda, half" if g.dtype in HALF else "cuda"]

    def summing_seconds(self, g: Tensor | Spec, *, kept: bool) -> float:
        """Predict the seconds of one sample's share of the clipped sum, from kept gradients or by a weight gradient."""
        multiplying, moving = self._rates(g)
        if kept:
            return self.instantiated_bytes(g) / moving
        return max(1, self.positions) * self.parameter.numel() / multiplying

    def instantiated_bytes(self, g: Tensor | Spec) -> int:
        """Bytes of one sample's gradient, which is float32 or wider."""
        return self.parameter.numel() * norm_dtype(g.dtype).itemsize


class Regrouped(Rule):
    """A rule with `fold` rows for each sample: instantiates for each row, then sums over each sample's rows."""

    def __init__(self, rule: Rule, fold: int) -> None:
        super().__init__(rule.parameter, rule.positions * fold, rule.inputs, rule.outputs, rule.groups)
        self.rule, self.fold, self.library = rule, fold, rule.library
        self.is_fallback, self.ways = rule.is_fallback, tuple(way for way in rule.ways if not way.ghost)

    def work(self, g: Tensor | Spec, way: str) -> Work:
        return Work(*(self.fold * number for number in self.rule.work(g, way)))

    def norm_bytes(self, g: Tensor | Spec, way: str, block: int) -> int:
        return int(block * self.work(g, way).workspace)

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        return self.rule.instantiate(g, self.rows(samples), way).unflatten(0, (-1, self.fold)).sum(1)

    def reach(self, g: Tensor) -> Reach | None:
        found = self.rule.reach(g)
        return found and Reach(*(each.unflatten(0, (-1, self.fold)).sum(1) for each in found))
