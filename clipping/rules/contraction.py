"""einsum of an activation a, samples first, and a weight W of any number of dimensions: y = einsum("b..,..->b..").

Each letter of W has a role in the product, as in a linear layer with groups:

    in a and y      a group: each has its own product
    in a alone      an input, d
    in y alone      an output, p

Letters of a and y that are not in W are positions, T. The per-sample gradient is G products gᵀa, and its squared norm
is the sum of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import wide_dtype
from clipping.core.microbatching import Parts
from clipping.numerics.per_sample import gram_product, part
from clipping.numerics.products import products
from clipping.numerics.rounding_bounds import Reach, of_operands
from clipping.rules.base import DIRECT, Gradient, Gram, Refused, Rule, Spec
from clipping.rules.linear import Bilinear

REMEDY = "write it as torch.matmul or as several einsums of two operands, or use microbatch"


class _Gram(Gram["Contraction"]):
    """Gram matrices of each group."""

    def norms(self, rule: Contraction, g: Tensor, samples: slice) -> Parts:
        x, of = rule.operands(g, samples)
        return (gram_product(x.flatten(0, 1), of.flatten(0, 1), rule.workspace(g)).view(len(x), -1).sum(1),)


class Contraction(Bilinear):
    """W in y = einsum("a,w->y").

    Args:
        weight: tensor with the letters `w`.
        x: activation with the letters `a`; the first letter is the samples'.
        letters: a, w and y, each a string without repeated letters; y begins as a does.
    """

    ways = (_Gram(), DIRECT)

    def __init__(self, weight: Tensor, x: Tensor, letters: tuple[str, str, str], fold: int = 1) -> None:
        a, w, y = letters
        sizes = dict(zip(a, x.shape, strict=True)) | dict(zip(w, weight.shape, strict=True))
        self.grouped = [c for c in w if c in a and c in y]
        self.contracted = [c for c in w if c in a and c not in y]
        self.made = [c for c in w if c not in a and c in y]
        self.along = [c for c in a[1:] if c not in w and c in y]
        self.letters, self.sizes, self.settings = letters, sizes, (letters,)

        def size(group: Sequence[str]) -> int:
            return math.prod(sizes[c] for c in group)

        super().__init__(weight, fold * size(self.along), size(self.contracted), size(self.made), size(self.grouped))
        self.x, self.fold = x, fold

    def regroup(self, fold: int) -> Rule:
        return Contraction(self.parameter, self.x, self.letters, fold)

    def operands(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """[b, G, T, d] and [b, G, T, p]."""
        rows = self.rows(samples)
        a, _, y = self.letters
        x, g = part(self.x, rows), part(g, rows)
        if over := [i for i, c in enumerate(a) if i and c not in y and c not in self.contracted]:
            x, a = x.sum(over), "".join(c for i, c in enumerate(a) if i not in over)
        x = x if x.dtype == g.dtype else x.to(g.dtype)
        return self._arranged(x, a, self.contracted), self._arranged(g, y, self.made)

    def _arranged(self, x: Tensor, letters: str, last: Sequence[str]) -> Tensor:
        order = [letters[0], *self.grouped, *self.along, *last]
        x = x.permute([letters.index(c) for c in order])
        count, last_size = x.shape[0], math.prod(self.sizes[c] for c in last)
        x = x.reshape(count // self.fold, self.fold, self.groups, self.positions // self.fold, last_size)
        x = x[:, 0] if self.fold == 1 else x.transpose(1, 2).flatten(2, 3)
        return x

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        x, g = self.operands(g, samples)
        count = len(x)
        return self._placed(products(*(each.flatten(0, 1).transpose(1, 2) for each in (x, g))), count)

    def reach(self, g: Tensor) -> Reach:
        def of_block(samples: slice) -> Reach:
            x, of = (each.flatten(0, 1) for each in self.operands(g, samples))
            return of_operands(x, of, self.inputs, self.outputs).of_groups(self.groups)

        return self._reach_of_rows(g, of_block, self.groups * self.positions * self.inputs * g.element_size())

    def gradients(self, x: Tensor, g: Tensor, count: int) -> Tensor:
        x, g = (y.unflatten(0, (count, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1) for y in (x, g))
        x, g = (y.to(wide_dtype(y.dtype)).transpose(1, 2) for y in (x, g))  # [count G, d, b T]
        return self._placed(products(x, g), count)

    def _placed(self, found: Tensor, count: int) -> Tensor:
        """[b · G, d, p] to [b, *shape of W]."""
        order = [*self.grouped, *self.contracted, *self.made]
        _, w, _ = self.letters
        found = found.reshape(count, *(self.sizes[c] for c in order))
        return found.permute(0, *(1 + order.index(c) for c in w))

    def copied(self, g: Tensor | Spec) -> int:
        return self.groups * self.positions * min(self.inputs, self.outputs) * g.element_size()


def parsed(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the output, with unused capitals in place of "...".

    Args:
        equation: as in `torch.einsum`.
        operands: two tensors.

    Raises:
        Refused: an operand repeats a letter.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation]
    dims = [
        x.dim() - len(term.replace("...", "")) if "..." in term else 0 for term, x in zip(terms, operands, strict=True)
    ]
    dots = "".join(free[: max(dims)])
    found = [term.replace("...", dots[len(dots) - n :]) for term, n in zip(terms, dims, strict=True)]
    if not arrow:
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        right = "..." + "".join(once) if "..." in left else "".join(once)
    right = right.replace("...", dots)
    if any(len(set(term)) < len(term) for term in [*found, right]):
        raise Refused("an einsum that takes a diagonal has no rule", REMEDY)
    return found, right


def einsum(equation: Any, *operands: Any) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.einsum of an activation and a weight, in either order; the activation's first letter is the samples'."""
    flat = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or len(flat) != 2:
        raise Refused("einsum has a rule for an equation and two operands only", REMEDY)
    terms, y = parsed(equation, flat)
    output = torch.einsum(equation, *flat)
    output = output.clone() if output._is_view() else output  # a view changed in place would get another node
    gradients = []
    for mine, other in ((0, 1), (1, 0)):
        a, w = terms[other], terms[mine]
        if not y or a[:1] != y[:1] or y[0] in w or not set(w) <= set(a + y):
            continue
        if any(n == 1 for n in _broadcast(flat[other], flat[mine], a, w)):
            continue
        gradients.append((flat[mine], Contraction, flat[other].detach(), (a, w, y)))
    if not gradients:
        reason = "einsum has a rule for samples in the first dimension of data and output, and weights summed with data"
        raise Refused(reason, REMEDY)
    return output, gradients


def _broadcast(x: Tensor, weight: Tensor, a: str, w: str) -> list[int]:
    """Return the sizes of letters that have size 1 in one operand and more in the other."""
    other = dict(zip(w, weight.shape, strict=True))
    return [min(n, other[c]) for c, n in zip(a, x.shape, strict=True) if c in other and other[c] != n]
