"""DP-AdamBC (`dpbench.AdamBC`), which removes the noise from Adam's second moment, against DP-Adam and DP-SGD.

Digits: 1438 training and 359 test images, 40 epochs of batches of 512 (120 steps), δ = 1e-5. The models are a linear
one, a linear one on pixels whose scales differ up to ten times (where Adam helps ordinary training), and a CNN. SGD has
a momentum of 0.9. Every optimizer has five learning rates, a factor of two apart, chosen by the test loss; the choice
is not accounted. AdamBC has its own floor, and for the linear models also two fixed ones, as in the paper.
"""

from dpbench.experiment import experiment_of, grid
from dpbench.training import AdamTrial

EPSILONS, SEEDS = [8.0, 2.0], [0, 1, 2, 3, 4]
#: Network -> the least learning rates of SGD and Adam. AdamBC's is half of Adam's.
LEAST = {"linear": (0.05, 0.008), "uneven": (0.2, 0.016), "cnn": (0.1, 0.004)}


def cells(device: str) -> list[AdamTrial]:
    found = []
    for network, (sgd, adam) in LEAST.items():
        seeds = SEEDS[:3] if network == "cnn" else SEEDS
        for optimizer, least in (("SGD", sgd), ("Adam", adam), ("AdamBC", adam / 2)):
            same = {"network": network, "optimizer": optimizer, "lr": [least * 2**i for i in range(5)]}
            found += grid(AdamTrial, target_epsilon=EPSILONS, seed=seeds, **same)
            if optimizer != "AdamBC":  # without noise it equals Adam
                found += grid(AdamTrial, target_epsilon=None, seed=0, **same)
            elif network != "cnn":
                same["optimizer"] = ["AdamBC:0.01", "AdamBC:1"]
                found += grid(AdamTrial, target_epsilon=EPSILONS, seed=SEEDS[:3], **same)
    return found


def smoke(device: str) -> list[AdamTrial]:
    optimizers = ["SGD", "Adam", "AdamBC"]
    return grid(AdamTrial, network="linear", target_epsilon=8.0, optimizer=optimizers, lr=0.03, epochs=2, seed=0)


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("adam_bias",))
