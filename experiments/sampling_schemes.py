"""Sampling schemes compared: the same records, batch size, noise and epochs, but very different ε.

n = 60000, b = 256, σ = 1.1, 60 epochs of 234 steps, δ = 1e-5 (TF Privacy's MNIST tutorial), and other σ. `prv` has the
tightest valid bound under each scheme; other accountants with a bound are shown too. Shuffled batches also have a
certified lower bound, which is above the ε of Poisson sampling: a run that shuffles but reports the ε of Poisson
sampling reports too little. The adjacency is that of the sampling: zero-out in one pass, shuffled or not, and add or
remove elsewhere. Under Poisson sampling both cost the same, so it can be compared with all.
"""

from typing import Any

from dpbench.experiment import experiment_of, grid
from dpbench.trials import SchemeTrial

RECORDS, BATCH = 60_000, 256
RUN: dict[str, Any] = {"sample_rate": BATCH / RECORDS, "steps": 60 * (RECORDS // BATCH), "delta": 1e-5}
SIGMA, SIGMAS = 1.1, [0.6, 0.75, 0.9, 1.1, 1.4, 1.8, 2.4, 3.2, 4.5, 6.0, 8.0]
#: The mean of a Poisson sample's size is 256, its standard deviation 16.
CAPS = {"truncated at the mean": 256, "truncated at +2 sd": 288, "truncated at +6 sd": 352}
_TRUNCATED = {"sampling": "truncated_poisson", "dataset_size": RECORDS}
#: Name in the figure -> how batches are drawn.
SCHEMES: dict[str, dict[str, Any]] = {
    "Poisson": {"sampling": "poisson"},
    **{name: _TRUNCATED | {"max_batch_size": cap} for name, cap in CAPS.items()},
    "without replacement": {"sampling": "without_replacement"},
    "shuffled": {"sampling": "shuffled"},
    "one pass": {"sampling": "one_pass"},
}
#: The sampling's own adjacency, and the one that all share.
ADJACENCIES = ("", "replace_one")


def cells(device: str, sigmas: list[float] = SIGMAS) -> list[SchemeTrial]:
    """Each scheme and adjacency at these noise multipliers."""
    found = []
    for scheme, drawn in SCHEMES.items():
        for adjacency in (*ADJACENCIES, "zero_out") if scheme == "Poisson" else ADJACENCIES:
            for sigma in sigmas:
                asked = ["prv"]
                if sigma == SIGMA:
                    asked += ["moments", "rdp"]
                if scheme == "Poisson" and adjacency != "replace_one":
                    asked += ["prv:lower"]
                if scheme == "without replacement" and adjacency == "replace_one":
                    asked += ["without_replacement"]
                if scheme == "shuffled":
                    asked += ["shuffled"]
                run = {"noise_multiplier": sigma, "adjacency": adjacency, "scheme": scheme} | RUN | drawn
                found += grid(SchemeTrial, accountant=asked, **run)
    return found


def smoke(device: str) -> list[SchemeTrial]:
    return cells(device, [SIGMA, 4.5])


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("sampling_schemes",))
