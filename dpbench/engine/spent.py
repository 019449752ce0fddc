"""What training has cost in privacy so far, and under which conditions that is true."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accounting import ADJACENCIES, SAMPLINGS, Kind
from accounting.sampling import BY_EPOCH

if TYPE_CHECKING:
    from dpbench.engine.noise import Noise
    from dpbench.engine.settings import Settings

#: Of no accountant's business, and of the reader's: what else leaks.
NOT_ACCOUNTED = "not accounted: hyperparameters tuned on the private data, early stopping by it, other releases of it"
#: How batches are drawn beside banded noise.
CYCLIC = "Poisson sampling in groups of records in turn"
#: Of another engine in this process.
NOT_COUNTED = "{} steps of another engine on this model are not counted"


@dataclass(frozen=True)
class PrivacySpent:
    """ε and what it is worth.

    Attributes:
        epsilon, delta: of all steps so far.
        steps: logical batches that were released, empty ones among them.
        accountant, kind: who says so, and whether it is an upper bound; only that is a guarantee.
        noise_multiplier, sample_rate: of each step; where noise has changed on the way, of the last. Beside banded
            noise the rate is that in a group.
        sampling, adjacency: the scheme that was accounted; see `accounting.SAMPLINGS` and `ADJACENCIES`, and
            "cyclic_poisson" beside banded noise (`accounting.banded`).
        sampled_by: "engine" if every batch came from `data_loader`, which draws by that scheme; else "assumed".
        noise: where the noise came from.
        private: False for seeded noise, no noise, batches that cannot be what is accounted, or an ε that is no upper
            bound.
        caveats: one line each.
        sensitivity: what the noise was scaled to, of the shapes that were seen.
        group_size: of how many records at once ε is.
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
    sensitivity: str = field(default="", compare=False)
    group_size: int = 1

    def __str__(self) -> str:
        assumed = " assumed" if self.sampled_by == "assumed" else ""
        scheme = f"{SAMPLINGS.get(self.sampling, CYCLIC)}{assumed}, {ADJACENCIES[self.adjacency]}"
        scheme += f", {self.group_size} records at once" if self.group_size > 1 else ""
        told = "" if self.private else "; NOT PRIVATE: " + "; ".join(self.caveats[:-1])
        return (
            f"ε = {self.epsilon:.4g} at δ = {self.delta:.3g} after {self.steps} steps "
            f"({self.kind.replace('_', ' ')} by {self.accountant}; {scheme}){told}"
        )


def account(
    settings: Settings,
    noise: Noise,
    *,
    steps: int,
    drawn: int,
    abandoned: int,
    by_engine: bool,
    delta: float,
    sensitivity: str,
    unlike: str | None = None,
    beside: int = 0,
) -> PrivacySpent:
    """ε of `steps` steps at `delta`.

    Args:
        settings: of the engine.
        noise: where it came from.
        steps: logical batches released, abandoned ones among them.
        drawn: logical batches that the loader handed out, and the abandoned ones.
        abandoned: logical batches that were gone back behind.
        by_engine: the loader drew all that were released.
        delta: δ.
        sensitivity: what the noise was scaled to, in words.
        unlike: what is wrong with the sizes of batches that were not drawn by the engine.
        beside: logical batches that another engine has released on the model.
    """
    mechanism = settings.mechanism
    counted, period = steps, settings.bands
    if mechanism.sampling in BY_EPOCH:
        period = settings.steps_per_epoch
    if period > 1:
        counted = max(steps, drawn)  # a batch that was skipped ends its epoch no later
    counted += abandoned * (period - 1)  # each may have been in an epoch, or a block of a band, of its own
    found = settings.guarantee(counted, delta)
    caveats = []
    if not noise.private:
        caveats.append("the noise is seeded and can be repeated")
    if any(each.noise_multiplier == 0 for each, count in (*settings.earlier, (mechanism, 1)) if count):
        caveats.append("there is no noise")
    if found.kind != "upper_bound":
        caveats.append(f"ε is of kind {found.kind.replace('_', ' ')}, not an upper bound")
    if unlike is not None:
        caveats.append(f"{unlike}: these are not Poisson samples")
    private = not caveats
    if not by_engine:
        caveats.append("batches were not drawn by data_loader: that they follow the scheme is assumed")
    if beside:
        caveats.append(NOT_COUNTED.format(beside))
    return PrivacySpent(
        epsilon=found.epsilon,
        delta=delta,
        steps=steps,
        accountant=settings.accountant,
        kind=found.kind,
        noise_multiplier=mechanism.noise_multiplier,
        sample_rate=mechanism.sample_rate,
        sampling=settings.sampling,
        adjacency=mechanism.adjacency,
        sampled_by="engine" if by_engine else "assumed",
        noise=noise.words,
        sensitivity=sensitivity,
        group_size=mechanism.group_size,
        private=private,
        caveats=(*caveats, NOT_ACCOUNTED),
    )
