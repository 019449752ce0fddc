"""The body of an `AuditTrial`: is what the engine releases as private as it says?

Every record is a canary: its gradient is the same in each of the model's parameters, along a coordinate of its own, and
far above the clipping norm. A fair coin decides whether it is in the data. The adversary sees the gradient of each step
that is released (the model's movement) and knows the scheme. A canary's score is its log likelihood ratio, the best
there is against a sound engine: over all steps under Poisson sampling, of the one step that it may be in where batches
are fixed. It guesses "in" for the highest eighth of the scores, and "out" for the lowest. The canaries are orthogonal:
none is in another's way.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from accounting.audit import epsilon_lower_bound
from clipping import Flat
from dpbench.engine import PrivacyEngine, PrivacyWarning
from dpbench.engine.sampling import Sampler
from dpbench.engine.settings import resolve
from dpbench.errors import one_of
from dpbench.outcome import Mismatch
from dpbench.training import FAULTS, AuditTrial

PARAMETERS = 64
DELTA = 1e-6


class Canaries(nn.Module):
    """Record j, a row of the identity, has the gradient e_j in every parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(count, 1, bias=False) for _ in range(PARAMETERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part(x)[:, 0] for part in self.parts), torch.zeros(len(x)))


class PerParameter(Flat):
    """The fault, once it `clips_apart`: every parameter at C, and the sensitivity said to be C.

    Asked when the engine is made, it keeps to that: the engine tries it.
    """

    def clips_apart(self) -> None:
        object.__setattr__(self, "per_layer", True)


def run(trial: AuditTrial) -> dict[str, Any]:
    """ε claimed, ε certified from below, and the guesses behind it.

    Raises:
        Mismatch: an engine that is less private than it says, or a seeded fault that was not found.
    """
    m, fault = trial.canaries, trial.fault and one_of("a fault", trial.fault, FAULTS)
    torch.manual_seed(trial.seed)
    model = Canaries(m)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    b = max(1, round(trial.sample_rate * m))
    shared: dict[str, Any] = {"batch_size": b, "sample_size": m, "target_epsilon": None, "target_delta": DELTA}
    engine = PrivacyEngine(
        model,
        **shared | {"target_epsilon": trial.target_epsilon},
        steps=trial.steps,
        max_grad_norm=trial.max_grad_norm,
        backend=trial.backend,
        clip=PerParameter(trial.max_grad_norm) if fault == "per_parameter" else "flat",
        generator=torch.Generator().manual_seed(trial.seed),
    )
    less = {"no_noise": 0.0, "unscaled": 1 / trial.max_grad_norm, "divisor": 1 / b}.get(fault, 1.0)
    added = engine.noise.added
    engine.noise.added = lambda total, deviation, at: added(total, less * deviation, at)  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        engine.attach(optimizer)
    if isinstance(engine.clip, PerParameter):
        engine.clip.clips_apart()
    key = trial.seed.to_bytes(32, "little")
    settings = engine.settings
    if fault == "fixed_batches":
        others = {"noise_multiplier": 1.0, "epochs": None, "steps": trial.steps, "max_batch_size": None}
        settings = resolve(**shared | others, accountant="prv", sampling="one_pass")
    batches = Sampler(settings, key)
    coins = np.random.default_rng(trial.seed).integers(0, 2, m).astype(bool)
    rows, scores, before = torch.eye(m), np.zeros(m), _position(model)
    for step in range(trial.steps):
        drawn = batches.batch(step)
        optimizer.step(loss=1e4 * model(rows[torch.from_numpy(drawn[coins[drawn]])]))  # type: ignore[call-arg]
        after = _position(model)
        # in units of C: 1 if the canary was in the batch, with noise of deviation σ
        signal = (before - after) * b / (trial.max_grad_norm * PARAMETERS**0.5)
        evidence = (signal - 0.5) / engine.noise_multiplier**2
        if fault == "fixed_batches":
            scores += np.isin(np.arange(m), drawn) * evidence
        else:
            scores += np.logaddexp(np.log1p(-b / m), np.log(b / m) + evidence)
        before = after
    order, few = np.argsort(scores, kind="stable"), m // 8
    correct = int(coins[order[-few:]].sum() + (~coins[order[:few]]).sum())
    spent = engine.privacy_spent()
    engine.detach()
    bound = epsilon_lower_bound(m, 2 * few, correct, DELTA)
    result = {
        "claimed_epsilon": spent.epsilon,
        "epsilon_lower_bound": bound,
        "violated": bound > spent.epsilon,
        "guesses": 2 * few,
        "correct": correct,
        "noise_multiplier": engine.noise_multiplier,
        "delta": DELTA,
    }
    certified = f"a lower bound of {bound:.3g} on ε is certified where {spent.epsilon:.3g} is claimed"
    if bound > spent.epsilon and not fault:
        raise Mismatch(result, f"{trial.backend} is less private than it says: {certified}")
    if fault and bound <= spent.epsilon:
        raise Mismatch(result, f"the audit does not find the fault {fault!r} ({FAULTS[fault]}): {certified}")
    return result


def _position(model: nn.Module) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[m], the sum of each canary's coordinates."""
    found: np.ndarray[Any, np.dtype[np.float64]] = (
        torch.stack([p.detach().double()[0] for p in model.parameters()]).sum(0).numpy()
    )
    return found
