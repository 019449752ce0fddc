"""Report the privacy that training has spent so far, with its conditions, to the caller and to a logger."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from accounting import ADJACENCIES, SAMPLINGS, Kind
from accounting.base import rounded

#: Leaks that no accountant covers.
NOT_ACCOUNTED = "not accounted: hyperparameters tuned on the private data, early stopping by it, other releases of it"
#: Sampling with banded noise.
CYCLIC = "Poisson sampling in groups of records in turn"
#: The accountant takes at most 1 / _SHARE of training's time, for a logger.
_SHARE = 50
#: Caveat on batches without a step, such as small ones: the size of a Poisson sample is private.
LEFT_OUT = "{} of data_loader's batches left out: if their records or their sizes decided it, that is not accounted"
#: Caveat on another engine in this process.
NOT_COUNTED = "{} steps of another engine on this model are not counted"


@dataclass(frozen=True)
class PrivacySpent:
    """ε of all steps so far, and its conditions.

    Attributes:
        epsilon, delta: of all steps so far.
        steps: released logical batches, with the empty ones.
        accountant, kind: its name, and the kind of ε; only an upper bound is a guarantee.
        noise_multiplier, sample_rate: of the last step. With banded noise the rate is that within a group.
        sampling, adjacency: the accounted scheme; see `accounting.SAMPLINGS` and `ADJACENCIES`, and "cyclic_poisson"
            with banded noise (`accounting.banded`).
        sampled_by: "engine" if every batch came from `data_loader`, which draws by that scheme; else "assumed".
        noise: its source.
        private: False for seeded noise, no noise, batches that contradict the accounted scheme, or an ε that is no
            upper bound.
        caveats: one line each.
        sensitivity: the bound that noise is scaled to, for the shapes so far.
        group_size: the number of records that ε protects at once.
    """

    epsilon: float
    delta: float
    steps: int
    accountant: str
    kind: Kind
    noise_multiplier: float
    sample_rate: float
    sampling: str
    adjacency: str
    sampled_by: str
    noise: str
    private: bool
    caveats: tuple[str, ...] = ()
    sensitivity: str = field(default="", compare=False)
    group_size: int = 1

    def __str__(self) -> str:
        assumed = " assumed" if self.sampled_by == "assumed" else ""
        scheme = f"{SAMPLINGS.get(self.sampling, CYCLIC)}{assumed}, {ADJACENCIES[self.adjacency]}"
        scheme += f", {self.group_size} records at once" if self.group_size > 1 else ""
        told = "" if self.private else "; NOT PRIVATE: " + "; ".join(self.caveats[:-1])
        return (
            f"ε = {rounded(self.epsilon, self.kind)} at δ = {self.delta:.3g} after {self.steps} steps "
            f"({self.kind.replace('_', ' ')} by {self.accountant}; {scheme}){told}"
        )


class Abandoned:
    """Counts the released logical batches that loading a checkpoint has undone; they still spend budget.

    Steps of another engine that was on the model before have their own mechanism: they are reported, not counted.

    Attributes:
        count: how many.

    Methods take:
        steps: logical batches that the engine has released, without the abandoned ones.
        model: not its wrapper.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: dict[str, int] = {}  # checkpoints saved or loaded here -> their released steps, counted here

    def save(self, steps: int) -> dict[str, Any]:
        """The part of a checkpoint: its unique name, and the count."""
        name = secrets.token_hex(8)
        self._known[name] = steps + self.count
        return {"name": name, "abandoned": self.count}

    def go_on(self, state: dict[str, Any], steps: int) -> None:
        """Update the count as the engine resumes from a checkpoint."""
        name, released = state["name"], steps + self.count
        if name in self._known:
            self.count = released - state["steps"]
        else:  # another training's: all steps released here are abandoned
            self.count = state["abandoned"] + released
        self._known[name] = state["steps"] + state["abandoned"]

    def leave(self, model: nn.Module, steps: int) -> None:
        """Remember the released steps as the engine detaches: of the model, and of each module that is trained."""
        trained = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        for module in [model, *trained] if steps + self.count else []:
            _LEFT.setdefault(module, {})[self] = steps + self.count

    def beside(self, model: nn.Module) -> int:
        """Steps that other engines have released on parts of it, without those before a checkpoint of this one."""
        others: dict[Abandoned, int] = {}
        for module in model.modules():
            for other, n in _LEFT.get(module, {}).items():
                others[other] = max(n, others.get(other, 0))
        return sum(
            max(0, n - max([other._known[name] for name in other._known.keys() & self._known], default=0))
            for other, n in others.items()
            if other is not self
        )


_LEFT: WeakKeyDictionary[nn.Module, dict[Abandoned, int]] = WeakKeyDictionary()


class Log:
    """Writes a step's public numbers: ε, δ, σ, the clipping threshold, the expected batch size and the step's number.

    These are settings, or computed from settings and the number of steps. Mean loss, accuracy, gradient norms, the
    number of clipped gradients and the actual batch size depend on the records, without noise and outside ε. They are
    not written. Log them yourself if all readers of the log may see the data.

    ε is computed after the first step, and then as often as 2 % of the time allows: an accountant may take a second.

    Args:
        writer: has add_scalar(name, value, step), as torch's SummaryWriter, or log(dict), as a wandb run.

    Raises:
        ValueError: the writer has neither.
    """

    def __init__(self, writer: Any) -> None:
        if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
            raise ValueError(f"expected log with add_scalar(name, value, step) or log(dict), got {writer!r}")
        self._writer, self._step, self._next = writer, 0, 0.0

    def tell(self, engine: Any, *, now: bool = False) -> None:
        """Write the state after the engine's last step, once, if it is time."""
        begin = time.monotonic()
        if engine.steps == self._step or (begin < self._next and not now):
            return
        self._step, spent = engine.steps, engine.privacy_spent()
        values = {
            "privacy/epsilon": spent.epsilon,
            "privacy/delta": spent.delta,
            "privacy/noise_multiplier": spent.noise_multiplier,
            "privacy/clipping_threshold": float(getattr(engine.clip, "max_grad_norm", engine.clip.sensitivity)),
            "privacy/expected_batch_size": float(engine.settings.batch_size),
        }
        if callable(getattr(self._writer, "add_scalar", None)):
            for name, value in values.items():
                self._writer.add_scalar(name, value, self._step)
        else:  # without wandb's own step, which must not fall, and which the caller may count otherwise
            self._writer.log({**values, "privacy/step": self._step})
        self._next = begin + _SHARE * (time.monotonic() - begin)
