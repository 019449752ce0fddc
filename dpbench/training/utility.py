"""Run a `UtilityTrial`: train a model with the privacy engine, and test it on held-out data."""

import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.engine import AdamBC, PrivacyEngine, PrivacyWarning
from dpbench.engine.sampling import Sampler
from dpbench.errors import one_of
from dpbench.models.data import split
from dpbench.training import UtilityTrial

MODELS = ("linear", "uneven", "cnn")
OPTIMIZERS = ("SGD", "Adam", "AdamBC")


def run(trial: UtilityTrial, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Accuracy at the end and after each epoch; ε if private; seconds of training alone."""
    (x, y), (test_x, test_y) = data_of(trial)
    x, test_x = x.to(dtype), test_x.to(dtype)
    model = model_of(trial.network, x.shape[1:], trial.seed).to(trial.device, dtype)
    private = trial.target_epsilon is not None
    noise, _, sampling = trial.noise.partition("@")
    generator = torch.Generator().manual_seed(trial.seed)
    budget: dict[str, Any] = {"target_epsilon": trial.target_epsilon} if private else {"noise_multiplier": 0.0}
    engine = PrivacyEngine(
        model,
        batch_size=trial.batch_size,
        sample_size=len(y),
        epochs=trial.epochs,
        max_grad_norm=trial.max_grad_norm,
        target_delta=trial.delta,
        backend=trial.backend,
        clip=trial.clip,
        generator=generator,
        noise=noise,
        sampling=sampling or "poisson",
        **budget,
    )
    optimizer = optimizer_of(trial, model, engine.noise_multiplier)
    batches = Sampler(engine.settings, trial.seed.to_bytes(32, "little"))  # equal in private and ordinary training
    if private:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # the noise is seeded; the record says so
            engine.attach(optimizer)
    curve, spent, losses_seen, step = [], 0.0, [], 0
    for _ in range(trial.epochs):
        start = time.perf_counter()
        for _ in range(engine.settings.steps_per_epoch):
            rows = torch.from_numpy(batches.batch(step).copy()).to(trial.device)
            losses = F.cross_entropy(model(x[rows]), y[rows], reduction="none")
            if private:
                optimizer.step(loss=losses)  # type: ignore[call-overload]
            else:
                optimizer.zero_grad()
                (losses.sum() / trial.batch_size).backward()
                optimizer.step()
            step += 1
        if trial.device == "cuda":
            torch.cuda.synchronize()
        spent += time.perf_counter() - start
        accuracy, loss = tested(model, test_x, test_y)
        curve.append({"steps": step, "seconds": spent, "accuracy": accuracy})
        losses_seen.append(loss)
    result: dict[str, Any] = {
        "accuracy": curve[-1]["accuracy"],
        "curve": curve,
        "test_losses": losses_seen,
        "train_size": len(y),
        "test_size": len(test_y),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "noise": engine.noise.words if private else "none",
    }
    if trial.optimizer != "SGD":
        result["spread"] = spread(optimizer)
    if private:
        spent_privacy = engine.privacy_spent()
        result |= {
            "epsilon": spent_privacy.epsilon,
            "delta": spent_privacy.delta,
            "kind_of_epsilon": spent_privacy.kind,
            "sampling": spent_privacy.sampling,
            "noise_multiplier": engine.noise_multiplier,
        }
        engine.detach()
    return result


def optimizer_of(trial: UtilityTrial, model: nn.Module, noise_multiplier: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, Adam or AdamBC; "AdamBC:0.01" has the floor 0.01 Φ."""
    name, _, part = trial.optimizer.partition(":")
    one_of("an optimizer", name, OPTIMIZERS)
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), trial.lr, momentum=0.9)
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), trial.lr)
    variance = (noise_multiplier * trial.max_grad_norm / trial.batch_size) ** 2
    return AdamBC(model.parameters(), trial.lr, floor=float(part) * variance if part else None)


def spread(optimizer: torch.optim.Optimizer) -> float:
    """The 90 % over the 10 % quantile of Adam's divisors; 1 means SGD with momentum."""
    parts = []
    for group in optimizer.param_groups:
        for state in map(optimizer.state.__getitem__, group["params"]):
            least = state.get("v_variance", 0.0) ** 0.5
            if group.get("floor") is not None:
                least = group["floor"] * (1 - group["betas"][1] ** float(state["step"]))
            parts.append(state["exp_avg_sq"].clamp(min=least).sqrt().flatten())
    divisors = torch.cat(parts).double()
    return float(divisors.quantile(0.9) / divisors.quantile(0.1))


def data_of(trial: UtilityTrial) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images, labels) to train on, and to test on: the same split for every trial of the same data."""
    (x, y), (test_x, test_y) = split(trial.data, image_size=8 if trial.data == "digits" else 32)
    on = torch.device(trial.device)
    return (x.to(on), y.to(on)), (test_x.to(on), test_y.to(on))


def model_of(name: str, shape: torch.Size, seed: int) -> nn.Module:
    """A linear model on pixels, or on pixels with scales that differ up to ten times; or a net of two convolutions.

    GroupNorm and tanh follow each convolution, and a linear layer comes last.
    """
    one_of("a model", name, MODELS)
    channels, height, width = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name != "cnn":
            scales = [Scaled(shape.numel())] if name == "uneven" else []
            return nn.Sequential(nn.Flatten(), *scales, nn.Linear(shape.numel(), 10))
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), 10),
        )


class Scaled(nn.Module):
    """Multiplies each of n inputs by a factor of its own in 0.1 to 1, the same for every seed.

    Args:
        inputs: n.
    """

    factors: Tensor

    def __init__(self, inputs: int) -> None:
        super().__init__()
        drawn = torch.rand(inputs, generator=torch.Generator().manual_seed(0))
        self.register_buffer("factors", 10**-drawn)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def tested(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy and mean loss."""
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in x.split(1000)])
    model.train()
    return float((outputs.argmax(1) == y).double().mean()), float(F.cross_entropy(outputs, y))
