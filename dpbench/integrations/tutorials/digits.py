"""A vision model on handwritten digits, by Lightning: what changes, and the accuracy at each ε.

The module is an ordinary LightningModule except for `reduction="none"`: one loss a sample, as each sample's gradient is
clipped by itself. The strategy does the rest. It draws the batches at random (Poisson sampling, which ε relies on),
clips, adds noise and steps; `global_step`, schedulers, loggers and checkpoints count steps of the engine.

It shows three habits of private training:

- **No BatchNorm.** It mixes the samples of a batch, and is refused. GroupNorm does not.
- **Large batches, many epochs.** Noise is added once a step, whatever the number of records.
- **ε is chosen first.** The engine finds the noise for it, and `epsilon` is in the logs of each step.

Run it: `python -m dpbench.integrations.tutorials.digits` (a minute). The held-out accuracy is not private if the
held-out images are private.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.trials.packages import needed

with needed("lightning", __name__):
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    from dpbench.integrations.lightning import PrivateStrategy  # needs it, too

TESTED = 359
"""Held-out images, of 1797."""


def network() -> nn.Module:
    """Two convolutions and a linear layer, for images [B, 1, 8, 8] of ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


class Digits(LightningModule):
    """An ordinary LightningModule except for `reduction`."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.lr = lr
        self.net = network()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The losses [B] of a piece of a batch."""
        images, targets = batch
        return F.cross_entropy(self.net(images), targets, reduction="none")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        images, targets = batch
        self.log("accuracy", (self.net(images).argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits: (to train on, to test on)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(found.target)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[TESTED:], order[:TESTED]
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


def trained(target_epsilon: float, *, epochs: int = 20, batch_size: int = 256) -> tuple[float, float]:
    """Train to an ε; return (held-out accuracy, spent ε at δ = 1/(2n)).

    Args:
        target_epsilon: ε at the end.
        epochs: passes over the data.
        batch_size: b, expected.
    """
    seed_everything(0, verbose=False)
    train, test = data()
    strategy = PrivateStrategy(
        privacy={"batch_size": batch_size, "max_grad_norm": 1.0, "target_epsilon": target_epsilon}
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=epochs, strategy=strategy, accelerator="cpu", enable_model_summary=False, **quiet)
    module = Digits()
    trainer.fit(module, DataLoader(train, batch_size=64))  # 64: the pieces that a batch comes in
    (logged,) = trainer.test(module, DataLoader(test, batch_size=TESTED), verbose=False)
    assert strategy.engine is not None
    return logged["accuracy"], strategy.engine.privacy_spent().epsilon


def main(epsilons: Sequence[float] = (1.0, 3.0, 8.0)) -> None:
    """Print the accuracy for each ε.

    Args:
        epsilons: targets, one training each.
    """
    warnings.simplefilter("ignore")
    for target in epsilons:
        accuracy, epsilon = trained(target)
        print(f"ε = {epsilon:.2f}: {accuracy:.1%} of the held-out digits")


if __name__ == "__main__":
    main()
