"""The steps that each accountant allows, and the noise that it requires, at a target ε (q = 0.01).

Steps at σ = 4, noise at T = 10⁴, δ = 1e-5, as in Abadi et al. 2016, where ε is 1.26.
"""

from dpbench.experiment import experiment_of, grid
from dpbench.trials import CalibrationTrial

ACCOUNTANTS = ["simple", "strong", "moments", "rdp", "gdp", "pld", "prv"]
TARGETS = [0.5, 0.7, 1.0, 1.26, 1.8, 2.5, 3.5, 5.0, 7.0, 10.0]


def cells(device: str, targets: list[float] = TARGETS) -> list[CalibrationTrial]:
    given = {"accountant": ACCOUNTANTS, "sample_rate": 0.01, "delta": 1e-5, "target_epsilon": targets}
    return [
        *grid(CalibrationTrial, unknown="steps", noise_multiplier=4.0, **given),
        *grid(CalibrationTrial, unknown="noise_multiplier", steps=10_000, **given),
    ]


def smoke(device: str) -> list[CalibrationTrial]:
    return cells(device, [1.26, 5.0])


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("accountant_price",))
