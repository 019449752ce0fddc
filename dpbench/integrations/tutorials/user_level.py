"""Protect a person, not a record: a user's data is one record, which holds k examples.

DP-SGD hides whether a *record* was there. A user with ten messages has ten records, and hiding each is not hiding all:
for a group of k records ε is k times as large. To protect all data of a user, make it **one record**. Then its
gradient, over all examples, is clipped as one, and ε is the user's (McMahan et al., Learning Differentially Private
Recurrent Language Models, 2018; "user-level sampling" in Charles et al., Fine-Tuning Large Language Models with
User-Level Differential Privacy, 2024).

Only shapes change. A batch is [users, k, ...]; the model's forward pass merges both dimensions and splits them again; a
user's loss is the mean over their examples. The backends follow samples through views, so a user takes the place of a
sample.

1. `grouped`: at most k examples of each user; missing ones are padded with weight 0.
2. `PerUser`: turns a model of examples into a model of users.
3. `user_losses`: one loss a user.

Run it: `python -m dpbench.integrations.tutorials.user_level` (seconds). Choose k without the data, or the choice is not
private. More examples a user reduce the noise from sampling, and cost time.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench import PrivacyEngine


def grouped(users: Tensor, inputs: Tensor, targets: Tensor, k: int) -> TensorDataset:
    """A record a user: (inputs [k, ...], targets [k], weights [k]).

    Args:
        users: [N] int64, each example's user.
        inputs, targets: [N, ...] and [N].
        k: number of examples of a user to keep, the first ones; their weight is 1, the weight of padding 0.

    Raises:
        ValueError: k below 1.
    """
    if k < 1:
        raise ValueError(f"expected k of 1 or more, got {k}")
    rows, weights = [], []
    for user in users.unique():
        own = (users == user).nonzero().flatten()[:k]
        rows.append(own[torch.arange(k).clamp(max=len(own) - 1)])
        weights.append((torch.arange(k) < len(own)).to(inputs.dtype))
    chosen = torch.stack(rows)
    return TensorDataset(inputs[chosen], targets[chosen], torch.stack(weights))


class PerUser(nn.Module):
    """Applies a model of examples [n, ...] to users [users, k, ...]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """[users, k, ...] -> [users, k, outputs]"""
        return self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def user_losses(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The mean cross entropy of each user's examples, [users].

    Args:
        outputs: [users, k, classes].
        targets: [users, k].
        weights: [users, k], 0 for padding.
    """
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return (each * weights).sum(1) / weights.sum(1)


def trained(
    data: TensorDataset, net: nn.Module, *, target_epsilon: float, batch_size: int = 64, epochs: int = 10
) -> PrivacyEngine:
    """Train `net` on users to a user's ε; return the engine.

    Args:
        data: of `grouped`.
        net: from an example to logits; changed in place.
        target_epsilon: ε of a user, at the end.
        batch_size: users in a batch, expected.
        epochs: passes over the users.
    """
    model = PerUser(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    engine = PrivacyEngine(
        model,
        batch_size=batch_size,  # users
        sample_size=len(data),  # users
        epochs=epochs,
        max_grad_norm=1.0,
        target_epsilon=target_epsilon,
    )
    engine.attach(optimizer)
    for _ in range(epochs):
        for inputs, targets, weights in engine.data_loader(data):
            optimizer.step(loss=user_losses(model(inputs), targets, weights))  # type: ignore[call-arg]
    engine.detach()
    return engine


def writers(count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Examples of `count` users, one to eight each: (users, inputs [N, 16], targets [N] of four classes).

    Args:
        count: of users.
        seed: of their examples.
    """
    numbers, rule = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    users = torch.arange(count).repeat_interleave(torch.randint(1, 9, (count,), generator=numbers))
    inputs = torch.randn(len(users), 16, generator=numbers)
    return users, inputs, (inputs @ torch.randn(16, 4, generator=rule)).argmax(1)


def main(ks: Sequence[int] = (1, 2, 4, 8)) -> None:
    """Print the accuracy for each number of examples a user, at one ε a user.

    Args:
        ks: examples a user.
    """
    warnings.simplefilter("ignore")
    users, inputs, targets = writers()
    _, test_inputs, test_targets = writers(200, seed=1)
    for k in ks:
        torch.manual_seed(0)
        net = nn.Linear(16, 4)
        engine = trained(grouped(users, inputs, targets, k), net, target_epsilon=3.0)
        right = float((net(test_inputs).argmax(1) == test_targets).double().mean())
        print(f"{k} examples a user: {right:.1%} right at ε = {engine.privacy_spent().epsilon:.2f} of a user")


if __name__ == "__main__":
    main()
