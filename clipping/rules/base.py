"""One use of one parameter, and the per-sample gradient that it contributes.

Every parameter enters an operation in one of a few ways; for each there is a `Rule`. A rule is made in the forward
pass, keeps what it needs of the operation's input, and is handed the gradient g of the operation's output in the
backward pass. Layouts: B samples first; T positions, d inputs, p outputs per group, as in arXiv:2205.10683 §4.

    instantiate    the per-sample gradient itself, [B, *shape]:          time 2BTpd,       space Bpd
    ghost          its squared norm from two Gram matrices, [B]:         time 2BT²(p + d), space 2BT²

Both go through the batch in blocks of samples, which costs nothing where a block still fills the machine: neither needs
more than `workspace(g)` bytes (or one sample's gradient, if that is more).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from clipping.interface import norm_dtype

WORKSPACE = 64 * 2**20
"""Bytes that one norm may always use beside the operation's own input and output gradient."""

ENTRY_COST = 32
"""Multiplications in the time of writing an entry of a per-sample gradient and reading it again for norm and sum."""


def workspace(g: Tensor) -> int:
    """Bytes that a norm may use: a quarter of the output's gradient, so that large batches need no more blocks."""
    return max(WORKSPACE, g.numel() * g.element_size() // 4)


class Refused(Exception):
    """This configuration of an operation has no exact rule."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


class Rule(ABC):
    """The gradient of one parameter through one operation.

    Attributes:
        parameter: the parameter, or the tensor made of parameters, that the operation read.
        positions, inputs, outputs, groups: T, d, p and the number of independent groups of the weight's linear form
            (0 where there is none).
    """

    has_ghost: ClassVar[bool] = False
    is_fallback = False
    aligned = False
    """The tensor has a row for each row of the output, and each meets its own."""
    fold = 1
    """Rows of the output to a sample: more than one where windows or tokens were folded into the batch."""

    def __init__(self, parameter: Tensor, positions: int = 0, inputs: int = 0, outputs: int = 0, groups: int = 1):
        self.parameter = parameter
        self.positions, self.inputs, self.outputs, self.groups = positions, inputs, outputs, groups

    @abstractmethod
    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        """Per-sample gradients [b, *shape] of the `samples` of a batch, from the output's gradient g [B, ...]."""

    def regroup(self, fold: int) -> Rule:
        """The rule for an output of B·fold rows, `fold` consecutive ones to a sample."""
        return Regrouped(self, fold)

    def inner(self, g: Tensor, other: Rule, other_g: Tensor) -> Tensor | None:
        """<this use's per-sample gradient, the other's> [B] of the same parameter, or None if there is no short way."""
        return None

    def squared_norms(self, g: Tensor, *, ghost: bool) -> Tensor:
        """‖per-sample gradient‖² [B], float32 or wider, by Gram matrices if `ghost`, else instantiated."""
        size = self.ghost_bytes(g) if ghost else self.instantiated_bytes(g)
        route = self._ghost if ghost else self._instantiated
        return torch.cat([route(g, samples) for samples in blocks(self.samples(g), size, workspace(g))])

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        """Σ_i c_i g_i, of the shape of `parameter`, from the output's gradient g [B, ...] and the factors c [B]."""
        total = torch.zeros_like(self.parameter, memory_format=torch.contiguous_format)
        for samples in blocks(self.samples(g), self.instantiated_bytes(g), workspace(g)):
            gradient = self.instantiate(g, samples)
            total += torch.tensordot(factors[samples].to(gradient.dtype), gradient, dims=1)
        return total

    def samples(self, g: Tensor) -> int:
        """B, from the output's gradient."""
        return g.shape[0] // self.fold

    def rows(self, samples: slice) -> slice:
        """Where the rows of these samples are in the output."""
        return slice(samples.start * self.fold, samples.stop * self.fold)

    def is_kept(self, g: Tensor) -> bool:
        """Whether the instantiated gradients of the whole batch are small enough to keep until the factors are known.

        They replace the output's gradient, which would be kept instead.
        """
        return self.samples(g) * self.instantiated_bytes(g) <= max(WORKSPACE, g.numel() * g.element_size())

    def norm_costs(self, g: Tensor) -> tuple[float, float]:
        """What one sample's norm adds to a step of book-keeping, in multiplications: (ghost, instantiated).

        A kept gradient is the weight gradient's work done sample by sample: it adds the passes over its entries only.
        """
        pairs = self.positions**2 * (self.inputs + self.outputs) * self.groups
        entries = self.parameter.numel()
        return pairs, ENTRY_COST * entries + (0 if self.is_kept(g) else self.positions * entries)

    def instantiated_bytes(self, g: Tensor) -> int:
        """Workspace that one sample's gradient takes."""
        return self.parameter.numel() * g.element_size()

    def ghost_bytes(self, g: Tensor) -> int:
        """Workspace that one sample's ghost norm takes."""
        return 2 * self.positions**2 * self.groups * norm_dtype(g.dtype).itemsize

    def _instantiated(self, g: Tensor, samples: slice) -> Tensor:
        return sum_of_squares(self.instantiate(g, samples))

    def _ghost(self, g: Tensor, samples: slice) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no Gram form; has_ghost says so")


class Regrouped(Rule):
    """A rule whose rows are `fold` to a sample: instantiated for each row, then summed over each sample's."""

    def __init__(self, rule: Rule, fold: int) -> None:
        super().__init__(rule.parameter, rule.positions * fold, rule.inputs, rule.outputs, rule.groups)
        self.rule, self.fold = rule, fold
        self.is_fallback = rule.is_fallback

    def instantiated_bytes(self, g: Tensor) -> int:
        return self.fold * self.rule.instantiated_bytes(g)

    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        return self.rule.instantiate(g, self.rows(samples)).unflatten(0, (-1, self.fold)).sum(1)


def blocks(batch_size: int, bytes_per_sample: int, available: int) -> list[slice]:
    """Cut a batch into blocks of samples that stay within `available` bytes."""
    step = max(1, available // max(1, bytes_per_sample))
    return [slice(start, min(start + step, batch_size)) for start in range(0, batch_size, step)]


def sum_of_squares(x: Tensor) -> Tensor:
    """[b, ...] to [b], accumulated in float32 or wider."""
    return torch.linalg.vector_norm(x.reshape(x.shape[0], -1), dim=1, dtype=norm_dtype(x.dtype)).square()


def gram_product(a: Tensor, g: Tensor, available: int) -> Tensor:
    """Σ_{t,s} (a_t · a_s)(g_t · g_s) = ‖gᵀa‖², with positions before features.

    Args:
        a: [n, T, d].
        g: [n, T, p].
        available: bytes that Gram matrices may take.

    Returns:
        [n], float32 or wider.
    """
    a = a.to(norm_dtype(g.dtype))
    if a.shape[1] == 1:
        return sum_of_squares(a) * sum_of_squares(g)
    return gram_inner(g, lambda rows: torch.bmm(a[:, rows], a.transpose(1, 2)), available)


def gram_inner(g: Tensor, other: Callable[[slice], Tensor], available: int) -> Tensor:
    """Σ_{t,s} other_{t,s} (g_t · g_s), blocked over rows t where T² entries are more than is available.

    Args:
        g: [n, T, p].
        other: rows of the other Gram matrix: slice -> [n, rows, T].
        available: bytes that Gram matrices may take.

    Returns:
        [n], float32 or wider.
    """
    g = g.to(norm_dtype(g.dtype))
    count, positions, _ = g.shape
    rows = max(1, available // max(1, 2 * count * positions * g.element_size()))
    total = g.new_zeros(count)
    for start in range(0, positions, rows):
        block = slice(start, start + rows)
        total += torch.bmm(g[:, block], g.transpose(1, 2)).mul_(other(block)).sum((1, 2))
    return total


class Bias(Rule):
    """A bias added to every position: the per-sample gradient is the sum of g over positions.

    Args:
        parameter: [p].
        channel: the dimension of the output that the bias runs along; negative counts from the end.
    """

    def __init__(self, parameter: Tensor, channel: int) -> None:
        super().__init__(parameter)
        self.channel = channel

    def instantiate(self, g: Tensor, samples: slice) -> Tensor:
        g = g[samples].movedim(self.channel, -1)
        if g.dim() == 2:
            return g
        return g.sum(tuple(range(1, g.dim() - 1)), dtype=norm_dtype(g.dtype))
