"""Rules of linear layers, and `Bilinear`, the base of rules whose weight multiplies the input.

A linear layer is y = a Wᵀ + b: W [p, d], a [B, *, d], y [B, *, p]; the middle dimensions are positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import HALF, as_autocast, norm_dtype, wide_dtype
from clipping.core.microbatching import Parts, added, blocks
from clipping.numerics import kernels
from clipping.numerics.per_sample import added_at_once, at_once, gram_norms_and_reach, gram_product, part, within
from clipping.numerics.products import aligned, on_gpu, padding, product, products
from clipping.numerics.rounding_bounds import Reach, of_lost, of_operands, portion
from clipping.rules.base import DIRECT, Gradient, Gram, Refused, Route, Rule, Spec, Way, of_columns
from clipping.rules.elementwise import Broadcast
from clipping.rules.pixel_gram import LINEAR, Geometry


class Bilinear(Rule):
    """A weight with a gradient that is linear in the input and in the output's gradient.

    The clipping factors scale a copy of the smaller of the two, and the library may copy more. If copies are large, the
    sum is formed in portions of the batch, one after the other, because memory peaks when a step's sums begin.

    Methods take:
        x: input of some samples, as from `operands`.
        g: gradient of the output, [B·fold, ...]; beside x, of the same samples and as from `operands`.
        samples: slice of the batch.
        count: number of portions.
        found, squares: [b · groups, 1 + k] and [b · groups], results of each sample and group.
    """

    library = "cublas"

    @abstractmethod
    def operands(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """Return input and output gradient of some samples in g's dtype, samples first, with equal numbers of dims."""

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Σ_i g_i from `operands`, one possibly wider: of the parameter's shape, in float32 or wider."""
        return self.gradients(x, g, 1)[0]

    def bytes_of_operands(self, g: Tensor | Spec) -> tuple[int, int]:
        """Bytes of one sample's input, and of its output gradient."""
        size = self.positions * self.groups * g.element_size()
        return size * self.inputs, size * self.outputs

    @abstractmethod
    def copied(self, g: Tensor | Spec) -> int:
        """Bytes of the largest copy for one sample's share of the sum."""

    @abstractmethod
    def gradients(self, x: Tensor, g: Tensor, count: int) -> Tensor:
        """`gradient` of `count` equal portions, with samples in any order: [count, *shape]."""

    def add_groups(self, squares: Tensor) -> Tensor:
        """[b · groups] to [b]."""
        return squares if self.groups == 1 else squares.view(-1, self.groups).sum(1)

    def by_sample(self, found: Tensor) -> Parts:
        """Add up groups, of squared norms and the columns of a reach [b · groups, 1 + k]: the result of `Way.norms`."""
        return self.add_groups(found[:, 0]), *Reach.of_columns(found[:, 1:]).of_groups(self.groups)

    def lost(self, g: Tensor) -> tuple[float, float]:
        """`of_lost` of the output's gradient."""
        return of_lost(g.dtype, self.inputs + (self.bias is not None), self.outputs * (1 + len(self.beside)))

    def features(self, route: Route) -> int:
        return max(self.inputs, self.outputs * (1 + len(self.beside))) + (self.bias is not None)

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        if g.dtype in HALF and (found := kernels.ways.weighted([self], [g], factors)) is not None:
            return found[0]
        factors, count = factors.to(wide_dtype(g.dtype)), len(factors)
        most = portion(count, self.positions, norm_dtype(g.dtype))
        room, copied = self.room(), max(1, self.copied(g))
        if count <= most and count * copied <= room:
            return self.gradient(*self._scaled(g, factors, slice(0, count)))
        room = max(room, 4 * self.instantiated_bytes(g))  # adding up portions of this size takes little time
        fitting = room // copied
        if not at_once(g) or count <= most:
            portions = blocks(count, 1, min(most, max(1, fitting)))
            return added(lambda samples: self.gradient(*self._scaled(g, factors, samples)), portions)

        def sums(samples: slice, count: int) -> Tensor:
            return self.gradients(*self._scaled(g, factors, samples), count)

        wide = self.parameter.numel() * norm_dtype(g.dtype).itemsize  # bytes of a sum
        return added_at_once(sums, count, most, min(fitting, most * max(1, room // max(1, 2 * wide))))

    def summing_seconds(self, g: Tensor | Spec, *, kept: bool) -> float:
        """A product takes as long as its multiplications, or as what it reads."""
        seconds, traffic = super().summing_seconds(g, kept=kept), float(sum(self.bytes_of_operands(g)))
        if g.dtype in HALF and kernels.fused.runs(self.parameter):
            traffic = max(traffic, kernels.ways.loaded_by_sum(self, g))
        return seconds if kept else max(seconds, traffic / self._rates(g)[1])

    def _scaled(self, g: Tensor, factors: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """Scale the smaller operand. A half-precision copy is widened, as rounding would lose digits that cancel."""
        x, g = self.operands(g, samples)
        factors = part(factors, samples).view(-1, *[1] * (g.dim() - 1))
        return (x * factors, g) if x.numel() < g.numel() else (x, g * factors)


class _Gram(Gram["LinearWeight"]):
    """On a GPU, whole Gram matrices if they fit the workspace: their diagonals hold the reach."""

    def norms(self, rule: LinearWeight, g: Tensor, samples: slice) -> Parts:
        a, of = rule.operands(g, samples)
        if rule.positions == 1:  # ‖g aᵀ‖² is R²
            reach = of_operands(a, of, rule.inputs, rule.outputs)
            return reach.apart, *reach
        if not self.is_whole(rule, g):
            return (gram_product(a, of, rule.workspace(g)),)
        beside = [rule.operands(each, samples)[1] for each in rule.beside]
        return of_columns(gram_norms_and_reach(a, of, rule.lost(g), bias=rule.bias is not None, beside=beside))

    def is_whole(self, rule: LinearWeight, g: Tensor) -> bool:
        """True if the Gram matrices are formed whole, on a GPU."""
        return kernels.fused.runs(rule.a, g) and self.work(rule, g).workspace <= rule.workspace(g)


GRAM = _Gram()


class LinearWeight(Bilinear):
    """∂/∂W of one sample is Σ_t g_t a_tᵀ = gᵀa, [p, d].

    The gradient of a transposed weight is the transpose, aᵀg: a and g change places in `operands`, and so do d and p.

    Args:
        weight: [p, d], or [d, p] if `transposed`.
        a: [n, *, d].
        fold: rows of a and g for each sample.
        share: `nodes.Share` of the operation's node, or None.

    Methods take:
        g, samples: as those of `Rule`.
    """

    ways: tuple[Way[Any], ...] = (GRAM, DIRECT)

    def __init__(self, weight: Tensor, a: Tensor, transposed: bool = False, fold: int = 1, share: Any = None) -> None:
        outputs, inputs = weight.shape
        samples = max(1, a.shape[0] // fold)
        super().__init__(weight, positions=a.numel() // a.shape[-1] // samples, inputs=inputs, outputs=outputs)
        self.a, self.transposed, self.fold, self.share = a, transposed, fold, share
        self.ways = (*LinearWeight.ways, *kernels.ways.of(self))

    def regroup(self, fold: int) -> Rule:
        return LinearWeight(self.parameter, self.a, self.transposed, fold, self.share)

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        x, g = self.operands(g, samples)
        return self.sliced(products(g.transpose(1, 2), x.transpose(1, 2)))

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return self.sliced(product(g.flatten(0, 1), x.flatten(0, 1)))

    def gradients(self, x: Tensor, g: Tensor, count: int) -> Tensor:
        x, g = (y.unflatten(0, (count, -1)).flatten(1, 2) for y in (x, g))
        return self.sliced(product(g, x))

    def sliced(self, found: Tensor) -> Tensor:
        """Remove the rows and columns of zeros that `aligned` adds.

        Args:
            found: [..., p or more, d or more].
        """
        rows, columns = self.parameter.shape
        return found[..., :rows, :columns].contiguous()

    def laid_out(self, g: Tensor, *, ghost: bool) -> Tensor:
        found = aligned(g, self.a.shape[-1]) if on_gpu(g) else g
        if self.share is not None and self.share.input_only:
            self.share.leave(g, (found,))
        return found

    def reach(self, g: Tensor) -> Reach:
        def of_block(samples: slice) -> Reach:
            return of_operands(*self.operands(g, samples), self.inputs, self.outputs)

        return self._reach_of_rows(g, of_block, self.positions * self.inputs * g.element_size())

    def copied(self, g: Tensor | Spec) -> int:
        entries = min(self.inputs, self.outputs)
        if g.dtype in HALF and on_gpu(self.parameter):
            width = self.a.shape[-1]
            more = padding((self.samples(g) * self.positions, width), g.dtype, self.parameter.numel() // width)
            entries += width + more if more else 0  # of the padded copy of the input
        return self.positions * entries * g.element_size()

    def geometry(self) -> Geometry:
        """Geometry of the convolution of `images`."""
        return LINEAR

    def images(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """`operands` as images of one row, [b, d, T] and [b, p, T]."""
        x, g = self.operands(g, samples)
        return x.mT, g.mT

    def inner(self, g: Tensor, other: Rule, other_g: Tensor) -> Tensor | None:
        if not isinstance(other, LinearWeight):
            return None
        (a, g), (b, h) = self.unpadded(g), other.unpadded(other_g)
        return cross_gram(a, g, b, h, self.workspace(g))

    def unpadded(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """`operands` of all samples without the padding, which may differ between two uses of a weight."""
        a, g = self.operands(g, slice(0, self.samples(g)))
        return part(a, slice(0, self.inputs), -1), part(g, slice(0, self.outputs), -1)

    def operands(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """[b, T, d] and [b, T, p], padded with zeros if that makes products faster (`products.padding`)."""
        x, g = self.by_position(g, samples)
        x, g = (g, x) if self.transposed else (x, g)
        return (aligned(x, self.outputs), aligned(g, self.inputs)) if g.dtype in HALF and on_gpu(g) else (x, g)

    def by_position(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """a and g, positions in one dimension, in g's dtype: under autocast it may be narrower than the input's."""
        a = self.a
        if samples.start or samples.stop * self.fold < len(a):  # g may be of fewer samples, to time them
            rows = self.rows(samples)
            a, g = a[rows], g[rows]
        a = a if a.dtype == g.dtype else a.to(g.dtype)
        if self.fold == 1 and a.dim() == 3:
            return a, g
        count = a.shape[0] // self.fold
        return a.reshape(count, -1, a.shape[-1]), g.reshape(count, -1, g.shape[-1])


def cross_gram(a: Tensor, g: Tensor, b: Tensor, h: Tensor, available: int) -> Tensor:
    """<gᵀa, hᵀb> = Σ_{t,s} (a_t · b_s)(g_t · h_s) of each sample, [n].

    Args:
        a, g: input [n, T, d] and output gradient [n, T, p] of one use.
        b, h: input [n, S, d] and output gradient [n, S, p] of the other use.
        available: bytes that Gram matrices may take.
    """
    a, g, b, h = (x.to(g.dtype) for x in (a, g, b, h))
    return within(lambda rows: products(a[:, rows], b).mul_(products(g[:, rows], h)), g.shape[1], h, available)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.linear and the gradients of its parameters."""
    input = _as_multiplied(input)
    share = kernels.nodes.share_of_linear(input, weight) or None
    if share is None:
        output = F.linear(input, weight, bias)
    else:
        of_bias = None if bias is None else as_autocast(bias)
        output = kernels.nodes.Linear.apply(share, input, as_autocast(weight), of_bias)
    return output, ((weight, LinearWeight, input, False, 1, share), (bias, Broadcast, output.shape))


def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.addmm(bias, a, W) with W [d, p], as in the Conv1D of GPT-2."""
    if beta != 1 or alpha != 1:
        raise Refused("addmm with beta or alpha has no rule", "scale its operands")
    mat1 = _as_multiplied(mat1)
    output = torch.addmm(input, mat1, mat2)
    return output, ((mat2, LinearWeight, mat1, True), (input, Broadcast, output.shape))


def matmul(input: Tensor, other: Tensor) -> tuple[Tensor, Sequence[Gradient]]:
    """a @ W with W [d, p] (torch.matmul, torch.mm, @)."""
    if other.dim() != 2 or input.dim() < 2:
        raise Refused("matmul has a rule for activations [n, *, d] times a matrix [d, p] only", "use nn.Linear")
    input = _as_multiplied(input)
    return torch.matmul(input, other), ((other, LinearWeight, input, True),)


def _as_multiplied(x: Tensor) -> Tensor:
    """On CUDA, cast x as autocast would, so that norm and sum read the copy that autograd holds.

    Otherwise x would be held besides that copy, and each of them would cast it. On a CPU half-precision products read
    float32, and nothing is cast.
    """
    return as_autocast(x) if x.is_cuda else x
