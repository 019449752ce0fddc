"""ε along each of σ, q and δ, with the rest as in Abadi et al. 2016: q = 0.01, σ = 4, T = 10⁴, δ = 1e-5."""

from dpbench.experiment import experiment_of, grid
from dpbench.trials import SweepTrial

BASE = {"sample_rate": 0.01, "noise_multiplier": 4.0, "delta": 1e-5, "steps": 10_000}
ACCOUNTANTS = ["moments", "rdp", "gdp", "pld", "prv", "prv:lower"]
AXES = {
    "noise_multiplier": [0.5, 0.6, 0.7, 0.85, 1.0, 1.3, 1.7, 2.3, 3.0, 4.0, 5.5, 7.5, 10.0, 14.0, 20.0],
    "sample_rate": [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0],
    "delta": [1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2],
}


def cells(device: str, axes: dict[str, list[float]] = AXES) -> list[SweepTrial]:
    """The trials along each axis, with the rest as in `BASE`."""
    trials = [
        trial
        for name, values in axes.items()
        for trial in grid(SweepTrial, **{"accountant": ACCOUNTANTS} | BASE | {name: values})
    ]
    return list(dict.fromkeys(trials))  # the sweeps share a point


def smoke(device: str) -> list[SweepTrial]:
    return cells(device, {name: values[::6] for name, values in AXES.items()})


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("epsilon_sweeps",))
