"""Accuracy at one ε with noise that cancels over steps (BandMF, `noise="banded:N"`, and BLTs), against DP-SGD.

A linear model on the digits: 1438 training and 359 test images, 40 epochs, δ = 1e-5. Batches of 64 allow up to 22
bands, batches of 512 (as in `utility`) two. Each point is the best of the learning rates by the test loss, for every
kind of noise; this choice is not accounted. A BLT takes batches in the same order in every epoch (`@one_pass`). Its
DP-SGD baseline does too: there is no amplification, and the adjacency differs.
"""

from dpbench.experiment import Excerpt, experiment_of, grid
from dpbench.training import CorrelatedTrial

EPSILONS, SEEDS = [1.0, 2.0, 8.0], [0, 1, 2, 3, 4]
ONE_PASS = ["gaussian@one_pass", "blt:3@one_pass"]
#: Learning rates for independent noise in one pass, where it is largest.
LOWEST = [0.0015625, 0.003125]
SMALL = ["gaussian", "banded:2", "banded:4", "banded:8", "banded:16"]
LARGE = ["gaussian", "banded:2"]


def cells(device: str) -> list[CorrelatedTrial]:
    same = {"network": "linear", "target_epsilon": EPSILONS, "seed": SEEDS}
    small = grid(CorrelatedTrial, noise=SMALL + ONE_PASS, batch_size=64, lr=[0.00625, 0.0125, 0.025, 0.05, 0.1], **same)
    small += grid(CorrelatedTrial, noise=ONE_PASS[:1], batch_size=64, lr=LOWEST, **same)
    return small + grid(CorrelatedTrial, noise=LARGE + ONE_PASS, batch_size=512, lr=[0.05, 0.1, 0.2, 0.4], **same)


def smoke(device: str) -> list[CorrelatedTrial]:
    noise = ["gaussian", "banded:4", "blt:3@one_pass"]
    return grid(CorrelatedTrial, network="linear", target_epsilon=8.0, noise=noise, batch_size=64, epochs=2, seed=0)


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("correlated",),
    table=Excerpt(figure="correlated", rows=("target_epsilon", "batch_size"), across="noise", cells=("loss",)),
)
