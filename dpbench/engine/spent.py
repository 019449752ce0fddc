"""What training has cost in privacy so far, and under which conditions that is true."""

from __future__ import annotations

from dataclasses import dataclass

from accounting import ADJACENCIES, SAMPLINGS, Kind

#: Of no accountant's business, and of the reader's: what else leaks.
NOT_ACCOUNTED = "not accounted: hyperparameters tuned on the private data, early stopping by it, other releases of it"


@dataclass(frozen=True)
class PrivacySpent:
    """ε and what it is worth.

    Attributes:
        epsilon, delta: of all steps so far.
        steps: logical batches that were released, empty ones among them.
        accountant, kind: who says so, and whether it is an upper bound; only that is a guarantee.
        noise_multiplier, sample_rate: of each step.
        sampling, adjacency: the scheme that was accounted; see `accounting.SAMPLINGS`.
        sampled_by: "engine" if every batch came from `data_loader`, which draws by that scheme; else "assumed".
        noise: where the noise came from.
        private: False for seeded noise, no noise, or an ε that is no upper bound.
        caveats: one line each.
    """

    epsilon: float
    delta: float
    steps: int
    accountant: str
    kind: Kind
    noise_multiplier: float
    sample_rate: float
    sampling: str
    adjacency: str
    sampled_by: str
    noise: str
    private: bool
    caveats: tuple[str, ...] = ()

    def __str__(self) -> str:
        scheme = f"{SAMPLINGS[self.sampling]}, {ADJACENCIES[self.adjacency]}"
        told = "" if self.private else "; NOT PRIVATE: " + "; ".join(self.caveats[:-1])
        return (
            f"ε = {self.epsilon:.4g} at δ = {self.delta:.3g} after {self.steps} steps "
            f"({self.kind.replace('_', ' ')} by {self.accountant}; {scheme}){told}"
        )
