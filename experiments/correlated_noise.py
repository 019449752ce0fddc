"""Does noise that cancels over steps (BandMF, `noise="banded:N"`, and BLTs) train better than DP-SGD's at the same ε?

A linear model on the digits: 1438 images to train on, 359 to test on, 40 epochs, δ = 1e-5. Batches of 64 allow 22
bands at most; batches of 512, which `utility` has, allow two. Each point is the best of the learning rates by the test
loss, for all kinds of noise alike: a choice that is not accounted. A BLT takes batches in one order in every epoch
(`@one_pass`), as does DP-SGD beside it: nothing is amplified, and neighbours are others.
"""

from __future__ import annotations

from dpbench.experiment import Experiment, grid
from dpbench.training import CorrelatedTrial

EPSILONS, SEEDS = [1.0, 2.0, 8.0], [0, 1, 2, 3, 4]
ONE_PASS = ["gaussian@one_pass", "blt:3@one_pass"]
LOWEST = [0.0015625, 0.003125]
"""Learning rates that independent noise needs in one pass, where it is largest."""
SMALL = ["gaussian", "banded:2", "banded:4", "banded:8", "banded:16"]
LARGE = ["gaussian", "banded:2"]


def cells(device: str) -> list[CorrelatedTrial]:
    """The same on every device: the model is small."""
    same = {"network": "linear", "target_epsilon": EPSILONS, "seed": SEEDS}
    small = grid(CorrelatedTrial, noise=SMALL + ONE_PASS, batch_size=64, lr=[0.00625, 0.0125, 0.025, 0.05, 0.1], **same)
    small += grid(CorrelatedTrial, noise=ONE_PASS[:1], batch_size=64, lr=LOWEST, **same)
    return small + grid(CorrelatedTrial, noise=LARGE + ONE_PASS, batch_size=512, lr=[0.05, 0.1, 0.2, 0.4], **same)


def smoke(device: str) -> list[CorrelatedTrial]:
    """Three kinds of noise, two epochs."""
    noise = ["gaussian", "banded:4", "blt:3@one_pass"]
    return grid(CorrelatedTrial, network="linear", target_epsilon=8.0, noise=noise, batch_size=64, epochs=2, seed=0)


EXPERIMENT = Experiment(
    name="correlated_noise",
    doc="accuracy at one epsilon with noise that cancels over steps (BandMF, BLT), beside DP-SGD",
    cells=cells,
    smoke=smoke,
    rounds=1,
    figures=("correlated",),
)
