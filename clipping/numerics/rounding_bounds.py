"""Bound what rounding adds to a record's sensitivity, and raise its norm by it.

DP-SGD needs ‖S(D ∪ x) - S(D)‖ ≤ C for the sums that are *computed*. Different operations of finite precision compute a
record's norm and its share of the sum; where large terms cancel, both may be nothing but rounding error. The size of
the terms is bounded by the **reach** of a use of a parameter. For rows a_t of its input and g_t of its output's
gradient:

    U = Σ_t ‖a_t‖ ‖g_t‖ ≥ ‖Σ_t g_t a_tᵀ‖.

Let u be the unit roundoff of the accumulation dtype (2^-24 for float32). If each addition rounds at random, the error
of a dot product of n terms, summed in lanes, is about ¼ √n u times the sum of the terms' sizes (Higham and
Mary 2019, *A new approach to probabilistic rounding error analysis*; a constant of 1 covers the other additions). So

    a squared norm by Gram matrices of rows of n features has error at most    γ_N U²,   γ_N = (4 + ½ √n) u
    a product over T positions, instantiated or within the sum, at most        γ_G U,    γ_G = (4 + √T) u
    a second backward pass, where a GPU sums g_t
    in another order by atomic additions:                                      γ_G + 32 u in place of γ_G

and the factors are computed from

    n̂ = max( √(Σ N + Σ γ_N U²) + √(Σ (γ_G U)²),  √(Σ U²) / ρ )

over the uses, where N is the computed squared norm. Then c = clip(n̂) times the record's share of the computed sum is
at most C. An ordinary record has U/‖g‖ of about √T or less (11 at T = 128, 32 at T = 1024), and n̂ exceeds its norm by
less than 1e-3. For a record whose terms cancel, the bound is loose and the record is clipped harder; other records are
not affected. Where the instantiated gradient is kept, norm and sum use one tensor, and nothing is added. The same holds
for a weight made of parameters (standardised, normed, cast): its gradient is formed and pulled back twice by the same
operations.

**Operands.** A product may also round its operands before it multiplies them: TF32 keeps 11 bits, u_o = 2^-11. This
depends on the product: a linear layer's sum uses cuBLAS and a convolution's cuDNN, each with its own switch (torch
allows TF32 in cuDNN by default). Norms use full precision, except for gradients that a convolution instantiates. Then
Σ_t (g_t + δg_t)(a_t + δa_t)ᵀ is summed in place of G = Σ_t g_t a_tᵀ, and with R² = Σ_t ‖a_t‖² ‖g_t‖²

    in the worst case the error is at most       2 u_o U
    if each entry rounds at random, uniformly
    and independently of the others:             ‖G + ΔG‖ ≤ ‖G‖ + κ u_o R, κ = 6

with probability 1 - 1e-12: the part of the error orthogonal to G has length about u_o R √(2/3), and adds to G in
squares. The part along G has at most this standard deviation, as ⟨G, ΔG⟩ = Σ_tj δg_tj (G a_t)_j + Σ_tk δa_tk (Gᵀ g_t)_k
and |(G a_t)_j| ≤ ‖G‖ ‖a_t‖. An ordinary record has R of about ‖G‖; a record whose terms cancel has more. So η includes
2 κ u_o (6e-3), and n̂ is raised where κ u_o R exceeds that share: n̂ ≥ (√(Σ N) + √(Σ (κ u_o R)²)) / (1 + 2 κ u_o).
Ordinary records keep their factors to the last bit. Gradients that a convolution instantiates without keeping them
also have such errors in the norm: √2 κ. With bfloat16 operands only the product with the factor is rounded, to 16 bits
(`clipping.numerics.products`): 2^-16 U, as part of γ_G U. Kernels that multiply by the factor themselves do so in
float32, and have this bound as well. No switch rounds products of float64.

**Other records** must keep their factors. So routes do not depend on the number of records (`chosen_for` of a tape
backend), and the bound holds for two batches on the same routes. A timed plan changes routes once, in its second step.
A record's own numbers must not depend on its neighbours either: we assume that the products of a forward and of a
backward pass round a row equally in batches of B and B + 1. MKL, oneDNN and cuDNN did so for most shapes tested, and
guarantee it for none; a batch padded to its longest record has other shapes with that record than without.

**Rounding errors of other records** change with the record, which moves their terms in a product of K = B·T terms.
They are bounded by what each record may add to the sum: c U ≤ ρ C, with ρ = max(40, 1.25 √T) (the second part of n̂;
ordinary records do not reach it), and b C for the b records of a portion, as portions are accumulated in float64:

    η ≤ u √(B T) (b + ρ/2) / 4            if each addition rounds at random: the Frobenius norm of the sum's error
                                          combines B T independent errors; it exceeds this with probability < 1e-12
    η ≤ u B T (b + ρ) + u ρ (T + n)       in the worst case, including the record's own norm

The sum's last rounding, from float64, adds up to u B, where the B gradients are all alike.

Where n̂ is NaN or infinite, something has overflowed, and the record's factor is 0: it adds zero to the sum, or NaN,
which is rejected. Entries too small to be squared (below `smallest`) count in n̂ as if each were that large.

Functions take:
    inputs, outputs: d and p, the entries of an input row and of a gradient row, without padding.
    positions, features: T, and the length of the longest rows that are multiplied with each other.
    second_pass: the sum uses tensors of a second backward pass.
    a, g: [b, T, d] and [b, T, p], rows of an input and of an output's gradient.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.core.dtypes import norm_dtype, smallest
from clipping.core.microbatching import power_of_two
from clipping.numerics import kernels

FEATURES, PRODUCT, SECOND_PASS = 0.5, 1.0, 32.0
"""In units of u: the measured factors of √n and √T, and the difference of a second backward pass."""
CAP, CAP_OF_LAYER = (40.0, 1.25), (64.0, 2.0)
"""ρ: the size of one record's terms over its threshold: the minimum, and the factor of √T. Terms cancel more in one
layer than in the whole gradient."""
OWN = 64.0
"""In units of u, relative to a norm: the rounding of a norm and its factor where nothing cancels."""
UNKNOWN = 8.0
"""U/‖g‖ assumed for a use whose gradient alone is known."""
HALVES = 2.0**-16
"""Relative error of a float32 number split into two bfloat16 numbers."""
TF32 = 2.0**-11
"""u_o of TF32, which keeps 11 bits."""
OPERANDS = 6.0
"""κ: 7 standard deviations of √(2/3)."""
ALLOWANCE = 2 * OPERANDS * TF32
"""η of operands rounded to TF32."""
PORTION = 2e4
"""b √(B T) of a float32 portion of a sum: then b u √(B T) / 4 is 3e-4. At three times this, records ordered such that
all round up exceed the bound for random rounding."""


class Reach(NamedTuple):
    """The reach of one use, for each record.

    Attributes:
        terms: U [B].
        lost: [B], bound on the terms of entries that may have underflowed when squared.
        apart: [B], R² or an upper bound of it.
    """

    terms: Tensor
    lost: Tensor
    apart: Tensor

    @classmethod
    def of_columns(cls, found: Tensor) -> Reach:
        """Build from a kernel's output.

        Args:
            found: [B, 2] with U and `lost`, from a processor that does not round operands: R is at most U.
                Or [B, 3], with R² as well.
        """
        terms, lost, *apart = found.unbind(-1)
        return cls(terms, lost, apart[0] if apart else terms.square())

    def of_groups(self, groups: int) -> Reach:
        """Combine groups with separate outputs, [B · groups] to [B].

        Args:
            groups: groups of each sample.
        """
        if groups == 1:
            return self
        terms, lost = (row_norms(each.view(-1, groups)) for each in (self.terms, self.lost))
        return Reach(terms, lost, self.apart.view(-1, groups).sum(1))


def of_operands(a: Tensor, g: Tensor, inputs: int, outputs: int) -> Reach:
    """Reach of rows a_t and g_t themselves; by one kernel, if there is one."""
    if kernels.fused.runs(a, g):
        return Reach.of_columns(kernels.cuda.row_reach(a, g, of_lost(g.dtype, inputs, outputs))[:, 1:])
    return of_rows(row_norms(a), row_norms(g), inputs, outputs)


def of_rows(a: Tensor, g: Tensor, inputs: int, outputs: int) -> Reach:
    """Σ_t ‖a_t‖ ‖g_t‖ from the norms of rows.

    Args:
        a: [b, T], norms of input rows; or [b, 1] if all positions have the same norm.
        g: [b, T], norms of gradient rows.
    """
    beside_inputs, beside_outputs = of_lost(g.dtype, inputs, outputs)
    if kernels.fused.runs(a, g):
        return Reach.of_columns(kernels.fused.reach(a, g, (beside_inputs, beside_outputs)))
    of_inputs = (a if a.shape == g.shape else a.expand_as(g)).sum(1)
    lost = g.sum(1).mul_(beside_outputs).add_(of_inputs, alpha=beside_inputs)
    terms = a * g
    return Reach(terms.sum(1), lost, terms.square_().sum(1))


@functools.cache
def of_lost(dtype: torch.dtype, inputs: int, outputs: int) -> tuple[float, float]:
    """Return the factors of ‖a_t‖ and ‖g_t‖ that bound the terms lost to underflow when the other row was squared.

    All entries of a row may be too small to be squared. Products of two such entries are negligible.
    """
    least = smallest(dtype)
    return least * math.sqrt(outputs), least * math.sqrt(inputs)


def all_alike(terms: Tensor, entries: int) -> Reach:
    """Reach of terms summed to `entries` numbers each: √T times their norm, an upper bound of U.

    Args:
        terms: [b, ...].
        entries: number of entries of one sample's gradient.
    """
    norms = row_norms(terms.flatten(1))
    most = norms * math.sqrt(max(1, math.prod(terms.shape[1:]) // max(1, entries)))
    return Reach(most, torch.zeros_like(norms), norms.square())


def row_norms(x: Tensor, dim: int = -1) -> Tensor:
    """Norms along one dimension, in float32 or wider.

    Args:
        dim: dimension to reduce.
    """
    # a positive dim: torch 2.11 keeps a last dimension of one entry for tensors without values
    return torch.linalg.vector_norm(x, dim=dim % x.dim(), dtype=norm_dtype(x.dtype))


@functools.cache
def unit(dtype: torch.dtype) -> float:
    """u of the dtype in which products of `dtype` are accumulated."""
    return torch.finfo(norm_dtype(dtype)).eps / 2


@functools.cache
def of_gram(features: int, dtype: torch.dtype) -> float:
    """γ_N, relative to U²."""
    return (4 + FEATURES * math.sqrt(features)) * unit(dtype)


@functools.lru_cache(1024)
def of_product(positions: int, dtype: torch.dtype, second_pass: bool) -> float:
    """γ_G, relative to U."""
    return (4 + PRODUCT * math.sqrt(positions) + (SECOND_PASS if second_pass else 0)) * unit(dtype)


def rounds_operands(of: Tensor, library: str) -> bool:
    """True if a float32 product of such operands may round them to TF32.

    Args:
        of: an operand.
        library: "cudnn" for a convolution, "cublas" for a matrix product.
    """
    if not of.is_cuda or torch.finfo(of.dtype).bits > 32 or (of.dtype == torch.bfloat16 and library == "cublas"):
        return False
    switches: Any = torch.backends
    switch = switches.cudnn.conv if library == "cudnn" else switches.cuda.matmul
    return bool(switch.fp32_precision == "tf32")


@functools.cache
def cap(positions: int, *, of_layer: bool = False) -> float:
    """ρ for uses of at most this many positions.

    Args:
        positions: the largest T of any use.
        of_layer: True for per-layer clipping.
    """
    least, each = CAP_OF_LAYER if of_layer else CAP
    return max(least, each * math.sqrt(positions))


@functools.lru_cache(1024)
def portion(samples: int, positions: int, dtype: torch.dtype) -> int:
    """b: number of samples whose share of a sum is formed in one portion, before accumulation in float64.

    Args:
        samples: B; it counts as the next power of two, so that few records more leave portions as they are.
    """
    wider, count = 2.0**-24 / unit(dtype), power_of_two(samples)
    return max(1, int(wider * PORTION / math.sqrt(count * max(1, positions))))


@functools.lru_cache(1024)
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
    """η: by how much one record may move the computed sum beyond its threshold, relative to it.

    It includes the last rounding of a sum of B gradients, from float64: B u where all are alike and both sums lie
    next to a rounding boundary, independent of the portions' rounding. It also includes 64 u for a record's own norm
    (a sum of thousands of squares), its root and factor.

    Args:
        positions: largest T of a use; 0 if gradients are summed one by one.
        features: length of the longest rows that are multiplied with each other.
        together: b, samples in a portion.
        of_layers: True for per-layer clipping.
        operands: True if some products round their operands to TF32.

    Returns:
        η if each addition rounds at random, and η in the worst case.
    """
    u, terms, most = unit(dtype), batch_size * positions, cap(positions, of_layer=of_layers)
    others = math.sqrt(terms) * (together + most / 2) / 4
    at_random = u * (OWN + max(batch_size / 4 + others, math.hypot(batch_size, others)))
    worst = u * (OWN + batch_size + terms * (together + most) + most * (positions + features))
    return (at_random + ALLOWANCE, worst + 2 * TF32 * most) if operands else (at_random, worst)


class Doubt:
    """Collects the rounding errors of all uses of parameters, and computes n̂, the bound on each record's norm.

    Args:
        like: [B], any tensor of the norms' dtype.
        parameters: number of entries of a gradient.
        of_layer: True if the gradient is one layer's.
        second_pass: True if the sum uses tensors of a second backward pass.
    """

    def __init__(self, like: Tensor, parameters: int, *, of_layer: bool = False, second_pass: bool = False) -> None:
        self._like, self._of_layer, self._second_pass = like, of_layer, second_pass
        self._least = math.sqrt(parameters) * smallest(like.dtype)
        self._uses: list[tuple[Reach, float, float, float]] = []
        self._positions = 1

    def add(self, reach: Reach, features: int, positions: int, *, gram: bool, of: Tensor, library: str = "") -> None:
        """Add a use whose norm was not computed from the tensor that is summed.

        Args:
            reach: reach of all records.
            gram: True if Gram matrices gave the norm.
            of: a tensor with the dtype and device of the sum's operands.
            library: library of that product; "" for none.
        """
        dtype = self._like.dtype
        of_squares = of_gram(features, dtype) if gram else 0.0
        of_sums, of_operands = of_product(positions, dtype, self._second_pass), 0.0
        if library and rounds_operands(of, library):
            of_operands = OPERANDS * TF32 * (math.sqrt(2) if library == "cudnn" and not gram else 1)
        elif library and of.is_cuda and of.dtype == torch.bfloat16:
            of_sums += HALVES
        self._uses.append((reach, of_squares, of_sums, of_operands))
        self._positions = max(self._positions, positions)

    def bound(self, squares: Tensor) -> Tensor:
        """n̂ [B] from the computed squared norms [B].

        Args:
            squares: ‖g_i‖²; rounding may make it slightly negative.
        """
        squares = squares.clamp(min=0)
        if not self._uses:
            return squares.sqrt() + self._least
        reaches, of_squares, of_sums, of_operands = zip(*self._uses, strict=True)
        each = [part.to(self._like.dtype) for reach in reaches for part in reach]
        terms, lost, apart = each[::3], each[1::3], each[2::3]
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
        # overflow (inf - inf or 0 · inf) gives factor 0; a NaN in the gradient still shows in the sum
        return found.nan_to_num_(math.inf, math.inf)
