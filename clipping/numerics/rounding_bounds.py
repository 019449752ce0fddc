"""How far rounding may carry a record beyond its clipping threshold, and what is added to its norm so that it does not.

DP-SGD needs ‖S(D ∪ x) - S(D)‖ ≤ C of the sums that are *computed*. A record's norm and its share of the sum are formed
by different operations of finite precision, and where large terms cancel both may be rounding and nothing else. What
tells how large the terms were is the **reach** of a use of a parameter, with rows a_t of its input and g_t of its
output's gradient:

    U = Σ_t ‖a_t‖ ‖g_t‖ ≥ ‖Σ_t g_t a_tᵀ‖.

With u the unit roundoff of what is accumulated in (2^-24 for float32), a dot product of n terms that is added up in
lanes is off by about ¼ √n u times the sum of the sizes of its terms, if each addition rounds at random (Higham and
Mary 2019, *A new approach to probabilistic rounding error analysis*; a constant of 1 is there for what is not). So

    a squared norm by Gram matrices of rows of n features is off by at most    γ_N U²,   γ_N = (4 + ½ √n) u
    a product over T positions, instantiated or within the sum, by at most     γ_G U,    γ_G = (4 + √T) u
    a second backward pass adds up g_t in another order, where a GPU does so
    by atomic additions: off in its last digits:                               γ_G + 32 u in place of γ_G

and the factors are made of

    n̂ = max( √(Σ N + Σ γ_N U²) + √(Σ (γ_G U)²),  √(Σ U²) / ρ )

over the uses, N the computed squared norm: c = clip(n̂) times the record's share of the computed sum is at most C. For
an ordinary record U/‖g‖ is about √T or less (11 at T = 128, 32 at T = 1024), and n̂ exceeds the norm by less than
1e-3; for one that cancels the bound is loose, and it is clipped harder, which costs nobody else anything. Where the
instantiated gradient is kept, norm and sum come of one tensor, and nothing is added; and where a weight was made of
parameters (standardised, normed, cast), of one that is formed and pulled back twice, by the same operations.

**Operands.** A product may round its operands, too, before they are multiplied: by TF32 to 11 bits, u_o = 2^-11. Which
does is that product's own: a linear layer's sum is cuBLAS', a convolution's cuDNN's, each with a switch (torch allows
TF32 in cuDNN by default); norms are formed in full precision, but for gradients that a convolution instantiates. Then
Σ_t (g_t + δg_t)(a_t + δa_t)ᵀ is summed in place of G = Σ_t g_t a_tᵀ, and with R² = Σ_t ‖a_t‖² ‖g_t‖²

    in the worst case it is off by at most       2 u_o U
    if each entry rounds at random, uniformly
    and independently of the others:             ‖G + ΔG‖ ≤ ‖G‖ + κ u_o R, κ = 6

with probability 1 - 1e-12. For across G the error's length is about u_o R √(2/3), and adds to that of G in squares; and
along G its standard deviation is at most the same, as ⟨G, ΔG⟩ = Σ_tj δg_tj (G a_t)_j + Σ_tk δa_tk (Gᵀ g_t)_k, where
|(G a_t)_j| ≤ ‖G‖ ‖a_t‖. An ordinary record has R of about ‖G‖, one that cancels more. So 2 κ u_o (6e-3) is stated as
part of η, and n̂ is raised where κ u_o R is more than that share of it: n̂ ≥ (√(Σ N) + √(Σ (κ u_o R)²)) / (1 + 2 κ u_o).
Ordinary records keep their factors, to the last bit. Gradients that a convolution instantiated, and did not keep, have
errors of their own in the norm: √2 κ. Of bfloat16 operands nothing is rounded but the factor's product, in 16 bits
(`clipping.numerics.products`): 2^-16 U, as part of γ_G U. Products of float64 are rounded by no switch.

**The others** are to keep their factors: so routes do not depend on how many records there are (`chosen_for` of a tape
backend), and what is stated holds for two batches that go by the same ones. A plan that is timed changes them once, in
its second step. Nor may a record's own numbers depend on its neighbours: the products of a forward and of a backward
pass are taken to round a row alike in batches of B and B + 1, which MKL, oneDNN and cuDNN were seen to do for most
shapes, and promise for none; and a batch that is padded to its longest record has other shapes with it than without.

**The others' roundings** change with the record, which moves them to other places in a product of K = B·T terms. They
are bounded through what each may put into the sum: c U ≤ ρ C, with ρ = max(40, 1.25 √T) (the second part of n̂; ordinary
records do not reach it), and b C for the b records of a portion, for portions of a sum are added up in float64:

    η ≤ u √(B T) (b + ρ/2) / 4            if each addition rounds at random: the sum's error in its Frobenius norm is
                                          of so many independent ones, and exceeds this with probability below 1e-12
    η ≤ u B T (b + ρ) + u ρ (T + n)       in the worst case, that of the record's own norm included

and the sum's last rounding, from float64, adds up to u B, where the B gradients are all alike.

Where n̂ is no number something has overflowed, and the record's factor is 0: it adds nothing to the sum, or what is no
number there either, which is refused. Entries too small to be squared (below `smallest`) are added to n̂ as if each
were that large.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.core.dtypes import norm_dtype, smallest
from clipping.numerics import kernels

FEATURES, PRODUCT, SECOND_PASS = 0.5, 1.0, 32.0
"""Of u: what is measured beside √n, √T, and what a second backward pass differs by."""
CAP, CAP_OF_LAYER = (40.0, 1.25), (64.0, 2.0)
"""ρ: how many times its threshold the terms of one record may measure, at least, and for each √T. Terms cancel more in
one layer than in the whole gradient."""
OWN = 64.0
"""Of u, relative to a norm: what it and its factor are rounded by where nothing cancels."""
UNKNOWN = 8.0
"""U/‖g‖ of a use of which only the gradient is known."""
HALVES = 2.0**-16
"""What two bfloat16 numbers keep of one in float32."""
TF32 = 2.0**-11
"""u_o of its 11 bits."""
OPERANDS = 6.0
"""κ: 7 standard deviations of √(2/3)."""
ALLOWANCE = 2 * OPERANDS * TF32
"""η of operands that are rounded to TF32."""
PORTION = 2e4
"""b √(B T) of a portion of a sum in float32: then b u √(B T) / 4 is 3e-4. With three times as much, records in an order
that rounds all of them up exceed what is stated for roundings at random."""


class Reach(NamedTuple):
    """Of one use, for each record.

    Attributes:
        terms: U [B].
        lost: [B] what of it is due to entries that may have been too small to be squared.
        apart: R² [B], or a number that is larger.
    """

    terms: Tensor
    lost: Tensor
    apart: Tensor

    @classmethod
    def of_columns(cls, found: Tensor) -> Reach:
        """From a kernel.

        Args:
            found: [B, 2], U and what was lost: R is at most U, and no processor whose kernel this is rounds operands.
                Or [B, 3], with R² beside them.
        """
        terms, lost, *apart = found.unbind(-1)
        return cls(terms, lost, apart[0] if apart else terms.square())

    def of_groups(self, groups: int, repeated: float = 1.0) -> Reach:
        """Of groups that have outputs of their own, [B · groups], together.

        Args:
            groups: of each sample.
            repeated: how often each is there.
        """
        if groups == 1 and repeated == 1:
            return self
        terms, lost = (row_norms(each.view(-1, groups)) * repeated for each in (self.terms, self.lost))
        return Reach(terms, lost, self.apart.view(-1, groups).sum(1) * repeated**2)


def of_rows(a: Tensor, g: Tensor, inputs: int, outputs: int) -> Reach:
    """Σ_t ‖a_t‖ ‖g_t‖ from the norms of rows.

    Args:
        a: [b, T] of inputs; or [b, 1], of all positions alike.
        g: [b, T] of gradients.
        inputs, outputs: entries of each row.
    """
    beside_inputs, beside_outputs = of_lost(g.dtype, inputs, outputs)
    if kernels.fused.runs(a, g):
        return Reach.of_columns(kernels.fused.reach(a, g, (beside_inputs, beside_outputs)))
    of_inputs = (a if a.shape == g.shape else a.expand_as(g)).sum(1)
    lost = g.sum(1).mul_(beside_outputs).add_(of_inputs, alpha=beside_inputs)
    terms = a * g
    return Reach(terms.sum(1), lost, terms.square_().sum(1))


def of_lost(dtype: torch.dtype, inputs: int, outputs: int) -> tuple[float, float]:
    """What an input row's norm is multiplied by, and a gradient row's, for what the other row may have lost: each of
    so many entries was smaller than can be squared. What both lost is beneath notice.

    Args:
        dtype: of the rows.
        inputs, outputs: d and p, the entries of an input row and of a gradient row.
    """
    least = smallest(dtype)
    return least * math.sqrt(outputs), least * math.sqrt(inputs)


def all_alike(terms: Tensor, entries: int) -> Reach:
    """Of terms [b, ...] that are added up to `entries` numbers each: √T times the norm of all, which is U or more.

    Args:
        terms: [b, ...].
        entries: of one sample's gradient.
    """
    norms = row_norms(terms.flatten(1))
    most = norms * math.sqrt(max(1, math.prod(terms.shape[1:]) // max(1, entries)))
    return Reach(most, torch.zeros_like(norms), norms.square())


def row_norms(x: Tensor, dim: int = -1) -> Tensor:
    """Norms along one dimension, in float32 or wider.

    Args:
        x: of any shape.
        dim: along which.
    """
    if dim == 1 and x.dim() > 2 and x.numel() and kernels.cpu.in_one_piece(x):
        return kernels.cpu.column_norms(x)
    # counted from the front: to torch 2.11 without values the last dimension, where it has one entry, stays
    return torch.linalg.vector_norm(x, dim=dim % x.dim(), dtype=norm_dtype(x.dtype))


def unit(dtype: torch.dtype) -> float:
    """u of what products of `dtype` are accumulated in.

    Args:
        dtype: of the operands.
    """
    return torch.finfo(norm_dtype(dtype)).eps / 2


def of_gram(features: int, dtype: torch.dtype) -> float:
    """γ_N, relative to U².

    Args:
        features: products that one entry of both Gram matrices takes.
        dtype: of the operands.
    """
    return (4 + FEATURES * math.sqrt(features)) * unit(dtype)


def of_product(positions: int, dtype: torch.dtype, second_pass: bool) -> float:
    """γ_G, relative to U.

    Args:
        positions: T.
        dtype: of the operands.
        second_pass: whether the sum is formed from tensors of a second backward pass.
    """
    return (4 + PRODUCT * math.sqrt(positions) + (SECOND_PASS if second_pass else 0)) * unit(dtype)


def rounds_operands(of: Tensor, library: str) -> bool:
    """Whether a product of such operands, in float32, may round them to TF32.

    Args:
        of: an operand.
        library: cudnn for a convolution, cublas for a product of matrices.
    """
    if not of.is_cuda or torch.finfo(of.dtype).bits > 32 or (of.dtype == torch.bfloat16 and library == "cublas"):
        return False
    switches: Any = torch.backends
    switch = switches.cudnn.conv if library == "cudnn" else switches.cuda.matmul
    return bool(switch.fp32_precision == "tf32")


def cap(positions: int, *, of_layer: bool = False) -> float:
    """ρ, where uses have at most so many positions; `of_layer` for per-layer clipping.

    Args:
        positions: T, of the use that has most.
        of_layer: per layer.
    """
    least, each = CAP_OF_LAYER if of_layer else CAP
    return max(least, each * math.sqrt(positions))


def portion(samples: int, positions: int, dtype: torch.dtype) -> int:
    """b: samples whose share of a sum may be formed at once, before it is added to the rest in float64.

    Args:
        samples: B.
        positions: T.
        dtype: of the operands.
    """
    wider = 2.0**-24 / unit(dtype)
    return max(1, int(wider * PORTION / math.sqrt(max(1, samples * positions))))


def excess(
    batch_size: int,
    positions: int,
    features: int,
    together: int,
    dtype: torch.dtype,
    *,
    of_layers: bool = False,
    operands: bool = False,
) -> tuple[float, float]:
    """η: what one record may move the computed sum by beyond its threshold, as a share of it.

    The last rounding of a sum of B gradients, from float64, is among it: of B u where all are alike and both sums lie
    just beside what is rounded the other way, which has nothing to do with how portions were rounded. So are 64 u for
    a record's own norm (a sum of thousands of squares at once), its root and factor.

    Args:
        batch_size: B.
        positions: T, the most of a use; 0 if gradients are summed one by one.
        features: of the longest rows that are multiplied with one another.
        together: b, samples whose share of the sum is formed at once.
        dtype: of what is summed.
        of_layers: of per-layer clipping.
        operands: those of some products are rounded to TF32.

    Returns:
        If each addition rounds at random, and in the worst case.
    """
    u, terms, most = unit(dtype), batch_size * positions, cap(positions, of_layer=of_layers)
    others = math.sqrt(terms) * (together + most / 2) / 4
    at_random = u * (OWN + max(batch_size / 4 + others, math.hypot(batch_size, others)))
    worst = u * (OWN + batch_size + terms * (together + most) + most * (positions + features))
    return (at_random + ALLOWANCE, worst + 2 * TF32 * most) if operands else (at_random, worst)


class Doubt:
    """What rounding may have hidden of each record's norm, over all uses of parameters.

    Args:
        like: [B], of the dtype of norms.
        parameters: how many numbers a gradient has.
        of_layer: it is one layer's.
    """

    def __init__(self, like: Tensor, parameters: int, *, of_layer: bool = False) -> None:
        self._like, self._of_layer = like, of_layer
        self._least = math.sqrt(parameters) * smallest(like.dtype)
        self._uses: list[tuple[Reach, float, float, float]] = []
        self._positions = 1

    def add(
        self,
        reach: Reach,
        features: int,
        positions: int,
        *,
        gram: bool,
        second_pass: bool = False,
        of: Tensor | None = None,
        library: str = "",
    ) -> None:
        """Of a use whose norm is not that of the tensor which is summed.

        Args:
            reach: of all records.
            features: the most that were multiplied with one another in a dot product of rows.
            positions: T.
            gram: the norm came of Gram matrices.
            second_pass: the sum is another backward pass's.
            of: a tensor of the dtype and device of what the sum is a product of.
            library: whose product that is; "" if it is none.
        """
        dtype = self._like.dtype
        of_squares = of_gram(features, dtype) if gram else 0.0
        of_sums, of_operands = of_product(positions, dtype, second_pass), 0.0
        if of is not None and library and rounds_operands(of, library):
            of_operands = OPERANDS * TF32 * (math.sqrt(2) if library == "cudnn" and not gram else 1)
        elif of is not None and library and of.is_cuda and of.dtype == torch.bfloat16:
            of_sums += HALVES
        self._uses.append((reach, of_squares, of_sums, of_operands))
        self._positions = max(self._positions, positions)

    def bound(self, squares: Tensor) -> Tensor:
        """n̂ [B] from the computed squared norms [B].

        Args:
            squares: ‖g_i‖², perhaps a rounding below zero.
        """
        squares = squares.clamp(min=0)
        if not self._uses:
            return squares.sqrt() + self._least
        reaches, of_squares, of_sums, of_operands = zip(*self._uses, strict=True)
        terms, lost, apart = ([each.to(self._like.dtype) for each in part] for part in zip(*reaches, strict=True))
        rates = [*map(math.sqrt, of_squares), *of_sums]
        scaled = torch._foreach_mul([*terms, *terms], rates)
        sums = torch.stack([*scaled, *terms]).square_().view(3, len(terms), -1).sum(1)
        sums[0] += squares
        doubted, unlike, reach = sums.sqrt_()
        found = (doubted + unlike).add_(torch.stack(lost).sum(0)).add_(self._least)
        found = torch.maximum(found, reach / cap(self._positions, of_layer=self._of_layer))
        if any(of_operands):
            rounded = torch.stack(torch._foreach_mul(apart, [rate**2 for rate in of_operands])).sum(0)
            found = torch.maximum(found, (squares.sqrt() + rounded.sqrt_()).div_(1 + ALLOWANCE))
        # an overflow: infinities subtracted from one another, or times 0. What is no number itself stays so in the sum
        return found.nan_to_num_(math.inf, math.inf)
