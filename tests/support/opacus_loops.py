"""The training loops of Opacus' examples, rewritten for scikit-learn's digits and any engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def digits() -> tuple[Tensor, Tensor]:
    """[1797, 1, 8, 8] in [-1, 1], and labels."""
    data = load_digits()
    return torch.tensor(data.images / 8 - 1, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)


class ConvNet(nn.Module):
    """The network of the MNIST example, for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, 2)
        self.fc1 = nn.Linear(16 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = x.view(-1, 16 * 2 * 2)
        return self.fc2(F.relu(self.fc1(x)))


def mnist(
    engine: Any,
    model: nn.Module,
    data: TensorDataset,
    *,
    batch_size: int,
    epochs: int,
    lr: float = 0.25,
    **private: Any,
) -> Any:
    """The MNIST example: zero_grad first, a new criterion each epoch, losses as numbers; (model, losses)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    loader = DataLoader(data, batch_size=batch_size)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **private)
    losses = []
    for _ in range(epochs):
        model.train()
        criterion = nn.CrossEntropyLoss()
        for images, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


class CharNet(nn.Module):
    """The network of the names example: an embedding, a recurrent layer, the last position."""

    def __init__(self, recurrent: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.rnn = recurrent(12, 24, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn(self.embedding(x), None)
        return self.out_layer(x[:, -1, :])


def sequences(rows: int = 2) -> TensorDataset:
    """Digits as sequences of grey values from `rows` of their rows: [1797, 8 * rows] of 17 values."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.images[:, 3 : 3 + rows]).long().flatten(1), torch.tensor(data.target))


def names(
    engine: Any, model: nn.Module, data: TensorDataset, *, batch_size: int, epochs: int, lr: float = 2.0, **private: Any
) -> Any:
    """The names example: zero_grad last, predictions from the same logits; (model, accuracies)."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]).long()

    loader = DataLoader(data, batch_size=batch_size, collate_fn=collate)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **private)
    accuracies = []
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            accuracies.append(float(logits.argmax(-1).eq(y).sum()) / max(1, len(y)))
            float(loss)
    return model, accuracies


def ghost(engine: Any, model: nn.Module, data: TensorDataset, *, batch_size: int, epochs: int, **private: Any) -> Any:
    """The loop of the ghost clipping tutorial, with the criterion that `make_private` returns; (model, losses)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if private.pop("adam", True) else _sgd(model)
    loader = DataLoader(data, batch_size=batch_size)
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(reduction="mean"),
        grad_sample_mode="ghost",
        **private,
    )
    model = model.train()
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy of the model in eval mode."""
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
