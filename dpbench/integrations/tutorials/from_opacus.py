"""Port code written for Opacus: first change one import, then the loop.

1. `by_make_private` is a loop from Opacus' tutorials; `with_opacus` runs it with Opacus' `PrivacyEngine`.
2. `one_import` runs it with ours. Only the import changes: the arguments, `make_private`, the loader, `backward()` and
   `get_epsilon` are Opacus'. At noise 0 the weights equal Opacus' to rounding. Models that Opacus refuses or computes
   wrongly are exact, and memory is near that of ordinary training.
3. `own_engine` uses the engine itself. The differences are few:

| Opacus | here |
|---|---|
| `make_private` returns another model, optimizer, loader | `engine.attach(optimizer)`: the model does not change |
| `criterion(...).backward(); optimizer.step()` | `optimizer.step(loss=losses)`, one loss a sample |
| `noise_multiplier=1.1`, or `make_private_with_epsilon` | `noise_multiplier=1.1`, or `target_epsilon=3` |
| `BatchMemoryManager` | `engine.data_loader(data, max_physical_batch_size=64)` |
| `get_epsilon(delta)` | `engine.privacy_spent()`: ε, δ, and whether it is a bound |
| sampling probability 1 / `len(loader)` | `batch_size / sample_size`, as requested |

Run it: `python -m dpbench.integrations.tutorials.from_opacus` (a minute). Only the first loop needs Opacus.

Functions take:
    train, noise_multiplier: images and labels; σ.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench import PrivacyEngine
from dpbench.integrations.tutorials.digits import data, network

EPOCHS, BATCH_SIZE, LR, CLIP, DELTA = 10, 256, 0.5, 1.0, 1e-4


def by_make_private(engine: Any, train: TensorDataset, noise_multiplier: float) -> tuple[nn.Module, float]:
    """Run a loop from Opacus' tutorials: (model, ε).

    Args:
        engine: Opacus' `PrivacyEngine()`, or ours in its place.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(train, batch_size=BATCH_SIZE),
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
    )
    for _ in range(EPOCHS):
        for images, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), targets).backward()
            optimizer.step()
    return model, engine.get_epsilon(delta=DELTA)


def with_opacus(train: TensorDataset, noise_multiplier: float) -> tuple[nn.Module, float]:
    """Run the loop with Opacus' engine."""
    from opacus import PrivacyEngine

    return by_make_private(PrivacyEngine(), train, noise_multiplier)


def one_import(train: TensorDataset, noise_multiplier: float) -> tuple[nn.Module, float]:
    """Run the same loop with our engine."""
    from dpbench.integrations.opacus import PrivacyEngine  # the changed import

    return by_make_private(PrivacyEngine(), train, noise_multiplier)


def own_engine(train: TensorDataset, noise_multiplier: float) -> tuple[nn.Module, float]:
    """Train with the engine itself: (model, ε)."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = PrivacyEngine(
        model,
        batch_size=BATCH_SIZE,
        sample_size=len(train),
        epochs=EPOCHS,
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
        target_delta=DELTA,
    )
    engine.attach(optimizer)
    for _ in range(EPOCHS):
        for images, targets in engine.data_loader(train):
            optimizer.step(loss=F.cross_entropy(model(images), targets, reduction="none"))  # type: ignore[call-arg]
    engine.detach()
    return model, engine.privacy_spent().epsilon


LOOPS: dict[str, Callable[[TensorDataset, float], tuple[nn.Module, float]]] = {
    "Opacus": with_opacus,
    "one import changed": one_import,
    "the engine itself": own_engine,
}


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of test images with the right label.

    Args:
        model: images -> logits.
        test: images and labels.
    """
    images, targets = test.tensors
    model.eval()
    found: Tensor = model(images).argmax(1) == targets
    return float(found.double().mean())


def main(noise_multiplier: float = 1.0) -> None:
    """Print each loop's accuracy and ε."""
    warnings.simplefilter("ignore")
    train, test = data()
    for name, loop in LOOPS.items():
        torch.manual_seed(0)
        model, epsilon = loop(train, noise_multiplier)
        print(f"{name}: {accuracy(model, test):.1%} of the held-out digits at ε = {epsilon:.2f}")


if __name__ == "__main__":
    main()
