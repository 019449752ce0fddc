"""Every accountant over a grid of (q, σ, T, δ): time, failures, distance from the lower bound."""

from dpbench.experiment import experiment_of, grid
from dpbench.trials import MapTrial

ACCOUNTANTS = ["simple", "strong", "moments", "rdp", "gdp", "pld", "prv", "prv:lower"]
RATES = [1e-4, 1e-3, 0.01, 0.1, 1.0]
SIGMAS = [0.5, 1.0, 2.0, 5.0, 20.0]
STEPS = [100, 10_000, 1_000_000]
DELTAS = [1e-5, 1e-10]


def cells(device: str) -> list[MapTrial]:
    return grid(MapTrial, accountant=ACCOUNTANTS, sample_rate=RATES, noise_multiplier=SIGMAS, steps=STEPS, delta=DELTAS)


def smoke(device: str) -> list[MapTrial]:
    few = {"sample_rate": [0.01, 1.0], "noise_multiplier": [1.0, 5.0], "steps": [10_000], "delta": [1e-5]}
    return grid(MapTrial, accountant=ACCOUNTANTS, **few)


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("accounting_map",))
