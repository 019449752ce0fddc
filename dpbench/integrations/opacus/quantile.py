"""Adaptive clipping: C follows a quantile of the gradients' norms. (Andrew et al. 2021, arXiv:1905.03871)

Beside the noisy sum, each logical batch releases the number of its gradients not above C:

    u = Σ_i (1[‖g_i‖ ≤ C] - ½) + N(0, σ_u²),    C ← C exp(-η (u / b + ½ - γ)), kept within its limits.

Adding or removing a record moves the sum by C and u by ½, so both together are one Gaussian mechanism: with κ = σ S /
σ_u as the unit of the count,

    S² = C² + (κ / 2)²,    S = C / √(1 - σ² / 4 σ_u²),

and noise of deviation σ S on the sum is accounted as σ: Opacus' adjusted noise multiplier (its Theorem 1). Here u is
centred, as the theorem requires, and divided by the expected size b, as the number of records in a batch is private.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clipping import Flat
from dpbench.engine import PrivacyEngine
from dpbench.engine.noise import At

STABILISER = 1e-6
"""Opacus adds it to each norm."""


@dataclass(frozen=True)
class BesideCount:
    """Flat clipping at C, with the sensitivity S of the sum and the count together."""

    max_grad_norm: float
    sensitivity: float
    per_layer = False

    def factors(self, norms: Tensor) -> Tensor:
        """min(1, C / (‖g_i‖ + stabiliser)) for each norm.

        Args:
            norms: [B], of float32 or wider.
        """
        return Flat(max_grad_norm=self.max_grad_norm, stabiliser=STABILISER).factors(norms)


@dataclass(kw_only=True)
class Quantile:
    """The count of a logical batch, and its update of C, with the arguments of Opacus' AdaClipDPOptimizer.

    Args:
        target_unclipped_quantile: γ in [0, 1].
        clipbound_learning_rate: η > 0.
        max_clipbound, min_clipbound: limits of C.
        unclipped_num_std: σ_u > σ / 2.

    Raises:
        ValueError: an invalid argument.
    """

    target_unclipped_quantile: float
    clipbound_learning_rate: float
    max_clipbound: float
    min_clipbound: float
    unclipped_num_std: float

    def __post_init__(self) -> None:
        gamma, low, high = self.target_unclipped_quantile, self.min_clipbound, self.max_clipbound
        if not 0 <= gamma <= 1:
            raise ValueError(f"expected target_unclipped_quantile in [0, 1], got {gamma!r}")
        if not 0 < low < high < math.inf:
            raise ValueError(f"expected 0 < min_clipbound < max_clipbound, got {low!r} and {high!r}")
        if not 0 < self.clipbound_learning_rate < math.inf:
            raise ValueError(f"expected clipbound_learning_rate > 0, got {self.clipbound_learning_rate!r}")

    def clip(self, norm: float, noise_multiplier: float) -> BesideCount:
        """The clipping function at C with noise of σ.

        Args:
            norm: C.
            noise_multiplier: σ.

        Raises:
            ValueError: σ >= 2 σ_u: the count alone would exceed the accounted ε.
        """
        deviation = self.unclipped_num_std
        part = 1 - (noise_multiplier / (2 * deviation)) ** 2 if deviation > 0 else 0.0
        if part <= 0:
            raise ValueError(
                f"expected unclipped_num_std > noise_multiplier / 2 = {noise_multiplier / 2:g}, got "
                f"{deviation!r}: the count alone would spend more than is accounted"
            )
        return BesideCount(norm, norm / math.sqrt(part))

    def count(self, norms: Tensor, norm: float) -> float:
        """Σ_i (1[‖g_i‖ ≤ C] - ½) of a piece of the batch.

        Args:
            norms: [B], of the records, before clipping.
            norm: C, of this logical batch.
        """
        return float((norms <= norm).double().sum()) - 0.5 * len(norms)

    def next(self, engine: PrivacyEngine, norm: float) -> float:
        """C of the next logical batch, after a release.

        Args:
            engine: counted the batch; its noise is added to the count.
            norm: C of the released batch.
        """
        count = torch.tensor([engine.counted], dtype=torch.float64, device="cpu")
        place = At(engine.steps, 0, sum(1 for _ in engine.model.parameters()))
        noisy = float(engine.noise.added(count, self.unclipped_num_std, place))
        share = noisy / engine.settings.batch_size + 0.5
        moved = norm * math.exp(-self.clipbound_learning_rate * (share - self.target_unclipped_quantile))
        return min(max(moved, self.min_clipbound), self.max_clipbound)
