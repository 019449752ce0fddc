"""Base rule of weights that multiply the operation's input; it forms the clipped sum in portions of the batch."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from clipping.core.dtypes import HALF, norm_dtype, wide_dtype
from clipping.core.microbatching import added, blocks
from clipping.numerics import kernels
from clipping.numerics.chunked_sums import added_at_once, at_once
from clipping.numerics.gram import part
from clipping.numerics.rounding_bounds import of_lost, portion
from clipping.rules.base import Rule, Spec


class Bilinear(Rule):
    """A weight with a gradient that is linear in the input and in the output's gradient.

    The clipping factors scale a copy of the smaller of the two, and the library may copy more. If copies are large, the
    sum is formed in portions of the batch, one after the other, because memory peaks when a step's sums begin.

    Methods take:
        x: input of some samples, as from `operands`.
        g: gradient of the output, [B·fold, ...]; together with x, of the same samples as from `operands`.
        samples: slice of the batch.
        count: number of portions.
    """

    library = "cublas"

    @abstractmethod
    def operands(self, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """Return input and output gradient of some samples in g's dtype, samples first, with equal numbers of dims."""

    @abstractmethod
    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Σ_i g_i from `operands`, one possibly wider: of the parameter's shape, in float32 or wider."""

    @abstractmethod
    def copied(self, g: Tensor | Spec) -> int:
        """Bytes of the largest copy for one sample's share of the sum."""

    @abstractmethod
    def gradients(self, x: Tensor, g: Tensor, count: int) -> Tensor:
        """`gradient` of `count` equal portions, with samples in any order: [count, *shape]."""

    def lost(self, g: Tensor) -> tuple[float, float]:
        """`of_lost` of the output's gradient."""
        return of_lost(g.dtype, self.inputs, self.outputs)

    def weighted(self, g: Tensor, factors: Tensor) -> Tensor:
        if g.dtype in HALF and (found := kernels.ways.weighted(self, g, factors)) is not None:
            return found
        factors = factors.to(wide_dtype(g.dtype))

        def sums(samples: slice, count: int) -> Tensor:
            return self.gradients(*self._scaled(g, factors, samples), count)

        if at_once(g) and self.samples(g) > (most := self.most(g)):
            return added_at_once(sums, self.samples(g), most, self._together(g))
        return added(lambda samples: self.gradient(*self._scaled(g, factors, samples)), self._portions(g))

    def _scaled(self, g: Tensor, factors: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        """Scale the smaller operand. A half-precision copy is widened, as rounding would lose digits that cancel."""
        x, g = self.operands(g, samples)
        factors = part(factors, samples).view(-1, *[1] * (g.dim() - 1))
        return (x * factors, g) if x.numel() < g.numel() else (x, g * factors)

    def most(self, g: Tensor | Spec) -> int:
        """Samples in a portion: see `clipping.numerics.rounding_bounds`."""
        return portion(self.samples(g), max(1, self.positions), norm_dtype(g.dtype))

    def _together(self, g: Tensor | Spec) -> int:
        """Samples to form portions of at once, limited by the memory for portions and copies."""
        room = max(self.room(), 4 * self.instantiated_bytes(g))
        each = self.parameter.numel() * norm_dtype(g.dtype).itemsize  # sums are wide
        return min(room // max(1, self.copied(g)), self.most(g) * max(1, room // max(1, 2 * each)))

    def _portions(self, g: Tensor | Spec) -> list[slice]:
        """Portions larger than the weight itself, so that adding them up takes little time."""
        room = max(self.room(), 4 * self.instantiated_bytes(g))
        return blocks(self.samples(g), 1, min(self.most(g), max(1, room // max(1, self.copied(g)))))
