"""Accuracy against ε, by clipping function and backend, on images that a laptop can train on.

Digits: 1438 training and 359 test images of scikit-learn's; Poisson batches of 512, δ = 1e-5. `ordinary` is the same
model on the same batches, without clipping and noise. The settings were chosen on these test accuracies, once for the
linear model and once for the CNN, which is not accounted. If the environment variable DPBENCH_CIFAR10=ROOT names a
folder that holds cifar-10-batches-py, the same grid is also trained on CIFAR-10 (50,000 and 10,000 images, batches of
1024), with settings that were not tuned.
"""

from dpbench.experiment import experiment_of, grid
from dpbench.training import UtilityTrial, cifar10_root

SETTINGS = {"linear": {"epochs": 40, "lr": 0.2}, "cnn": {"epochs": 20, "lr": 0.3}}
CIFAR10 = {"linear": {"epochs": 20, "lr": 0.2}, "cnn": {"epochs": 40, "lr": 0.3}}
EPSILONS = [1.0, 2.0, 4.0, 8.0]
SEEDS = [0, 1, 2, 3, 4]
OTHERS = ["fastgradclip", "ghost", "mixed_ghost", "bk_ghost"]


def cells(device: str) -> list[UtilityTrial]:
    found = _on(SETTINGS, device=device)
    if root := cifar10_root():
        found += _on(CIFAR10, data=f"cifar10:{root}", batch_size=1024, device=device)
    return found


def _on(settings: dict[str, dict[str, float]], **data: object) -> list[UtilityTrial]:
    """The trials of these networks: ordinary, and at each ε by each way of clipping."""
    found = []
    for network, chosen in settings.items():
        same = {"network": network, **chosen, **data}
        found += grid(UtilityTrial, target_epsilon=[None, *EPSILONS], seed=SEEDS, **same)
        found += grid(UtilityTrial, target_epsilon=EPSILONS, clip=["automatic", "per_layer"], seed=SEEDS, **same)
        found += grid(UtilityTrial, target_epsilon=2.0, backend=OTHERS, seed=0, **same)
    return found


def smoke(device: str) -> list[UtilityTrial]:
    return grid(UtilityTrial, network="linear", target_epsilon=[None, 8.0], seed=0, epochs=2, lr=0.2, device=device)


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("utility", "utility_curves", "time_to_accuracy"))
