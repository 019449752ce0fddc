"""ε against epochs, by each accountant (Figure 2 of Abadi et al. 2016).

There q = 0.01, σ = 4 and δ = 1e-5, up to 400 epochs. The paper's two curves are `moments` and `strong:published`. The
valid bounds are `strong` and `simple` with exact amplification, `strong:exact` with the exact Gaussian step too, and
the later accountants. The Gaussian limit is an estimate, and the lower bound is certified.
"""

from dpbench.experiment import experiment_of, grid
from dpbench.trials import EpsilonTrial

SAMPLE_RATE = 0.01
CURVES = ["simple", "strong", "strong:exact", "strong:published", "moments", "rdp", "gdp", "pld", "prv", "prv:lower"]
EPOCHS = [1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 250, 300, 350, 400]


def cells(device: str, epochs: list[int] = EPOCHS) -> list[EpsilonTrial]:
    steps = [round(epoch / SAMPLE_RATE) for epoch in epochs]
    return grid(EpsilonTrial, accountant=CURVES, steps=steps, sample_rate=SAMPLE_RATE, noise_multiplier=4.0, delta=1e-5)


def smoke(device: str) -> list[EpsilonTrial]:
    return cells(device, [1, 100, 400])


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("epsilon_epochs",))
