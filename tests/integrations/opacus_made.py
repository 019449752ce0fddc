"""A model made private by Opacus' interface, with its loop; and small data and networks of Opacus' examples."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpbench.integrations.opacus import BatchMemoryManager, PrivacyEngine

SGD = partial(torch.optim.SGD, lr=0.1)
ADAPTIVE = dict(
    clipping="adaptive",
    target_unclipped_quantile=0.5,
    clipbound_learning_rate=0.3,
    max_clipbound=10.0,
    min_clipbound=0.01,
    unclipped_num_std=4.0,
)
"""Arguments of clipping to a quantile of the norms."""


class Made:
    """`make_private` of a model, with noise 1 and C = 1 unless told otherwise; `engine` may be Opacus'."""

    def __init__(
        self, net: nn.Module, records: Any, *, batch_size: int, engine: Any = None, optimizer: Any = SGD, **private: Any
    ) -> None:
        self.net, self.engine = net, engine or PrivacyEngine()
        loader = private.pop("data_loader", None) or DataLoader(records, batch_size=batch_size)
        arguments = {"module": net, "optimizer": optimizer(net.parameters()), "data_loader": loader}
        arguments |= {"max_grad_norm": 1.0, **private}
        if "target_epsilon" in private:
            made = self.engine.make_private_with_epsilon(**arguments)
        else:
            made = self.engine.make_private(**{"noise_multiplier": 1.0, **arguments})
        self.model, self.optimizer, *criterion, self.loader = made
        self.criterion = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=self.optimizer.loss_reduction)

    def train(self, loss: Any = None, *, loader: Any = None, batches: int | None = None) -> Made:
        """Step on the batches of a pass, or the first of them, by loss(outputs, targets)."""
        call = self.model if callable(self.model) else self.net
        for x, y in islice(self.loader if loader is None else loader, batches):
            self.optimizer.zero_grad()
            (loss or self.criterion)(call(x), y).backward()
            self.optimizer.step()
        return self

    def pieces(self, most: int) -> BatchMemoryManager:
        return BatchMemoryManager(data_loader=self.loader, max_physical_batch_size=most, optimizer=self.optimizer)

    def batch(self) -> Any:
        return next(iter(self.loader))

    def save(self, path: Any, **more: Any) -> None:
        self.engine.save_checkpoint(path=path, module=self.model, **more)

    def load(self, path: Any, **more: Any) -> dict[str, Any]:
        return self.engine.load_checkpoint(path=path, module=self.model, **more)

    @property
    def steps(self) -> int:
        return self.engine.engine.steps

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    @property
    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.optimizer.params])


def digits() -> tuple[Tensor, Tensor]:
    """[1797, 1, 8, 8] in [-1, 1], and labels."""
    data = load_digits()
    return torch.tensor(data.images / 8 - 1, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)


class ConvNet(nn.Module):
    """The network of the MNIST example, for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2)
        self.fc1, self.fc2 = nn.Linear(16 * 2 * 2, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.view(-1, 16 * 2 * 2))))
