"""The price of tuning: ε of the best of several private runs, if only that is published, against that of one run.

n = 60000, b = 256, 60 epochs of 234 steps, δ = 1e-5, at two noise multipliers. The number of runs is drawn before the
first, from each of three distributions (`accounting.tuned`); its mean is along the axis. The base is one run without
tuning.
"""

from dpbench.experiment import experiment_of, grid
from dpbench.trials import TunedTrial

SETTING = {"accountant": "rdp", "sample_rate": 256 / 60_000, "steps": 60 * 234, "delta": 1e-5}
SIGMAS, RUNS = [1.1, 2.0], [2, 3, 5, 10, 20, 30, 50, 100]
DISTRIBUTIONS = ["poisson", "geometric", "logarithmic"]


def cells(device: str, runs: list[int] = RUNS) -> list[TunedTrial]:
    """The trials with these mean numbers of runs, and those of one run."""
    return [
        *grid(TunedTrial, noise_multiplier=SIGMAS, distribution="", runs=1, **SETTING),
        *grid(TunedTrial, noise_multiplier=SIGMAS, distribution=DISTRIBUTIONS, runs=runs, **SETTING),
    ]


def smoke(device: str) -> list[TunedTrial]:
    return cells(device, [2, 10])


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("tuning",))
